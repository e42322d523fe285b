from __future__ import annotations

import math

import pytest

from app.bench.engine_rates import shape_config
from app.config import EMBEDDED_MODEL
from app.engine.prompt_cost import MIN_TOKENS, PromptCost
from app.model.config import ModelConfig


@pytest.mark.parametrize("cost", [PromptCost(700.0, 0.0), PromptCost(15_000.0, 0.03), PromptCost(math.inf, 0.0)])
@pytest.mark.parametrize("start", [0, 1000, 100_000])
@pytest.mark.parametrize("count", [1, 60, 5000])
def test_what_fits_costs_as_much_as_it_may(cost: PromptCost, start: int, count: int) -> None:
    assert math.isclose(cost.fitting(start, cost.of(start, count)), count, rel_tol=1e-9)
    assert cost.of(start, 0) == 0
    assert cost.fitting(start, math.inf) == math.inf


def test_where_expanding_the_keys_alone_costs_more_nothing_fits() -> None:
    assert PromptCost(15_000.0, 0.03).fitting(100_000, 2999.0) < 0


def test_chunks_of_a_prompt_cost_as_much_as_the_whole_where_nothing_is_expanded() -> None:
    cost = PromptCost(700.0, 0.0)
    assert math.isclose(sum(cost.of(start, 64) for start in range(0, 640, 64)), cost.of(0, 640))


def test_the_embedded_model_by_its_multiplications() -> None:
    """384 wide, 6 heads of 64 + 32 / 64, ranks 192 and 128; 7 layers of 5 experts of 128, a dense one of 1024."""
    projections = 384 * 192 + 192 * 6 * 96 + 384 * (128 + 32) + 384 * 6 * 64 + 128 * 6 * (64 + 64)
    experts = 384 * (3 * 128 * 5 + 16)
    token = projections + (7 * experts + 3 * 384 * 1024) / 8
    cost = PromptCost.of_model(ModelConfig.from_folder(EMBEDDED_MODEL), absorbed=True)
    assert cost == PromptCost(pytest.approx(token / (6 * (2 * 128 + 32))), 0.0)
    assert cost.min_tokens == MIN_TOKENS


def test_expanded_keys_are_worth_some_hundred_tokens() -> None:
    cost = PromptCost.of_model(shape_config("deepseek-v2-lite"), absorbed=False)
    assert 10_000 < cost.keys_per_token < 20_000
    assert cost.min_tokens == math.ceil(512 * 256 / 320)  # R (dn + dv) / (dn + dr + dv)
