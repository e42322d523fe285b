from __future__ import annotations

from dataclasses import replace

import pytest

from app.bench.engine_rates import shape_config
from app.config import EMBEDDED_MODEL
from app.engine.limits import Limits
from app.engine.prompt_cost import PromptCost
from app.engine.workspace import workspace_bytes
from app.model.config import ModelConfig
from kernels import invariance

LIMITS = Limits(
    max_model_len=131072, max_num_seqs=256, max_batched_tokens=8192, max_chunk_tokens=8192, max_waiting_seqs=64,
    chunk_steps=(1,), max_step_s=0.1, prompt_cost=PromptCost(1e12, 0.0), max_passed_over_s=30.0,
    prefix_caching=True, vocab_size=102400,
    eos_token_ids=frozenset(),
)  # fmt: skip


def test_it_is_a_few_gigabytes_for_a_model_of_16b_parameters() -> None:
    assert 3e9 < workspace_bytes(shape_config("deepseek-v2-lite"), LIMITS, 2) < 8e9


def test_it_grows_with_every_limit() -> None:
    config = ModelConfig.from_folder(EMBEDDED_MODEL)
    least = workspace_bytes(config, LIMITS, 2)
    for change in ({"max_model_len": 10**6}, {"max_num_seqs": 512}, {"max_batched_tokens": 16384}):
        assert workspace_bytes(config, replace(LIMITS, **change), 2) > least, change
    assert workspace_bytes(config, LIMITS, 4) > least


def test_sums_in_fp64_take_more(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ModelConfig.from_folder(EMBEDDED_MODEL)
    plain = {size: workspace_bytes(config, LIMITS, size) for size in (2, 4)}
    monkeypatch.setattr(invariance, "_required", [True])
    extra = {size: workspace_bytes(config, LIMITS, size) - plain[size] for size in (2, 4)}
    assert extra[4] > extra[2] > 0
