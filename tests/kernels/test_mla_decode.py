"""mla_decode: every case on three backends against the reference; on CPU also bitwise independence of the batch."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from kernels.fp8_entry import Fp8Entry
from kernels.mla_decode import mla_decode, mla_decode_reference, plan_mla_decode
from kernels.mla_decode_cpu import used_blocks
from tests.kernels.cases import CUDA, TORCH, Target, assert_bitwise_equal, assert_close, generator

# Relative error of the output. fp32 kernels accumulate in another order; in 16 bits the weights P are rounded as well.
TOLERANCE = {torch.float16: 1.5e-3, torch.bfloat16: 8e-3}


@dataclass(frozen=True)
class Case:
    name: str
    context_lens: tuple[int, ...]
    query_lens: tuple[int, ...] | None = None  # None: one query per sequence, without query_starts
    num_heads: int = 3
    latent_dim: int = 24
    rope_dim: int = 8
    block_size: int = 16
    num_padding: int = 0  # rows past query_starts[-1]
    scale: float = 0.2
    fp32_tolerance: float = 3e-6
    is_fp8: bool = False


CASES = (
    Case("empty-batch", ()),
    Case("one-token", (1,)),
    Case("no-tokens", (0,)),
    Case("all-empty", (0, 0, 0)),
    Case("empty-among-others", (0, 5, 0, 70, 0)),
    Case("block-edges", (15, 16, 17, 32, 33)),
    Case("tile-edges", (63, 64, 65, 127, 128, 129)),
    Case("sixteen-sequences", tuple(range(1, 17))),
    Case("seventeen-sequences", tuple(range(3, 20)), num_heads=1),
    Case("one-long-among-short", (3, 400, 1)),
    Case("block-64", (64, 1, 130, 200), block_size=64),
    Case("block-128", (127, 128, 300), block_size=128),
    Case("block-32", (31, 100), block_size=32),
    Case("odd-block", (7, 8, 50), block_size=7),
    Case("sixteen-heads", (40, 130), num_heads=16, block_size=64),
    Case("more-heads-than-a-tile", (90, 65), num_heads=70, block_size=64),
    Case("odd-dims", (33, 70), latent_dim=20, rope_dim=6),
    Case("large-logits", (20, 90), scale=300.0, fp32_tolerance=1e-4),  # a logit of 2e3 is rounded by 1e-4
    Case("chunk", (40,), (17,)),
    Case("ragged", (20, 70, 9, 1, 66), (1, 5, 9, 1, 2)),
    Case("ragged-with-empty-sequences", (12, 0, 30), (3, 0, 4)),
    Case("padding-rows", (20, 70), (2, 3), num_padding=4),
    Case("only-padding", (), (), num_padding=3),
    Case("more-queries-than-keys", (2, 20), (4, 2)),
    Case("fp8", (63, 64, 65, 0, 1, 130), is_fp8=True),
    Case("fp8-ragged", (20, 70, 9, 1, 66), (1, 5, 9, 1, 2), block_size=64, num_heads=17, is_fp8=True),
    Case(
        "fp8-odd-dims", (33, 70), latent_dim=20, rope_dim=6, block_size=7, num_padding=2, query_lens=(2, 1), is_fp8=True
    ),
)

# The shapes that are served: most take the kernel for Hopper there.
SERVED = (
    Case("v2-lite", (1000, 64, 1, 0, 63, 65, 2049), num_heads=16, latent_dim=512, rope_dim=64, block_size=64),
    Case("v3-128-heads", (500, 64, 129), num_heads=128, latent_dim=512, rope_dim=64, block_size=64),
    Case("v3-64-heads-block-128", (500, 128, 129), num_heads=64, latent_dim=512, rope_dim=64, block_size=128),
    Case("v2-lite-block-16", (300, 16, 17), num_heads=16, latent_dim=512, rope_dim=64),
    Case("embedded", (300, 64, 65), num_heads=6, latent_dim=128, rope_dim=32, block_size=64),
    Case("long-alone", (40000,), num_heads=16, latent_dim=512, rope_dim=64, block_size=64),
    Case("speculative", (300, 64), (3, 2), num_heads=16, latent_dim=512, rope_dim=64, block_size=64),
    Case("many-short", tuple(range(1, 400, 3)), num_heads=16, latent_dim=512, rope_dim=64, block_size=64),
)
SERVED += tuple(replace(case, name="fp8-" + case.name, is_fp8=True) for case in SERVED)


@dataclass(frozen=True)
class Inputs:
    q: torch.Tensor
    cache: torch.Tensor
    block_tables: torch.Tensor
    context_lens: torch.Tensor
    query_starts: torch.Tensor | None


def build(case: Case, target: Target, dtype: torch.dtype) -> Inputs:
    """Random keys in shuffled blocks; unused slots, unreferenced blocks and table entries past the end are poison."""
    rng = generator(case.name)
    dim = case.latent_dim + case.rope_dim
    block_counts = [-(-length // case.block_size) for length in case.context_lens]
    num_blocks = sum(block_counts) + 2
    order = torch.randperm(num_blocks, generator=rng)
    cache = torch.full((num_blocks, case.block_size, dim), torch.nan)
    block_tables = torch.full((len(block_counts), max(block_counts, default=0) + 1), 2**30, dtype=torch.int32)
    used = 0
    for i, (length, count) in enumerate(zip(case.context_lens, block_counts, strict=True)):
        blocks = order[used : used + count]
        used += count
        block_tables[i, :count] = blocks
        for t in range(length):
            cache[blocks[t // case.block_size], t % case.block_size] = torch.randn(dim, generator=rng)
    query_starts = None
    num_rows = len(case.context_lens)
    if case.query_lens is not None:
        query_starts = torch.tensor([0, *case.query_lens]).cumsum(0).to(torch.int32).to(target.device)
        num_rows = sum(case.query_lens)
    q = torch.randn(num_rows + case.num_padding, case.num_heads, dim, generator=rng)
    return Inputs(
        q=target.place(q, dtype),
        cache=target.place(poisoned_fp8(case, cache, dtype)) if case.is_fp8 else target.place(cache, dtype),
        block_tables=target.place(block_tables),
        context_lens=target.place(torch.tensor(case.context_lens, dtype=torch.int32)),
        query_starts=query_starts,
    )


def poisoned_fp8(case: Case, cache: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Entries whose every byte is 0xff, a NaN in each of the formats, where `cache` is NaN."""
    packed = Fp8Entry(case.latent_dim, case.rope_dim, dtype).pack(cache)
    packed[cache.isnan().any(-1)] = 0xFF
    return packed


