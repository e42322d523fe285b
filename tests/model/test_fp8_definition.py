"""The bounds that engines on a GPU are held to: what FP8 itself costs lies below them, what a fault does above."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from app.model.transformer import Transformer
from kernels.fp8_experts import Fp8Experts
from tests.checkpoints import load_oracle, oracle_logits, random_prompt
from tests.model.conftest import load_transformer
from tests.model.fp8_definition import (
    MAX_ERROR,
    MAX_MEAN_KL,
    MAX_MEDIAN_ERROR,
    NUM_OUTPUTS,
    PROMPT_LENGTHS,
    SCALE_SPREAD,
    SIZES,
    DefinedExperts,
    forced_logits,
    load_definition,
    mean_kl,
    prompts,
    row_errors,
    save_fp8_checkpoint,
)

TOKENS = {f"r{length}": random_prompt(NUM_OUTPUTS, seed=1000 + length) for length in PROMPT_LENGTHS}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return save_fp8_checkpoint(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def exact(folders: tuple[Path, Path]) -> torch.Tensor:
    """Logits of the exact twin, which are those of transformers."""
    oracle, rows = load_oracle(folders[1]), []
    for name, prompt in prompts().items():
        rows.append(oracle_logits(oracle, prompt + TOKENS[name][:-1])[len(prompt) - 1 :])
    twin = forced_logits(load_transformer(folders[1]), TOKENS, is_fp8_cache=False)
    assert row_errors(twin, torch.cat(rows)).max() <= 1e-4
    return twin


@pytest.fixture(scope="module")
def defined(folders: tuple[Path, Path]) -> tuple[Transformer, DefinedExperts, torch.Tensor]:
    model, experts = load_definition(folders[0])
    return model, experts, forced_logits(model, TOKENS, is_fp8_cache=True)


@pytest.mark.parametrize("is_fp8_cache", [True, False], ids=["fp8", "auto"])
def test_what_fp8_costs(folders: tuple[Path, Path], exact: torch.Tensor, is_fp8_cache: bool) -> None:
    model, _ = load_definition(folders[0], torch.bfloat16)
    divergence = mean_kl(forced_logits(model, TOKENS, is_fp8_cache=is_fp8_cache), exact)
    assert MAX_MEAN_KL / 10 < divergence < MAX_MEAN_KL / 2


def test_products_of_a_matrix_unit_stay_near(
    defined: tuple[Transformer, DefinedExperts, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums of e4m3 products that are cut to 14 bits or less: noise of 2.5e-4 before the hidden values are rounded."""
    model, _, expected = defined
    silu, generator = torch.nn.functional.silu, torch.Generator().manual_seed(0)

    def noisy(gate: torch.Tensor) -> torch.Tensor:
        return silu(gate) * (1.0 + 2.5e-4 * torch.randn(gate.shape, generator=generator))

    monkeypatch.setattr(torch.nn.functional, "silu", noisy)
    errors = row_errors(forced_logits(model, TOKENS, is_fp8_cache=True), expected)
    assert 0 < errors.median() <= MAX_MEDIAN_ERROR / 2
    assert errors.max() <= MAX_ERROR / 2


def swapped_gate_and_up(experts: Fp8Experts) -> Fp8Experts:
    return replace(experts, gate_up_scales=torch.cat(experts.gate_up_scales.chunk(2, 1)[::-1], 1))


def transposed(experts: Fp8Experts) -> Fp8Experts:
    return replace(experts, down_scales=experts.down_scales.mT.contiguous())


def of_the_next_expert(experts: Fp8Experts) -> Fp8Experts:
    return replace(experts, down_scales=experts.down_scales.roll(1, 0))


def one_block(experts: Fp8Experts) -> Fp8Experts:
    scales = experts.gate_up_scales.clone()
    scales[0, 0, 0] *= SCALE_SPREAD
    return replace(experts, gate_up_scales=scales)


@pytest.mark.parametrize("fault", [swapped_gate_and_up, transposed, of_the_next_expert, one_block])
def test_wrong_scales_show(
    defined: tuple[Transformer, DefinedExperts, torch.Tensor], exact: torch.Tensor,
    fault: Callable[[Fp8Experts], Fp8Experts], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    model, experts, expected = defined
    monkeypatch.setattr(experts, "experts", fault(experts.experts))
    found = forced_logits(model, TOKENS, is_fp8_cache=True)
    errors = row_errors(found, expected)
    assert errors.median() > 5 * MAX_MEDIAN_ERROR and errors.max() > MAX_ERROR, float(errors.median())
    assert mean_kl(found, exact) > MAX_MEAN_KL


def test_a_cache_in_another_precision_shows(defined: tuple[Transformer, DefinedExperts, torch.Tensor]) -> None:
    model, _, expected = defined
    errors = row_errors(forced_logits(model, TOKENS, is_fp8_cache=False), expected)
    assert errors.median() > 3 * MAX_MEDIAN_ERROR


def test_every_expert_is_chosen() -> None:
    assert SIZES["num_experts_per_tok"] == SIZES["n_routed_experts"]
