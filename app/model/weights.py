"""The weights of a model in the form the layers run: projections that share an input are one matrix, experts one stack.

They come from a checkpoint (`load_weights`) or a random generator (`random_weights`, for benchmarks).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from app.model.attention.mla import MlaWeights
from app.model.checkpoint import Checkpoint, checkpoint_digest, verify_manifest
from app.model.config import ModelConfig, MoeConfig
from app.model.layers import GatedMlp, Linear
from app.model.moe import MoeWeights

__all__ = ["LayerWeights", "ModelWeights", "TensorSource", "checkpoint_digest", "load_weights", "random_weights"]

RANDOM_STD = 0.02
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class LayerWeights:
    input_norm: torch.Tensor  # [D]
    attention: MlaWeights
    post_attention_norm: torch.Tensor  # [D]
    mlp: GatedMlp | MoeWeights


@dataclass(frozen=True, slots=True)
class ModelWeights:
    embedding: torch.Tensor  # [V, D]
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor  # [D]
    lm_head: Linear  # D -> V


class TensorSource(Protocol):
    def fill(self, name: str, destination: torch.Tensor) -> None:
        """Write the tensor called `name` in the Hugging Face layout into `destination`, at the latest at `flush`."""

    def flush(self) -> None:
        """Return when every tensor asked for so far can be read on its device's default stream."""


def load_weights(
    folder: str | Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
) -> ModelWeights:
    """Check the files against the folder's manifest, if it has one, then read every tensor once.

    Raises CheckpointError, naming file and tensor, on anything changed, missing, unexpected, misshapen or corrupt.
    """
    verify_manifest(folder)
    with Checkpoint(folder) as checkpoint:
        weights = _Assembler(config, checkpoint, dtype, device).model()
        checkpoint.close(lambda name: _is_ignored(name, config))
    return weights


def random_weights(config: ModelConfig, *, seed: int, dtype: torch.dtype, device: torch.device | str) -> ModelWeights:
    """Weights drawn from N(0, 0.02), norms of 1: the shapes and the speed of a checkpoint without its files."""
    return _Assembler(config, _RandomSource(seed, dtype, device), dtype, device).model()


def _is_ignored(name: str, config: ModelConfig) -> bool:
    """Multi-token-prediction layers, stored rotary frequencies and the second copy of tied embeddings are not used."""
    layer = _LAYER.match(name)
    if layer is not None and int(layer.group(1)) >= config.num_layers:
        return True
    return name.endswith("rotary_emb.inv_freq") or (config.tie_word_embeddings and name == "lm_head.weight")


class _RandomSource:
    """Every number is one of `dtype`, as if it came from a checkpoint of that dtype."""

    def __init__(self, seed: int, dtype: torch.dtype, device: torch.device | str) -> None:
        self._dtype = dtype
        self._generator = torch.Generator(device=device).manual_seed(seed)

    def fill(self, name: str, destination: torch.Tensor) -> None:
        if name.endswith("norm.weight"):
            destination.fill_(1.0)
        else:
            drawn = torch.empty(destination.shape, dtype=self._dtype, device=destination.device)
            destination.copy_(drawn.normal_(0.0, RANDOM_STD, generator=self._generator))

    def flush(self) -> None:
        """Nothing is pending."""


