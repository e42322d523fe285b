"""The engine on CUDA beside transformers, in fp32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from app.config import EngineConfig, ModelSource
from app.engine.engine import Engine
from app.engine.loading import load_engine
from app.protocol import GenerateRequest, SamplingParams, TokenChunk
from tests.checkpoints import (
    FAMILIES,
    load_oracle,
    oracle_logits,
    random_prompt,
    save_random_checkpoint,
)

pytestmark = pytest.mark.gpu

LENGTHS = (1, 17, 63, 64, 65, 130)
MAX_LOGPROB_DIFF = 1e-3  # three layers of sums in another order, on logits of some 10


def engine_on(folder: Path) -> Engine:
    config = EngineConfig(device="cuda", dtype="float32", cache_blocks=64, max_chunk_tokens=48)
    return load_engine(ModelSource(path=str(folder), name="random"), config)


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
