"""One small deployment per version: what every replica last reported, for routers and for /metrics."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from app.protocol import EngineStats
from app.serving.routing import PoolLimits, PoolName

STALE_AFTER_S = 10.0


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """What a replica pushes each second."""

    pool: PoolName
    replica_id: str
    limits: PoolLimits
    stats: EngineStats


@dataclass(frozen=True, slots=True)
class VersionSnapshot:
    """What the monitor hands to routers. A pool's limits stay known when its replicas have gone."""

    limits: Mapping[PoolName, PoolLimits]
    replicas: tuple[tuple[float, ReplicaReport], ...]  # (age in seconds, report), stale ones left out


class Monitor:
    """The deployment class. Bound with the pools so that they belong to its application."""

    def __init__(self, *_pools: object) -> None:
        self._reports: dict[str, tuple[float, ReplicaReport]] = {}
        self._limits: dict[PoolName, PoolLimits] = {}

    def report(self, report: ReplicaReport) -> None:
        # Age counts from arrival: the sender's clock may differ.
        self._reports[report.replica_id] = (time.monotonic(), report)
        self._limits[report.pool] = report.limits

    def snapshot(self) -> VersionSnapshot:
        now = time.monotonic()
        self._reports = {key: held for key, held in self._reports.items() if now - held[0] < STALE_AFTER_S}
        replicas = tuple((now - arrived_s, report) for arrived_s, report in self._reports.values())
        return VersionSnapshot(dict(self._limits), replicas)
