"""Under `invariance` sums of fp32 values are those of fp64, rounded once: in the same bits, however they are split."""

from __future__ import annotations

import pytest
import torch

from kernels.fixed_linear import linear_fixed
from kernels.fused_experts import fused_experts
from kernels.head_projection import project_heads
from kernels.mla_decode import mla_decode
from kernels.mla_rope_cache import mla_rope_cache, mla_rope_cache_reference
from kernels.rms_norm import add_rms_norm, rms_norm
from tests.kernels.cases import CUDA, Target, assert_bitwise_equal, assert_close, generator
from tests.kernels.conftest import TRITON_ON_CPU

# Sums in fp64 differ by some 1e-16 of their largest terms, which changes the rounding to fp32 of hardly any value.
MAX_SHARE_ROUNDED_OTHERWISE = 2e-6
MAX_DOUBLE_ERROR = 1e-14
EPS = 1e-6
# (rows, inputs, outputs) and (tokens, width, hidden width, experts, choices); the served ones take a GPU.
LINEAR_SHAPES = [(3, 70, 37), (65, 37, 131)]
EXPERT_SHAPES = [(7, 20, 24, 3, 2), (19, 36, 40, 4, 3)]
SERVED = pytest.mark.gpu


pytestmark = pytest.mark.usefixtures("invariant")


@pytest.fixture(params=[*TRITON_ON_CPU, pytest.param(CUDA, id="cuda", marks=pytest.mark.gpu)])
def triton_target(request: pytest.FixtureRequest) -> Target:
    found: Target = request.param
    return found


