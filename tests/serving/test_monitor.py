"""What the monitor says of replicas that find no room; its reports are tested with the router's side of them."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from app.serving import monitor as module
from app.serving.monitor import PLACED_S, REPEAT_S, Monitor


def test_a_replica_that_finds_no_room_is_logged_now_and_then(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    group = {"name": "SERVE_REPLICA::p#short#x", "state": "PENDING", "bundles": {0: {"GPU": 8.0}}, "strategy": "PACK"}
    table: dict[str, Any] = {"1": group}
    clock = SimpleNamespace(now=100.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(module, "placement_group_table", lambda: table)
    monkeypatch.setattr(module, "ray", SimpleNamespace(nodes=list))
    monkeypatch.setattr(module, "time", clock)
    monitor = Monitor()

    def logged_at(now: float) -> int:
        clock.now = now
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="ray.serve"):
            monitor.check_health()
        assert all("p/short waits: it asks 8 GPU; the cluster has no nodes" in text for text in caplog.messages)
        return len(caplog.messages)

    assert [logged_at(100.0), logged_at(101.0)] == [0, 0]
    assert [logged_at(100.0 + PLACED_S), logged_at(101.0 + PLACED_S)] == [1, 0]
    assert logged_at(100.0 + PLACED_S + REPEAT_S) == 1
    table.clear()
    assert logged_at(300.0) == 0
    table["1"] = group
    assert logged_at(301.0) == 0
