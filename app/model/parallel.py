"""The ranks that share one model: who they are and the few collectives they use.

rank e * T + t = number t of tensor group e        T = 2, E = 2

          expert group 0   expert group 1
tensor group 0   rank 0           rank 1      one slice of a step's tokens; heads, MLPs and vocabulary are split
tensor group 1   rank 2           rank 3      the next slice of the tokens
                 some experts     ... of each rank's width
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from app.errors import RankLostError
from app.model.peer_memory import open_mailbox
from kernels import peer_exchange
from kernels.peer_exchange import Mailbox

logger = logging.getLogger(__name__)
# Ranks read their slices at different speeds; a rank that dies meanwhile closes its connections.
LOAD_TIMEOUT_S = 1800.0
# The others wait that much longer for rank 0's next plan: it may compile a kernel that only it needs.
FOLLOWER_PATIENCE = 4
# torch 2.13 gives the collective a new name and deprecates the old one.
_all_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True, slots=True)
class RankPlace:
    """One rank among tensor x expert. Rank e * tensor + t is number t of tensor group e; rank 0 runs the engine."""

    rank: int
    tensor: int  # ranks of a tensor group: they split heads, MLPs and vocabulary
    expert: int  # tensor groups: they split a step's tokens and the routed experts
    init_method: str  # tcp://host:port, a free port of rank 0's host
    timeout_s: float = 30.0  # a collective that takes longer counts as a dead rank
    expert_placement: str | None = None  # a file that says where routed experts lie; None: spread evenly
    peer_memory: bool = True  # small collectives of GPUs of one host go through their memory

    @property
    def num_ranks(self) -> int:
        return self.tensor * self.expert


@dataclass(frozen=True, slots=True)
class Pending:
    """A collective's result that may still be on its way. `wait` gives it; on CUDA only the stream waits."""

    result: torch.Tensor
    work: Any  # dist.Work, or None if there was nothing to do

    def wait(self) -> torch.Tensor:
        if self.work is not None:
            with _losing_ranks():
                self.work.wait()
        return self.result


class Group:
    """Ranks that compute together, and this one's number among them. Of one rank every collective is a no-op.

    Every collective raises RankLostError if it fails or times out; on CUDA a timeout shows where the host waits.
    Small ones go by `mailbox` where there is one, all in the order of the calls on one stream.
    """

    def __init__(self, handle: dist.ProcessGroup | None = None, mailbox: Mailbox | None = None) -> None:
        self.handle, self._mailbox = handle, mailbox
        self.rank = dist.get_rank(handle) if handle else 0
        self.size = dist.get_world_size(handle) if handle else 1
        self._is_alone = self.size == 1

    @property
    def shares_memory(self) -> bool:
        """Whether small collectives go by a mailbox, where there are any."""
        return self.size == 1 or self._mailbox is not None

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Inside, collectives return at once what has their result's shape: for a first run that compiles kernels."""
        mailbox = self._mailbox
        self._is_alone, self._mailbox = True, mailbox and mailbox.to_itself()
        try:
            yield
        finally:
            self._is_alone, self._mailbox = self.size == 1, mailbox

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, in place and in any order; `x` is contiguous."""
        if self._mailbox is not None and self._mailbox.sums(x):
            return peer_exchange.all_reduce(x, self._mailbox)
        if self._is_alone:
            return x
        with _losing_ranks():
            dist.all_reduce(x, group=self.handle)
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """[N, ...] of every rank, N alike -> [size * N, ...]."""
        return self.start_all_gather(x).wait()

    def start_all_gather(self, x: torch.Tensor) -> Pending:
        if self.size == 1:
            return Pending(x, None)
        x = x.contiguous()
        if self._mailbox is not None and self._mailbox.holds(x):
            return Pending(peer_exchange.all_gather(x, self._mailbox), None)
        if self._is_alone:
            return Pending(x.repeat(self.size, *[1] * (x.dim() - 1)), None)
        out = x.new_empty(self.size * x.shape[0], *x.shape[1:])
        with _losing_ranks():
            return Pending(out, _all_gather_into(out, x, group=self.handle, async_op=True))

    def start_all_to_all(self, x: torch.Tensor, sent: list[int] | None, received: list[int] | None) -> Pending:
        """Rows of x, `sent[r]` to rank r in order -> `received[r]` rows of each rank r; None: equally many."""
        num_rows = x.shape[0] if received is None else sum(received)
        if self._mailbox is not None and sent is received is None and self._mailbox.holds(x, self.size):
            return Pending(peer_exchange.all_to_all(x, self._mailbox), None)
        if self._is_alone:
            return Pending(x.new_zeros(num_rows, *x.shape[1:]), None)
        out = x.new_empty(num_rows, *x.shape[1:])
        with _losing_ranks():
            work = dist.all_to_all_single(out, x, received, sent, group=self.handle, async_op=True)
        return Pending(out, work)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Rank 0's values, in place; `x` is contiguous."""
        if self._mailbox is not None and self._mailbox.holds(x):
            return x.copy_(peer_exchange.all_gather(x, self._mailbox)[: len(x)])
        if not self._is_alone:
            with _losing_ranks():
                dist.broadcast(x, group=self.handle, group_src=0)
        return x

    def smallest(self, value: int) -> int:
        """Of every rank's value."""
        return int(self.all_gather(torch.tensor([value])).min())


