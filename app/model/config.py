"""The architecture of a checkpoint, parsed from its config.json into one frozen value.

    ModelConfig > RopeConfig > YarnConfig
                > MoeConfig

Every field a family leaves out has that family's default; whatever this code cannot run is a CheckpointError that
names file and field, never a silent approximation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from app.model.fields import Fields

CONFIG_FILE = "config.json"
GENERATION_CONFIG_FILE = "generation_config.json"
FP8_BLOCK = 128  # rows and columns that share one scale

# kimi_k2 is deepseek_v3 under another name.
_FAMILIES = {"deepseek_v2": "deepseek_v2", "deepseek_v3": "deepseek_v3", "kimi_k2": "deepseek_v3"}


@dataclass(frozen=True, slots=True)
class YarnConfig:
    """Context extension by blending interpolated and original rotary frequencies (arXiv 2309.00071)."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float
    mscale: float
    mscale_all_dim: float
    attention_factor: float | None
    truncate: bool

    @property
    def cos_sin_scale(self) -> float:
        """Multiplies cos and sin."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._magnitude(self.mscale) / self._magnitude(self.mscale_all_dim)
        return self._magnitude(1.0)

    @property
    def softmax_factor(self) -> float:
        """Multiplies (dn + dr)^-1/2."""
        return self._magnitude(self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    def _magnitude(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0


@dataclass(frozen=True, slots=True)
class RopeConfig:
    theta: float
    interleaved: bool  # pairs (2i, 2i+1) are rotated; else (i, i + dr/2)
    yarn: YarnConfig | None


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """Routed and shared experts, in the terms of kernels.expert_routing.route_experts."""

    num_experts: int
    num_shared_experts: int
    intermediate_size: int  # of one expert; the shared one is num_shared_experts times as wide
    top_k: int
    num_groups: int
    top_groups: int
    scoring: Literal["softmax", "sigmoid"]
    group_score: Literal["max", "top2_sum"]
    normalize: bool
    scale: float
    has_bias: bool  # e_score_correction_bias takes part in the choice
    first_layer: int
    layer_freq: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int  # of the dense layers' MLP
    num_layers: int
    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rms_norm_eps: float
    attention_bias: bool
    tie_word_embeddings: bool
    max_position_embeddings: int
    rope: RopeConfig
    moe: MoeConfig | None
    is_fp8: bool  # projections are stored in e4m3, with one scale per block of FP8_BLOCK x FP8_BLOCK
    eos_token_ids: tuple[int, ...]  # any of them ends a sequence

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def cache_dim(self) -> int:
        """Values cached per token and layer: the normalised latent and the rotated shared key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        yarn = self.rope.yarn
        return 1.0 / math.sqrt(self.qk_head_dim) * (yarn.softmax_factor if yarn else 1.0)

    def is_moe_layer(self, layer: int) -> bool:
        moe = self.moe
        return moe is not None and layer >= moe.first_layer and layer % moe.layer_freq == 0

    @classmethod
    def from_folder(cls, folder: str | Path) -> ModelConfig:
        """Parse config.json, and generation_config.json if there is one.

        Raises CheckpointError on a missing or malformed file, an unknown model_type or an unsupported field.
        """
        folder = Path(folder)
        fields = Fields.read(folder / CONFIG_FILE)
        generation_file = folder / GENERATION_CONFIG_FILE
        generation = Fields.read(generation_file) if generation_file.exists() else Fields(generation_file, {})
        return _parse(fields, generation)


def _parse(fields: Fields, generation: Fields) -> ModelConfig:
    model_type = fields.text("model_type")
    fields.must_be("model_type", model_type, *_FAMILIES)
    family = _FAMILIES[model_type]
    fields.must_be("hidden_act", fields.text("hidden_act", "silu"), "silu")
    fields.must_be("mlp_bias", fields.flag("mlp_bias", False), False)
    is_fp8 = _is_fp8(fields)
    rope_dim = fields.integer("qk_rope_head_dim")
    if rope_dim % 2:
        fields.fail("qk_rope_head_dim", f"must be even, got {rope_dim}")
    eos_token_ids = generation.token_ids("eos_token_id") + fields.token_ids("eos_token_id")
    return ModelConfig(
        model_type=model_type,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=fields.integer("num_attention_heads"),
        q_lora_rank=fields.integer("q_lora_rank", None),
        kv_lora_rank=fields.integer("kv_lora_rank"),
        qk_nope_head_dim=fields.integer("qk_nope_head_dim"),
        qk_rope_head_dim=rope_dim,
        v_head_dim=fields.integer("v_head_dim"),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        attention_bias=fields.flag("attention_bias", False),
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        max_position_embeddings=fields.integer("max_position_embeddings"),
        rope=_parse_rope(fields, family),
        moe=_parse_moe(fields, family),
        is_fp8=is_fp8,
        eos_token_ids=tuple(dict.fromkeys(eos_token_ids)),
    )


