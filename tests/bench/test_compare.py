"""The comparison with transformers, on the embedded model and few tokens; the ratio itself is not a test's business."""

from __future__ import annotations

import pytest

from app.bench import compare
from app.bench.compare import EngineGenerator, compare_transformers, describe, first_mismatch, passage_prompts
from app.config import EngineConfig, ModelSource
from app.engine.loading import load_engine
from app.protocol import GenerateRequest


def test_both_sides_generate_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "EXPERTS_BACKENDS", ("absent", "grouped_mm"))
    monkeypatch.setattr(compare, "TRIAL_TOKENS", 2)
    lines: list[str] = []
    result = compare_transformers(None, threads=1, streams=[1, 3], output_tokens=6, runs=1, report=lines.append)
    for streams, row in zip((1, 3), result["results"], strict=True):
        assert row.first_mismatch is None
        assert row.same_tokens == row.streams == streams
        assert row.experts == "grouped_mm"
        assert row.ratio == pytest.approx(row.engine_tokens_per_s[0] / row.transformers_tokens_per_s[0])
        assert describe(row) in lines


def test_the_next_prompt_starts_when_one_has_ended() -> None:
    engine = load_engine(ModelSource(), EngineConfig(cache_blocks=16, max_num_seqs=3))
    prompts = [[100 + index] * 5 for index in range(5)]
    running, add = [], engine.add

    def counted(request: GenerateRequest) -> None:
        add(request)
        stats = engine.stats()
        running.append(stats.num_requests_running + stats.num_requests_waiting)

    generator = EngineGenerator(engine)
    together = generator.generate(prompts, 4, ignore_eos=True)
    engine.add = counted  # type: ignore[method-assign]
    assert generator.generate(prompts, 4, ignore_eos=True, concurrency=2) == together
    assert running == [1, 2, 1, 2, 1]


def test_prompts_differ_in_text_and_length() -> None:
    prompts = passage_prompts(range(300), 8)
    assert len({tuple(prompt) for prompt in prompts}) == 8
    assert len({len(prompt) for prompt in prompts}) == 8
    assert all(33 <= len(prompt) <= 96 for prompt in prompts)


def test_mismatches_are_located() -> None:
    assert first_mismatch([[1, 2], [3, 4]], [[1, 2], [3, 4]]) is None
    assert first_mismatch([[1, 2], [3, 4]], [[1, 2], [3, 5]]) == "stream 1, token 1: 4, transformers 5"
    assert first_mismatch([[1]], [[1, 2]]) == "stream 0: 1 tokens, transformers 2"
