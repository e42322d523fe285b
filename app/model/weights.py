"""The weights of a model in the form the layers run: projections that share an input are one matrix, experts one stack.

They come from a checkpoint (`load_weights`) or a random generator (`random_weights`, for benchmarks), whole or as the
part that one of several ranks holds (sharding.py).
"""

from __future__ import annotations

import logging
import re
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from app.model.attention.mla import MlaWeights
from app.model.checkpoint import SCALE_SUFFIX, Checkpoint, Span, TensorSource, checkpoint_digest, verify_manifest
from app.model.config import ModelConfig, MoeConfig
from app.model.expert_weights import ExpertStack
from app.model.layers import GatedMlp, Linear
from app.model.moe import MoeWeights
from app.model.sharding import Shard, piece_ends
from kernels.checks import Backend

__all__ = ["LayerWeights", "ModelWeights", "checkpoint_digest", "load_weights", "random_weights"]

logger = logging.getLogger(__name__)
RANDOM_STD = 0.02
RANDOM_SCALE = 2.0**-10  # of FP8 blocks: 22 standard deviations fit
REPORT_PERIOD_S = 5.0  # of loading progress
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class LayerWeights:
    input_norm: torch.Tensor  # [D]
    attention: MlaWeights
    post_attention_norm: torch.Tensor  # [D]
    mlp: GatedMlp | MoeWeights


@dataclass(frozen=True, slots=True)
class ModelWeights:
    embedding: torch.Tensor  # [V, D], or a range of V
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor  # [D]
    lm_head: Linear | None  # D -> V, or the same range; None on a rank that computes no logits
    bytes_read: int = 0  # of the checkpoint's files


def load_weights(
    folder: str | Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    backend: Backend | None = None,
    shard: Shard | None = None,
) -> ModelWeights:
    """Check the files against the folder's manifest, if it has one, then read every tensor once.

    shard: read the part of one rank and nothing else; of the files it hashes its share
    Raises CheckpointError, naming file and tensor, on anything changed, missing, unexpected, misshapen or corrupt.
    """
    shard, start = shard or Shard(), time.monotonic()
    verify_manifest(folder, part=shard.rank, num_parts=shard.num_ranks)
    with Checkpoint(folder) as checkpoint:
        weights = _Assembler(config, checkpoint, dtype, device, backend, shard).model()
        checkpoint.close(lambda name: _is_ignored(name, config))
        logger.info(
            "%s: read %.3f GB of weights in %.1f s", shard, checkpoint.bytes_read / 1e9, time.monotonic() - start
        )
    return replace(weights, bytes_read=checkpoint.bytes_read)


def random_weights(
    config: ModelConfig,
    *,
    seed: int,
    dtype: torch.dtype,
    device: torch.device | str,
    backend: Backend | None = None,
    shard: Shard | None = None,
) -> ModelWeights:
    """Weights drawn from N(0, 0.02), norms of 1: the shapes and the speed of a checkpoint without its files.

    Every rank's shard is a part of the same model.
    """
    return _Assembler(config, _RandomSource(seed, dtype, device), dtype, device, backend, shard or Shard()).model()


def _is_ignored(name: str, config: ModelConfig) -> bool:
    """Multi-token-prediction layers, stored rotary frequencies and the second copy of tied embeddings are not used."""
    layer = _LAYER.match(name)
    if layer is not None and int(layer.group(1)) >= config.num_layers:
        return True
    return name.endswith("rotary_emb.inv_freq") or (config.tie_word_embeddings and name == "lm_head.weight")


class _RandomSource:
    """Every number is one of `dtype`, as if it came from a checkpoint of that dtype; it depends on seed and name."""

    def __init__(self, seed: int, dtype: torch.dtype, device: torch.device | str) -> None:
        self._seed, self._dtype = seed, dtype
        self._generator = torch.Generator(device=device)

    def fill(self, name: str, destination: torch.Tensor, spans: Sequence[Span] = ()) -> None:
        if name.endswith("norm.weight"):
            destination.fill_(1.0)
            return
        if name.endswith(SCALE_SUFFIX):
            destination.fill_(RANDOM_SCALE)
            return
        spans = spans or [Span.whole(size) for size in destination.shape]
        self._generator.manual_seed(zlib.crc32(name.encode(), self._seed))
        drawn = torch.empty([span.total for span in spans], dtype=self._dtype, device=destination.device)
        drawn.normal_(0.0, RANDOM_STD, generator=self._generator)
        if destination.dtype == torch.float8_e4m3fn:
            drawn /= RANDOM_SCALE
        destination.copy_(drawn[tuple(span.indices for span in spans)])

    def skip(self, name: str) -> None:
        """Nothing is stored."""

    def flush(self) -> None:
        """Nothing is pending."""


