"""What an FP8 latent cache costs in accuracy: teacher-forced divergence of the embedded model's next-token choices."""

from __future__ import annotations

import pytest
import torch

from app.config import EMBEDDED_MODEL
from app.model.config import ModelConfig
from app.model.transformer import Transformer
from app.model.weights import load_weights
from app.tokenizer import Tokenizer
from tests.model.driver import Driver

TEXT = (
    "Once a week I bake bread with my neighbour. We mix flour, water and salt in the evening, leave the dough in a "
    "cold room, and shape it in the morning. While it is in the oven we talk about the garden, and which vegetables "
    "to plant next. Last year the tomatoes were too small, so this time we want to give them more light. What would "
    "you cook with fresh tomatoes, and how long should a soup stay on the stove before it tastes of something?"
)
# Measured 2026-11-29: mean 0.0014 nats, largest 0.017, over the positions of TEXT.
MAX_MEAN_KL = 0.01  # nats; rounding to bfloat16 alone costs some 1e-5
MIN_AGREEING = 0.9  # of most likely tokens
# Sums in another order move a few latents of later layers across a rounding of e4m3; reading wrong ones costs 0.1 on.
MAX_LOGIT_DIFFERENCE = 0.02


@pytest.fixture(scope="module")
def model() -> Transformer:
    config = ModelConfig.from_folder(EMBEDDED_MODEL)
    weights = load_weights(EMBEDDED_MODEL, config, dtype=torch.float32, device="cpu")
    return Transformer(config, weights, device="cpu", dtype=torch.float32, absorbed_prefill=True)


@pytest.fixture(scope="module")
def token_ids() -> list[int]:
    return Tokenizer(EMBEDDED_MODEL).encode(TEXT)


def log_probabilities(model: Transformer, token_ids: list[int], chunk: int, *, is_fp8: bool) -> torch.Tensor:
    driver = Driver(model, num_blocks=4, is_fp8=is_fp8)
    return torch.log_softmax(driver.run(driver.add(token_ids), chunk), dim=-1)


def test_divergence_from_the_exact_cache(model: Transformer, token_ids: list[int]) -> None:
    exact = log_probabilities(model, token_ids, 1, is_fp8=False)
    rounded = log_probabilities(model, token_ids, 1, is_fp8=True)
    divergence = (exact.exp() * (exact - rounded)).sum(-1)
    assert len(divergence) > 60
    assert 0 < divergence.mean() <= MAX_MEAN_KL
    assert (exact.argmax(-1) == rounded.argmax(-1)).float().mean() >= MIN_AGREEING


def test_chunks_change_no_bit(model: Transformer, token_ids: list[int]) -> None:
    """Every query reads its keys from the cache, its own among them: rounding does not depend on the chunk."""
    singly = log_probabilities(model, token_ids, 1, is_fp8=True)
    assert torch.equal(log_probabilities(model, token_ids, len(token_ids), is_fp8=True)[0], singly[-1])


def test_expanded_prefill_reads_the_same_numbers(token_ids: list[int]) -> None:
    config = ModelConfig.from_folder(EMBEDDED_MODEL)
    weights = load_weights(EMBEDDED_MODEL, config, dtype=torch.float32, device="cpu")
    logits = []
    for absorbed in (True, False):
        model = Transformer(config, weights, device="cpu", dtype=torch.float32, absorbed_prefill=absorbed)
        logits.append(log_probabilities(model, token_ids, 48, is_fp8=True)[-1])
    assert (logits[0] - logits[1]).abs().max() <= MAX_LOGIT_DIFFERENCE
