"""One small deployment per version: what every replica and router last reported, for routers and for /metrics."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import ray
from ray import serve
from ray.util.placement_group import placement_group_table

from app.config import ScalingSettings, load_config
from app.protocol import EngineStats
from app.serving.board import PoolDecision
from app.serving.placement import nodes_of, waiting_groups
from app.serving.routing import PoolLimits, PoolName
from app.serving.scaling_view import PoolStart, RouterDemand, ScalingView

logger = logging.getLogger("ray.serve")

STALE_AFTER_S = 10.0
ALIVE_S = 3.0  # after its last report, one a second, a replica counts as gone
PLACED_S = 5.0  # a replica that waits no longer is just being placed
REPEAT_S = 60.0


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """What a replica pushes each second."""

    pool: PoolName
    replica_id: str
    limits: PoolLimits
    stats: EngineStats
    start_s: float = 0.0  # how long its constructor took


@dataclass(frozen=True, slots=True)
class PoolTraffic:
    """What one router does with the requests for a pool. Counters are cumulative since the router's start.

    Field names are metric names: see `serving/metrics.py`.
    """

    router_requests_held: int = 0  # gauge: sequences that wait in the router because the pool has no replica
    router_requests_rejected: int = 0  # refused with 429 or 503 because too much waits
    router_tokens_rejected: int = 0  # prompt tokens of these
    router_retries: int = 0  # sent once more because a replica was lost
    router_requests_lost: int = 0  # ended with an error because a replica was lost
    router_requests_spilled: int = 0  # sent here though predicted for the other pool
    router_holds_ended: Mapping[str, int] = field(default_factory=dict)  # by reason: see Dispatcher._hold


@dataclass(frozen=True, slots=True)
class RouterReport:
    """What a router tells each time it asks for the snapshot."""

    router_id: str
    pools: Mapping[PoolName, PoolTraffic]


@dataclass(frozen=True, slots=True)
class VersionSnapshot:
    """What the monitor hands to routers. A pool's limits stay known when its replicas have gone."""

    limits: Mapping[PoolName, PoolLimits]
    replicas: tuple[tuple[float, ReplicaReport], ...]  # (age in seconds, report), stale ones left out
    routers: tuple[RouterReport, ...] = ()
    decisions: Mapping[PoolName, PoolDecision] = field(default_factory=dict)  # of the pools that scale, if known
    starts: Mapping[PoolName, PoolStart] = field(default_factory=dict)  # of the pools that scale


class Monitor:
    """The deployment class. Bound with the pools so that they belong to its application.

    What changes its state is `async`, so that Serve runs it in the event loop; the rest would run in threads.
    """

    def __init__(self, *_pools: object) -> None:
        self._reports: dict[str, tuple[float, ReplicaReport]] = {}
        self._routers: dict[str, tuple[float, RouterReport]] = {}
        self._limits: dict[PoolName, PoolLimits] = {}
        self._waiting: dict[str, float] = {}  # lines about replicas without room, and when to log each next
        self._scaling = ScalingView()
        self._reader: asyncio.Task[None] | None = None

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Take what may change at run time (ScalingSettings)."""
        self._scaling.configure(load_config(ScalingSettings, user_config, where="user_config"))
        if self._scaling.is_active and self._reader is None:
            app = serve.get_replica_context().app_name
            self._reader = asyncio.create_task(self._scaling.read_forever(app, time.monotonic))

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What Serve hands to the scaling policy."""
        now = time.monotonic()
        alive = Counter(report.pool for arrived_s, report in self._reports.values() if now - arrived_s < ALIVE_S)
        return self._scaling.stats(alive, now)

    async def report(self, report: ReplicaReport) -> None:
        # Age counts from arrival: the sender's clock may differ.
        now = time.monotonic()
        if report.replica_id not in self._reports:
            self._scaling.hear_start(report.pool, report.start_s, now)
        self._reports[report.replica_id] = (now, report)
        self._limits[report.pool] = report.limits

    def check_health(self) -> None:
        """Asked by Serve now and then: the moment to log which replicas find no room, as they cannot say it."""
        now = time.monotonic()
        lines = waiting_groups(placement_group_table(), nodes_of(ray.nodes()))  # type: ignore[no-untyped-call]
        self._waiting = {line: self._waiting.get(line, now + PLACED_S) for line in lines}
        for line, due_s in self._waiting.items():
            if now >= due_s:
                logger.warning(line)
                self._waiting[line] = now + REPEAT_S

    async def exchange(self, report: RouterReport) -> VersionSnapshot:
        """Take a router's report and give it the snapshot: one call a second instead of two."""
        self._routers[report.router_id] = (time.monotonic(), report)
        snapshot = await self.snapshot()
        demands = {router.router_id: _demands(router) for router in snapshot.routers}
        self._scaling.hear_routers(demands, time.monotonic())
        return snapshot

    async def snapshot(self) -> VersionSnapshot:
        now = time.monotonic()
        self._reports = {key: held for key, held in self._reports.items() if now - held[0] < STALE_AFTER_S}
        self._routers = {key: held for key, held in self._routers.items() if now - held[0] < STALE_AFTER_S}
        replicas = tuple((now - arrived_s, report) for arrived_s, report in self._reports.values())
        return VersionSnapshot(
            dict(self._limits),
            replicas,
            tuple(report for _, report in self._routers.values()),
            self._scaling.decisions(now),
            self._scaling.starts(now),
        )


def _demands(router: RouterReport) -> dict[PoolName, RouterDemand]:
    return {
        pool: RouterDemand(traffic.router_requests_held, traffic.router_tokens_rejected)
        for pool, traffic in router.pools.items()
    }