class _Assembler:
    """Allocates each fused tensor once and has the source fill its parts in place."""

    def __init__(
        self,
        config: ModelConfig,
        source: TensorSource,
        dtype: torch.dtype,
        device: torch.device | str,
        backend: Backend | None,
        shard: Shard,
    ) -> None:
        self._config, self._source, self._dtype, self._device = config, source, dtype, device
        self._backend, self._shard = backend, shard

    def model(self) -> ModelWeights:
        config, hidden = self._config, Span.whole(self._config.hidden_size)
        rows, size = self._shard.vocabulary(config.vocab_size)
        embedding = torch.zeros(size, hidden.total, dtype=self._dtype, device=self._device)
        self._source.fill("model.embed_tokens.weight", embedding[: rows.count], (rows, hidden))
        norm = self._tensor("model.norm.weight", hidden)
        lm_head = None
        if config.tie_word_embeddings:
            self._source.flush()
            lm_head = Linear(embedding, backend=self._backend) if self._shard.has_head else None
        elif not self._shard.has_head:
            self._source.skip("lm_head.weight")
        else:
            weight = torch.zeros_like(embedding)
            self._source.fill("lm_head.weight", weight[: rows.count], (rows, hidden))
            lm_head = Linear(weight, backend=self._backend)
        return ModelWeights(embedding, self._layers(), norm, lm_head)

    def _layers(self) -> tuple[LayerWeights, ...]:
        layers: list[LayerWeights] = []
        reported_s = time.monotonic()
        for index in range(self._config.num_layers):
            layers.append(self._layer(index))
            if time.monotonic() - reported_s > REPORT_PERIOD_S:
                reported_s = time.monotonic()
                logger.info("%s: %d of %d layers are loaded", self._shard, len(layers), self._config.num_layers)
        return tuple(layers)

    def _layer(self, index: int) -> LayerWeights:
        config, prefix, hidden = self._config, f"model.layers.{index}.", Span.whole(self._config.hidden_size)
        mlp: GatedMlp | MoeWeights
        if config.moe is not None and config.is_moe_layer(index):
            mlp = self._moe(prefix + "mlp.", config.moe, index)
        else:
            mlp = self._mlp(prefix + "mlp.", config.intermediate_size)
        return LayerWeights(
            input_norm=self._tensor(prefix + "input_layernorm.weight", hidden),
            attention=self._attention(prefix + "self_attn."),
            post_attention_norm=self._tensor(prefix + "post_attention_layernorm.weight", hidden),
            mlp=mlp,
        )

    def _attention(self, prefix: str) -> MlaWeights:
        config, heads = self._config, self._shard.heads
        hidden, rank = Span.whole(config.hidden_size), config.q_lora_rank
        q_rows = heads(config.num_heads, config.qk_head_dim)
        a_name, a_rows = ("q_proj", q_rows) if rank is None else ("q_a_proj", Span.whole(rank))
        names = {prefix + a_name: a_rows, prefix + "kv_a_proj_with_mqa": Span.whole(config.cache_dim)}
        qkv_a_bias = o_bias = q_norm = q_b = None
        if config.attention_bias:
            qkv_a_bias = torch.zeros(a_rows.count + config.cache_dim, dtype=self._dtype, device=self._device)
            # q_proj never has a bias: its part stays 0.
            if rank is not None:
                self._source.fill(prefix + "q_a_proj.bias", qkv_a_bias[: a_rows.count])
            self._source.fill(prefix + "kv_a_proj_with_mqa.bias", qkv_a_bias[a_rows.count :])
            if self._shard.tensor_rank == 0:  # the others' outputs are added to this one's
                o_bias = self._tensor(prefix + "o_proj.bias", hidden)
            else:
                self._source.skip(prefix + "o_proj.bias")
        if rank is not None:
            q_norm = self._tensor(prefix + "q_a_layernorm.weight", Span.whole(rank))
            q_b = self._linear({prefix + "q_b_proj": q_rows}, Span.whole(rank))
        kv_rows = heads(config.num_heads, config.qk_nope_head_dim + config.v_head_dim)
        o_columns = heads(config.num_heads, config.v_head_dim)
        o_ends = piece_ends(config, o_columns, head_dim=config.v_head_dim)
        return MlaWeights(
            qkv_a=self._linear(names, hidden, qkv_a_bias),
            q_norm=q_norm,
            q_b=q_b,
            kv_norm=self._tensor(prefix + "kv_a_layernorm.weight", Span.whole(config.kv_lora_rank)),
            kv_b=self._tensor(prefix + "kv_b_proj.weight", kv_rows, Span.whole(config.kv_lora_rank)),
            o=self._linear({prefix + "o_proj": hidden}, o_columns, o_bias, o_ends),
        )

    def _mlp(self, prefix: str, size: int, count: int = 1) -> GatedMlp:
        """One MLP, or `count` of them side by side."""
        hidden, width = Span.whole(self._config.hidden_size), self._shard.width(size, count)
        ends = piece_ends(self._config, width, count=count)
        gate_up = self._linear({prefix + "gate_proj": width, prefix + "up_proj": width}, hidden)
        return GatedMlp(gate_up, self._linear({prefix + "down_proj": hidden}, width, piece_ends=ends))

    def _moe(self, prefix: str, moe: MoeConfig, layer: int) -> MoeWeights:
        hidden, width, shard = Span.whole(self._config.hidden_size), moe.intermediate_size, self._shard
        placement = shard.placement.layer(layer) if shard.placement else None
        experts = range(moe.num_experts) if placement is None else placement.experts[shard.expert_rank]
        num_shared = moe.num_shared_experts if placement is None else 0
        own, count, device = shard.width(width), len(experts) + num_shared, torch.device(self._device)
        stack = ExpertStack(self._config, count, own, self._dtype, device, self._backend)
        for slot, expert in enumerate(experts):
            stack.fill(self._source, slot, f"{prefix}experts.{expert}.", own)
        for expert in set(range(moe.num_experts)) - set(experts):
            stack.skip(self._source, f"{prefix}experts.{expert}.")
        for index in range(num_shared):  # the shared expert, cut along its width
            span = Span(num_shared * width, index * width + own.start, own.count)
            stack.fill(self._source, len(experts) + index, prefix + "shared_experts.", span)
        shared = None
        if placement is not None and moe.num_shared_experts:
            shared = self._mlp(prefix + "shared_experts.", width, moe.num_shared_experts)
        router = torch.empty(moe.num_experts, hidden.total, dtype=torch.float32, device=self._device)
        self._source.fill(prefix + "gate.weight", router)
        bias = None
        if moe.has_bias:
            bias = torch.empty(moe.num_experts, dtype=torch.float32, device=self._device)
            self._source.fill(prefix + "gate.e_score_correction_bias", bias)
        return MoeWeights(moe, router, bias, stack.experts(), placement, shared)

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device)

    def _tensor(self, name: str, *spans: Span) -> torch.Tensor:
        tensor = self._empty(*(span.count for span in spans))
        self._source.fill(name, tensor, spans)
        return tensor

    def _linear(
        self, rows: dict[str, Span], columns: Span, bias: torch.Tensor | None = None,
        piece_ends: Sequence[int] | None = None,
    ) -> Linear:  # fmt: skip
        """Projections of the same input, one above the other, given as name -> rows."""
        weight = self._empty(sum(span.count for span in rows.values()), columns.count)
        start = 0
        for name, span in rows.items():
            self._source.fill(name + ".weight", weight[start : start + span.count], (span, columns))
            start += span.count
        return Linear(weight, bias, piece_ends, self._backend)
