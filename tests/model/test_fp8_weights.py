"""Experts of an FP8 checkpoint kept as they are stored, wherever the kernels for them run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from app.model import expert_weights
from app.model.checkpoint import Span
from app.model.config import ModelConfig
from app.model.moe import Experts, Fp8Layer, MoeWeights
from app.model.weights import load_weights, random_weights
from tests.checkpoints import quantize_checkpoint, random_prompt, save_random_checkpoint
from tests.model.conftest import load_transformer
from tests.model.driver import Driver

SIZES = {
    "hidden_size": 256, "moe_intermediate_size": 128, "num_hidden_layers": 1, "first_k_dense_replace": 0,
    "n_shared_experts": 2, "initializer_range": 0.05,
}  # fmt: skip
# Activations are rounded to 3 bits of mantissa, twice: some 4% of an expert's output, which is added to a residual.
MAX_RELATIVE_DIFFERENCE = 0.05


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = save_random_checkpoint(tmp_path / "fp8", "v3", **SIZES)
    quantize_checkpoint(folder)
    return folder


def moe_of(folder: Path, backend: str) -> MoeWeights:
    config = ModelConfig.from_folder(folder)
    weights = load_weights(folder, config, dtype=torch.float32, device="cpu", backend=backend)  # type: ignore[arg-type]
    moe = weights.layers[0].mlp
    assert isinstance(moe, MoeWeights)
    return moe


def test_values_and_scales_are_the_files(folder: Path) -> None:
    stored = load_file(folder / "model.safetensors")
    layer = moe_of(folder, "triton").experts
    assert isinstance(layer, Fp8Layer)
    weights, prefix = layer._weights, "model.layers.0.mlp."

    def expected(name: str, rows: slice = slice(None), columns: slice = slice(None)) -> torch.Tensor:
        return stored[prefix + name][rows, columns].float()

    for projection, slot in (("gate_proj", 0), ("up_proj", 1)):
        part = weights.gate_up[5].chunk(2)[slot].float()
        assert torch.equal(part, expected(f"experts.5.{projection}.weight"))
        scale = weights.gate_up_scales[5].chunk(2)[slot]
        assert torch.equal(scale, expected(f"experts.5.{projection}.weight_scale_inv"))
    # The second half of the shared expert's width: rows of its gate, columns of its down projection.
    half, block = slice(128, 256), slice(1, 2)
    assert torch.equal(weights.gate_up[9].chunk(2)[0].float(), expected("shared_experts.gate_proj.weight", half))
    assert torch.equal(weights.down[9].float(), expected("shared_experts.down_proj.weight", columns=half))
    scales = expected("shared_experts.down_proj.weight_scale_inv", columns=block)
    assert torch.equal(weights.down_scales[9], scales)


def test_the_torch_backend_dequantises(folder: Path) -> None:
    assert isinstance(moe_of(folder, "torch").experts, Experts)


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled where there is a GPU")
def test_logits_are_near_the_dequantised_models(tmp_path: Path) -> None:
    few = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "n_shared_experts": 1}
    folder = save_random_checkpoint(tmp_path, "v3", **SIZES | few)
    quantize_checkpoint(folder)
    logits = []
    for backend in ("torch", "triton"):
        model = load_transformer(folder, absorbed_prefill=True, backend=backend)
        driver = Driver(model, num_blocks=2)
        logits.append(driver.run(driver.add(random_prompt(5, seed=1)), 5))
    difference = (logits[0] - logits[1]).norm() / logits[0].norm()
    assert 0 < difference <= MAX_RELATIVE_DIFFERENCE


@pytest.mark.parametrize(
    ("span", "kept"),
    [(Span.whole(256), True), (Span(256, 128, 128), True), (Span(256, 64, 128), False), (Span(256, 0, 64), False)],
)
def test_only_whole_blocks_are_kept(folder: Path, span: Span, kept: bool) -> None:
    config = ModelConfig.from_folder(folder)
    cpu = torch.device("cpu")
    assert expert_weights.keeps_fp8(config, span, cpu, "triton") is kept
    assert not expert_weights.keeps_fp8(config, span, cpu, "torch")


def test_random_weights_have_the_shape_and_spread_of_the_checkpoint(folder: Path) -> None:
    config = ModelConfig.from_folder(folder)
    weights = random_weights(config, seed=1, dtype=torch.bfloat16, device="cpu", backend="triton")
    moe = weights.layers[0].mlp
    assert isinstance(moe, MoeWeights) and isinstance(moe.experts, Fp8Layer)
    drawn = moe.experts._weights
    spread = (drawn.gate_up.float() * drawn.gate_up_scales[0, 0, 0]).std()
    assert spread == pytest.approx(0.02, rel=0.05)