def assert_rounded_alike(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Of small tensors every bit is the same, of large ones all but a few values'."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    different = int((actual != expected).sum())
    assert different <= MAX_SHARE_ROUNDED_OTHERWISE * expected.numel(), f"{different} of {expected.numel()} differ"


def randn(target: Target, *shape: int, seed: str = "x", scale: float = 1.0) -> torch.Tensor:
    return target.place(torch.randn(*shape, generator=generator(seed + str(shape))) * scale)


def check_linear(target: Target, num_rows: int, width: int, num_outputs: int) -> None:
    x = randn(target, num_rows, width + 3)[:, :width]
    weight, bias = randn(target, num_outputs, width), randn(target, num_outputs)
    expected = x.double() @ weight.double().T + bias.double()
    assert_rounded_alike(linear_fixed(x, weight, bias), expected.float())
    whole = linear_fixed(x, weight, bias, out_dtype=torch.float64)
    assert whole.dtype == torch.float64
    assert_close(whole, expected, MAX_DOUBLE_ERROR)
    cut = width // 3
    parts = (slice(0, cut), bias), (slice(cut, None), None)
    sums = [linear_fixed(x[:, at], weight[:, at].contiguous(), b, out_dtype=torch.float64) for at, b in parts]
    assert_rounded_alike((sums[0] + sums[1]).float(), whole.float())


@pytest.mark.parametrize("shape", LINEAR_SHAPES, ids=str)
def test_a_product_whose_inputs_are_split(triton_target: Target, shape: tuple[int, int, int]) -> None:
    check_linear(triton_target, *shape)


@SERVED
@pytest.mark.parametrize("shape", [(64, 2048, 2048), (300, 2048, 3648), (8, 10944, 2048)], ids=str)
def test_a_served_product_whose_inputs_are_split(shape: tuple[int, int, int]) -> None:
    check_linear(CUDA, *shape)


def experts_reference(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """fp64, gate, up and hidden values rounded to fp32."""
    out = x.new_zeros(x.shape, dtype=torch.float64)
    for expert in range(len(down)):
        token, choice = (ids == expert).nonzero(as_tuple=True)
        gate, up = (x[token].double() @ gate_up[expert].double().T).float().double().chunk(2, -1)
        hidden = (gate / (1 + torch.exp(-gate)) * up).float().double()
        out.index_add_(0, token, hidden @ down[expert].double().T * weights[token, choice, None].double())
    return out


def check_experts(target: Target, num_tokens: int, dim: int, inter: int, num_experts: int, top_k: int) -> None:
    x = randn(target, num_tokens, dim)
    gate_up = randn(target, num_experts, 2 * inter, dim, scale=dim**-0.5)
    down = randn(target, num_experts, dim, inter, scale=inter**-0.5)
    random = generator(num_tokens)
    ids = target.place(torch.rand(num_tokens, num_experts, generator=random).topk(top_k).indices.int())
    ids[-1, -1] = -1
    weights = target.place(torch.rand(num_tokens, top_k, generator=random))

    def run(gate_up: torch.Tensor, down: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        out = fused_experts(x, gate_up.contiguous(), down.contiguous(), ids, weights, backend=target.backend)
        assert out.dtype == torch.float64
        return out

    whole = run(gate_up, down, ids)
    # Where a hidden value is rounded otherwise, its rows differ by one in 2^24 of its share.
    assert_close(whole, experts_reference(x, gate_up, down, ids, weights), 1e-9)
    cut = inter // 8 * 4
    gate, up = gate_up.chunk(2, 1)
    halves = [
        run(torch.cat([gate[:, at], up[:, at]], 1), down[:, :, at], ids) for at in (slice(0, cut), slice(cut, None))
    ]
    assert_rounded_alike((halves[0] + halves[1]).float(), whole.float())
    first = num_experts // 2
    places = ids.masked_fill(ids >= first, -1), (ids - first).clamp_min(-1)
    ranks = [run(gate_up[:first], down[:first], places[0]), run(gate_up[first:], down[first:], places[1])]
    assert_rounded_alike((ranks[0] + ranks[1]).float(), whole.float())


@pytest.mark.parametrize("shape", EXPERT_SHAPES, ids=str)
def test_experts_whose_widths_or_numbers_are_split(
    triton_target: Target, shape: tuple[int, int, int, int, int]
) -> None:
    check_experts(triton_target, *shape)


@SERVED
@pytest.mark.parametrize("num_tokens", [8, 129])
def test_served_experts_whose_widths_or_numbers_are_split(num_tokens: int) -> None:
    check_experts(CUDA, num_tokens, 2048, 1408, 64, 6)


def test_no_tokens_give_no_sums_in_fp64(triton_target: Target) -> None:
    """Ranks exchange what they have, be it nothing: in one dtype."""
    none = triton_target.place(torch.empty(0, 8)), triton_target.place(torch.empty(0, 2, dtype=torch.int32))
    weights = randn(triton_target, 2, 16, 8), randn(triton_target, 2, 8, 8)
    out = fused_experts(none[0], *weights, none[1], none[1].float(), backend=triton_target.backend)
    assert out.shape == (0, 8) and out.dtype == torch.float64
    assert linear_fixed(none[0], weights[1][0], out_dtype=torch.float64).dtype == torch.float64


def test_a_sum_in_fp64_goes_into_the_residual_with_one_rounding(triton_target: Target) -> None:
    x, weight = randn(triton_target, 17, 129).double() * 1.1, randn(triton_target, 129)
    residual = randn(triton_target, 17, 129, seed="residual")
    total = (residual.double() + x).float()
    out = add_rms_norm(x, residual, weight, EPS, backend=triton_target.backend)
    assert_bitwise_equal(residual, total)
    wide = total.double()
    mean = wide.square().mean(-1, keepdim=True)
    eps = torch.tensor(EPS).double().to(mean.device)  # kernels take numbers as fp32
    assert_bitwise_equal(out, (wide / (mean + eps).sqrt() * weight.double()).float())
    assert_bitwise_equal(rms_norm(total, weight, EPS, backend=triton_target.backend), out)


def test_heads_do_not_depend_on_how_many_there_are(triton_target: Target) -> None:
    """36 and 18 of them would be served by other tiles of attention; rows lie at other strides besides."""
    num_rows, num_heads, nope, rank, rope = 3, 36, 24, 32, 16
    lens = triton_target.place(torch.tensor([5, 90, 64], dtype=torch.int32))
    tables = triton_target.place(torch.arange(6, dtype=torch.int32).view(3, 2))
    norm_weight, cos_sin = randn(triton_target, rank), randn(triton_target, 100, rope)
    q, to_latent = randn(triton_target, num_rows, num_heads, nope + rope), randn(triton_target, num_heads, nope, rank)
    kv, past = randn(triton_target, num_rows, rank + rope), randn(triton_target, 6, 64, rank + rope, seed="past")
    slots = torch.stack([tables[row, (length - 1) // 64] * 64 + (length - 1) % 64 for row, length in enumerate(lens)])
    outs = []
    for heads in (slice(0, num_heads), slice(0, 18), slice(18, num_heads)):
        count = heads.stop - heads.start
        qkv = torch.cat([q[:, heads].flatten(1), kv], dim=1)
        own_q = qkv[:, : count * (nope + rope)].unflatten(1, (count, -1))
        cache = past.clone()
        arguments = (own_q, qkv[:, -(rank + rope) :], norm_weight, EPS, cos_sin, (lens - 1).long(), slots.long(), cache)
        _, expected = mla_rope_cache_reference(*arguments, interleaved=True)
        mla_rope_cache(*arguments, interleaved=True, backend=triton_target.backend)
        assert_close(cache, expected, 1e-6)
        latent = project_heads(own_q, to_latent[heads], tail=rope, backend=triton_target.backend)
        outs.append((mla_decode(latent, cache, tables, lens, 0.2, rank, backend=triton_target.backend), cache))
    assert_bitwise_equal(torch.cat([outs[1][0], outs[2][0]], dim=1), outs[0][0])
    assert_bitwise_equal(outs[1][1], outs[0][1])
