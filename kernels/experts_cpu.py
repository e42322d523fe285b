"""The experts on a CPU in fp32: few tokens in machine code of our own, many in packed matrix products, equal bits."""

from __future__ import annotations

import torch

from kernels import native


class CpuExperts:
    """fused_experts for weights that stay: gate_up [E, 2I, D] and down [E, D, I], fp32 on CPU."""

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        self._num_experts = gate_up.shape[0]
        memory = native.aligned_memory(gate_up.numel() + down.numel())
        self._gate_up = memory[: gate_up.numel()].reshape(gate_up.mT.shape)  # [E, D, 2I]
        self._down = memory[gate_up.numel() :].reshape(down.mT.shape)  # [E, I, D]
        self._gate_up[:], self._down[:] = gate_up.mT.numpy(), down.mT.numpy()
        self._packed_gate_up = [native.pack(weight) for weight in gate_up]
        self._packed_down = [native.pack(weight) for weight in down]

    @staticmethod
    def can_hold(gate_up: torch.Tensor) -> bool:
        return native.can_run(gate_up) and max(gate_up.shape[2], gate_up.shape[1] // 2) <= native.MAX_INNER

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """x [N, D], ids [N, k] int32, weights [N, k] fp32 -> [N, D]; see fused_experts."""
        if x.shape[0] > native.MAX_ROWS:
            return self._many(x, ids, weights)
        out = torch.zeros_like(x)
        native.few_experts(x.numpy(), self._gate_up, self._down, ids.numpy(), weights.numpy(), out.numpy())
        return out

    def _many(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Two products per hit expert over its rows, which lie one expert after the other; pairs without one last."""
        num_tokens, top_k = ids.shape
        experts = torch.where(ids < 0, self._num_experts, ids).flatten()
        order = torch.argsort(experts, stable=True)
        counts = torch.bincount(experts, minlength=self._num_experts + 1).tolist()
        results = torch.zeros(num_tokens * top_k, x.shape[1])
        rows_of = x.index_select(0, order // top_k).split(counts)
        for expert, (rows, out) in enumerate(zip(rows_of[:-1], results.split(counts)[:-1], strict=True)):
            if rows.shape[0] == 0:
                continue
            gate_up = native.packed_product(rows, self._packed_gate_up[expert])
            hidden = torch.empty(rows.shape[0], gate_up.shape[1] // 2)
            native.silu_and_mul(gate_up.numpy(), hidden.numpy())
            out.copy_(native.packed_product(hidden, self._packed_down[expert]))
        place = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0]))  # pair -> row
        total = torch.zeros_like(x)
        native.add_weighted(results.numpy(), place.view(ids.shape).numpy(), weights.numpy(), total.numpy())
        return total
