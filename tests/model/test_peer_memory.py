"""Two ranks, a process each: on GPUs collectives through shared memory give what NCCL gives, whoever is late."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist

from app.model import peer_memory
from app.model.parallel import RankPlace, Ranks
from app.model.peer_memory import open_mailbox
from kernels.peer_exchange import Mailbox, all_reduce_reference
from tests.two_ranks import NEEDS_TWO_GPUS, run_two_ranks

TIMEOUT_S = 120.0
NUM_ROUNDS, NUM_REPLAYS = 40, 200


def test_ranks_without_gpus_agree_that_there_is_none() -> None:
    """Whatever keeps one of them from it, and however early."""
    run_two_ranks(_check_agreement, True, timeout_s=TIMEOUT_S)


@pytest.mark.gpu
@NEEDS_TWO_GPUS
@pytest.mark.parametrize("sees_all", [True, False], ids=["all GPUs seen", "its own seen"])
def test_shared_memory_gives_what_nccl_gives(sees_all: bool) -> None:
    run_two_ranks(_check_exchange, sees_all, timeout_s=TIMEOUT_S)


@pytest.mark.gpu
@NEEDS_TWO_GPUS
def test_nccl_does_it_all_where_writes_do_not_arrive() -> None:
    run_two_ranks(_check_fallback, True, timeout_s=TIMEOUT_S)


def _check_agreement(place: RankPlace, _sees_all: bool) -> None:
    ranks = Ranks.join(place, torch.device("cpu"))
    assert ranks.tensor.handle is not None and ranks.world is ranks.tensor
    with pytest.MonkeyPatch.context() as patch:
        assert open_mailbox(ranks.tensor.handle, torch.device("cpu")) is None
        patch.setattr(peer_memory, "_place", lambda: f"host {place.rank}")
        assert open_mailbox(ranks.tensor.handle, torch.device("cpu")) is None
    assert ranks.tensor.all_reduce(torch.ones(4)).tolist() == [2.0] * 4
    os._exit(0)


def _join(place: RankPlace, sees_all: bool) -> Ranks:
    if not sees_all:  # as Ray does; before anything asks for a device
        os.environ["CUDA_VISIBLE_DEVICES"] = str(place.rank)
    device = torch.device("cuda", place.rank if sees_all else 0)
    torch.cuda.set_device(device)
    return Ranks.join(place, device)


def _check_exchange(place: RankPlace, sees_all: bool) -> None:
    ranks = _join(place, sees_all)
    assert ranks.tensor._mailbox is not None and ranks.world is ranks.tensor
    device = torch.device("cuda", torch.cuda.current_device())
    _compare(ranks, place.rank, device)
    _replay(ranks, place.rank, device)
    os._exit(0)


def _check_fallback(place: RankPlace, sees_all: bool) -> None:
    """Rank 1's words go nowhere, so rank 0 waits for them in vain, but not for ever."""
    around = Mailbox.around

    nowhere: list[torch.Tensor] = []

    def lossy(rank: int, inbox: torch.Tensor, addresses: Sequence[int]) -> Mailbox:
        nowhere.append(inbox.clone())
        return around(rank, inbox, addresses if rank == 0 else [nowhere[0].data_ptr(), addresses[1]])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Mailbox, "around", lossy)
        patch.setattr(peer_memory, "TRIAL_S", 3.0)
        ranks = _join(place, sees_all)
    assert ranks.tensor._mailbox is None
    assert ranks.tensor.all_reduce(torch.ones(4, device="cuda")).tolist() == [2.0] * 4
    os._exit(0)


def _values(rank: int, index: int, rows: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(1000 * rank + index)
    return torch.randn(rows, 2048, generator=generator, device=device).to(dtype)


def _compare(ranks: Ranks, rank: int, device: torch.device) -> None:
    """Eager calls of all sizes, those beyond the mailbox's among them; a rank is sometimes late."""
    group, late = ranks.tensor, random.Random(rank)
    dtypes = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
    for index in range(NUM_ROUNDS):
        rows, dtype = (1, 4, 32, 100, 128, 129, 400)[index % 7], dtypes[index % 4]
        parts = [_values(other, index, rows, dtype, device) for other in range(2)]
        if late.random() < 0.3:
            torch.cuda._sleep(3_000_000)
        total, own = group.all_reduce(parts[rank].clone()), parts[rank]
        expected = own.clone()
        dist.all_reduce(expected, group=group.handle)
        assert torch.equal(total, expected), f"{rows} rows of {dtype}"
        if dtype != torch.float64:
            assert torch.equal(total, all_reduce_reference(parts))
        assert torch.equal(group.all_gather(own), torch.cat(parts))
        assert torch.equal(group.broadcast(own.clone()), parts[0])
        if rows % 2 == 0:
            half = rows // 2
            swapped = group.start_all_to_all(own, None, None).wait()
            assert torch.equal(swapped, torch.cat([part[rank * half :][:half] for part in parts]))


def _replay(ranks: Ranks, rank: int, device: torch.device) -> None:
    """A graph of calls in several sizes, each on what the one before gave, replayed while ranks are late in turn."""
    group = ranks.tensor
    parts = {rows: _values(rank, rows, rows, torch.bfloat16, device) for rows in (1, 5, 128)}

    def calls() -> torch.Tensor:
        found = [group.all_reduce(part * 0.5) for part in parts.values()]
        found += [group.all_reduce(one * 0.25) for one in found]
        return torch.cat([group.all_gather(one) for one in found])

    expected = calls().clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = calls()
    late = random.Random(rank)
    for _ in range(NUM_REPLAYS):
        if late.random() < 0.3:
            torch.cuda._sleep(late.randrange(3_000_000))
        out.zero_()
        graph.replay()
        assert torch.equal(out, expected)
