"""Bounds on what is in progress and on what may wait."""

from __future__ import annotations

import pytest

from app.config import QueueBounds
from app.errors import OverloadedError
from app.serving.admission import ConcurrencyLimit, check_queue
from app.serving.routing import PoolLoad

BOUNDS = QueueBounds(max_waiting_seqs=10, max_ttft_s=2.0)


def retry_after_s(load: PoolLoad, num_seqs: int = 1, num_tokens: int = 100) -> float | None:
    """None: it goes in."""
    try:
        check_queue(load, num_seqs, num_tokens, BOUNDS)
    except OverloadedError as error:
        return error.retry_after_s
    return None


@pytest.mark.parametrize(
    ("load", "expected"),
    [
        (PoolLoad(2, waiting_seqs=19), None),
        (PoolLoad(2, waiting_seqs=20), 1.0),
        (PoolLoad(2, waiting_seqs=49, admitted_seqs_per_s=10.0), 3.0),
        (PoolLoad(2, waiting_seqs=10_000, admitted_seqs_per_s=1.0), 60.0),
        (PoolLoad(0, waiting_seqs=9), None),  # held while there is no replica
        (PoolLoad(0, waiting_seqs=10), 1.0),
    ],
)
def test_the_number_that_waits(load: PoolLoad, expected: float | None) -> None:
    assert retry_after_s(load) == expected


def test_a_prompt_of_many_choices_goes_in_alone() -> None:
    assert retry_after_s(PoolLoad(1), num_seqs=50) is None
    assert retry_after_s(PoolLoad(1, waiting_seqs=1), num_seqs=50) == 1.0


@pytest.mark.parametrize(
    ("load", "num_tokens", "expected"),
    [
        (PoolLoad(2, waiting_prefill_tokens=3000, prefill_tokens_per_s=1000.0), 1000, None),
        (PoolLoad(2, waiting_prefill_tokens=3000, prefill_tokens_per_s=1000.0), 1001, 1.0),
        (PoolLoad(2, waiting_prefill_tokens=12_000, prefill_tokens_per_s=1000.0), 2000, 5.0),
        (PoolLoad(2, waiting_prefill_tokens=12_000), 2000, None),  # speed not known yet
        (PoolLoad(2, prefill_tokens_per_s=1000.0), 90_000, None),  # the only one to wait
    ],
)
def test_the_prompt_tokens_that_wait(load: PoolLoad, num_tokens: int, expected: float | None) -> None:
    assert retry_after_s(load, num_tokens=num_tokens) == expected


def test_places_are_given_back() -> None:
    limit = ConcurrencyLimit(lambda: 1)
    with limit.admit(), pytest.raises(OverloadedError), limit.admit():
        raise AssertionError("there was one place")
    with limit.admit():
        assert limit.num_ongoing == 1
    assert limit.num_ongoing == 0
