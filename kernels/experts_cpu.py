"""The experts on a CPU in fp32, in machine code of our own."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels import native, native_products
from kernels.native import Array

PackedExpert = tuple[Array, Array]


def pack_expert(gate_up: torch.Tensor, down: torch.Tensor) -> PackedExpert:
    """One expert, gate_up [2I, D] and down [D, I]: packed one by one, all of them never lie in memory twice."""
    return native_products.pack(gate_up), native_products.pack(down)


class CpuExperts:
    """fused_experts for weights that stay, fp32 on CPU."""

    def __init__(self, packed: Sequence[PackedExpert]) -> None:
        self._gate_up = native_products.join([gate_up for gate_up, _ in packed])
        self._down = native_products.join([down for _, down in packed])

    @classmethod
    def of(cls, gate_up: torch.Tensor, down: torch.Tensor) -> CpuExperts:
        """gate_up [E, 2I, D] and down [E, D, I]"""
        return cls([pack_expert(*weights) for weights in zip(gate_up, down, strict=True)])

    @staticmethod
    def can_hold(gate_up: torch.Tensor) -> bool:
        return native.can_run(gate_up)

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """x [N, D], ids [N, k] int32, weights [N, k] fp32 -> [N, D]; see fused_experts."""
        return native_products.apply_experts(x, self._gate_up, self._down, ids, weights)
