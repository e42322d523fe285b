"""The engine on CUDA: Triton kernels and graphs give what the CPU gives, and leave no memory behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from app.bench.random_engine import random_engine, shape_config
from app.config import EngineConfig, ModelSource
from app.engine.engine import Engine
from app.engine.loading import load_engine
from app.protocol import GenerateRequest, SamplingParams

pytestmark = pytest.mark.gpu

LENGTHS = (1, 2, 63, 64, 65, 129, 300)
MIN_AGREEING = 0.98  # of greedy tokens in fp32: two candidates may lie closer than the rounding of another order


def greedy_tokens(engine: Engine, num_tokens: int = 32) -> dict[str, list[int]]:
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    for length in LENGTHS:
        prompt = tuple(6 + (length * 31 + 97 * index) % 8000 for index in range(length))
        engine.add(GenerateRequest(f"r{length}", prompt, sampling, cache_salt=str(length)))
    tokens: dict[str, list[int]] = {f"r{length}": [] for length in LENGTHS}
    while engine.has_work:
        for chunk in engine.step():
            tokens[chunk.request_id] += chunk.token_ids
        engine.check_integrity()
    return tokens


def agreement(a: dict[str, list[int]], b: dict[str, list[int]]) -> float:
    pairs = [(x, y) for name in a for x, y in zip(a[name], b[name], strict=True)]
    return sum(x == y for x, y in pairs) / len(pairs)


def make_engine(device: str, dtype: str = "float32", **config: int) -> Engine:
    return load_engine(ModelSource(), EngineConfig(device=device, dtype=dtype, cache_blocks=128, **config))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def on_cpu() -> dict[str, list[int]]:
    return greedy_tokens(make_engine("cpu"))


@pytest.mark.parametrize("chunk", [512, 96])
def test_greedy_tokens_agree_with_the_cpu(on_cpu: dict[str, list[int]], chunk: int) -> None:
    on_cuda = greedy_tokens(make_engine("cuda", max_chunk_tokens=chunk))
    assert agreement(on_cuda, on_cpu) >= MIN_AGREEING


def test_bfloat16_generates_sensible_text(on_cpu: dict[str, list[int]]) -> None:
    first = {name: tokens[:1] for name, tokens in greedy_tokens(make_engine("cuda", "bfloat16")).items()}
    assert agreement(first, {name: tokens[:1] for name, tokens in on_cpu.items()}) >= 0.7


def test_repeated_runs_are_bitwise_equal_and_memory_does_not_grow() -> None:
    engine = make_engine("cuda", "bfloat16")
    engine.warm_up(is_complete=True)
    first = greedy_tokens(engine)
    engine.reset()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        assert greedy_tokens(engine) == first
        engine.reset()
    assert torch.cuda.memory_allocated() <= before


def test_seeded_sampling_on_device_ends_and_stays_in_vocabulary() -> None:
    engine = make_engine("cuda", "bfloat16")
    for index in range(5):
        sampling = SamplingParams(max_tokens=20, temperature=0.9, top_p=0.9, top_k=40, min_p=0.02, seed=index)
        engine.add(GenerateRequest(f"s{index}", (0, 6, 7, 8), sampling))
    while engine.has_work:
        for chunk in engine.step():
            assert all(0 <= token_id < engine.limits.vocab_size for token_id in chunk.token_ids)


def embedded(dtype: str, **config: int) -> Engine:
    return make_engine("cuda", dtype, batch_invariant=True, **config)


def served_shape(dtype: str, **config: int) -> Engine:
    """Three layers of DeepSeek-V2-Lite's shape, whose attention is Hopper's own kernel there."""
    shape = replace(shape_config("deepseek-v2-lite"), num_layers=3)
    fields = EngineConfig(device="cuda", dtype=dtype, cache_blocks=128, batch_invariant=True, **config)  # type: ignore[arg-type]
    return random_engine(shape, fields)


@pytest.mark.parametrize(
    ("engine_of", "dtype", "long"),
    [(embedded, "bfloat16", 1100), (embedded, "float32", 1100), (served_shape, "bfloat16", 4500)],
)
def test_batch_invariant_answers_do_not_depend_on_what_runs_beside_them(
    engine_of: Callable[..., Engine], dtype: str, long: int
) -> None:
    """Tokens and the bits of their log-probabilities: all at once, in other chunks, each alone."""

    def answers(engine: Engine, lengths: tuple[int, ...]) -> dict[int, list[tuple[int, float]]]:
        sampling = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=0)
        found: dict[int, list[tuple[int, float]]] = {length: [] for length in lengths}
        for length in lengths:
            prompt = tuple(6 + (length * 31 + 97 * index) % 8000 for index in range(length))
            engine.add(GenerateRequest(str(length), prompt, sampling, cache_salt=str(length)))
        while engine.has_work:
            for chunk in engine.step():
                for token_id, logprob in zip(chunk.token_ids, chunk.logprobs or (), strict=True):
                    found[int(chunk.request_id)].append((token_id, logprob.logprob))
        return found

    lengths = (*LENGTHS, long)
    engine = engine_of(dtype)
    together = answers(engine, lengths)
    engine.reset()
    assert all(answers(engine, (length,)) == {length: together[length]} for length in lengths)
    assert answers(engine_of(dtype, max_chunk_tokens=96), lengths) == together
