"""The decoder: embedding, layers of latent attention and (mixture of experts) MLP, and the logits of each sequence."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from app.model.attention.mla import AttentionStep, MlaAttention
from app.model.config import ModelConfig
from app.model.inputs import ModelInput
from app.model.layers import GatedMlp, rope_table
from app.model.moe import MixtureOfExperts, MoeWeights
from app.model.weights import LayerWeights, ModelWeights
from kernels.checks import Backend, padded_rows
from kernels.rms_norm import add_rms_norm, rms_norm


class DecoderLayer:
    """Attention and MLP around a residual stream that is updated in place."""

    def __init__(
        self, config: ModelConfig, weights: LayerWeights, cos_sin: torch.Tensor, backend: Backend | None
    ) -> None:
        self.input_norm, self._post_attention_norm = weights.input_norm, weights.post_attention_norm
        self._eps, self._backend = config.rms_norm_eps, backend
        self._attention = MlaAttention(config, weights.attention, cos_sin, backend)
        self._mlp: GatedMlp | MixtureOfExperts
        if isinstance(weights.mlp, MoeWeights):
            self._mlp = MixtureOfExperts(weights.mlp, backend)
        else:
            self._mlp = weights.mlp

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor, step: AttentionStep, cache: torch.Tensor
    ) -> torch.Tensor:
        """x [N, D], already normed -> the MLP's output [N, D], not yet added to `residual`."""
        x = self._attention.forward(x, step, cache)
        x = add_rms_norm(x, residual, self._post_attention_norm, self._eps, backend=self._backend)
        if isinstance(self._mlp, MixtureOfExperts):
            return self._mlp.forward(x, step.inputs.slots)
        return self._mlp.forward(x)


class Transformer:
    """Turns a ModelInput and the cache into logits.

    absorbed_prefill: prefill chunks take the absorbed path like decodes, so that on CPU in fp32 a token's logits are
    bitwise the same however its sequence is batched and chunked; otherwise they expand keys and values, which is
    faster on a GPU.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
        absorbed_prefill: bool,
        backend: Backend | None = None,
    ) -> None:
        self.config, self.device, self.dtype = config, torch.device(device), dtype
        self._absorbed_prefill, self._backend = absorbed_prefill, backend
        self._embedding, self._norm, self._lm_head = weights.embedding, weights.norm, weights.lm_head
        cos_sin = rope_table(config, device)
        self._layers = [DecoderLayer(config, layer, cos_sin, backend) for layer in weights.layers]

    @torch.inference_mode()
    def forward(self, inputs: ModelInput, cache: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
        """Run one step and write its latents to the cache.

        cache: [num_layers, num_blocks, block_size, cache_dim], or a sequence of the layers' tensors
        Returns: [num_seqs, vocab_size] fp32, the logits after each sequence's last token
        """
        step = AttentionStep.of(
            inputs,
            absorbed_prefill=self._absorbed_prefill,
            num_heads=self.config.num_heads,
            block_size=cache[0].shape[1],
            backend=self._backend,
        )
        eps = self.config.rms_norm_eps
        residual = F.embedding(inputs.token_ids, self._embedding)
        x = rms_norm(residual, self._layers[0].input_norm, eps, backend=self._backend)
        for index, layer in enumerate(self._layers):
            if index:
                x = add_rms_norm(x, residual, layer.input_norm, eps, backend=self._backend)
            x = layer.forward(x, residual, step, cache[index])
        return self._logits(x, residual, inputs.logit_rows)

    def _logits(self, x: torch.Tensor, residual: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Final norm and output projection of the wanted rows only, padded to whole row tiles."""
        num_seqs = rows.shape[0]
        rows = F.pad(rows, (0, padded_rows(num_seqs) - num_seqs))
        x, residual = x.index_select(0, rows), residual.index_select(0, rows)
        x = add_rms_norm(x, residual, self._norm, self.config.rms_norm_eps, backend=self._backend)
        return self._lm_head.forward(x)[:num_seqs].float()
