"""Assembling a model's weights: what is ignored, what is an error, FP8 and random weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from app.errors import CheckpointError
from app.model.config import ModelConfig
from app.model.layers import Linear
from app.model.moe import MoeWeights
from app.model.transformer import Transformer
from app.model.weights import ModelWeights, load_weights, random_weights
from kernels.fused_experts import fused_experts_reference
from tests.checkpoints import edit_json, quantize_checkpoint, random_prompt, save_random_checkpoint
from tests.model.conftest import load_transformer
from tests.model.driver import Driver

TENSORS = "model.safetensors"
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_random_checkpoint(tmp_path, "v3")


def load(folder: Path) -> ModelWeights:
    return load_weights(folder, ModelConfig.from_folder(folder), dtype=torch.float32, device="cpu")


def edit_tensors(folder: Path, edit: Callable[[Tensors], None]) -> None:
    tensors = load_file(folder / TENSORS)
    edit(tensors)
    save_file(tensors, folder / TENSORS)


def logits_of(folder: Path) -> torch.Tensor:
    driver = Driver(load_transformer(folder), num_blocks=2)
    return driver.run(driver.add(random_prompt(40, seed=3)), 512)


def matrix_of(linear: Linear | None, num_inputs: int) -> torch.Tensor:
    assert linear is not None
    return linear.forward(torch.eye(num_inputs)).T


def test_matrices_that_share_an_input_are_one(folder: Path) -> None:
    tensors = load_file(folder / TENSORS)
    layer = load(folder).layers[1]
    prefix = "model.layers.1."
    parts = [tensors[f"{prefix}self_attn.{name}.weight"] for name in ("q_a_proj", "kv_a_proj_with_mqa")]
    assert torch.equal(matrix_of(layer.attention.qkv_a, 64), torch.cat(parts))
    moe = layer.mlp
    assert isinstance(moe, MoeWeights)
    parts = [tensors[f"{prefix}mlp.experts.5.{name}.weight"] for name in ("gate_proj", "up_proj")]
    gate_up, down = torch.cat(parts), tensors[f"{prefix}mlp.experts.5.down_proj.weight"]
    x, only_5 = torch.randn(4, 64), torch.full((4, 1), 5, dtype=torch.int32)
    expected = fused_experts_reference(x, gate_up[None], down[None], torch.zeros_like(only_5), torch.ones(4, 1))
    out = moe.experts.forward(x, only_5, torch.ones(4, 1)).float()
    assert torch.allclose(out, expected, rtol=1e-5, atol=1e-6)


def test_the_router_stays_fp32(folder: Path) -> None:
    weights = load_weights(folder, ModelConfig.from_folder(folder), dtype=torch.bfloat16, device="cpu")
    moe = weights.layers[1].mlp
    assert isinstance(moe, MoeWeights) and moe.bias is not None
    assert moe.router.dtype == moe.bias.dtype == torch.float32
    assert weights.embedding.dtype == torch.bfloat16


@pytest.mark.parametrize(
    "name",
    ["lm_head.weight", "model.layers.2.self_attn.q_b_proj.weight", "model.layers.1.mlp.experts.7.up_proj.weight"],
)
def test_a_missing_tensor_is_named(folder: Path, name: str) -> None:
    edit_tensors(folder, lambda tensors: tensors.__delitem__(name))
    with pytest.raises(CheckpointError, match="is missing") as error:
        load(folder)
    assert (error.value.file, error.value.tensor) == (str(folder / TENSORS), name)


@pytest.mark.parametrize("name", ["model.layers.1.mlp.experts.8.up_proj.weight", "model.layers.0.mystery"])
def test_an_unexpected_tensor_is_named(folder: Path, name: str) -> None:
    edit_tensors(folder, lambda tensors: tensors.update({name: torch.zeros(1)}))
    with pytest.raises(CheckpointError, match="is unexpected") as error:
        load(folder)
    assert (error.value.file, error.value.tensor) == (str(folder / TENSORS), name)


def test_a_misshapen_tensor_is_named(folder: Path) -> None:
    name = "model.layers.0.self_attn.kv_b_proj.weight"
    edit_tensors(folder, lambda tensors: tensors.update({name: tensors[name][1:].clone()}))
    with pytest.raises(CheckpointError, match=r"expected shape \[176, 32\], got \[175, 32\]") as error:
        load(folder)
    assert (error.value.file, error.value.tensor) == (str(folder / TENSORS), name)


def test_prediction_layers_and_stored_frequencies_are_ignored(folder: Path) -> None:
    expected = logits_of(folder)
    extra = {
        "model.layers.3.eh_proj.weight": torch.ones(4, 4),
        "model.layers.3.mlp.experts.0.up_proj.weight": torch.ones(2, 2),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
    }
    edit_tensors(folder, lambda tensors: tensors.update(extra))
    assert torch.equal(logits_of(folder), expected)


def test_tied_embeddings_need_no_head_and_ignore_one(folder: Path) -> None:
    edit_json(folder / "config.json", tie_word_embeddings=True)
    weights = load(folder)
    assert torch.equal(matrix_of(weights.lm_head, 64), weights.embedding)
    edit_tensors(folder, lambda tensors: tensors.__delitem__("lm_head.weight"))
    load(folder)


def test_shards_give_what_one_file_gives(folder: Path) -> None:
    expected = logits_of(folder)
    tensors = load_file(folder / TENSORS)
    (folder / TENSORS).unlink()
    weight_map = {name: f"part-{index % 3}.safetensors" for index, name in enumerate(sorted(tensors))}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in tensors if weight_map[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert torch.equal(logits_of(folder), expected)


def test_an_fp8_checkpoint_gives_its_dequantised_model(tmp_path: Path) -> None:
    """Quantise every projection of a model in 128x128 blocks: it must equal the model of the dequantised values."""
    sizes = {"hidden_size": 192, "moe_intermediate_size": 160, "num_hidden_layers": 2}
    plain = save_random_checkpoint(tmp_path / "plain", "v3", initializer_range=0.05, **sizes)
    quantized = save_random_checkpoint(tmp_path / "fp8", "v3", initializer_range=0.05, **sizes)
    save_file(quantize_checkpoint(quantized), plain / TENSORS)
    assert torch.equal(logits_of(quantized), logits_of(plain))


def test_random_weights_repeat_by_seed(folder: Path) -> None:
    config = ModelConfig.from_folder(folder)
    first, again, other = (random_weights(config, seed=seed, dtype=torch.float32, device="cpu") for seed in (1, 1, 2))
    assert torch.equal(first.embedding, again.embedding)
    assert not torch.equal(first.embedding, other.embedding)
    assert first.embedding.std() == pytest.approx(0.02, rel=0.05)
    assert torch.equal(first.norm, torch.ones_like(first.norm))
    model = Transformer(config, first, device="cpu", dtype=torch.float32, absorbed_prefill=True)
    driver = Driver(model, num_blocks=1)
    assert driver.run(driver.add([1, 2, 3]), 3).isfinite().all()