@dataclass(frozen=True, slots=True)
class Ranks:
    """The groups that one rank belongs to."""

    tensor: Group
    expert: Group
    world: Group  # all ranks, on the device
    host: Group  # all ranks, on the host: plans, heartbeats
    loading: Group  # likewise, with the patience that loading takes
    timeout_s: float

    @classmethod
    def alone(cls) -> Ranks:
        return cls(Group(), Group(), Group(), Group(), Group(), math.inf)

    @classmethod
    def join(cls, place: RankPlace, device: torch.device) -> Ranks:
        """Meet the other ranks. Raises RankLostError if they do not come."""
        if place.num_ranks == 1:
            return cls.alone()
        timeout = timedelta(seconds=place.timeout_s)
        patience = timeout if place.rank == 0 else FOLLOWER_PATIENCE * timeout
        with _losing_ranks():
            dist.init_process_group(
                "gloo", init_method=place.init_method, rank=place.rank, world_size=place.num_ranks,
                timeout=timedelta(seconds=LOAD_TIMEOUT_S),
            )  # fmt: skip
            rows = torch.arange(place.num_ranks).view(place.expert, place.tensor)
            everyone = rows.view(1, -1).tolist()
            make = functools.partial(_make_group, place.rank, device, timeout)
            memory = device.type == "cuda" and place.peer_memory
            tensor = make(rows.tolist(), memory)
            expert = make(rows.T.tolist(), memory and tensor.shares_memory)
            world = tensor if place.expert == 1 else expert
            if place.tensor > 1 and place.expert > 1:
                world = make(everyone, memory and tensor.shares_memory and expert.shares_memory)
            host = _make_group(place.rank, torch.device("cpu"), patience, everyone, False)
            ranks = cls(tensor, expert, world, host, loading=Group(dist.group.WORLD), timeout_s=place.timeout_s)
        logger.info("rank %d of %d has joined %s", place.rank, place.num_ranks, place.init_method)
        return ranks

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        with ExitStack() as stack:
            for group in {self.tensor, self.expert, self.world}:
                stack.enter_context(group.rehearsing())
            yield

    def leave(self, device: torch.device) -> None:
        """For the end of a process; on CUDA that end itself, since communicators that graphs use cannot be closed."""
        if self.loading.size > 1 and device.type == "cpu":
            dist.destroy_process_group()


def _make_group(rank: int, device: torch.device, timeout: timedelta, members: list[list[int]], memory: bool) -> Group:
    """Every rank makes every group, in the same order, and keeps its own. They are of one size.

    memory: try whether they can share some
    """
    mine = None
    for ranks in members:
        if len(ranks) == 1:
            continue
        handle = dist.new_group(ranks, backend="nccl" if device.type == "cuda" else "gloo", timeout=timeout)
        if rank in ranks:
            mine = handle
    return Group(mine, open_mailbox(mine, device) if mine is not None and memory else None)


@contextmanager
def _losing_ranks() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # what torch raises on closed connections and timeouts
        reason = str(error).splitlines()[0].partition(". This is typically")[0]
        raise RankLostError(f"a collective failed: {reason}") from error
