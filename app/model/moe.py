"""Mixture of experts: the router's choice and the experts, the shared ones among them.

A shared expert of S times an expert's width is S more experts that every token passes with weight 1: their parts of
the gated product add up to it, and one grouped product serves all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from app.model.config import MoeConfig
from app.model.layers import GatedMlp, Linear
from app.model.placement import LayerPlacement
from kernels.checks import Backend
from kernels.expert_routing import route_experts
from kernels.experts_cpu import CpuExperts
from kernels.fp8_experts import Fp8Experts, fp8_experts
from kernels.fused_experts import fused_experts
from kernels.row_linear import linear_rows


class Experts:
    """Feed-forward networks by number: gate_up [E, 2I, D] and down [E, D, I], or packed for a CPU."""

    def __init__(self, weights: CpuExperts | tuple[torch.Tensor, torch.Tensor], backend: Backend | None) -> None:
        self._weights, self._backend = weights, backend

    def forward(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [N, D], ids [N, k] int32, -1 for none, weights [N, k] fp32 -> [N, D]; see fused_experts.

        Of packed experts, and in fp32 under `invariance`, it is fp64: sums that do not depend on which rank adds what.
        """
        if isinstance(self._weights, CpuExperts):
            if counts is not None:
                counts.numpy()[:] += np.bincount(ids.numpy().ravel() + 1, minlength=len(counts) + 1)[1:]
            return self._weights.forward(x, ids, weights)
        return fused_experts(x, *self._weights, ids, weights, counts=counts, backend=self._backend)


class Fp8Layer:
    """Experts in the weights of an FP8 checkpoint; their activations are rounded to FP8 as well."""

    def __init__(self, weights: Fp8Experts, backend: Backend | None) -> None:
        self._weights, self._backend = weights, backend

    def forward(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor | None = None
    ) -> torch.Tensor:
        """As of Experts; see fp8_experts."""
        return fp8_experts(x, self._weights, ids, weights, counts=counts, backend=self._backend)


@dataclass(frozen=True, slots=True)
class MoeWeights:
    config: MoeConfig
    router: torch.Tensor  # [E, D] fp32
    bias: torch.Tensor | None  # [E] fp32, added to the scores for the choice only
    experts: Experts | Fp8Layer  # E + S of them; without `placement`
    # Set if ranks split the routed experts: `experts` are then those that this rank holds.
    placement: LayerPlacement | None = None
    shared: GatedMlp | None = None


class Router:
    """Chooses each token's experts. It is fp32 whatever the model's dtype: an error there changes which experts run."""

    def __init__(self, weights: MoeWeights, backend: Backend | None) -> None:
        self._config, self._bias, self._backend = weights.config, weights.bias, backend
        self._router = Linear(weights.router, backend=backend)
        # Products of bf16 numbers are exact in fp32: where the router's weights are bf16 numbers, as published ones
        # are, the tensor cores give its fp32 logits without a conversion.
        narrow = weights.router.to(torch.bfloat16)
        is_exact = weights.router.is_cuda and torch.equal(narrow.float(), weights.router)
        self._narrow_router = narrow if is_exact else None

    def choose(self, x: torch.Tensor, slots: torch.Tensor, *, num_shared: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """x [N, D] -> ids [N, top_k + num_shared] int32 and weights, likewise; no expert for rows of slot -1."""
        config = self._config
        return route_experts(
            self._logits(x),
            self._bias,
            top_k=config.top_k,
            num_groups=config.num_groups,
            top_groups=config.top_groups,
            scoring=config.scoring,
            group_score=config.group_score,
            normalize=config.normalize,
            scale=config.scale,
            num_shared=num_shared,
            slots=slots,
            backend=self._backend,
        )

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        if self._narrow_router is not None and x.dtype == torch.bfloat16:
            return linear_rows(x, self._narrow_router, out_dtype=torch.float32)
        return self._router.forward(x.float())


class MixtureOfExperts:
    """All experts of a layer, or this rank's part of every expert's width.

    counts: [num_experts + num_shared_experts] int64: how often each was chosen so far
    """

    def __init__(self, weights: MoeWeights, backend: Backend | None) -> None:
        self._router, self._experts = Router(weights, backend), weights.experts
        self._num_shared = weights.config.num_shared_experts
        num_experts = weights.config.num_experts + self._num_shared
        self.counts = torch.zeros(num_experts, dtype=torch.int64, device=weights.router.device)

    def forward(self, x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """[N, D] -> [N, D]; rows whose slot [N] is -1 are padding and meet no expert."""
        ids, expert_weights = self._router.choose(x, slots, num_shared=self._num_shared)
        return self._experts.forward(x, ids, expert_weights, self.counts)
