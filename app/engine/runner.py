"""Holds the model and the cache tensors; turns a batch into logits."""

from __future__ import annotations

import torch

from app.engine.batch import Batch
from app.engine.graphs import StepGraphs
from app.engine.plan import StepPlan, to_model_input
from app.model.transformer import Transformer


class Runner:
    def __init__(self, model: Transformer, cache: torch.Tensor, graphs: StepGraphs | None = None) -> None:
        """cache: [num_layers, num_blocks, block_size, cache_dim]; graphs: on CUDA, for the steps they hold."""
        self._model = model
        self._cache = cache
        self._graphs = graphs

    @property
    def can_run_ahead(self) -> bool:
        """Whether `forward` returns before the device is done, so that launching the next step early gains time."""
        return self._graphs is not None

    def warm_up(self) -> None:
        """Make every step fit some graph of its kind, as far as steps run from graphs."""
        if self._graphs is not None:
            self._graphs.capture_largest()

    def capture_next(self) -> bool:
        """Use an idle moment for one more graph; False if there is nothing left to prepare."""
        return self._graphs is not None and self._graphs.capture_next()

    @torch.inference_mode()
    def forward(self, batch: Batch, previous_token_ids: torch.Tensor | None = None) -> torch.Tensor:
        """Compute the batch's new tokens into the cache; returns fp32 logits [num_sequences, vocab].

        previous_token_ids: [rows of the step before] int64 on the device, for a batch with previous_rows
        """
        return self._run(StepPlan.of(batch), previous_token_ids)

    def _run(self, plan: StepPlan, previous_token_ids: torch.Tensor | None) -> torch.Tensor:
        logits = self._graphs.forward(plan, previous_token_ids) if self._graphs else None
        return self._eager(plan, previous_token_ids) if logits is None else logits

    def _eager(self, plan: StepPlan, previous_token_ids: torch.Tensor | None) -> torch.Tensor:
        inputs = to_model_input(plan, self._cache.shape[2], self._cache.device)
        if previous_token_ids is not None:
            token_ids = inputs.token_ids[: len(plan.token_ids)]
            token_ids.copy_(previous_token_ids.index_select(0, token_ids))
        return self._model.forward(inputs, self._cache)
