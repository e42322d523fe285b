"""Mixture of experts: the router's choice and the experts, the shared ones among them.

A shared expert of S times an expert's width is S more experts that every token passes with weight 1: their parts of
the gated product add up to it, and one grouped product serves all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from app.model.config import MoeConfig
from app.model.layers import Linear
from kernels.checks import Backend, use_triton
from kernels.expert_routing import route_experts
from kernels.experts_cpu import CpuExperts
from kernels.fused_experts import fused_experts
from kernels.row_linear import linear_rows


@dataclass(frozen=True, slots=True)
class MoeWeights:
    config: MoeConfig
    router: torch.Tensor  # [E, D] fp32
    bias: torch.Tensor | None  # [E] fp32, added to the scores for the choice only
    gate_up: torch.Tensor  # [E + S, 2I, D]: gate rows, then up rows
    down: torch.Tensor  # [E + S, D, I]


class MixtureOfExperts:
    def __init__(self, weights: MoeWeights, backend: Backend | None) -> None:
        self._config, self._bias, self._backend = weights.config, weights.bias, backend
        self._router = Linear(weights.router)
        # Products of bf16 numbers are exact in fp32: where the router's weights are bf16 numbers, as published ones
        # are, the tensor cores give its fp32 logits without a conversion.
        narrow = weights.router.to(torch.bfloat16)
        is_exact = weights.router.is_cuda and torch.equal(narrow.float(), weights.router)
        self._narrow_router = narrow if is_exact else None
        self._experts: CpuExperts | tuple[torch.Tensor, torch.Tensor] = weights.gate_up, weights.down
        if not use_triton(weights.gate_up, backend) and CpuExperts.can_hold(weights.gate_up):
            self._experts = CpuExperts(weights.gate_up, weights.down)

    def forward(self, x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """[N, D] -> [N, D]; rows whose slot [N] is -1 are padding and meet no expert.

        The router is fp32 whatever the model's dtype: a rounding error there changes which experts run.
        """
        config = self._config
        ids, expert_weights = route_experts(
            self._router_logits(x),
            self._bias,
            top_k=config.top_k,
            num_groups=config.num_groups,
            top_groups=config.top_groups,
            scoring=config.scoring,
            group_score=config.group_score,
            normalize=config.normalize,
            scale=config.scale,
            num_shared=config.num_shared_experts,
            slots=slots,
            backend=self._backend,
        )
        if isinstance(self._experts, CpuExperts):
            return self._experts.forward(x, ids, expert_weights)
        return fused_experts(x, *self._experts, ids, expert_weights, backend=self._backend)

    def _router_logits(self, x: torch.Tensor) -> torch.Tensor:
        if self._narrow_router is not None and x.dtype == torch.bfloat16:
            return linear_rows(x, self._narrow_router, out_dtype=torch.float32)
        return self._router.forward(x.float())
