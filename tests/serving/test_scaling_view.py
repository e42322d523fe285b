"""What the monitor tells the scaling policy, and what it keeps of the policy's decisions."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from app.config import PoolScalingSettings, ScalingSettings
from app.protocol import EngineStats
from app.serving import board
from app.serving import monitor as monitor_module
from app.serving.board import PoolDecision
from app.serving.monitor import ALIVE_S, Monitor, PoolTraffic, ReplicaReport, RouterReport
from app.serving.routing import PoolLimits
from app.serving.scaling_view import REJECTION_WINDOW_S, STALE_AFTER_S, RouterDemand, ScalingView

SETTINGS = ScalingSettings(
    short=PoolScalingSettings(max_replicas=3), long=PoolScalingSettings(min_replicas=0), budget=4
)
ASLEEP = PoolDecision(running=0, target=0, wanted=0, granted=0)
LOST = PoolDecision(running=0, target=1, wanted=1, granted=1)
RUNNING = PoolDecision(running=1, target=1, wanted=1, granted=1)


def view() -> ScalingView:
    view = ScalingView()
    view.configure(SETTINGS)
    return view


def held(seqs: int, rejected: int = 0) -> dict[str, Any]:
    return {"router-1": {"long": RouterDemand(seqs, rejected)}}


def test_settings_reach_the_policy() -> None:
    stats = view().stats({}, 0.0)
    assert stats["scaling//budget"] == 4
    assert stats["scaling/short/max_replicas"] == 3
    assert stats["scaling/long/min_replicas"] == 0
    assert not ScalingView().is_active and view().is_active


def test_a_pool_nobody_has_heard_of_is_wanted_once() -> None:
    one = view()
    assert one.stats({}, 0.0)["demand/long/waiting_seqs"] == 1
    one.hear_start("long", 3.0, 5.0)
    assert one.stats({}, 6.0)["demand/long/waiting_seqs"] == 0
    assert one.starts(6.0)["long"].cold_start_s == 5.0


def test_what_all_routers_hold_is_the_demand() -> None:
    one = view()
    one.hear_start("long", 5.0, 1.0)
    one.hear_routers({**held(2), "router-2": {"long": RouterDemand(3, 0), "short": RouterDemand(0, 0)}}, 2.0)
    assert one.stats({}, 2.0)["demand/long/waiting_seqs"] == 5
    one.hear_routers(held(0), 3.0)
    assert one.stats({}, 3.0)["demand/long/waiting_seqs"] == 0


def test_the_rate_of_refused_tokens_follows_the_counters() -> None:
    one = view()
    one.hear_start("long", 5.0, 0.0)
    one.hear_routers(held(0, 1_000_000), 0.0)  # long ago
    one.stats({}, 0.0)
    for second in range(1, 61):
        one.hear_routers(held(0, 1_000_000 + 100 * second), float(second))
        rate = one.stats({}, float(second))["demand/long/rejected_tokens_per_s"]
    assert rate == pytest.approx(100, rel=0.05)
    end_s = 60.0 + 2 * REJECTION_WINDOW_S
    one.hear_routers(held(0, 1_006_000), end_s)
    assert one.stats({}, end_s - 0.1)["demand/long/rejected_tokens_per_s"] > 0
    assert one.stats({}, end_s)["demand/long/rejected_tokens_per_s"] == 0


def test_a_cold_start_is_measured_from_the_first_that_waits() -> None:
    one = view()
    one.hear_start("long", 3.0, 1.0)
    assert one.starts(1.0)["long"].cold_start_s == 3.0  # until a wait was measured
    one.take((1.0, {"long": ASLEEP}), 10.0)
    one.hear_routers(held(1), 20.0)
    one.hear_routers(held(4), 22.0)
    start = one.starts(24.0)["long"]
    assert (start.cold_start_s, start.waited_s) == (3.0, 4.0)
    one.take((2.0, {"long": RUNNING}), 27.5)
    start = one.starts(30.0)["long"]
    assert (start.cold_start_s, start.waited_s) == (7.5, 0.0)


def test_what_routers_hold_on_to_after_a_start_is_no_new_wait() -> None:
    one = view()
    one.take((1.0, {"long": ASLEEP}), 10.0)
    one.hear_routers(held(1), 20.0)
    one.hear_start("long", 3.0, 26.0)
    one.hear_routers(held(1), 26.1)  # has not heard yet, and the decision on the board is an old one
    one.take((2.0, {"long": RUNNING}), 26.5)
    assert one.starts(27.0)["long"].cold_start_s == 6.0


@pytest.mark.parametrize("noticed_s", [0.0, 5.0, 12.0])
def test_after_a_loss_the_wait_counts_from_the_first_that_is_held(noticed_s: float) -> None:
    """However late Serve notices that the last replica has gone."""
    one = view()
    one.hear_start("long", 40.0, 0.0)
    for second in range(20):
        now = 100.0 + second
        one.take((now, {"long": RUNNING if second < noticed_s else LOST}), now)
        one.hear_routers(held(1), now)
    assert one.starts(119.0)["long"].waited_s == 19.0
    one.hear_start("long", 40.0, 145.0)
    assert one.starts(145.0)["long"].cold_start_s == 45.0


@pytest.mark.asyncio
async def test_a_replica_that_drains_ends_no_wait_and_counts_as_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reports on, each second, until its last stream has ended."""
    clock = [0.0]
    monkeypatch.setattr(monitor_module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monitor = Monitor()
    monitor._scaling.configure(SETTINGS)

    async def num_alive() -> float:
        return (await monitor.record_autoscaling_stats())["demand/long/num_alive"]

    def report(replica_id: str) -> ReplicaReport:
        return ReplicaReport("long", replica_id, PoolLimits(10, 20, "v"), EngineStats(), start_s=3.0)

    for second in range(20):
        clock[0] = float(second)
        await monitor.report(report("draining"))
        if second >= 10:
            monitor._scaling.take((clock[0], {"long": ASLEEP}), clock[0])
            await monitor.exchange(RouterReport("r", {"long": PoolTraffic(router_requests_held=1)}))
    assert monitor._scaling.starts(19.0)["long"].waited_s == 9.0
    assert await num_alive() == 1
    clock[0] = 20.0
    await monitor.report(report("new"))
    assert await num_alive() == 2
    assert monitor._scaling.starts(20.0)["long"].cold_start_s == 10.0
    clock[0] = 19.0 + ALIVE_S
    assert await num_alive() == 1


def test_a_pool_that_only_closed_has_no_start_to_measure() -> None:
    one = view()
    one.hear_start("long", 3.0, 1.0)
    one.take((1.0, {"long": PoolDecision(running=1, target=0, wanted=0, granted=0)}), 10.0)
    one.hear_routers(held(1), 11.0)
    one.hear_start("long", 3.0, 12.0)
    one.take((2.0, {"long": RUNNING}), 12.5)
    assert one.starts(13.0)["long"].cold_start_s == 3.0


def test_decisions_nobody_renews_are_forgotten() -> None:
    one = view()
    one.take((1.0, {"long": RUNNING, "other": RUNNING}), 10.0)
    assert one.decisions(12.0) == {"long": RUNNING}
    one.take((1.0, {"long": RUNNING}), 15.0)
    one.take(None, 15.0)
    assert one.decisions(10.0 + STALE_AFTER_S) == {}
    one.take((2.0, {"long": ASLEEP}), 30.0)
    assert one.decisions(31.0) == {"long": ASLEEP}


@pytest.mark.asyncio
async def test_the_monitor_hands_on_settings_demand_and_decisions(monkeypatch: pytest.MonkeyPatch) -> None:
    context = SimpleNamespace(app_name="pools")
    monkeypatch.setattr(monitor_module, "serve", SimpleNamespace(get_replica_context=lambda: context))
    monkeypatch.setattr(board, "read", lambda app: (1.0, {"long": ASLEEP}) if app == "pools" else None)
    monitor = Monitor()
    await monitor.reconfigure(SETTINGS.model_dump())
    router = RouterReport("r", {"long": PoolTraffic(router_requests_held=2)})
    async with asyncio.timeout(30.0):
        while (snapshot := await monitor.exchange(router)).decisions != {"long": ASLEEP}:
            await asyncio.sleep(0.001)
    assert set(snapshot.starts) == {"short", "long"}
    stats = await monitor.record_autoscaling_stats()
    assert stats["demand/long/waiting_seqs"] == 2 and stats["scaling//budget"] == 4
    await monitor.reconfigure({"short": {"max_replicas": 2}, "budget": 2})
    stats = await monitor.record_autoscaling_stats()
    assert stats["scaling//budget"] == 2 and "scaling/long/max_replicas" not in stats
    assert monitor._reader is not None
    monitor._reader.cancel()
