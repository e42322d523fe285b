"""A router's side of one version: its tokenizer, its pools' handles, and what its monitor last said."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable
from contextlib import suppress

from ray import serve

from app.config import RouterSettings, VersionConfig
from app.serving.demand import ZeroGate
from app.serving.dispatch import Dispatcher, Items, PromptRun
from app.serving.metrics import ReplicaSeries, RouterSeries, ScalingSeries
from app.serving.monitor import STALE_AFTER_S, RouterReport, VersionSnapshot
from app.serving.pool_client import PoolClient
from app.serving.routing import POOLS, OutputEstimates, PoolLimits, PoolLoad, PoolName
from app.tokenizer import Tokenizer

logger = logging.getLogger("ray.serve")

POLL_PERIOD_S = 1.0
WAITING_POLL_PERIOD_S = 0.2  # until the first snapshot, and while a request is held for want of a replica
HELD_POLL_DELAY_S = 0.02  # many requests may be held at once


class Version:
    """One application of pools. Raises CheckpointError if its tokenizer cannot be read."""

    def __init__(self, config: VersionConfig, settings: Callable[[], RouterSettings]) -> None:
        self.app = config.app
        self.model = config.model.name
        self.tokenizer = Tokenizer(config.model.folder)
        self.limits: dict[PoolName, PoolLimits] = {}  # of every pool that ever reported
        self.problem: str | None = None  # why it cannot serve, whatever its replicas do
        self._snapshot = VersionSnapshot({}, ())
        self._snapshot_s = -STALE_AFTER_S
        self.estimates = OutputEstimates(settings().expected_output_tokens)
        self._router_id = uuid.uuid4().hex
        self._held = asyncio.Event()
        gates = {pool: ZeroGate(pool) for pool in POOLS}
        self._pools = {
            pool: Dispatcher(pool, PoolClient(config.app, pool, gate), gate, settings, self.estimates, self._held.set)
            for pool, gate in gates.items()
        }
        self._monitor = serve.get_deployment_handle("monitor", app_name=config.app)

    @property
    def ready_pools(self) -> set[PoolName]:
        """Pools with a replica or at zero, as the monitor last said: an unreachable one does not make them unready."""
        asleep = {pool for pool, dispatcher in self._pools.items() if pool in self.limits and dispatcher.gate.is_asleep}
        return asleep | {report.pool for _, report in self._snapshot.replicas}

    def series(self) -> list[ReplicaSeries]:
        """Every replica's snapshot for /metrics, stale ones left out."""
        since_s = time.monotonic() - self._snapshot_s
        return [
            ReplicaSeries((self.model, self.app, report.pool, report.replica_id), age_s + since_s, report.stats)
            for age_s, report in self._snapshot.replicas
            if age_s + since_s < STALE_AFTER_S
        ]

    def router_series(self) -> list[RouterSeries]:
        """What every router does with this version's requests, for /metrics."""
        if time.monotonic() - self._snapshot_s >= STALE_AFTER_S:
            return []
        return [
            RouterSeries((self.model, self.app, pool, router.router_id), traffic)
            for router in self._snapshot.routers
            for pool, traffic in router.pools.items()
        ]

    def scaling_series(self) -> list[ScalingSeries]:
        """What the scaling policy last decided for each pool that scales, for /metrics."""
        if time.monotonic() - self._snapshot_s >= STALE_AFTER_S:
            return []
        decisions = self._snapshot.decisions.items()
        return [ScalingSeries((self.model, self.app, pool), decision) for pool, decision in decisions]

    async def poll_forever(self) -> None:
        """Keep the snapshot fresh. An unreachable monitor leaves the old one: no data is not zero."""
        while True:
            try:
                traffic = {pool: dispatcher.traffic for pool, dispatcher in self._pools.items()}
                self._snapshot = await self._monitor.exchange.remote(RouterReport(self._router_id, traffic))
                self._snapshot_s = time.monotonic()
                self.limits.update(self._snapshot.limits)
                self._compare_tokenizers()
                for pool, dispatcher in self._pools.items():
                    reports = [held for held in self._snapshot.replicas if held[1].pool == pool]
                    dispatcher.update(reports, self._snapshot.decisions.get(pool), self._snapshot.starts.get(pool))
            except Exception as error:  # not deployed yet, restarting, or its node is gone
                logger.debug("no snapshot of %s: %s", self.app, type(error).__name__)
            is_waited_for = not self.limits or any(one.traffic.router_requests_held for one in self._pools.values())
            # The monitor hears at once of the first request that is held: a replica is started for it.
            with suppress(TimeoutError):
                async with asyncio.timeout(WAITING_POLL_PERIOD_S if is_waited_for else POLL_PERIOD_S):
                    await self._held.wait()
                    await asyncio.sleep(HELD_POLL_DELAY_S)
            self._held.clear()

    def _compare_tokenizers(self) -> None:
        others = [pool for pool, one in self.limits.items() if one.tokenizer not in {None, self.tokenizer.digest}]
        problem = f"{self.app}: the router's versions name a model with another tokenizer" if others else None
        if problem and self.problem is None:
            logger.error(problem)
        self.problem = problem

    def expect(self, pool: PoolName) -> None:
        """See Dispatcher."""
        self._pools[pool].expect()

    def loads(self) -> dict[PoolName, PoolLoad]:
        return {pool: dispatcher.load() for pool, dispatcher in self._pools.items()}

    def generate(self, run: PromptRun, deadline_s: float | None) -> Items:
        """Run the sequences of one prompt on a replica of its pool: see Dispatcher."""
        return self._pools[run.pool].generate(run, deadline_s)
