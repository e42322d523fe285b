"""Open-loop load against a local server, and what the client itself costs."""

from __future__ import annotations

import asyncio

import pytest

from app.bench.load import LoadRun, Progress, Target, run_load
from app.bench.summary import Slo, summarize
from app.bench.traffic import PlannedRequest
from tests.bench.sse_server import SseServer, serving


def load(server: SseServer, requests: list[PlannedRequest], reports: list[Progress] | None = None) -> LoadRun:
    async def run() -> LoadRun:
        async with serving(server):
            on_progress = None if reports is None else reports.append
            return await run_load(requests, Target(server.url, timeout_s=100.0), on_progress=on_progress)

    return asyncio.run(run())


def test_requests_leave_on_time_however_slow_the_answers() -> None:
    requests = [PlannedRequest(0.05 * index, 8, 10) for index in range(8)]
    run = load(SseServer(event_delay_s=0.05), requests)  # each answer takes ten times the gap between two requests
    assert [record.error for record in run.records] == [None] * 8
    assert all(record.sent_s > record.planned.at_s - 0.001 for record in run.records)
    # Closed-loop sending would wait for an answer before the next request.
    assert max(record.sent_s for record in run.records) < min(record.ended_s for record in run.records)


def test_metrics_and_progress_are_sampled_meanwhile() -> None:
    reports: list[Progress] = []
    run = load(SseServer(event_delay_s=0.2), [PlannedRequest(0.0, 8, 10)] * 3, reports)  # reports come each second
    assert run.samples[0].kv_usage("pools/short") == pytest.approx(0.5)
    assert {pool: len(replicas) for pool, replicas in run.samples[0].pools().items()} == {
        "pools/short": 2,
        "pools/long": 1,
    }
    assert (reports[0].sent, reports[0].ended, reports[0].planned) == (3, 0, 3)
    assert "in flight 3" in str(reports[0])


def test_failures_are_counted_and_do_not_stop_the_run() -> None:
    run = load(SseServer(failure="status"), [PlannedRequest(0.0, 4, 2)] * 5)
    summary = summarize(run, Slo(), [])
    assert summary.errors == {"http_429": 5}
    assert (summary.succeeded, summary.good_share) == (0, 0.0)


def test_the_client_keeps_up_with_a_thousand_events_per_second() -> None:
    """Both ends run in this process, so its CPU time is an upper bound on the client's."""
    num_events = 100 * 100
    run = load(SseServer(), [PlannedRequest(0.0, 16, 100)] * 100)
    assert sum(len(record.event_times_s) for record in run.records) == num_events
    # A quarter of a core at 1,000 events a second; measured: about a hundredth.
    assert run.client_cpu_s / num_events < 0.25 / 1000
