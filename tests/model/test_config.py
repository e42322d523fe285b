"""config.json and generation_config.json: both spellings, the families' defaults, and errors that name the field."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from app.errors import CheckpointError
from app.model.config import ModelConfig, YarnConfig
from app.model.layers import rope_table

V3: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "q_lora_rank": 40,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "max_position_embeddings": 1024,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "eos_token_id": 1,
}
V2 = {**V3, "model_type": "deepseek_v2"}
OLD_YARN = {
    "type": "yarn",
    "factor": 8,
    "original_max_position_embeddings": 128,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


def parse(folder: Path, fields: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(fields))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return ModelConfig.from_folder(folder)


def test_sizes_follow_from_the_fields(tmp_path: Path) -> None:
    config = parse(tmp_path, V3)
    assert (config.num_layers, config.num_heads, config.q_lora_rank) == (4, 4, 40)
    assert config.cache_dim == 32 + 16
    assert config.softmax_scale == pytest.approx(40**-0.5)
    assert [config.is_moe_layer(layer) for layer in range(4)] == [False, True, True, True]


def test_kimi_k2_is_v3(tmp_path: Path) -> None:
    kimi = parse(tmp_path, {**V3, "model_type": "kimi_k2"})
    v3 = parse(tmp_path, V3)
    assert (kimi.moe, kimi.rope) == (v3.moe, v3.rope)


def test_moe_layer_freq_skips_layers(tmp_path: Path) -> None:
    config = parse(tmp_path, {**V3, "moe_layer_freq": 2, "first_k_dense_replace": 1})
    assert [config.is_moe_layer(layer) for layer in range(4)] == [False, False, True, False]


def test_without_experts_every_layer_is_dense(tmp_path: Path) -> None:
    config = parse(tmp_path, {**V3, "n_routed_experts": None})
    assert config.moe is None
    assert not any(config.is_moe_layer(layer) for layer in range(4))


@pytest.mark.parametrize("num_shared", [0, None])
def test_shared_experts_may_be_absent(tmp_path: Path, num_shared: int | None) -> None:
    moe = parse(tmp_path, {**V3, "n_shared_experts": num_shared}).moe
    assert moe is not None and moe.num_shared_experts == 0


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        pytest.param(V3, ("sigmoid", "top2_sum", 4, 2, True, True), id="noaux_tc"),
        pytest.param({**V3, "norm_topk_prob": False}, ("sigmoid", "top2_sum", 4, 2, False, True), id="not-normalised"),
        pytest.param({**V2, "topk_method": "greedy"}, ("softmax", "max", 1, 1, False, False), id="greedy"),
        pytest.param(
            {**V2, "topk_method": "group_limited_greedy", "norm_topk_prob": True},
            ("softmax", "max", 4, 2, False, False),
            id="group_limited_greedy",
        ),
        pytest.param(V2, ("softmax", "max", 1, 1, False, False), id="v2-default"),
    ],
)
def test_routing_kinds(tmp_path: Path, fields: dict[str, Any], expected: tuple[Any, ...]) -> None:
    moe = parse(tmp_path, fields).moe
    assert moe is not None
    assert (moe.scoring, moe.group_score, moe.num_groups, moe.top_groups, moe.normalize, moe.has_bias) == expected


def test_both_spellings_of_rope_agree(tmp_path: Path) -> None:
    old = parse(tmp_path, {**V3, "rope_theta": 50000.0, "rope_scaling": OLD_YARN})
    parameters = {**OLD_YARN, "rope_type": "yarn", "rope_theta": 50000.0}
    new = parse(tmp_path, {**V3, "rope_parameters": parameters})
    assert old.rope == new.rope
    assert old.rope.theta == 50000.0
    assert old.rope.yarn is not None and old.rope.yarn.factor == 8.0
    plain = parse(tmp_path, {**V3, "rope_theta": 50000, "rope_scaling": None})
    assert plain.rope.yarn is None and plain.rope.theta == 50000.0


def test_v2_is_always_interleaved(tmp_path: Path) -> None:
    assert parse(tmp_path, {**V2, "rope_interleave": False}).rope.interleaved
    assert not parse(tmp_path, {**V3, "rope_interleave": False}).rope.interleaved


@pytest.mark.parametrize(
    ("mscale", "mscale_all_dim", "attention_factor", "cos_sin_scale", "softmax_factor"),
    [
        (1.0, 1.0, None, 1.0, 1.2772588722**2),
        (0.707, 0.0, None, 1.2772588722, 1.0),
        (2.0, 1.0, None, 1.5545177444 / 1.2772588722, 1.2772588722**2),
        (1.0, 1.0, 1.5, 1.5, 1.2772588722**2),
    ],
)
def test_yarn_scales(
    mscale: float,
    mscale_all_dim: float,
    attention_factor: float | None,
    cos_sin_scale: float,
    softmax_factor: float,
) -> None:
    """0.1 ln(16) + 1 = 1.2772588722"""
    yarn = YarnConfig(16.0, 4096, 32.0, 1.0, mscale, mscale_all_dim, attention_factor, True)
    assert yarn.cos_sin_scale == pytest.approx(cos_sin_scale)
    assert yarn.softmax_factor == pytest.approx(softmax_factor)


def test_rope_table_holds_cosines_then_sines(tmp_path: Path) -> None:
    config = parse(tmp_path, {**V3, "rope_theta": 10000.0})
    table = rope_table(config, "cpu")
    assert table.shape == (1024, 16) and table.dtype == torch.float32
    for position in (0, 1, 700):
        angles = torch.tensor([position * 10000.0 ** (-2 * pair / 16) for pair in range(8)])
        torch.testing.assert_close(table[position], torch.cat([angles.cos(), angles.sin()]), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("config_ids", "generation_ids", "expected"),
    [(1, None, (1,)), (1, [7, 8], (7, 8, 1)), ([1, 2], 2, (2, 1)), (None, None, ())],
)
def test_eos_token_ids_join_both_files(
    tmp_path: Path, config_ids: object, generation_ids: object, expected: tuple[int, ...]
) -> None:
    config = parse(tmp_path, {**V3, "eos_token_id": config_ids}, {"eos_token_id": generation_ids})
    assert config.eos_token_ids == expected


def test_fp8_blocks_are_understood(tmp_path: Path) -> None:
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    parsed = parse(tmp_path, {**V3, "quantization_config": quantization})
    assert parsed.is_fp8
    assert parsed == replace(parse(tmp_path, V3), is_fp8=True)


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("model_type", {"model_type": "llama"}),
        ("model_type", {"model_type": None}),
        ("hidden_size", {"hidden_size": None}),
        ("hidden_size", {"hidden_size": "64"}),
        ("num_hidden_layers", {"num_hidden_layers": 0}),
        ("vocab_size", {"vocab_size": True}),
        ("qk_rope_head_dim", {"qk_rope_head_dim": 15}),
        ("hidden_act", {"hidden_act": "gelu"}),
        ("attention_bias", {"attention_bias": "yes"}),
        ("mlp_bias", {"mlp_bias": True}),
        ("topk_method", {"topk_method": "greedy"}),
        ("scoring_func", {"scoring_func": "softmax"}),
        ("scoring_func", {"model_type": "deepseek_v2", "scoring_func": "sigmoid"}),
        ("n_group", {"n_group": 3}),
        ("n_group", {"n_group": 8}),
        ("topk_group", {"topk_group": 5}),
        ("num_experts_per_tok", {"num_experts_per_tok": 5}),
        ("rope_scaling.type", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}),
        ("rope_parameters.rope_type", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}),
        ("rope_scaling.factor", {"rope_scaling": {**OLD_YARN, "factor": "8"}}),
        ("eos_token_id", {"eos_token_id": ["</s>"]}),
        ("quantization_config.quant_method", {"quantization_config": {"quant_method": "gptq"}}),
        ("quantization_config.weight_block_size", {"quantization_config": {"quant_method": "fp8"}}),
    ],
)
def test_an_unsupported_field_is_named(tmp_path: Path, field: str, changes: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError) as error:
        parse(tmp_path, {**V3, **changes})
    assert error.value.file == str(tmp_path / "config.json")
    assert f"{field}: " in error.value.message


@pytest.mark.parametrize(("content", "problem"), [(None, "be read"), ("{", "is not JSON"), ("[]", "JSON object")])
def test_a_bad_file_is_named(tmp_path: Path, content: str | None, problem: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=problem) as error:
        ModelConfig.from_folder(tmp_path)
    assert error.value.file == str(tmp_path / "config.json")
