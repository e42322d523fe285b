"""The linear layer's forms and the gated activation: right, and indifferent to the rows beside a row."""

from __future__ import annotations

import pytest
import torch

from app.model.layers import GatedMlp, Linear, silu_and_mul
from kernels.checks import ROW_TILE

MAX_DIFF = 1e-5
# (in, out): below and above the size from which weights are packed, with sizes that fill no vector register.
SHAPES = [(40, 52), (384, 256), (300, 500), (384, 520)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize(("num_inputs", "num_outputs"), SHAPES)
def test_linear_multiplies(num_inputs: int, num_outputs: int, has_bias: bool, dtype: torch.dtype) -> None:
    weight = (torch.randn(num_outputs, num_inputs) / num_inputs**0.5).to(dtype)
    bias = torch.randn(num_outputs).to(dtype) if has_bias else None
    x = torch.randn(16, 2 * num_inputs).to(dtype)[:, num_inputs:]
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    actual = Linear(weight, bias).forward(x)
    assert actual.dtype == dtype
    # bf16 keeps 8 bits of values that reach about 4.
    assert (actual.double() - expected).abs().max() < (MAX_DIFF if dtype == torch.float32 else 0.05)


@pytest.mark.parametrize(("num_inputs", "num_outputs"), SHAPES)
def test_a_row_keeps_its_bits_beside_others(num_inputs: int, num_outputs: int) -> None:
    linear = Linear(torch.randn(num_outputs, num_inputs))
    x = torch.randn(40 * ROW_TILE, num_inputs)
    whole = linear.forward(x)
    for num_rows in (ROW_TILE, 2 * ROW_TILE, 3 * ROW_TILE, 13 * ROW_TILE):
        for start in (0, 5, len(x) - num_rows):
            assert torch.equal(linear.forward(x[start : start + num_rows].clone()), whole[start : start + num_rows])


def test_gated_mlp() -> None:
    gate_up, down, x = torch.randn(60, 20) / 4, torch.randn(20, 30) / 5, torch.randn(8, 20)
    gate, up = (x @ gate_up.T).chunk(2, -1)
    expected = (torch.nn.functional.silu(gate) * up) @ down.T
    assert (GatedMlp(Linear(gate_up), Linear(down)).forward(x) - expected).abs().max() < MAX_DIFF


def test_silu_and_mul_keeps_a_rows_bits_and_survives_large_gates() -> None:
    x = torch.randn(4096, 2 * 23) * 10
    x[:, :3] = torch.tensor([-200.0, 200.0, 0.0])
    whole = silu_and_mul(x)
    assert whole.isfinite().all()
    for start in (0, 1, 2048, 4088):
        assert torch.equal(silu_and_mul(x[start : start + 8].clone()), whole[start : start + 8])
