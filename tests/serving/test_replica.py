"""What a replica does around its engine: reports that go on, and an end without noise."""

from __future__ import annotations

import asyncio
import gc
import warnings
from types import SimpleNamespace
from typing import Any

import pytest

from app.errors import EngineError
from app.protocol import EngineStats
from app.serving import replica as module
from app.serving.monitor import ReplicaReport
from app.serving.replica import Replica
from app.serving.routing import PoolLimits


class Engine:
    """Fails every other time it is asked for its figures."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.is_stopped = False

    def stats(self) -> EngineStats:
        self.num_calls += 1
        if self.num_calls % 2:
            raise EngineError("scripted")
        return EngineStats()

    def stop(self) -> None:
        self.is_stopped = True


class Monitor:
    def __init__(self) -> None:
        self.reports: list[ReplicaReport] = []
        self.report = self

    async def remote(self, report: ReplicaReport) -> None:
        self.reports.append(report)


def bare_replica() -> Any:
    """A replica whose constructor has not run."""
    return Replica.__new__(Replica)


@pytest.mark.asyncio
async def test_one_failure_does_not_silence_the_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    monitor, engine, replica = Monitor(), Engine(), bare_replica()
    handles: list[Any] = [RuntimeError("not deployed"), monitor]

    def get_handle(*_args: Any, **_kwargs: Any) -> Any:
        handle = handles.pop(0)
        if isinstance(handle, Exception):
            raise handle
        return handle

    context = SimpleNamespace(app_name="pools", replica_id=SimpleNamespace(unique_id="r1"))
    serve = SimpleNamespace(get_replica_context=lambda: context, get_deployment_handle=get_handle)
    monkeypatch.setattr(module, "serve", serve)
    monkeypatch.setattr(module, "REPORT_PERIOD_S", 0.001)
    replica._start_s = 0.0
    replica._pool, replica._limits, replica._engine, replica._shards = "short", PoolLimits(1, 2, "v"), engine, None
    replica._reporter = asyncio.create_task(replica._report_forever())
    async with asyncio.timeout(30.0):
        while len(monitor.reports) < 2:
            await asyncio.sleep(0.001)
    replica.__del__()
    assert engine.is_stopped
    with pytest.raises(asyncio.CancelledError):
        await replica._reporter


def test_a_constructor_that_failed_leaves_no_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    noise: list[Any] = []
    monkeypatch.setattr("sys.unraisablehook", noise.append)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        bare_replica()
        gc.collect()
    assert not noise and not caught
