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
from app.model.parallel import Group, Ranks
from app.model.spread_experts import SpreadExperts
from app.model.weights import LayerWeights, ModelWeights
from kernels.checks import Backend, padded_rows
from kernels.rms_norm import add_rms_norm, rms_norm


class DecoderLayer:
    """Attention and MLP around a residual stream that is updated in place."""

    def __init__(
        self, config: ModelConfig, weights: LayerWeights, cos_sin: torch.Tensor, backend: Backend | None, ranks: Ranks
    ) -> None:
        self.input_norm, self._post_attention_norm = weights.input_norm, weights.post_attention_norm
        self._eps, self._backend, self._tensor = config.rms_norm_eps, backend, ranks.tensor
        self._attention = MlaAttention(config, weights.attention, cos_sin, backend, ranks)
        self.mlp: GatedMlp | MixtureOfExperts | SpreadExperts
        if not isinstance(weights.mlp, MoeWeights):
            self.mlp = weights.mlp
        elif weights.mlp.placement is not None:
            self.mlp = SpreadExperts(weights.mlp, backend, ranks.expert)
        else:
            self.mlp = MixtureOfExperts(weights.mlp, backend)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor, step: AttentionStep, cache: torch.Tensor
    ) -> torch.Tensor:
        """x [N, D], already normed -> the MLP's output [N, D], not yet added to `residual`; maybe in fp64."""
        x = self._attention.forward(x, step, cache)
        x = add_rms_norm(x, residual, self._post_attention_norm, self._eps, backend=self._backend)
        return self._tensor.all_reduce(self._run_mlp(x, step.inputs))

    def _run_mlp(self, x: torch.Tensor, inputs: ModelInput) -> torch.Tensor:
        if isinstance(self.mlp, GatedMlp):
            return self.mlp.forward(x)
        if isinstance(self.mlp, MixtureOfExperts):
            return self.mlp.forward(x, inputs.slots)
        if inputs.shared is None:
            raise ValueError("inputs: not split over the expert ranks")
        return self.mlp.forward(x, inputs.shared)


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
        ranks: Ranks | None = None,
    ) -> None:
        """config: of the whole model; weights: what this rank holds of it."""
        self.config, self.device, self.dtype = config, torch.device(device), dtype
        self.ranks, self.weight_bytes_read = ranks or Ranks.alone(), weights.bytes_read
        self.absorbed_prefill, self._backend = absorbed_prefill, backend
        self._embedding, self._norm, self._lm_head = weights.embedding, weights.norm, weights.lm_head
        cos_sin = rope_table(config, device)
        self._layers = [DecoderLayer(config, layer, cos_sin, backend, self.ranks) for layer in weights.layers]

        self.expert_layers, self.expert_counts = self._share_counts()

    def _share_counts(self) -> tuple[tuple[int, ...], torch.Tensor]:
        """The layers with routed experts, and how often each expert was chosen so far: [layers, num_experts] int64.

        One tensor, so that a device copies all of them at once.
        """
        layers = {i: layer.mlp for i, layer in enumerate(self._layers) if not isinstance(layer.mlp, GatedMlp)}
        if not layers or self.config.moe is None:
            return (), torch.zeros(0, 0, dtype=torch.int64)
        rows = torch.stack([mlp.counts for mlp in layers.values()])
        for mlp, counts in zip(layers.values(), rows, strict=True):
            mlp.counts = counts
        return tuple(layers), rows[:, : self.config.moe.num_experts]

    @torch.inference_mode()
    def forward(self, inputs: ModelInput, cache: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
        """Run one step and write its latents to the cache.

        cache: [num_layers, num_blocks, block_size, cache_dim], or a sequence of the layers' tensors
        Returns: [num_seqs, vocab_size] fp32, the logits after each sequence's last token; [0, vocab_size] on a rank
            outside the first tensor group
        """
        step = AttentionStep.of(
            inputs,
            absorbed_prefill=self.absorbed_prefill,
            num_heads=self.config.num_heads // self.ranks.tensor.size,
            backend=self._backend,
        )
        eps = self.config.rms_norm_eps
        residual = self._embed(inputs.token_ids)
        x = rms_norm(residual, self._layers[0].input_norm, eps, backend=self._backend)
        for index, layer in enumerate(self._layers):
            if index:
                x = add_rms_norm(x, residual, layer.input_norm, eps, backend=self._backend)
            x = layer.forward(x, residual, step, cache[index])
        return self._logits(x, residual, inputs.logit_rows)

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[N] -> [N, D]; each tensor rank holds a range of the vocabulary."""
        group = self.ranks.tensor
        if group.size == 1:
            return F.embedding(token_ids, self._embedding)
        size = self._embedding.shape[0]
        own_ids = token_ids - group.rank * size
        is_own = (own_ids >= 0) & (own_ids < size)
        return group.all_reduce(F.embedding(own_ids.where(is_own, 0), self._embedding).mul_(is_own[:, None]))

    def _logits(self, x: torch.Tensor, residual: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Final norm and output projection of the wanted rows only, padded to whole row tiles."""
        num_seqs, experts = rows.shape[0], self.ranks.expert
        rows = F.pad(rows, (0, padded_rows(num_seqs) - num_seqs))
        is_own = rows >= 0
        if experts.size > 1:  # a row lies on one of the ranks
            rows = rows.clamp_min(0)
        x, residual = x.index_select(0, rows), residual.index_select(0, rows)
        x = add_rms_norm(x, residual, self._norm, self.config.rms_norm_eps, backend=self._backend)
        if experts.size > 1:
            x = experts.all_reduce(x.masked_fill_(~is_own[:, None], 0.0))
        if self._lm_head is None:
            return x.new_empty(0, self.config.vocab_size, dtype=torch.float32)
        logits = self._lm_head.forward(x)[:num_seqs]
        if self.ranks.tensor.size > 1:
            return _join_columns(logits, self.ranks.tensor)[:, : self.config.vocab_size].contiguous()
        return logits.float()


def _join_columns(x: torch.Tensor, group: Group) -> torch.Tensor:
    """[N, M] of every rank -> [N, size * M] fp32."""
    num_rows, width = x.shape
    parts = group.all_gather(x).view(group.size, num_rows, width)
    return torch.empty(num_rows, group.size, width, device=x.device).copy_(parts.transpose(0, 1)).flatten(1)
