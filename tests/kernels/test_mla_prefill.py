"""mla_prefill: every case on three backends against the reference; on CPU also bitwise independence of the cut."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from kernels.mla_prefill import mla_prefill, mla_prefill_reference
from kernels.mla_prefill_hopper import plan_tiles
from tests.kernels.cases import CUDA, TORCH, Target, assert_bitwise_equal, assert_close, generator

# Relative error of the output. fp32 kernels accumulate in another order; in 16 bits the weights P are rounded as well.
TOLERANCE = {torch.float16: 1.5e-3, torch.bfloat16: 8e-3}


@dataclass(frozen=True)
class Case:
    name: str
    query_lens: tuple[int, ...]
    key_lens: tuple[int, ...]
    num_heads: int = 2
    nope_dim: int = 16
    rope_dim: int = 8
    value_dim: int = 16
    num_padding: int = 0  # query and key rows past the last sequence
    scale: float = 0.2
    fp32_tolerance: float = 3e-6


CASES = (
    Case("one-token", (1,), (1,)),
    Case("no-sequences", (), (), num_padding=2),
    Case("tile-edges", (15, 16, 17), (15, 16, 17)),
    Case("two-tiles", (33,), (33,)),
    Case("over-a-cached-prefix", (5, 17), (40, 18)),
    Case("decode-like", (1, 1, 1), (7, 16, 33)),
    Case("empty-among-others", (0, 3, 0), (0, 9, 0)),
    Case("keys-without-queries", (0, 4), (12, 4)),
    Case("more-queries-than-keys", (20, 3), (2, 3)),
    Case("queries-without-keys", (3, 2), (0, 2)),
    Case("padding-rows", (4, 2), (6, 2), num_padding=5),
    Case("odd-dims", (9,), (19,), num_heads=3, nope_dim=12, rope_dim=6, value_dim=20),
    Case("large-logits", (18,), (25,), scale=300.0, fp32_tolerance=1e-4),  # a logit of 2e3 is rounded by 1e-4
)
DIMS = {"nope_dim": 128, "rope_dim": 64, "value_dim": 128}
SERVED = (
    Case("short", (1, 5, 127, 128, 129), (1, 5, 127, 128, 129), **DIMS),
    Case("prefix", (100, 1, 256, 300), (1000, 129, 256, 301), num_heads=16, **DIMS),
    Case("edges", (0, 7, 3, 130), (5, 2, 0, 391), num_padding=9, **DIMS),
    Case("long", (3000,), (3000,), num_heads=4, **DIMS),
    Case("embedded", (70, 200), (70, 300), num_heads=6, nope_dim=64, rope_dim=32, value_dim=64),
)


@dataclass(frozen=True)
class Inputs:
    q: torch.Tensor
    kv: torch.Tensor  # k_nope and v are views of it
    k_rope: torch.Tensor
    query_starts: torch.Tensor
    key_starts: torch.Tensor


def starts(lens: tuple[int, ...], target: Target) -> torch.Tensor:
    return target.place(torch.tensor([0, *lens]).cumsum(0).to(torch.int32))


def build(case: Case, target: Target, dtype: torch.dtype) -> Inputs:
    """Random inputs; padding rows hold NaN."""
    rng = generator(case.name)
    num_queries, num_keys = sum(case.query_lens), sum(case.key_lens)
    padding = case.num_padding
    q = torch.randn(num_queries + padding, case.num_heads, case.nope_dim + case.rope_dim, generator=rng)
    kv = torch.randn(num_keys + padding, case.num_heads, case.nope_dim + case.value_dim, generator=rng)
    k_rope = torch.randn(num_keys + padding, case.rope_dim, generator=rng)
    for tensor, used in ((q, num_queries), (kv, num_keys), (k_rope, num_keys)):
        tensor[used:] = torch.nan
    return Inputs(
        q=target.place(q, dtype),
        kv=target.place(kv, dtype),
        k_rope=target.place(k_rope, dtype),
        query_starts=starts(case.query_lens, target),
        key_starts=starts(case.key_lens, target),
    )


def arguments(inputs: Inputs, case: Case) -> tuple[torch.Tensor | float, ...]:
    """The positional ones of mla_prefill and of its reference."""
    k_nope, v = inputs.kv.split([case.nope_dim, case.value_dim], dim=-1)
    return inputs.q, k_nope, inputs.k_rope, v, inputs.query_starts, inputs.key_starts, case.scale


def attend(inputs: Inputs, case: Case, target: Target) -> torch.Tensor:
    return mla_prefill(
        *arguments(inputs, case),
        max_query_len=max(case.query_lens, default=0),
        max_key_len=max(case.key_lens, default=0),
        backend=target.backend,
    )


def check(case: Case, target: Target, dtype: torch.dtype) -> None:
    inputs = build(case, target, dtype)
    out = attend(inputs, case, target)
    expected = mla_prefill_reference(*arguments(inputs, case))
    assert out.dtype == dtype
    assert_close(out, expected, TOLERANCE.get(dtype, case.fp32_tolerance))
    empty_rows = expected.abs().sum(dim=(1, 2)) == 0
    assert not out[empty_rows].any()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_matches_reference(case: Case, target: Target) -> None:
    check(case, target, torch.float32)


@pytest.mark.parametrize("name", ["over-a-cached-prefix", "odd-dims"])
def test_matches_reference_in_16_bits(name: str, target: Target) -> None:
    case = next(case for case in CASES if case.name == name)
    for dtype in target.dtypes[1:]:
        check(case, target, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("case", SERVED, ids=lambda case: case.name)
def test_served_shapes(case: Case, dtype: torch.dtype) -> None:
    check(case, CUDA, dtype)


@pytest.mark.gpu
def test_repeats_are_bitwise_equal() -> None:
    case = SERVED[1]
    inputs = build(case, CUDA, torch.bfloat16)
    first = attend(inputs, case, CUDA)
    for _ in range(20):
        assert_bitwise_equal(attend(inputs, case, CUDA), first)


def test_rows_do_not_depend_on_the_cut_or_the_batch() -> None:
    case = Case("whole", (150,), (150,), num_heads=3)
    inputs = build(case, TORCH, torch.float32)
    whole = attend(inputs, case, TORCH)
    for cut in (1, 7, 64, 149):
        head, tail = Case("head", (cut,), (cut,), num_heads=3), Case("tail", (150 - cut,), (150,), num_heads=3)
        pair = Case("pair", (*head.query_lens, *tail.query_lens), (*head.key_lens, *tail.key_lens), num_heads=3)
        both = Inputs(
            q=inputs.q,
            kv=torch.cat([inputs.kv[:cut], inputs.kv]),
            k_rope=torch.cat([inputs.k_rope[:cut], inputs.k_rope]),
            query_starts=starts(pair.query_lens, TORCH),
            key_starts=starts(pair.key_lens, TORCH),
        )
        assert_bitwise_equal(attend(both, pair, TORCH), whole)


def test_refuses_wrong_arguments() -> None:
    case = CASES[4]
    inputs = build(case, TORCH, torch.float32)
    k_nope, v = inputs.kv[..., :16], inputs.kv[..., 16:]

    def call(**changes: torch.Tensor) -> torch.Tensor:
        arguments = {
            "q": inputs.q,
            "k_nope": k_nope,
            "k_rope": inputs.k_rope,
            "v": v,
            "query_starts": inputs.query_starts,
            "key_starts": inputs.key_starts,
        }
        return mla_prefill(**(arguments | changes), scale=1.0, max_query_len=17, max_key_len=40)

    with pytest.raises(ValueError, match="q: expected shape"):
        call(q=inputs.q[..., :-1])
    with pytest.raises(ValueError, match="v: expected shape"):
        call(v=v[:-1])
    with pytest.raises(ValueError, match="key_starts: expected shape"):
        call(key_starts=inputs.key_starts[:-1])
    with pytest.raises(ValueError, match=r"k_rope: expected torch\.float32"):
        call(k_rope=inputs.k_rope.half())
    with pytest.raises(ValueError, match="last dimension must be contiguous"):
        call(v=v.transpose(0, 2).contiguous().transpose(0, 2))


def test_tiles_are_all_of_them_and_those_with_most_keys_come_first() -> None:
    rng = generator("tiles")
    for count in (1, 2, 7, 40):
        query_lens = torch.randint(0, 400, (count,), generator=rng).tolist()
        key_lens = [max(0, length + int(torch.randint(-50, 600, (1,), generator=rng))) for length in query_lens]
        num_queries = sum(query_lens) + 13  # rows of padding
        plan = plan_tiles(starts(tuple(query_lens), TORCH), starts(tuple(key_lens), TORCH), num_queries)
        found = [(packed >> 32, packed >> 16 & 0xFFFF, packed & 0xFFFF) for packed in plan.tolist()]
        tiles = [
            (min(keys, keys - new + first + 128), sequence, first // 128)
            for sequence, (new, keys) in enumerate(zip(query_lens, key_lens, strict=True))
            for first in range(0, new, 128)
        ]
        expected = sorted((tile for tile in tiles if tile[0] > 0), reverse=True)
        assert found == expected + [(0, 0, 0)] * (len(found) - len(expected))
