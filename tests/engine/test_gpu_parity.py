"""The engine on CUDA beside transformers, in fp32; FP8 checkpoints and an FP8 cache beside their exact twins."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from app.config import EngineConfig, ModelSource
from app.engine.engine import Engine
from app.engine.loading import load_engine
from app.model.config import ModelConfig
from app.model.moe import Fp8Layer, MoeWeights
from app.model.weights import load_weights
from app.protocol import GenerateRequest, SamplingParams, TokenChunk
from tests.checkpoints import (
    FAMILIES,
    load_oracle,
    oracle_logits,
    quantize_checkpoint,
    random_prompt,
    save_random_checkpoint,
)

pytestmark = pytest.mark.gpu

LENGTHS = (1, 17, 63, 64, 65, 130)
MAX_LOGPROB_DIFF = 1e-3  # three layers of sums in another order, on logits of some 10
# Activations rounded to 3 bits of mantissa in every expert; random weights leave next to no margin between tokens.
MAX_FP8_LOGPROB_DIFF = 0.5


def engine_on(folder: Path, dtype: str = "float32", **config: object) -> Engine:
    engine_config = {"device": "cuda", "dtype": dtype, "cache_blocks": 64, "max_chunk_tokens": 48, **config}
    return load_engine(ModelSource(path=str(folder), name="random"), EngineConfig(**engine_config))  # type: ignore[arg-type]


def generate(engine: Engine, num_tokens: int) -> dict[int, list[TokenChunk]]:
    """Prompts of all LENGTHS together, greedily."""
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True, logprobs=0)
    for length in LENGTHS:
        engine.add(GenerateRequest(str(length), tuple(random_prompt(length, seed=length)), sampling))
    chunks: dict[int, list[TokenChunk]] = {length: [] for length in LENGTHS}
    while engine.has_work:
        for chunk in engine.step():
            chunks[int(chunk.request_id)].append(chunk)
    return chunks


def largest_logprob_difference(folder: Path, chunks: dict[int, list[TokenChunk]]) -> float:
    """Between the engine's log-probabilities of what it chose and those of transformers after the same tokens."""
    oracle, largest = load_oracle(folder), 0.0
    for length, parts in chunks.items():
        chosen = [token_id for part in parts for token_id in part.token_ids]
        logprobs = [entry.logprob for part in parts for entry in part.logprobs or ()]
        logits = oracle_logits(oracle, random_prompt(length, seed=length) + chosen[:-1])[length - 1 :]
        expected = torch.log_softmax(logits, -1)[torch.arange(len(chosen)), torch.tensor(chosen)]
        largest = max(largest, (torch.tensor(logprobs) - expected).abs().max().item())
    return largest


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_logprobs_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    folder = save_random_checkpoint(tmp_path, family)
    chunks = generate(engine_on(folder), 12)
    assert all(sum(len(part.token_ids) for part in parts) == 12 for parts in chunks.values())
    assert largest_logprob_difference(folder, chunks) <= MAX_LOGPROB_DIFF


def test_an_fp8_checkpoint_keeps_its_experts_and_stays_near(tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "moe_intermediate_size": 128, "initializer_range": 0.05}
    folder = save_random_checkpoint(tmp_path / "fp8", "v3", **sizes)
    plain = save_random_checkpoint(tmp_path / "plain", "v3", **sizes)
    save_file(quantize_checkpoint(folder), plain / "model.safetensors")
    config = ModelConfig.from_folder(folder)
    moe = load_weights(folder, config, dtype=torch.bfloat16, device="cuda").layers[1].mlp
    assert isinstance(moe, MoeWeights) and isinstance(moe.experts, Fp8Layer)
    chunks = generate(engine_on(folder, "bfloat16", cache_dtype="fp8"), 8)
    assert largest_logprob_difference(plain, chunks) <= MAX_FP8_LOGPROB_DIFF
