"""Holds the model and the cache tensors; turns a batch into logits."""

from __future__ import annotations

import torch

from app.engine.batch import Batch
from app.engine.graphs import DecodeGraphs
from app.engine.plan import StepPlan, to_model_input
from app.model.transformer import Transformer


class Runner:
    def __init__(self, model: Transformer, cache: torch.Tensor, graphs: DecodeGraphs | None = None) -> None:
        """cache: [num_layers, num_blocks, block_size, cache_dim]; graphs: on CUDA, for the decode sub-batch."""
        self._model = model
        self._cache = cache
        self._graphs = graphs

    @property
    def can_run_ahead(self) -> bool:
        """Whether `forward` returns before the device is done, so that launching the next step early gains time."""
        return self._graphs is not None

    @torch.inference_mode()
    def forward(self, batch: Batch, previous_token_ids: torch.Tensor | None = None) -> torch.Tensor:
        """Compute the batch's new tokens into the cache; returns fp32 logits [num_sequences, vocab].

        previous_token_ids: [rows of the step before] int64 on the device, for a batch with previous_rows
        """
        return self._run(StepPlan.of(batch), previous_token_ids)

    def _run(self, plan: StepPlan, previous_token_ids: torch.Tensor | None) -> torch.Tensor:
        if self._graphs is None:
            return self._eager(plan, previous_token_ids)
        decodes, prefills = plan.split()
        parts = []
        if len(decodes.num_new_tokens):
            parts.append(self._graphs.forward(decodes, previous_token_ids))
        if len(prefills.num_new_tokens):
            parts.append(self._eager(prefills))
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _eager(self, plan: StepPlan, previous_token_ids: torch.Tensor | None = None) -> torch.Tensor:
        inputs = to_model_input(plan, self._cache.shape[2], self._cache.device)
        if previous_token_ids is not None:
            token_ids = inputs.token_ids[: len(plan.token_ids)]
            token_ids.copy_(previous_token_ids.index_select(0, token_ids))
        return self._model.forward(inputs, self._cache)
