"""Device memory over many steps and beside a full cache; what the first requests wait for."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import triton

from app.bench.random_engine import random_engine, shape_config
from app.config import EngineConfig, ModelSource
from app.engine.engine import Engine
from app.engine.loading import load_engine
from app.protocol import GenerateRequest, SamplingParams

pytestmark = pytest.mark.gpu

NUM_STEPS = 2000
FREE_BYTES = 20 * 2**30  # left for cache, graphs and the activations of the largest step


def request(name: str, num_tokens: int, max_tokens: int, vocab_size: int) -> GenerateRequest:
    rng = random.Random(name)
    sampling = SamplingParams(max_tokens=max_tokens, temperature=rng.choice([0.0, 0.8]), seed=1, ignore_eos=True)
    return GenerateRequest(name, tuple(rng.randrange(6, vocab_size) for _ in range(num_tokens)), sampling)


def test_no_memory_grows_over_many_steps_of_every_kind() -> None:
    """Prompts of one to three chunks, with and without a graph, beside decodes; some end early, some are aborted."""
    config = EngineConfig(device="cuda", cache_blocks=400, max_batched_tokens=2048, max_chunk_tokens=1536)
    engine = load_engine(ModelSource(), config)
    engine.warm_up(is_complete=True)
    rng = random.Random(0)
    settled = 0
    for step in range(NUM_STEPS):
        if step % 7 == 0 and engine.stats().num_requests_waiting < 8:
            length = rng.choice([1, 40, 300, 900, 1400, 3000])
            engine.add(request(f"r{step}", length, rng.randrange(1, 60), engine.limits.vocab_size))
        if step % 50 == 49:
            engine.abort(f"r{step // 7 * 7}")
        engine.step()
        if step == NUM_STEPS // 4:
            settled = torch.cuda.memory_reserved()
    engine.check_integrity()
    assert torch.cuda.memory_reserved() <= settled


@pytest.fixture
def engine_in_little_memory() -> Iterator[Engine]:
    """DeepSeek-V2-Lite's shape on a card of which most is taken; its cache gets 90% of the rest, as by default."""
    gc.collect()  # the parts of an earlier engine refer to each other
    torch.cuda.empty_cache()
    ballast = torch.empty(torch.cuda.mem_get_info()[0] - 34 * 2**30 - FREE_BYTES, dtype=torch.uint8, device="cuda")
    config = EngineConfig(max_num_seqs=128, max_batched_tokens=8192, max_chunk_tokens=8192, prefix_caching=False)
    yield random_engine(shape_config("deepseek-v2-lite"), config)
    del ballast


@pytest.fixture
def compiled() -> Iterator[list[str]]:
    """The kernels that are compiled, or loaded from disk, from here on."""
    names: list[str] = []

    def note(**about: Any) -> None:
        names.append(about["repr"])

    with triton.knobs.runtime.scope():
        triton.knobs.runtime.jit_post_compile_hook = note
        yield names


def test_after_the_warm_up_no_step_waits_for_a_compiler_or_for_memory(
    engine_in_little_memory: Engine, compiled: list[str]
) -> None:
    engine = engine_in_little_memory
    engine.warm_up(is_complete=True)
    assert compiled  # the hook works
    compiled.clear()
    num_retries = torch.cuda.memory_stats()["num_alloc_retries"]
    prompts = ((5, 40), (300, 30), (1, 30), (1500, 25), (700, 20), (20_000, 10), (3, 20), (60_000, 4), (4000, 4))
    for index, (length, max_tokens) in enumerate(prompts):
        engine.add(request(f"r{index}", length, max_tokens, engine.limits.vocab_size))
        engine.step()
    while engine.has_work:
        engine.step()
    assert compiled == []
    assert torch.cuda.memory_stats()["num_alloc_retries"] == num_retries


def test_a_full_cache_leaves_room_for_the_largest_steps(engine_in_little_memory: Engine) -> None:
    engine = engine_in_little_memory
    engine.warm_up(is_complete=True)
    capacity = engine.stats().num_blocks * 64
    length = 8000
    for index in range(capacity // length + 2):
        engine.add(request(f"r{index}", length, 300, engine.limits.vocab_size))
    fullest = 0.0
    while engine.stats().num_preemptions == 0 and engine.has_work:
        engine.step()
        fullest = max(fullest, engine.stats().kv_cache_usage_perc)
    assert fullest > 0.98
    for _ in range(20):
        engine.step()
    engine.check_integrity()
