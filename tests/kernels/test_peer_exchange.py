"""Small collectives through mailboxes: several ranks in one process, which send before any of them receives."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest
import torch

from kernels import peer_exchange
from kernels.peer_exchange import WORDS, Mailbox, all_gather, all_reduce, all_reduce_reference, all_to_all
from tests.kernels.cases import CUDA, INTERPRETED, Target, assert_bitwise_equal, generator
from tests.kernels.conftest import TRITON_ON_CPU

CAPACITY = 3 * WORDS
SHAPES = [(1, 4), (3, 12), (1, 2 * WORDS), (5, 2 * WORDS - 4)]


@pytest.fixture(
    params=[*TRITON_ON_CPU, pytest.param(CUDA, id="cuda", marks=pytest.mark.gpu)],
)
def triton_target(request: pytest.FixtureRequest) -> Target:
    """Between processes on a CPU it is gloo."""
    found: Target = request.param
    return found


def mailboxes(size: int, target: Target) -> list[Mailbox]:
    inboxes = [target.place(torch.zeros(2, size, CAPACITY, dtype=torch.int64)) for _ in range(size)]
    addresses = [inbox.data_ptr() for inbox in inboxes]
    return [Mailbox.around(rank, inbox, addresses) for rank, inbox in enumerate(inboxes)]


def run(collective: Callable[..., torch.Tensor], parts: list[torch.Tensor], boxes: list[Mailbox]) -> list[torch.Tensor]:
    for part, box in zip(parts, boxes, strict=True):
        collective(part, box, receives=False)
    return [collective(part, box, sends=False) for part, box in zip(parts, boxes, strict=True)]


@pytest.mark.parametrize("size", [2, 3])
def test_every_rank_gets_the_sum_in_the_same_bits(
    size: int, triton_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Again and again in other sizes: what an earlier call left in the inbox is never taken for this one's."""
    boxes, random = mailboxes(size, triton_target), generator(size)
    monkeypatch.setattr(peer_exchange, "MAX_PROGRAMS", 2)  # so that one has several tiles
    for shape, dtype in itertools.product([*SHAPES, *reversed(SHAPES)], triton_target.dtypes):
        if shape[0] * shape[1] * dtype.itemsize > 4 * CAPACITY:
            continue
        parts = [triton_target.place(torch.randn(shape, generator=random), dtype) for _ in range(size)]
        expected = all_reduce_reference(parts)
        for part, total in zip(parts, run(all_reduce, parts, boxes), strict=True):
            assert total is part
            assert_bitwise_equal(total, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int32, torch.int64, torch.uint8])
def test_gather_and_exchange_move_every_byte(dtype: torch.dtype, triton_target: Target) -> None:
    boxes, random = mailboxes(3, triton_target), generator(str(dtype))
    for num_rows, width in ((1, 8), (4, 56), (2, 92)):
        values = torch.randint(0, 200, (3, 3 * num_rows, width), generator=random)
        parts = list(triton_target.place(values, dtype).unbind())
        for gathered in run(all_gather, parts, boxes):
            assert_bitwise_equal(gathered, torch.cat(parts))
        for rank, swapped in enumerate(run(all_to_all, parts, boxes)):
            assert_bitwise_equal(swapped, torch.cat([part.view(3, num_rows, width)[rank] for part in parts]))


def test_special_values_pass(triton_target: Target) -> None:
    special = torch.tensor([[torch.inf, -torch.inf, torch.nan, -0.0, 1e-40, 1024.0, 1.0, -1.0]])
    for dtype in triton_target.dtypes:
        for other in (torch.zeros_like(special), special):
            parts = [triton_target.place(part.clone(), dtype) for part in (special, other)]
            expected = all_reduce_reference(parts)
            for total in run(all_reduce, parts, mailboxes(2, triton_target)):
                torch.testing.assert_close(total, expected, rtol=0.0, atol=0.0, equal_nan=True)
                assert torch.equal(total.signbit()[:, 3], expected.signbit()[:, 3])


def test_a_fast_rank_overwrites_nothing_that_another_has_yet_to_read(triton_target: Target) -> None:
    """It may send its next words as soon as it has this call's, which the slower rank may not have read yet."""
    boxes = mailboxes(2, triton_target)
    calls = [
        [triton_target.place(torch.full((1, 4), value)) for value in values] for values in ((1.0, 2.0), (10.0, 20.0))
    ]
    for part, box in zip(calls[0][:1] + calls[1][:1], boxes, strict=True):
        all_reduce(part, box, receives=False)
    all_reduce(calls[0][0], boxes[0], sends=False)
    all_reduce(calls[0][1], boxes[0], receives=False)
    assert (boxes[1].inbox[1, 0, :4] >> 32).tolist() == [1] * 4, "the first words are still there"
    all_reduce(calls[1][0], boxes[1], sends=False)
    all_reduce(calls[1][1], boxes[1], receives=False)
    for rank in (0, 1):
        all_reduce(calls[rank][1], boxes[rank], sends=False)
    assert [[part[0, 0].item() for part in parts] for parts in calls] == [[11.0, 22.0]] * 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled there, where ranks run side by side")
def test_a_rank_waits_for_every_word() -> None:
    """The other one's come one after the other, by hand."""
    box, _ = mailboxes(2, INTERPRETED)
    words = torch.tensor([5.0, 6.0, 7.0, 8.0]).view(torch.int32).long()

    def send() -> None:
        for index, word in enumerate(words.tolist()):
            time.sleep(0.1)
            box.inbox[1, 1, index] = word | 1 << 32

    x = torch.ones(4)
    sender = threading.Thread(target=send)
    sender.start()
    all_reduce(x, box)
    sender.join()
    assert x.tolist() == [6.0, 7.0, 8.0, 9.0]


