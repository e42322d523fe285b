"""What a router knows of a version while its monitor answers, restarts or is gone."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from app.config import RouterSettings, VersionConfig
from app.protocol import EngineStats
from app.serving import pool_client, versions
from app.serving.monitor import ReplicaReport, RouterReport, VersionSnapshot
from app.serving.routing import PoolLimits
from app.serving.versions import Version

LIMITS = PoolLimits(100, 200, "v")
REPORT = ReplicaReport("short", "r1", LIMITS, EngineStats(num_blocks=5))


class Monitor:
    """Stands for every deployment handle; `answer` is what the next exchange gives or raises."""

    def __init__(self) -> None:
        self.answer: VersionSnapshot | Exception = RuntimeError("not deployed")
        self.num_asked = 0
        self.exchange = self

    def options(self, **_options: Any) -> Monitor:
        return self

    async def remote(self, _report: RouterReport) -> VersionSnapshot:
        self.num_asked += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.mark.asyncio
async def test_an_outage_of_the_monitor_takes_nothing_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monitor, clock = Monitor(), [100.0]
    for module in (versions, pool_client):
        monkeypatch.setattr(module.serve, "get_deployment_handle", lambda *_args, **_kwargs: monitor)
    monkeypatch.setattr(versions, "POLL_PERIOD_S", 0.001)
    monkeypatch.setattr(versions, "WAITING_POLL_PERIOD_S", 0.001)
    monkeypatch.setattr(versions, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    version = Version(VersionConfig(app="pools"), RouterSettings)
    poll = asyncio.create_task(version.poll_forever())

    async def hear(answer: VersionSnapshot | Exception) -> None:
        monitor.answer = answer
        num_asked = monitor.num_asked
        async with asyncio.timeout(30.0):
            while monitor.num_asked < num_asked + 2:  # it has taken the first answer when it asks again
                await asyncio.sleep(0.001)

    await hear(RuntimeError("not deployed"))
    assert version.limits == {} and version.ready_pools == set() and version.series() == []
    await hear(VersionSnapshot({"short": LIMITS}, ((1.0, REPORT),)))
    assert version.limits == {"short": LIMITS} and version.ready_pools == {"short"}
    (series,) = version.series()
    assert series.labels == ("longspan-tiny", "pools", "short", "r1")
    # Unreachable: old figures leave /metrics, but the pool still counts as there.
    await hear(RuntimeError("unreachable"))
    clock[0] += 5.0
    assert version.series()[0].age_s == pytest.approx(6.0)
    clock[0] += 5.0
    assert version.series() == [] and version.ready_pools == {"short"}
    # Restarted: it knows nothing yet, and limits do not change within a version.
    await hear(VersionSnapshot({}, ()))
    assert version.ready_pools == set() and version.limits == {"short": LIMITS}
    assert version.problem is None
    # The pools serve another model: its replicas encode nothing like this router.
    await hear(VersionSnapshot({"short": replace(LIMITS, tokenizer="other")}, ((1.0, REPORT),)))
    assert version.problem is not None and "pools" in version.problem
    await hear(VersionSnapshot({"short": replace(LIMITS, tokenizer=version.tokenizer.digest)}, ((1.0, REPORT),)))
    assert version.problem is None
    poll.cancel()
