"""Rates and speeds measured from an engine's counters."""

from __future__ import annotations

import pytest

from app.protocol import EngineStats, Histogram
from app.serving.load import ReplicaSignals
from app.serving.signals import ARRIVAL_WINDOW_S, SignalMeter


def stats(
    finished: int = 0, running: int = 0, waiting: int = 0, computed: int = 0, tokens: int = 0, started: int = 0
) -> EngineStats:
    return EngineStats(
        num_requests_running=running,
        num_requests_waiting=waiting,
        num_waiting_prefill_tokens=tokens,
        num_blocks=100,
        num_free_blocks=75,
        prefill_tokens_computed=computed,
        request_success={"stop": finished - finished // 2, "length": finished // 2},
        request_queue_time_seconds=Histogram((1.0,), (started, 0), 0.0),
    )


def run(meter: SignalMeter, seconds: range, **rates: float) -> ReplicaSignals:
    for second in seconds:
        signals = meter.update(stats(**{name: round(rate * second) for name, rate in rates.items()}), float(second))
    return signals


def test_gauges_pass_through() -> None:
    signals = SignalMeter(8).update(stats(running=3, waiting=2, tokens=700), 0.0)
    assert signals == ReplicaSignals(2, 700, 3, 8, 0.25)


def test_arrivals_are_what_was_done_plus_what_is_in_hand() -> None:
    done = run(SignalMeter(8), range(300), finished=4, computed=900)
    assert done.arrival_seqs_per_s == pytest.approx(4, rel=0.01)
    assert done.arrival_tokens_per_s == pytest.approx(900, rel=0.01)
    queueing = run(SignalMeter(8), range(300), finished=2, waiting=2, computed=500, tokens=400)
    assert queueing.arrival_seqs_per_s == pytest.approx(4, rel=0.01)
    assert queueing.arrival_tokens_per_s == pytest.approx(900, rel=0.01)


def test_arrivals_are_none_after_a_window_with_nothing_to_do() -> None:
    meter = SignalMeter(8)
    run(meter, range(100), finished=4, computed=900)
    last = stats(finished=4 * 99, computed=900 * 99)
    for second in range(100, 99 + int(ARRIVAL_WINDOW_S)):
        assert meter.update(last, float(second)).arrival_seqs_per_s > 1
    signals = meter.update(last, 99 + ARRIVAL_WINDOW_S)
    assert signals.arrival_seqs_per_s == signals.arrival_tokens_per_s == 0
    running = stats(finished=4 * 99, computed=900 * 99, running=1)
    meter = SignalMeter(8)
    run(meter, range(100), finished=4, computed=900)
    for second in range(100, 250):
        signals = meter.update(running, float(second))
    assert signals.arrival_seqs_per_s > 0


def test_a_new_replica_rises_as_its_neighbour_falls_so_their_sum_is_right() -> None:
    old, new = SignalMeter(8), SignalMeter(8)
    run(old, range(300), finished=4)
    for second in range(300, 330):
        first = old.update(stats(finished=4 * 300 + 2 * (second - 300)), float(second))
        second_ = new.update(stats(finished=2 * (second - 300)), float(second))
        assert first.arrival_seqs_per_s + second_.arrival_seqs_per_s == pytest.approx(4, rel=0.05)


def test_the_speed_is_that_of_a_replica_with_prompts_queued_and_room_to_run_them() -> None:
    meter = SignalMeter(8)
    assert meter.update(stats(), 0.0).prefill_tokens_per_s is None
    computed = 0
    for second in range(1, 60):
        computed += 100  # idle most of the time
        signals = meter.update(stats(computed=computed), float(second))
    assert signals.prefill_tokens_per_s == 100
    for second in range(60, 200):
        computed += 5000
        signals = meter.update(stats(computed=computed, tokens=9000), float(second))
    assert signals.prefill_tokens_per_s == 5000
    for second in range(200, 400):
        computed += 50  # prompts wait for a place in the batch, not for compute
        signals = meter.update(stats(computed=computed, tokens=9000, running=8), float(second))
    assert signals.prefill_tokens_per_s == 5000
    for second in range(400, 700):
        computed += 3000  # longer prompts are slower
        signals = meter.update(stats(computed=computed, tokens=9000, running=4), float(second))
    assert signals.prefill_tokens_per_s == pytest.approx(3000, rel=0.01)


def test_time_in_the_batch_by_littles_law() -> None:
    meter = SignalMeter(8)
    for second in range(300):
        signals = meter.update(stats(finished=3 * second, started=3 * second, running=6), float(second))
    assert signals.decode_s == pytest.approx(2.0, rel=0.02)


def test_time_in_the_batch_is_not_inflated_while_the_first_sequences_run() -> None:
    meter = SignalMeter(200)
    for second in range(100):  # one starts every second and takes 200: none has finished yet
        signals = meter.update(stats(started=second, running=second), float(second))
        assert signals.decode_s is None or signals.decode_s < 200
    assert signals.decode_s is not None and signals.decode_s > 80


def test_cancelled_requests_and_a_restarted_counter_give_no_negative_rates() -> None:
    meter = SignalMeter(8)
    meter.update(stats(waiting=50, tokens=5000), 0.0)
    signals = meter.update(stats(), 1.0)
    assert signals.arrival_seqs_per_s == signals.arrival_tokens_per_s == 0.0
