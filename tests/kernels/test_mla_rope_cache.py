"""mla_rope_cache on three backends."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from kernels.fp8_entry import Fp8Entry
from kernels.mla_rope_cache import mla_rope_cache, mla_rope_cache_reference
from tests.kernels.cases import Target, assert_bitwise_equal, assert_close, generator

EPS = 1e-6
# One rounding to the output dtype after fp32 arithmetic; in fp32 fused multiply-adds round differently.
RELATIVE_TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@dataclass(frozen=True)
class Case:
    name: str
    slots: tuple[int, ...]
    num_heads: int = 2
    nope: int = 6
    rank: int = 12
    rope: int = 8
    block_size: int = 4
    num_blocks: int = 3
    interleaved: bool = True
    is_fp8: bool = False


CASES = [
    Case("empty batch", ()),
    Case("one token", (5,)),
    Case("halves", (1, 0, 7), interleaved=False),
    Case("padding rows", (3, -1, 0, -1)),
    Case("nothing written", (-1, -1)),
    Case("first and last slot", (0, 11)),
    Case("odd rank", (2, 9), rank=13),
    Case("rope of two", (2, 9), rope=2),
    Case("no nope part", (4,), nope=0),
    Case("nine heads, odd sizes", (6, 1, 3), num_heads=9, nope=5, rank=7, rope=6, block_size=3, num_blocks=5),
    Case("halves, unusual block size", (20, 13, 6), block_size=7, interleaved=False),
    Case("fp8", (3, -1, 0, 9), is_fp8=True),
    Case("fp8, no tokens", (), is_fp8=True),
    Case("fp8, halves, wide", (5, 2), rank=132, rope=12, is_fp8=True, interleaved=False),
]


@dataclass(frozen=True)
class Inputs:
    q: torch.Tensor
    kv: torch.Tensor
    norm_weight: torch.Tensor
    cos_sin: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    cache: torch.Tensor


def inputs_of(case: Case, target: Target, dtype: torch.dtype) -> Inputs:
    random = generator(case.name)
    num_tokens = len(case.slots)
    angles = torch.rand(50, case.rope // 2, generator=random) * 6
    entries = torch.randn(case.num_blocks, case.block_size, case.rank + case.rope, generator=random)
    if case.is_fp8:
        entries = Fp8Entry(case.rank, case.rope, dtype).pack(entries)
    # As projections give them: q and kv are slices of wider rows.
    q = torch.randn(num_tokens, case.num_heads, case.nope + case.rope + 4, generator=random)
    kv = torch.randn(num_tokens, case.rank + case.rope + 4, generator=random)
    return Inputs(
        q=target.place(q, dtype)[..., : case.nope + case.rope],
        kv=target.place(kv, dtype)[:, : case.rank + case.rope],
        norm_weight=target.place(torch.randn(case.rank, generator=random), dtype),
        cos_sin=target.place(torch.cat([angles.cos(), angles.sin()], -1)),
        positions=target.place(torch.randint(0, 50, (num_tokens,), generator=random)),
        slots=target.place(torch.tensor(case.slots, dtype=torch.int64)),
        cache=target.place(entries) if case.is_fp8 else target.place(entries, dtype),
    )


def run(inputs: Inputs, target: Target, *, interleaved: bool) -> None:
    mla_rope_cache(
        inputs.q, inputs.kv, inputs.norm_weight, EPS, inputs.cos_sin, inputs.positions, inputs.slots, inputs.cache,
        interleaved=interleaved, backend=target.backend,
    )  # fmt: skip


def assert_same_entries(case: Case, actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """Equal scales; latents that an fp32 sum in another order may have put on the other side of a rounding."""
    entry = Fp8Entry(case.rank, case.rope, dtype)
    latents, ropes, scales = entry.views(actual)
    expected_latents, expected_ropes, expected_scales = entry.views(expected)
    assert torch.equal(scales, expected_scales)
    assert_close(ropes, expected_ropes, RELATIVE_TOLERANCE[dtype])
    assert (latents.float() != expected_latents.float()).float().mean() <= 0.01
    assert_close(latents.float(), expected_latents.float(), 0.02)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_matches_reference(case: Case, target: Target) -> None:
    for dtype in target.dtypes:
        inputs = inputs_of(case, target, dtype)
        before = inputs.q.clone(), inputs.kv.clone(), inputs.cache.clone()
        q, cache = mla_rope_cache_reference(
            inputs.q, inputs.kv, inputs.norm_weight, EPS, inputs.cos_sin, inputs.positions, inputs.slots, inputs.cache,
            interleaved=case.interleaved,
        )  # fmt: skip
        run(inputs, target, interleaved=case.interleaved)
        assert_close(inputs.q, q, RELATIVE_TOLERANCE[dtype])
        if case.is_fp8:
            assert_same_entries(case, inputs.cache, cache, dtype)
        else:
            assert_close(inputs.cache, cache, RELATIVE_TOLERANCE[dtype])
        assert_bitwise_equal(inputs.q[..., : case.nope], before[0][..., : case.nope])
        assert_bitwise_equal(inputs.kv, before[1])
        untouched = [slot for slot in range(case.num_blocks * case.block_size) if slot not in case.slots]
        width = before[2].shape[-1]
        assert_bitwise_equal(inputs.cache.view(-1, width)[untouched], before[2].view(-1, width)[untouched])


def test_token_does_not_depend_on_the_others(target: Target) -> None:
    case = Case("invariance", tuple(range(12)), num_heads=3, rank=20)
    together = inputs_of(case, target, torch.float32)
    alone = inputs_of(case, target, torch.float32)
    alone = Inputs(
        alone.q[5:6],
        alone.kv[5:6],
        alone.norm_weight,
        alone.cos_sin,
        alone.positions[5:6],
        alone.slots[5:6],
        alone.cache,
    )
    run(together, target, interleaved=True)
    run(alone, target, interleaved=True)
    assert_bitwise_equal(alone.q, together.q[5:6])
    assert_bitwise_equal(alone.cache[1, 1], together.cache[1, 1])


def test_rotation_keeps_lengths_and_depends_on_distance_only(target: Target) -> None:
    """The two properties rope exists for, checked without the reference."""
    case = Case("property", (0, 1), num_heads=1, rope=8)
    inputs = inputs_of(case, target, torch.float32)
    frequencies = 10000.0 ** -(torch.arange(4) / 4)
    angles = torch.arange(50)[:, None] * frequencies
    cos_sin = target.place(torch.cat([angles.cos(), angles.sin()], -1))
    scores = []
    for shift in (0, 17):
        q, cache = inputs.q.clone(), inputs.cache.clone()
        positions = target.place(torch.tensor([3 + shift, 9 + shift]))
        shifted = Inputs(q, inputs.kv, inputs.norm_weight, cos_sin, positions, inputs.slots, cache)
        run(shifted, target, interleaved=True)
        assert_close(q[..., -8:].norm(dim=-1), inputs.q[..., -8:].norm(dim=-1), 1e-6)
        scores.append(q[1, 0, -8:] @ cache[0, 0, -8:])
    assert_close(scores[1], scores[0], 1e-5)


def test_wrong_arguments_are_refused(target: Target) -> None:
    good = inputs_of(Case("good", (0, 1)), target, torch.float32)
    for name, wrong in (
        ("slots", good.slots.int()),
        ("positions", good.positions[:1]),
        ("cos_sin", good.cos_sin.double()),
        ("cos_sin", good.cos_sin[:, :7].contiguous()),
        ("kv", good.kv[:, :-1]),
        ("cache", good.cache.transpose(0, 1)),
        ("q", good.q.flatten(1)),
    ):
        fields = {field: getattr(good, field) for field in Inputs.__dataclass_fields__} | {name: wrong}
        with pytest.raises(ValueError, match=r"expected|contiguous|even"):
            run(Inputs(**fields), target, interleaved=True)
