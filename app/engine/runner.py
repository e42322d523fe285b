"""Holds the model and the cache tensors; turns a batch into logits."""

from __future__ import annotations

import torch

from app.engine.batch import Batch, to_model_input
from app.model.transformer import Transformer


class Runner:
    def __init__(self, model: Transformer, cache: torch.Tensor, device: torch.device) -> None:
        """cache: [num_layers, num_blocks, block_size, cache_dim]."""
        self._model = model
        self._cache = cache
        self._device = device

    @torch.inference_mode()
    def forward(self, batch: Batch) -> torch.Tensor:
        """Compute the batch's new tokens into the cache; returns fp32 logits [num_sequences, vocab]."""
        inputs = to_model_input(batch, self._cache.shape[2], self._device)
        return self._model.forward(inputs, self._cache)
