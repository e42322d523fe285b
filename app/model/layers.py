"""The plain parts of a layer: normalisation, linear projections, the gated MLP and the rotary table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from app.model.config import ModelConfig, RopeConfig, YarnConfig
from kernels import invariance, native, native_products
from kernels.checks import Backend, use_triton
from kernels.row_linear import linear_rows


class Linear:
    """x W^T + b. On CPU in fp32 the weight lies packed: with few rows a product is bound by how fast the weight
    streams in, and a row keeps its bits whatever other rows there are.

    piece_ends: for inputs that ranks split, see sharding.piece_ends. In fp32 on a CPU, and under `invariance`, the
    result then is fp64, so that the sum over the ranks has the bits that one rank gives.
    """

    __slots__ = ("_backend", "_bias", "_num_outputs", "_piece_ends", "_weight")

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, piece_ends: Sequence[int] | None = None,
        backend: Backend | None = None,
    ) -> None:  # fmt: skip
        """weight: [out, in]; bias: [out]."""
        self._bias, self._num_outputs, self._backend = bias, weight.shape[0], backend
        self._piece_ends = None if piece_ends is None else np.array(piece_ends, np.int64)
        is_packed = native.can_run(weight) and not use_triton(weight, backend)
        self._weight = native_products.pack(weight) if is_packed else weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[N, in], rows may be strided -> [N, out]."""
        if isinstance(self._weight, torch.Tensor):
            is_double = self._piece_ends is not None and invariance.is_wide(x.dtype)
            out_dtype = torch.float64 if is_double else None
            return linear_rows(x, self._weight, self._bias, out_dtype=out_dtype, backend=self._backend)
        y = native_products.linear(x, self._weight, self._num_outputs, self._piece_ends)
        return y if self._bias is None else y.add_(self._bias)


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """(SiLU(x gate^T) * (x up^T)) down^T"""

    gate_up: Linear  # D -> 2I: gate rows, then up rows
    down: Linear  # I -> D

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[N, D] -> [N, D], in fp64 if `down` says so."""
        return self.down.forward(silu_and_mul(self.gate_up.forward(x)))


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """SiLU of the first half of each row times the second: [N, 2I] -> [N, I].

    Under `invariance` fp32 values are rounded once, as in fused_experts.
    """
    if invariance.is_wide(gate_up.dtype):
        gate, up = gate_up.double().chunk(2, dim=-1)
        return torch.exp(-gate).add_(1.0).reciprocal_().mul_(gate).mul_(up).to(gate_up.dtype)
    if native.can_run(gate_up):
        out = torch.empty(gate_up.shape[0], gate_up.shape[1] // 2)
        native_products.silu_and_mul(gate_up.numpy(), out.numpy())
        return out
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def rope_table(config: ModelConfig, device: torch.device | str) -> torch.Tensor:
    """Cosines and sines of every position: [max_position_embeddings, dr] fp32, cos half then sin half.

    YaRN's magnitude is already in both halves. Angles are fp32 products, as the models were trained with.
    """
    frequencies = _inverse_frequencies(config.rope, config.qk_rope_head_dim)
    positions = torch.arange(config.max_position_embeddings, dtype=torch.float32)
    angles = torch.outer(positions, frequencies)
    table = torch.cat([angles.cos(), angles.sin()], dim=-1)
    if config.rope.yarn:
        table *= config.rope.yarn.cos_sin_scale
    return table.to(device)


def _inverse_frequencies(rope: RopeConfig, dim: int) -> torch.Tensor:
    """Radians per position of each of the dim / 2 rotated pairs, [dim / 2] fp32."""
    periods = rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if rope.yarn is None:
        return 1.0 / periods
    kept = _share_kept(rope.theta, rope.yarn, dim)
    return (1.0 / (rope.yarn.factor * periods)) * (1.0 - kept) + (1.0 / periods) * kept


def _share_kept(theta: float, yarn: YarnConfig, dim: int) -> torch.Tensor:
    """How much of each pair's original frequency YaRN keeps: 1 for the fast pairs, 0 for the slow ones."""

    def pair_with(rotations: float) -> float:
        """The pair that turns so many times within the original context."""
        return dim * math.log(yarn.original_max_position_embeddings / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_with(yarn.beta_fast), pair_with(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if high == low:
        high += 0.001
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)
    return 1.0 - ramp.clamp(0, 1)
