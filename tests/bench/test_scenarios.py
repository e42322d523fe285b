"""What the scenarios conclude from what they saw."""

from __future__ import annotations

import asyncio
from typing import Any

import psutil
import pytest

from app.bench.affinity import requests_by_replica
from app.bench.client import Client
from app.bench.mixed import Comparison, ShortRun, spinning
from app.bench.replica_kill import KillRun
from app.bench.scale_up import OVERLOAD_S, RATE
from app.config import EngineConfig, QueueBounds
from tests.bench.sse_server import SseServer, serving


def test_requests_are_counted_per_replica_whatever_they_ended_with() -> None:
    async def count() -> Any:
        async with serving(SseServer()) as server, Client(server.url, timeout_s=60.0) as client:
            return await requests_by_replica(client)

    assert asyncio.run(count()) == {("short", "r1"): 6, ("long", "r3"): 1}


def test_a_replica_that_computes_nothing_refuses_nothing_of_an_overload() -> None:
    """A slow machine may still have all of the requests when the last one comes: none of them counts as lost."""
    assert EngineConfig().max_num_seqs + QueueBounds().max_waiting_seqs >= RATE * OVERLOAD_S


def test_a_comparison_takes_all_rounds_together() -> None:
    alone = [ShortRun([0.1] * 95 + [0.2] * 5, [], 0) for _ in range(2)]
    beside = [ShortRun([0.1] * 100, [3.0], 1), ShortRun([0.3] * 100, [5.0], 0)]
    ratios = Comparison.of(list(zip(alone, beside, strict=True)))
    assert ratios.median_ratio == pytest.approx(2.0)
    assert ratios.p95_ratio == pytest.approx(0.3 / 0.105, rel=0.05)
    assert (ratios.num_failed, ratios.slowest_long_s) == (1, 5.0)


def test_a_spinner_takes_a_core_and_goes() -> None:
    before = set(psutil.Process().children())
    with spinning(0):
        (spinner,) = set(psutil.Process().children()) - before
        assert spinner.is_running()
    assert not spinner.is_running()


@pytest.mark.parametrize(
    ("change", "is_passed"),
    [
        ({}, True),
        ({"begun": {"done": 2, "truncated": 1}}, False),  # no clear event
        ({"not_begun": {"done": 1, "http_503": 1}}, False),
        ({"whole": {"http_500": 1}}, False),
        ({"num_hung": 1}, False),
    ],
)
def test_a_kill_is_passed_if_every_request_ends_as_promised(change: dict[str, Any], is_passed: bool) -> None:
    seen: dict[str, Any] = {
        "begun": {"done": 2, "stream_error:unavailable": 2},
        "not_begun": {"done": 4},
        "whole": {"done": 3},
        "num_hung": 0,
        **change,
    }
    assert KillRun(**seen, error_event_s=0.1, wall_s=3.0).is_passed is is_passed
