"""The experts on a CPU in fp32, in machine code of our own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kernels import native, native_products
from kernels.native import Array


class CpuExperts:
    """fused_experts for weights that stay, fp32 on CPU. They come one by one, so that none lies in memory twice.

    piece_ends: of the pieces of I whose sums are rounded on their own, see native_products; by default it is one
    """

    def __init__(self, count: int, piece_ends: Sequence[int] = ()) -> None:
        self._count, self._piece_ends = count, np.array(piece_ends, np.int64)
        self._gate_up: Array | None = None
        self._down: Array | None = None

    @classmethod
    def of(cls, gate_up: torch.Tensor, down: torch.Tensor, piece_ends: Sequence[int] = ()) -> CpuExperts:
        """gate_up [E, 2I, D] and down [E, D, I]"""
        experts = cls(len(gate_up), piece_ends or [down.shape[2]])
        for index, weights in enumerate(zip(gate_up, down, strict=True)):
            experts.put(index, *weights)
        return experts

    def put(self, index: int, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        """Pack one expert, gate_up [2I, D] and down [D, I]."""
        self._gate_up = native_products.put(self._gate_up, self._count, index, native_products.pack(gate_up))
        self._down = native_products.put(self._down, self._count, index, native_products.pack(down))

    @staticmethod
    def can_hold(gate_up: torch.Tensor) -> bool:
        return native.can_run(gate_up)

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """x [N, D], ids [N, k] int32, weights [N, k] fp32 -> [N, D] fp64; see fused_experts."""
        if self._gate_up is None or self._down is None:
            raise ValueError("experts: none was put in")
        return native_products.apply_experts(x, self._gate_up, self._down, self._piece_ends, ids, weights)
