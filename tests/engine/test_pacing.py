from __future__ import annotations

import math

from app.engine.pacing import MIN_ALLOWANCE, PrefillPacer, StepBudget
from app.engine.prompt_cost import PromptCost

ABSORBED = PromptCost(keys_per_token=100.0, expanded_key=0.0)
EXPANDED = PromptCost(keys_per_token=10_000.0, expanded_key=0.03)


def test_it_finds_what_fits_and_stays_there() -> None:
    pacer = PrefillPacer(max_tokens=8192, max_step_s=0.1)
    for _ in range(30):
        pacer.record(pacer.allowance, 0.01 + pacer.allowance / 20_000)
    assert 0.08 < 0.01 + pacer.allowance / 20_000 < 0.13


def test_small_steps_and_decodes_teach_nothing() -> None:
    pacer = PrefillPacer(max_tokens=8192, max_step_s=0.1)
    pacer.record(2, 0.09)
    pacer.record(0, 5.0)
    assert pacer.allowance == 8192


def test_it_recovers_after_a_hiccup_and_never_stops_prompts() -> None:
    pacer = PrefillPacer(max_tokens=4096, max_step_s=0.1)
    pacer.record(4096, 600.0)
    assert pacer.allowance == MIN_ALLOWANCE
    for _ in range(40):
        pacer.record(pacer.allowance, pacer.allowance / 80_000)
    assert pacer.allowance > 7500
    for _ in range(5):
        pacer.record(0.4 * pacer.allowance, 0.001)
    assert pacer.allowance < 8100, "it grows only where it is used"


def test_limits_below_the_least_are_kept() -> None:
    pacer = PrefillPacer(max_tokens=16, max_step_s=0.1)
    pacer.record(16, 1.0)
    assert pacer.allowance == 16


def test_a_step_longer_than_allowed_tells_how_long_an_allowed_one_takes() -> None:
    pacer = PrefillPacer(max_tokens=8192, max_step_s=0.1)
    for _ in range(2):
        pacer.record(8192, 0.8)
        assert math.isclose(pacer.allowance, 1024)


def test_a_budget_is_spent_on_tokens_by_what_they_attend_to() -> None:
    budget = StepBudget(ABSORBED, tokens=1000, cost=5000.0)
    assert budget.take(start=9900, before=0, wanted=1000, share=0.5) == 24  # 24 x (1 + 99.12) of 2500
    assert budget.fits(start=0, count=600) and not budget.fits(start=0, count=630)  # 600 x (1 + 3)
    assert budget.take(start=0, before=0, wanted=600) == 600
    assert budget.take(start=9900, before=24, wanted=1000) == 1  # some 200 are left
    assert budget.take(start=9900, before=0, wanted=1000) == 0, "a chunk of its own would be too small"
    assert budget.tokens == 375


def test_a_chunk_taken_in_two_parts_costs_as_much_as_in_one() -> None:
    parts = StepBudget(EXPANDED, tokens=8192, cost=5000.0)
    whole = StepBudget(EXPANDED, tokens=8192, cost=5000.0)
    first = parts.take(start=20_000, before=0, wanted=8192, share=0.5)
    second = parts.take(start=20_000, before=first, wanted=8192 - first)
    assert abs(first + second - whole.take(start=20_000, before=0, wanted=8192)) <= 1
    assert first >= EXPANDED.min_tokens


def test_small_chunks_are_taken_only_where_nothing_else_is() -> None:
    least = EXPANDED.min_tokens
    budget = StepBudget(EXPANDED, tokens=8192, cost=3100.0)
    assert budget.take(start=200_000, before=0, wanted=8192) == least, "somebody always advances"
    assert budget.take(start=200_000, before=0, wanted=8192) == 0
    tokens_only = StepBudget(EXPANDED, tokens=8)
    assert tokens_only.take(start=0, before=0, wanted=5) == 5
    assert tokens_only.take(start=0, before=0, wanted=5) == 3
    assert tokens_only.is_spent
