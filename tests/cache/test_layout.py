"""Bytes of a cached token, plain and in FP8, and an engine that runs on FP8 entries."""

from __future__ import annotations

import pytest
import torch

from app.bench.random_engine import shape_config
from app.cache.layout import CacheLayout
from app.config import EngineConfig, ModelSource
from app.engine.loading import load_engine
from app.protocol import GenerateRequest, SamplingParams


@pytest.mark.parametrize(("is_fp8", "entry_bytes"), [(False, 1152), (True, 656)])
def test_bytes_of_a_token(is_fp8: bool, entry_bytes: int) -> None:
    """27 layers of 512 + 64 values: 1152 bytes in bfloat16; 512 + 128 + 4, rounded up to 656, in FP8."""
    layout = CacheLayout.of(shape_config("deepseek-v2-lite"), torch.bfloat16, is_fp8=is_fp8)
    assert layout.bytes_per_token == 27 * entry_bytes
    cache = layout.allocate(3, torch.device("cpu"))
    assert cache.nbytes == 3 * layout.bytes_per_block and cache.shape[:3] == (27, 3, 64)
    assert layout.num_blocks_in(10 * layout.bytes_per_block - 1) == 9


def test_an_engine_on_fp8_entries_batches_and_reuses_prefixes_without_a_trace() -> None:
    config = EngineConfig(device="cpu", num_threads=1, cache_dtype="fp8", cache_blocks=24, max_chunk_tokens=96)
    engine = load_engine(ModelSource(), config)
    sampling = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    prompts = {f"r{length}": tuple(6 + 97 * index % 8000 for index in range(length)) for length in (1, 64, 150)}

    def tokens_of(names: list[str]) -> dict[str, list[int]]:
        for name in names:
            engine.add(GenerateRequest(name, prompts[name], sampling))
        found: dict[str, list[int]] = {name: [] for name in names}
        while engine.has_work:
            for chunk in engine.step():
                found[chunk.request_id] += chunk.token_ids
        return found

    together = tokens_of(list(prompts))
    cached_again = tokens_of(list(prompts))
    engine.reset()
    alone = {name: tokens_of([name])[name] for name in prompts}
    assert together == cached_again == alone
    engine.check_integrity()
