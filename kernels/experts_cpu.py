"""The experts on a CPU in fp32, in machine code of our own."""

from __future__ import annotations

import torch

from kernels import native, native_products


class CpuExperts:
    """fused_experts for weights that stay: gate_up [E, 2I, D] and down [E, D, I], fp32 on CPU."""

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        self._gate_up, self._down = native_products.pack(gate_up), native_products.pack(down)

    @staticmethod
    def can_hold(gate_up: torch.Tensor) -> bool:
        return native.can_run(gate_up)

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """x [N, D], ids [N, k] int32, weights [N, k] fp32 -> [N, D]; see fused_experts."""
        return native_products.apply_experts(x, self._gate_up, self._down, ids, weights)
