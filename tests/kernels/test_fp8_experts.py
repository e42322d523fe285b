"""fp8_experts on three backends, beside its definition and beside the products of exact weights."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from kernels.fp8_experts import BLOCK, Fp8Experts, dequantize, fp8_experts, fp8_experts_reference
from kernels.fp8_experts import quantize_groups as quantize
from kernels.fused_experts import fused_experts_reference
from kernels.grouped_gemm import choose_tiles
from tests.kernels.cases import CUDA, TORCH, Target, assert_bitwise_equal, assert_close, generator
from tests.kernels.experts import Case, check_repeats_and_replay

# A hidden value beside a rounding of e4m3 may fall on its other side: one such step is 2^-4 of that value.
RELATIVE_TOLERANCE = {torch.float32: 4e-3, torch.float16: 5e-3, torch.bfloat16: 1e-2}


CASES = [
    Case("no tokens", 0),
    Case("one token", 1),
    Case("odd", 13, top_k=3),
    Case("several blocks", 5, dim=384, inter=256, num_experts=3),
    Case("one expert", 5, top_k=1, num_experts=1),
    Case("all on one expert", 18, ids=((3, 3),) * 18),
    Case("some without expert", 4, ids=((1, -1), (-1, -1), (-1, 0), (2, 3))),
    Case("nothing to do", 3, ids=((-1, -1),) * 3),
]


@dataclass(frozen=True)
class Inputs:
    x: torch.Tensor
    experts: Fp8Experts
    ids: torch.Tensor
    weights: torch.Tensor

    def run(self, target: Target) -> torch.Tensor:
        return fp8_experts(self.x, self.experts, self.ids, self.weights, backend=target.backend)

    def reference(self) -> torch.Tensor:
        return fp8_experts_reference(self.x, self.experts, self.ids, self.weights)


def blocks_of(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[E, M, N] -> e4m3 and scales as checkpoints have them: any fp32 number, here that of the block's largest."""
    blocks = weight.unflatten(2, (-1, BLOCK)).unflatten(1, (-1, BLOCK))  # [E, M/128, 128, N/128, 128]
    scales = blocks.abs().amax((2, 4)) / 448
    values = (blocks / scales[:, :, None, :, None]).to(torch.float8_e4m3fn)
    return values.flatten(3, 4).flatten(1, 2).contiguous(), scales


def inputs_of(case: Case, target: Target, dtype: torch.dtype) -> Inputs:
    random = generator(case.name)
    ids = case.chosen(random)
    gate_up = torch.randn(case.num_experts, 2 * case.inter, case.dim, generator=random) * case.dim**-0.5
    down = torch.randn(case.num_experts, case.dim, case.inter, generator=random) * case.inter**-0.5
    # Scales that differ from block to block, so that a wrong one shows.
    gate_up *= torch.rand(gate_up.shape[1] // BLOCK, generator=random).repeat_interleave(BLOCK)[:, None] + 0.5
    return Inputs(
        x=target.place(torch.randn(case.num_tokens, case.dim, generator=random), dtype),
        experts=Fp8Experts(*(target.place(part) for part in (*blocks_of(gate_up), *blocks_of(down)))),
        ids=target.place(ids),
        weights=target.place(torch.rand(case.num_tokens, ids.shape[1], generator=random)),
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_matches_reference(case: Case, target: Target) -> None:
    for dtype in target.dtypes[:2] if target is not CUDA else target.dtypes:
        inputs = inputs_of(case, target, dtype)
        out = inputs.run(target)
        assert out.dtype == dtype
        assert_close(out, inputs.reference(), RELATIVE_TOLERANCE[dtype])


def test_the_definition_is_near_the_product_of_exact_activations() -> None:
    """Rounding activations to 3 bits of mantissa: some 3% of a hidden value each time, 4% of the sum."""
    inputs = inputs_of(Case("near", 40, top_k=3, dim=256, inter=384), TORCH, torch.float32)
    experts = inputs.experts
    gate_up = torch.stack([dequantize(*pair) for pair in zip(experts.gate_up, experts.gate_up_scales, strict=True)])
    down = torch.stack([dequantize(*pair) for pair in zip(experts.down, experts.down_scales, strict=True)])
    exact = fused_experts_reference(inputs.x, gate_up, down, inputs.ids, inputs.weights)
    assert_close(inputs.reference(), exact, 0.06)


def test_groups_have_scales_of_their_own() -> None:
    x = torch.randn(3, 2 * BLOCK, generator=generator("groups"))
    x[:, BLOCK:] *= 1e-4
    x[1] = 0.0
    values, scales = quantize(x)
    assert scales.shape == (3, 2) and (scales[0, 0] / scales[0, 1]).item() >= 2**10
    assert_close(dequantize(values, scales), x, 0.04)
    assert not dequantize(values, scales)[1].any()


def test_a_token_does_not_depend_on_the_others(target: Target) -> None:
    inputs = inputs_of(Case("alone", 6, ids=((0, 1), (1, 2), (-1, 1), (0, 3), (1, 1), (-1, -1))), target, torch.float32)
    clean = inputs.run(target)
    inputs.x[0] = 3.0
    assert_bitwise_equal(inputs.run(target)[1:], clean[1:])


def test_wrong_arguments_are_refused(target: Target) -> None:
    good = inputs_of(Case("good", 3), target, torch.float32)
    experts = good.experts
    gate_up, down = experts.gate_up[..., :64].contiguous(), experts.down[:, :64].contiguous()
    narrow = Fp8Experts(gate_up, experts.gate_up_scales, down, experts.down_scales)
    with pytest.raises(ValueError, match="multiples of 128"):
        fp8_experts(good.x[:, :64].contiguous(), narrow, good.ids, good.weights)
    wrong = Fp8Experts(experts.gate_up, experts.gate_up_scales[:, :1].contiguous(), experts.down, experts.down_scales)
    with pytest.raises(ValueError, match="gate_up_scales: expected shape"):
        fp8_experts(good.x, wrong, good.ids, good.weights)
    wrong = Fp8Experts(experts.gate_up.float(), experts.gate_up_scales, experts.down, experts.down_scales)
    with pytest.raises(ValueError, match=r"gate_up: expected torch\.float8_e4m3fn"):
        fp8_experts(good.x, wrong, good.ids, good.weights)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 15, 32, 129, 512, 2048])
def test_cuda_real_shape(num_tokens: int) -> None:
    """DeepSeek-V2-Lite's experts: right, the same 20 times, and the same replayed from a graph."""
    inputs = inputs_of(Case(f"real {num_tokens}", num_tokens, 6, 64, 2048, 1408), CUDA, torch.bfloat16)
    tokens = inputs.x, inputs.ids, inputs.weights
    check_repeats_and_replay(lambda: inputs.run(CUDA), inputs.reference, tokens, RELATIVE_TOLERANCE[torch.bfloat16])


@pytest.mark.gpu
@pytest.mark.parametrize("rows_per_expert", [1, 4, 16, 17, 96, 97, 400, 401])
def test_cuda_tile_edges(rows_per_expert: int) -> None:
    inputs = inputs_of(Case("edges", rows_per_expert * 8, 1, 8, 256, 384), CUDA, torch.bfloat16)
    tiles = choose_tiles("fp8_experts", inputs.ids.numel(), 8, inputs.x.device, dim=256, inter=384)
    inputs.ids[: tiles.rows + 1, 0] = 2
    assert_close(inputs.run(CUDA), inputs.reference(), RELATIVE_TOLERANCE[torch.bfloat16])
