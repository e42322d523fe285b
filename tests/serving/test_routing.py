"""Pool and version choice."""

from __future__ import annotations

from collections import Counter

import pytest

from app.config import RouterSettings
from app.errors import UnavailableError
from app.serving.routing import PoolLimits, PoolName, choose_pool, choose_version, predicted_cost_tokens

SETTINGS = RouterSettings(short_max_cost_tokens=100, expected_output_tokens=20)
LIMITS: dict[PoolName, PoolLimits] = {
    "short": PoolLimits(max_model_len=120, vocab_size=10, version="v"),
    "long": PoolLimits(max_model_len=1000, vocab_size=10, version="v"),
}


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "pool"),
    [
        (80, None, "short"),  # 80 + 20 expected
        (81, None, "long"),
        (81, 5, "short"),  # max_tokens caps the expectation
        (90, 10, "short"),
        (90, 11, "long"),
        (80, 40, "short"),  # the worst case, 120, just fits
        (80, 41, "long"),  # predicted short, but it might not fit
        (5000, 1, "long"),  # fits nowhere: judged later, against the long pool
    ],
)
def test_choose_pool(prompt: int, max_tokens: int | None, pool: str) -> None:
    assert choose_pool(prompt, max_tokens, LIMITS, SETTINGS) == pool


def test_a_prompt_that_fills_the_short_pool_is_long() -> None:
    settings = RouterSettings(short_max_cost_tokens=1000, expected_output_tokens=1)
    assert choose_pool(119, None, LIMITS, settings) == "short"
    assert choose_pool(120, None, LIMITS, settings) == "long"


def test_a_pool_that_never_reported_is_starting() -> None:
    with pytest.raises(UnavailableError, match="short"):
        choose_pool(1, 1, {"long": LIMITS["long"]}, SETTINGS)
    with pytest.raises(UnavailableError, match="long"):
        choose_pool(500, 1, {"short": LIMITS["short"]}, SETTINGS)


def test_predicted_cost() -> None:
    assert predicted_cost_tokens(10, None, 20) == 30
    assert predicted_cost_tokens(10, 5, 20) == 15
    assert predicted_cost_tokens(10, 500, 20) == 30


def test_versions_share_by_weight() -> None:
    picks = Counter(choose_version(["a", "b", "c"], {"a": 3, "b": 1}, i / 100) for i in range(100))
    assert picks == {"a": 75, "b": 25}
    assert Counter(choose_version(["a", "b"], {}, i / 100) for i in range(100)) == {"a": 50, "b": 50}


def test_weight_zero_takes_nothing() -> None:
    with pytest.raises(UnavailableError):
        choose_version(["a"], {"a": 0.0}, 0.0)
    with pytest.raises(UnavailableError):
        choose_version(["a"], {"other": 1.0}, 0.5)