def _is_fp8(fields: Fields) -> bool:
    """FP8 weights in 128x128 blocks are understood; which other tensors have scales is seen in the files themselves."""
    quantization = fields.child("quantization_config")
    if quantization is None:
        return False
    quantization.must_be("quant_method", quantization.text("quant_method"), "fp8")
    quantization.must_be("fmt", quantization.text("fmt", "e4m3"), "e4m3")
    block = quantization.values.get("weight_block_size")
    quantization.must_be("weight_block_size", block, [FP8_BLOCK, FP8_BLOCK])
    return True


def _parse_rope(fields: Fields, family: str) -> RopeConfig:
    """Read either spelling: rope_parameters (holds theta), or rope_theta beside an optional rope_scaling."""
    rope = fields.child("rope_parameters") or fields.child("rope_scaling") or Fields(fields.path, {})
    theta = rope.number("rope_theta", None) or fields.number("rope_theta", 10000.0)
    interleaved = family == "deepseek_v2" or fields.flag("rope_interleave", True)
    rope.must_be("partial_rotary_factor", rope.number("partial_rotary_factor", 1.0), 1.0)
    name = "rope_type" if "rope_type" in rope.values else "type"
    kind = rope.text(name, "default")
    rope.must_be(name, kind, "default", "yarn")
    if kind == "default":
        return RopeConfig(theta, interleaved, yarn=None)
    max_position = fields.integer("max_position_embeddings")
    original = rope.integer("original_max_position_embeddings", max_position)
    yarn = YarnConfig(
        factor=rope.number("factor", max_position / original),
        original_max_position_embeddings=original,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        mscale=rope.number("mscale", 0.0),
        mscale_all_dim=rope.number("mscale_all_dim", 0.0),
        attention_factor=rope.number("attention_factor", None),
        truncate=rope.flag("truncate", True),
    )
    return RopeConfig(theta, interleaved, yarn)


def _parse_moe(fields: Fields, family: str) -> MoeConfig | None:
    num_experts = fields.integer("n_routed_experts", None)
    if num_experts is None:
        return None
    is_v3 = family == "deepseek_v3"
    method = fields.text("topk_method", "noaux_tc" if is_v3 else "greedy")
    fields.must_be("topk_method", method, *(("noaux_tc",) if is_v3 else ("greedy", "group_limited_greedy")))
    scoring = fields.text("scoring_func", "sigmoid" if is_v3 else "softmax")
    fields.must_be("scoring_func", scoring, "sigmoid" if is_v3 else "softmax")
    is_grouped = method != "greedy"
    num_groups = fields.integer("n_group", 1) if is_grouped else 1
    top_groups = fields.integer("topk_group", num_groups) if is_grouped else 1
    top_k = fields.integer("num_experts_per_tok")
    if num_experts % num_groups:
        fields.fail("n_group", f"{num_groups} does not divide n_routed_experts = {num_experts}")
    if is_v3 and num_experts // num_groups < 2:
        fields.fail("n_group", f"{num_groups} groups of n_routed_experts = {num_experts} leave fewer than two in each")
    if top_groups > num_groups:
        fields.fail("topk_group", f"{top_groups} is more than n_group = {num_groups}")
    if top_k > top_groups * (num_experts // num_groups):
        fields.fail("num_experts_per_tok", f"{top_k} is more than the chosen groups hold")
    return MoeConfig(
        num_experts=num_experts,
        num_shared_experts=fields.integer("n_shared_experts", 0, minimum=0),
        intermediate_size=fields.integer("moe_intermediate_size"),
        top_k=top_k,
        num_groups=num_groups,
        top_groups=top_groups,
        scoring="sigmoid" if is_v3 else "softmax",
        group_score="top2_sum" if is_v3 else "max",
        # V2's own modelling code carries norm_topk_prob but serves its checkpoints without it.
        normalize=is_v3 and fields.flag("norm_topk_prob", True),
        scale=fields.number("routed_scaling_factor", 1.0),
        has_bias=is_v3,
        first_layer=fields.integer("first_k_dense_replace", 0, minimum=0),
        layer_freq=fields.integer("moe_layer_freq", 1),
    )