@pytest.mark.gpu
@pytest.mark.parametrize("size", [2, 3, 5])
def test_ranks_run_side_by_side(size: int) -> None:
    """Each on a stream of its own of one GPU, where all programs fit at once; one or the other is late."""
    boxes, streams = mailboxes(size, CUDA), [torch.cuda.Stream() for _ in range(size)]
    random = generator(size)

    def run_rank(
        rank: int, box: Mailbox, part: torch.Tensor, split: torch.Tensor, delay: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.cuda.stream(streams[rank]):
            torch.cuda._sleep(delay)
            all_reduce(part, box)
            return all_gather(part[:, :4].contiguous(), box), all_to_all(split, box)

    for rank, box in enumerate(boxes):  # a kernel is not loaded while one runs that waits for it
        run_rank(rank, box.to_itself(), torch.zeros(1, CAPACITY, device="cuda"), torch.zeros(size, 2, device="cuda"), 1)
    for index in range(200):
        words = (4, WORDS, CAPACITY)[index % 3]
        parts = [CUDA.place(torch.randn(1, words, generator=random)) for _ in range(size)]
        splits = [CUDA.place(torch.randn(size, 2, generator=random)) for _ in range(size)]
        delays = torch.randint(1, 200_000, (size,), generator=random).tolist()
        expected = all_reduce_reference(parts)
        torch.cuda.synchronize()
        outs = [run_rank(rank, boxes[rank], parts[rank], splits[rank], delays[rank]) for rank in range(size)]
        torch.cuda.synchronize()
        for rank, (gathered, swapped) in enumerate(outs):
            assert_bitwise_equal(parts[rank], expected)
            assert_bitwise_equal(gathered, expected[:, :4].expand(size, 4).contiguous())
            assert_bitwise_equal(swapped, torch.stack([split[rank] for split in splits]))


def test_calls_are_counted_past_the_largest_number(triton_target: Target) -> None:
    boxes = mailboxes(2, triton_target)
    for box in boxes:
        box.num_calls.fill_(2**31 - 3)
    for index in range(6):
        parts = [triton_target.place(torch.full((1, 6), float(index + rank))) for rank in range(2)]
        for total in run(all_reduce, parts, boxes):
            assert total.tolist() == [[2.0 * index + 1.0] * 6]
    assert boxes[0].num_calls.tolist() == [-(2**31) + 3, 2**31 - 3, 2**31 - 3]


def test_what_does_not_fit_is_refused(triton_target: Target) -> None:
    (box,) = mailboxes(1, triton_target)
    fits = torch.zeros(CAPACITY, 1)
    assert box.sums(fits) and not box.sums(fits.double()) and not box.sums(torch.zeros(CAPACITY + 2, 1))
    assert not any(box.holds(part) for part in (fits[:0], torch.zeros(3), torch.zeros(2, dtype=torch.float16)))
    assert box.holds(torch.zeros(CAPACITY * 3), 3) and not box.holds(torch.zeros(CAPACITY * 3 + 6), 3)
    assert not box.holds(torch.zeros(8), 3)
    unaligned = torch.zeros(5, dtype=torch.float16)[1:]
    assert not box.holds(unaligned)
    with pytest.raises(ValueError, match=r"x: torch\.float64 is not summed"):
        all_reduce(fits.double(), box)
    with pytest.raises(ValueError, match="x: 6152 bytes in 1 parts are not aligned pairs of words that fit"):
        all_gather(torch.zeros(CAPACITY + 2), box)
    with pytest.raises(ValueError, match="x: 8 bytes in 1 parts"):
        all_reduce(unaligned, box)
    with pytest.raises(ValueError, match="x: must be contiguous"):
        all_gather(torch.zeros(4, 4).T, box)


def test_a_rank_can_write_to_itself(triton_target: Target) -> None:
    """As a rehearsal does: from every rank comes what was sent to it."""
    for rank in range(3):
        box = mailboxes(3, triton_target)[rank].to_itself()
        for dtype in (torch.float32, torch.float16):
            x = triton_target.place(torch.randn(6, 8, generator=generator(rank)), dtype)
            assert_bitwise_equal(all_gather(x, box), torch.cat([x] * 3))
            assert_bitwise_equal(all_to_all(x, box), x)
            assert_bitwise_equal(all_reduce(x.clone(), box), all_reduce_reference([x] * 3))


COMPILATION = """
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kernels.peer_exchange import _exchange_kernel

types = dict(x_ptr="*i32", out_ptr="*i32", addresses_ptr="*i64", num_calls_ptr="*i32", num_words="i32", num_tiles="i32")
for summed in (None, tl.float32, tl.float16, tl.bfloat16):
    values = dict(RANK=1, SIZE=2, CAPACITY=4096, WORDS=512, IS_SPLIT=summed is None, SUMMED=summed,
                  SENDS=True, RECEIVES=True, PDL=True)
    names = [*types, *values]
    source = ASTSource(_exchange_kernel, {**types, **dict.fromkeys(values, "constexpr")},
                       {(names.index(name),): value for name, value in values.items()})
    text = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    assert "ld.volatile.global" in text and "griddepcontrol.wait" in text
print("compiled")
"""


def test_it_compiles_for_a_gpu() -> None:
    """What the interpreter takes the compiler may refuse. In a process that does not interpret."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-c", COMPILATION], env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert run.stdout.strip() == "compiled", run.stderr[-2000:]
