"""Parts of an operator on several threads: each runs once, errors reach the caller, results are those of one thread."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from functools import partial

import pytest
import torch

from kernels import native_products, parallel
from kernels.experts_cpu import CpuExperts
from kernels.head_projection import HeadProjection
from kernels.mla_decode import mla_decode
from tests.kernels.cases import assert_bitwise_equal, generator

WAIT_S = 30.0


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_ranges_cover_everything_once() -> None:
    for size in (1, 2, 3, 17, 100):
        for per_thread in (1, 2, 5):
            ranges = parallel.split(size, parallel.MIN_COST, per_thread)
            assert [i for first, last in ranges for i in range(first, last)] == list(range(size))
            assert len(ranges) == min(size, 2 * per_thread)


def test_small_work_and_one_thread_are_not_split() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert parallel.split(10, parallel.MIN_COST - 1) == [(0, 10)]
        torch.set_num_threads(1)
        assert parallel.split(10, 10**12) == [(0, 10)]
    finally:
        torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_two_threads_work_at_once() -> None:
    meeting = threading.Barrier(2, timeout=WAIT_S)  # breaks if one thread runs both
    parallel.run([lambda: (meeting.wait(), None)[1], lambda: (meeting.wait(), None)[1]])


@pytest.mark.usefixtures("two_threads")
def test_a_helper_stays_off_the_cpu_of_its_caller() -> None:
    seen: list[set[int]] = []
    meeting = threading.Barrier(2, timeout=WAIT_S)

    def look() -> None:
        meeting.wait()
        if threading.current_thread().name == "longspan-helper":
            seen.append(os.sched_getaffinity(0))

    parallel.run([look, look])
    cpus = os.sched_getaffinity(0)
    assert len(seen) == 1
    assert seen[0] <= cpus and len(seen[0]) == max(1, len(cpus) - 1)


@pytest.mark.usefixtures("two_threads")
def test_every_part_runs_once_from_several_callers() -> None:
    counts = [[0] * 8 for _ in range(4)]

    def count(caller: int, part: int) -> None:
        counts[caller][part] += 1

    def call(caller: int) -> None:
        for _ in range(200):
            parallel.run([partial(count, caller, part) for part in range(8)])

    callers = [threading.Thread(target=call, args=(caller,)) for caller in range(4)]
    for thread in callers:
        thread.start()
    for thread in callers:
        thread.join(WAIT_S)
    assert counts == [[200] * 8] * 4


@pytest.mark.usefixtures("two_threads")
def test_an_error_reaches_the_caller_and_the_helper_lives_on() -> None:
    meeting = threading.Barrier(2, timeout=WAIT_S)

    def fail() -> None:
        meeting.wait()
        raise ArithmeticError("part")

    for _ in range(2):
        with pytest.raises(ArithmeticError):
            parallel.run([fail, fail])
    test_two_threads_work_at_once()


def test_two_threads_give_the_bits_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "MIN_COST", 1)
    random = generator("threads")
    x, weight = torch.randn(70, 96, generator=random), torch.randn(130, 96, generator=random)
    panels = native_products.pack(weight)
    heads = HeadProjection(torch.randn(3, 20, 50, generator=random))
    experts = CpuExperts.of(torch.randn(7, 48, 96, generator=random), torch.randn(7, 96, 24, generator=random))
    ids = torch.randint(-1, 7, (70, 3), generator=random, dtype=torch.int32)
    expert_weights = torch.rand(70, 3, generator=random)
    cache = torch.randn(6, 64, 32, generator=random)
    tables = torch.tensor([[1, 2, 3], [4, 5, 0]], dtype=torch.int32)
    lens, starts = torch.tensor([150, 90], dtype=torch.int32), torch.tensor([0, 60, 70], dtype=torch.int32)

    def results() -> list[torch.Tensor]:
        return [
            native_products.linear(x, panels, 130),
            heads.forward(x[:, :66].view(70, 3, 22), tail=2),
            experts.forward(x, ids, expert_weights),
            mla_decode(x.view(70, 3, 32), cache, tables, lens, 0.2, 24, query_starts=starts),
        ]

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = results()
        for num_threads in (2, 3, 5):
            torch.set_num_threads(num_threads)
            for actual, one in zip(results(), expected, strict=True):
                assert_bitwise_equal(actual, one)
    finally:
        torch.set_num_threads(before)