class _Assembler:
    """Allocates each fused tensor once and has the source fill its parts in place."""

    def __init__(
        self, config: ModelConfig, source: TensorSource, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self._config, self._source, self._dtype, self._device = config, source, dtype, device

    def model(self) -> ModelWeights:
        config = self._config
        embedding = self._tensor("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        if config.tie_word_embeddings:
            lm_head = Linear(embedding)
        else:
            lm_head = self._linear({"lm_head": config.vocab_size}, config.hidden_size)
        norm = self._tensor("model.norm.weight", config.hidden_size)
        layers = tuple(self._layer(index) for index in range(config.num_layers))
        return ModelWeights(embedding, layers, norm, lm_head)

    def _layer(self, index: int) -> LayerWeights:
        config, prefix = self._config, f"model.layers.{index}."
        mlp: GatedMlp | MoeWeights
        if config.moe is not None and config.is_moe_layer(index):
            mlp = self._moe(prefix + "mlp.", config.moe)
        else:
            mlp = self._mlp(prefix + "mlp.", config.intermediate_size)
        return LayerWeights(
            input_norm=self._tensor(prefix + "input_layernorm.weight", config.hidden_size),
            attention=self._attention(prefix + "self_attn."),
            post_attention_norm=self._tensor(prefix + "post_attention_layernorm.weight", config.hidden_size),
            mlp=mlp,
        )

    def _attention(self, prefix: str) -> MlaWeights:
        config = self._config
        hidden, rank = config.hidden_size, config.q_lora_rank
        q_name, q_rows = ("q_proj", config.num_heads * config.qk_head_dim) if rank is None else ("q_a_proj", rank)
        names = {prefix + q_name: q_rows, prefix + "kv_a_proj_with_mqa": config.cache_dim}
        qkv_a_bias = o_bias = q_norm = q_b = None
        if config.attention_bias:
            qkv_a_bias = torch.zeros(q_rows + config.cache_dim, dtype=self._dtype, device=self._device)
            # q_proj never has a bias: its part stays 0.
            if rank is not None:
                self._source.fill(prefix + "q_a_proj.bias", qkv_a_bias[:q_rows])
            self._source.fill(prefix + "kv_a_proj_with_mqa.bias", qkv_a_bias[q_rows:])
            o_bias = self._tensor(prefix + "o_proj.bias", hidden)
        if rank is not None:
            q_norm = self._tensor(prefix + "q_a_layernorm.weight", rank)
            q_b = self._linear({prefix + "q_b_proj": config.num_heads * config.qk_head_dim}, rank)
        kv_rows = config.num_heads * (config.qk_nope_head_dim + config.v_head_dim)
        return MlaWeights(
            qkv_a=self._linear(names, hidden, qkv_a_bias),
            q_norm=q_norm,
            q_b=q_b,
            kv_norm=self._tensor(prefix + "kv_a_layernorm.weight", config.kv_lora_rank),
            kv_b=self._tensor(prefix + "kv_b_proj.weight", kv_rows, config.kv_lora_rank),
            o=self._linear({prefix + "o_proj": hidden}, config.num_heads * config.v_head_dim, o_bias),
        )

    def _mlp(self, prefix: str, width: int) -> GatedMlp:
        hidden = self._config.hidden_size
        gate_up = self._linear({prefix + "gate_proj": width, prefix + "up_proj": width}, hidden)
        return GatedMlp(gate_up, self._linear({prefix + "down_proj": hidden}, width))

    def _moe(self, prefix: str, moe: MoeConfig) -> MoeWeights:
        hidden, width = self._config.hidden_size, moe.intermediate_size
        gate_up = self._empty(moe.num_experts + moe.num_shared_experts, 2 * width, hidden)
        down = self._empty(moe.num_experts + moe.num_shared_experts, hidden, width)
        for expert in range(moe.num_experts):
            name = f"{prefix}experts.{expert}."
            self._source.fill(name + "gate_proj.weight", gate_up[expert, :width])
            self._source.fill(name + "up_proj.weight", gate_up[expert, width:])
            self._source.fill(name + "down_proj.weight", down[expert])
        router = torch.empty(moe.num_experts, hidden, dtype=torch.float32, device=self._device)
        self._source.fill(prefix + "gate.weight", router)
        bias = None
        if moe.has_bias:
            bias = torch.empty(moe.num_experts, dtype=torch.float32, device=self._device)
            self._source.fill(prefix + "gate.e_score_correction_bias", bias)
        if moe.num_shared_experts:
            self._split_shared(prefix + "shared_experts.", gate_up[moe.num_experts :], down[moe.num_experts :])
        return MoeWeights(moe, router, bias, gate_up, down)

    def _split_shared(self, prefix: str, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        """Cut the shared expert along its width: gate_up [S, 2I, D] and down [S, D, I] get a part of it each."""
        count, hidden, width = down.shape
        gate = self._tensor(prefix + "gate_proj.weight", count * width, hidden)
        up = self._tensor(prefix + "up_proj.weight", count * width, hidden)
        whole = self._tensor(prefix + "down_proj.weight", hidden, count * width)
        self._source.flush()
        gate_up[:, :width].copy_(gate.view(count, width, hidden))
        gate_up[:, width:].copy_(up.view(count, width, hidden))
        down.copy_(whole.view(hidden, count, width).transpose(0, 1))

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device)

    def _tensor(self, name: str, *shape: int) -> torch.Tensor:
        tensor = self._empty(*shape)
        self._source.fill(name, tensor)
        return tensor

    def _linear(self, rows: dict[str, int], columns: int, bias: torch.Tensor | None = None) -> Linear:
        """Projections of the same input, one above the other, given as name -> number of rows."""
        weight = self._empty(sum(rows.values()), columns)
        start = 0
        for name, count in rows.items():
            self._source.fill(name + ".weight", weight[start : start + count])
            start += count
        return Linear(weight, bias)
