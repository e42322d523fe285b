"""What a router makes of the replicas' reports and of its own share."""

from __future__ import annotations

import pytest

from app.protocol import EngineStats, Histogram
from app.serving.monitor import ReplicaReport
from app.serving.pool_view import PoolView, Ticket
from app.serving.routing import PoolLimits, ReplicaLoad

LIMITS = PoolLimits(1000, 100, "v", max_num_seqs=4)


def report(name: str = "a", **stats: object) -> ReplicaReport:
    return ReplicaReport("short", name, LIMITS, EngineStats(num_blocks=10, num_free_blocks=10, **stats))  # type: ignore[arg-type]


def only(view: PoolView, now: float = 0.0) -> ReplicaLoad:
    (replica,) = view.replicas(now)
    return replica


def test_the_own_share_counts_at_once() -> None:
    view = PoolView()
    view.update([(0.5, report())], now=10.0)
    ticket = Ticket(view, 2, 300)
    assert (view.held.num_seqs, view.held.num_prefill_tokens) == (2, 300)
    assert view.load(10.0).waiting_prefill_tokens == 300
    ticket.send("a", 200)
    assert view.held.num_seqs == 0
    assert (only(view, 10.0).sent_seqs, only(view, 10.0).sent_tokens, only(view, 10.0).age_s) == (2, 200, 0.5)
    ticket.send("a", 0)
    assert (only(view).sent_seqs, only(view).sent_tokens) == (2, 0)
    ticket.close()
    ticket.close()
    assert only(view).load == 0.0 and view.load(10.0).is_idle


def test_of_a_report_only_what_exceeds_the_own_share_is_others() -> None:
    view = PoolView()
    view.update([(0.0, report())], now=0.0)
    tickets = [Ticket(view, 1, 100) for _ in range(3)]
    for ticket in tickets:
        ticket.send("a", 100)
    view.update([(0.2, report(num_requests_running=5, num_waiting_prefill_tokens=450))], now=1.0)
    assert (only(view).num_seqs, only(view).waiting_prefill_tokens) == (2, 150)
    assert (only(view).load, only(view).sent_seqs) == (pytest.approx(5 + 450 / 2048), 3)
    # A report may come when what it saw has ended: nobody else's work.
    burst = Ticket(view, 5, 900)
    burst.send("a", 900)
    for ticket in (burst, *tickets):
        ticket.close()
    view.update([(0.9, report(num_requests_running=8, num_waiting_prefill_tokens=990))], now=2.0)
    assert only(view).load == 0.0
    view.update([(0.9, report(num_requests_running=7))], now=3.0)
    view.update([(0.9, report(num_requests_running=6))], now=4.0)
    assert only(view).load == 6.0


def test_what_exceeds_the_batch_waits() -> None:
    view = PoolView()
    view.update([(0.0, report("a")), (0.0, report("b"))], now=0.0)
    for name, count in (("a", 6), ("b", 3)):
        for _ in range(count):
            Ticket(view, 1, 10).send(name, 10)
    load = view.load(0.0)
    assert (load.num_replicas, load.running_seqs, load.waiting_seqs, load.waiting_prefill_tokens) == (2, 9, 2, 90)
    assert load.is_queueing and not load.is_idle


def test_sequences_that_wait_for_cache_blocks_wait() -> None:
    view = PoolView()
    for _ in range(3):
        Ticket(view, 1, 10).send("a", 10)
    view.update([(0.0, report(num_requests_running=1, num_requests_waiting=2))], now=0.0)
    assert view.load(0.0).waiting_seqs == 2


def test_speeds_are_those_of_the_last_seconds() -> None:
    view = PoolView()
    view.update([(0.0, report())], now=0.0)
    assert view.load(0.0).prefill_tokens_per_s is None
    tokens, seconds = 0, 0.0
    for second, speed in enumerate([1000] * 60 + [200] * 60, start=1):
        tokens, seconds = tokens + speed // 2, seconds + 0.5
        admitted = Histogram((1.0,), (3 * second, 0), 0.0)
        stats = report(prefill_step_tokens=tokens, prefill_step_seconds=seconds, request_queue_time_seconds=admitted)
        view.update([(0.0, stats)], now=float(second))
        if second == 60:
            assert view.load(60.0).prefill_tokens_per_s == pytest.approx(1000)
    load = view.load(120.0)
    assert load.prefill_tokens_per_s == pytest.approx(200, rel=0.25)  # three windows on
    assert load.admitted_seqs_per_s == pytest.approx(3.0, rel=0.01)


def test_a_replica_to_avoid_is_left_out_for_a_while_and_a_forgotten_one_for_good() -> None:
    view = PoolView()
    view.update([(0.0, report("a")), (0.0, report("b"))], now=0.0)
    view.avoid("a", until_s=5.0)
    assert [one.replica_id for one in view.replicas(4.0)] == ["b"]
    assert [one.replica_id for one in view.replicas(5.0)] == ["a", "b"]
    ticket = Ticket(view, 1, 10)
    ticket.send("b", 10)
    view.update([(0.0, report("a"))], now=6.0)
    assert [one.replica_id for one in view.replicas(6.0)] == ["a"]
    ticket.close()
    view.update([], now=7.0)
    assert view.replicas(7.0) == [] and view.load(7.0).num_replicas == 0
    assert not view._shares
