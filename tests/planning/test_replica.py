"""The simulated engine against hand-made arithmetic, and its books after every advance."""

from __future__ import annotations

import random

import pytest

from app.planning.cost_model import ReplicaCost
from app.planning.replica import SimulatedReplica, SimulatedRequest
from app.planning.trace import TraceRequest

COST = ReplicaCost(
    prefill_tokens_per_s=1000,
    step_base_s=0.01,
    decode_seq_s=0.0,
    context_token_s=0.0,
    kv_capacity_tokens=1000,
    max_running_seqs=4,
    max_batched_tokens=100,
    max_chunk_tokens=50,
)


def request(prompt: int, output: int, order: int = 0) -> SimulatedRequest:
    return SimulatedRequest(TraceRequest(0.0, prompt, output), "short", "short", order)


def test_one_request() -> None:
    replica, one = SimulatedReplica(COST, 0.0), request(120, 11)
    replica.add(one, 0.5)
    replica.advance(10.0)
    prefill_s = 3 * 0.01 + 0.120  # chunks of 50, 50 and 20
    assert one.started_s == 0.5
    assert one.first_token_s == pytest.approx(0.5 + prefill_s)
    assert one.finished_s == pytest.approx(0.5 + prefill_s + 10 * 0.01)
    assert replica.is_empty and replica.kv_tokens == 0
    assert replica.finished == [one]
    assert replica.stats().prefill_tokens_computed == 120


def test_a_long_prompt_does_not_stop_decoding_and_shares_steps_with_a_short_one() -> None:
    replica = SimulatedReplica(COST, 0.0)
    decoding, long, short = request(10, 100, 0), request(800, 1, 1), request(20, 1, 2)
    for one in (decoding, long, short):
        replica.add(one, 0.0)
    replica.advance(0.2)
    assert decoding.first_token_s is not None and short.first_token_s is not None
    assert long.first_token_s is None
    replica.advance(5.0)
    assert decoding.finished_s is not None and long.first_token_s is not None
    assert decoding.finished_s < long.first_token_s + 1.0


def test_places_are_limited_and_filled_in_order() -> None:
    replica = SimulatedReplica(COST, 0.0)
    many = [request(10, 20, order) for order in range(10)]
    for one in many:
        replica.add(one, 0.0)
    replica.advance(0.05)
    assert replica.stats().num_requests_running <= 4
    replica.advance(10.0)
    starts = [one.started_s for one in many]
    assert None not in starts and starts == sorted(starts)  # type: ignore[type-var]


def test_the_youngest_gives_way_when_the_cache_is_full_and_finishes_later() -> None:
    replica = SimulatedReplica(COST, 0.0)
    many = [request(200, 200, order) for order in range(4)]
    for one in many:
        replica.add(one, 0.0)
    replica.advance(100.0)
    assert replica.num_preemptions > 0
    assert many[0].num_preemptions == 0
    assert all(one.finished_s is not None for one in many)
    assert replica.peak_kv_tokens <= 1000
    assert replica.stats().request_success == {"length": 4}


@pytest.mark.parametrize("seed", range(30))
def test_random_traffic_keeps_the_books(seed: int) -> None:
    draw = random.Random(seed)
    replica = SimulatedReplica(COST, 0.0)
    sent, now = [], 0.0
    for order in range(60):
        now += draw.expovariate(2.0)
        one = request(draw.randint(1, 500), draw.randint(1, 300), order)
        sent.append(one)
        replica.add(one, now)
        replica.advance(now + draw.random())
        replica.check_integrity()
    replica.advance(now + 1000.0)
    replica.check_integrity()
    assert replica.is_empty
    assert replica.kv_tokens == replica.stats().num_waiting_prefill_tokens == 0
    for one in sent:
        assert one.started_s is not None and one.first_token_s is not None and one.finished_s is not None
        assert one.sent_s is not None and one.sent_s <= one.started_s < one.first_token_s <= one.finished_s
