"""Ranks as threads of one process: one of them runs at a time, until it needs what the others have."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from app.model.parallel import Group, Pending, Ranks

T = TypeVar("T")
TIMEOUT_S = 120.0


@dataclass
class Meeting:
    """Where the ranks of one group hand each other tensors, in the order of their calls."""

    size: int
    turn: threading.Lock  # held by the one that runs: kernels under Triton's interpreter cannot run side by side
    values: dict[int, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.size)

    def exchange(self, rank: int, value: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's value."""
        self.values[rank] = value.clone()
        self.turn.release()
        try:
            self.barrier.wait(TIMEOUT_S)
            found = [self.values[other] for other in range(self.size)]
            self.barrier.wait(TIMEOUT_S)  # nobody puts the next one there while others still look
        finally:
            self.turn.acquire()
        return found


class LocalGroup(Group):
    def __init__(self, meeting: Meeting, rank: int) -> None:
        super().__init__()
        self._meeting, self.rank, self.size = meeting, rank, meeting.size
        self._is_alone = self.size == 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        values = self._meeting.exchange(self.rank, x)
        assert all(value.dtype == x.dtype for value in values)
        return x.copy_(sum(values[1:], values[0]))

    def start_all_gather(self, x: torch.Tensor) -> Pending:
        return Pending(torch.cat(self._meeting.exchange(self.rank, x)), None)

    def start_all_to_all(self, x: torch.Tensor, sent: list[int] | None, received: list[int] | None) -> Pending:
        num_rows = [len(x) // self.size] * self.size if sent is None else sent
        sizes = self._meeting.exchange(self.rank, torch.tensor(num_rows))
        parts = [
            value.split(size.tolist())[self.rank]
            for value, size in zip(self._meeting.exchange(self.rank, x), sizes, strict=True)
        ]
        assert received is None or [len(part) for part in parts] == received
        return Pending(torch.cat(parts), None)


def run_ranks(tensor: int, expert: int, work: Callable[[int, Ranks], T]) -> list[T]:
    """What each rank's `work(rank, ranks)` returns; an exception of one ends all."""
    turn = threading.Lock()
    rows = [Meeting(tensor, turn) for _ in range(expert)]
    columns = [Meeting(expert, turn) for _ in range(tensor)]
    world = Meeting(tensor * expert, turn)

    def run(rank: int) -> T:
        everybody = LocalGroup(world, rank)
        ranks = Ranks(
            tensor=LocalGroup(rows[rank // tensor], rank % tensor),
            expert=LocalGroup(columns[rank % tensor], rank // tensor),
            world=everybody, host=everybody, loading=everybody, timeout_s=TIMEOUT_S,
        )  # fmt: skip
        with turn:
            try:
                return work(rank, ranks)
            except BaseException:
                for meeting in (*rows, *columns, world):
                    meeting.barrier.abort()
                raise

    with ThreadPoolExecutor(tensor * expert) as pool:
        return list(pool.map(run, range(tensor * expert)))