def arguments(inputs: Inputs, case: Case) -> tuple[torch.Tensor | float, ...]:
    """The positional ones of mla_decode and of its reference."""
    return inputs.q, inputs.cache, inputs.block_tables, inputs.context_lens, case.scale, case.latent_dim


def attend(inputs: Inputs, case: Case, target: Target) -> torch.Tensor:
    return mla_decode(*arguments(inputs, case), query_starts=inputs.query_starts, backend=target.backend)


def check(case: Case, target: Target, dtype: torch.dtype) -> None:
    inputs = build(case, target, dtype)
    out = attend(inputs, case, target)
    expected = mla_decode_reference(*arguments(inputs, case), query_starts=inputs.query_starts)
    assert out.dtype == dtype
    assert_close(out, expected, TOLERANCE.get(dtype, case.fp32_tolerance))
    empty_rows = expected.abs().sum(dim=(1, 2)) == 0
    assert not out[empty_rows].any()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_matches_reference(case: Case, target: Target) -> None:
    check(case, target, torch.float32)


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.name in ("block-64", "ragged", "fp8")], ids=lambda c: c.name
)
def test_matches_reference_in_16_bits(case: Case, target: Target) -> None:
    for dtype in target.dtypes[1:]:
        check(case, target, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("case", SERVED, ids=lambda case: case.name)
def test_served_shapes(case: Case, dtype: torch.dtype) -> None:
    check(case, CUDA, dtype)


@pytest.mark.gpu
def test_repeats_are_bitwise_equal() -> None:
    case = SERVED[0]
    inputs = build(case, CUDA, torch.bfloat16)
    first = attend(inputs, case, CUDA)
    for _ in range(20):
        assert_bitwise_equal(attend(inputs, case, CUDA), first)


@pytest.mark.gpu
def test_a_captured_graph_follows_lengths_and_tables() -> None:
    case = SERVED[0]
    inputs = build(case, CUDA, torch.bfloat16)

    def step() -> torch.Tensor:
        plan = plan_mla_decode(inputs.context_lens, num_queries=len(inputs.q), num_heads=case.num_heads)
        return mla_decode(*arguments(inputs, case), plan=plan)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    inputs.context_lens.copy_(torch.tensor([700, 1, 0, 0, 60, 2, 2048], dtype=torch.int32))
    inputs.block_tables[0, :12] = inputs.block_tables[6, :12].clone()
    graph.replay()
    expected = mla_decode_reference(*arguments(inputs, case))
    assert_close(out, expected, TOLERANCE[torch.bfloat16])


def test_rows_do_not_depend_on_batch_chunk_or_place() -> None:
    """A prompt of 300 tokens: decoded token by token, in chunks, alone and beside others; blocks in three layouts."""
    length, heads, latent, rope, block_size = 300, 6, 32, 8, 16
    rng = generator("invariance")
    num_blocks = -(-length // block_size)
    tokens = torch.randn(length, latent + rope, generator=rng)
    q = torch.randn(length, heads, latent + rope, generator=rng)
    other_q = torch.randn(5, heads, latent + rope, generator=rng)
    layouts = {
        "consecutive": torch.arange(num_blocks),
        "shuffled": torch.randperm(num_blocks, generator=rng),
        "two-runs": torch.cat([torch.arange(9, num_blocks), torch.arange(9)]),
    }
    # Beside it: another sequence of 77 keys in blocks of its own.
    others = torch.randn(80, latent + rope, generator=rng)
    expected: torch.Tensor | None = None
    for blocks in layouts.values():
        cache = torch.full((num_blocks + 5, block_size, latent + rope), torch.nan)
        for t in range(length):
            cache[blocks[t // block_size], t % block_size] = tokens[t]
        cache[num_blocks:] = others.view(5, block_size, -1)
        tables = torch.zeros(2, num_blocks, dtype=torch.int32)
        tables[0] = blocks
        tables[1, :5] = torch.arange(num_blocks, num_blocks + 5)

        def rows(first: int, last: int, *, beside: int = 0, cache: torch.Tensor = cache, tables: torch.Tensor = tables):
            """Rows [first, last) of the prompt as one chunk, with `beside` queries of the other sequence after it."""
            lens = torch.tensor([last, 77][: 2 if beside else 1], dtype=torch.int32)
            starts = torch.tensor([0, last - first, last - first + beside][: len(lens) + 1], dtype=torch.int32)
            queries = torch.cat([q[first:last], other_q[:beside]])
            out = mla_decode(queries, cache, tables[: len(lens)], lens, 0.3, latent, query_starts=starts)
            return out[: last - first]

        whole = rows(0, length)
        if expected is None:
            expected = whole
        assert_bitwise_equal(whole, expected)
        for chunk in (16, 64, 100):
            chunks = [rows(first, min(first + chunk, length)) for first in range(0, length, chunk)]
            assert_bitwise_equal(torch.cat(chunks), expected)
        spans = [(300 - n, 300 - n + 1, n % 4) for n in (1, 2, 13, 44, 45, 172, 284, 285, 300)]
        for first, last, beside in (*spans, (299, 300, 5), (128, 200, 3), (7, 14, 0), (0, 7, 1)):
            assert_bitwise_equal(rows(first, last, beside=beside), expected[first:last])
        lens = torch.tensor([length, 77], dtype=torch.int32)
        pair = mla_decode(torch.stack([q[-1], other_q[0]]), cache, tables, lens, 0.3, latent)
        assert_bitwise_equal(pair[:1], expected[-1:])


def test_blocks_in_use_are_found_once_and_renumbered() -> None:
    tables = torch.tensor([[5, 2, 2**30], [2, 2**30, 7]], dtype=torch.int32)
    used, numbered = used_blocks(tables, torch.tensor([5, 1], dtype=torch.int32), 4)
    assert used.tolist() == [2, 5]
    assert numbered[0, :2].tolist() == [1, 0] and numbered[1, 0] == 0
    used, numbered = used_blocks(tables, torch.zeros(2, dtype=torch.int32), 4)
    assert not len(used) and not numbered.any()


def test_refuses_wrong_arguments() -> None:
    case = CASES[5]
    inputs = build(case, TORCH, torch.float32)
    arguments = (inputs.q, inputs.cache, inputs.block_tables, inputs.context_lens, 1.0)
    with pytest.raises(ValueError, match="value_dim"):
        mla_decode(*arguments, 33)
    with pytest.raises(ValueError, match="q: expected shape"):
        mla_decode(inputs.q[..., :-1], *arguments[1:], 24)
    with pytest.raises(ValueError, match=r"context_lens: expected torch\.int32"):
        mla_decode(*arguments[:3], inputs.context_lens.long(), 1.0, 24)
    with pytest.raises(ValueError, match="q: expected one row per sequence"):
        mla_decode(inputs.q[:-1], *arguments[1:], 24)
    with pytest.raises(ValueError, match=r"cache: expected torch\.float32"):
        mla_decode(inputs.q, inputs.cache.half(), *arguments[2:], 24)
    with pytest.raises(ValueError, match="cache: must be contiguous"):
        mla_decode(inputs.q, inputs.cache.transpose(0, 1), *arguments[2:], 24)
