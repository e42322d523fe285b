"""A router's side of one version: its tokenizer, its pools' handles, and what its monitor last said."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Sequence

from ray import serve

from app.config import VersionConfig
from app.protocol import GenerateRequest, TokenChunk
from app.serving.metrics import ReplicaSeries
from app.serving.monitor import STALE_AFTER_S, VersionSnapshot
from app.serving.pool_client import PoolClient
from app.serving.routing import POOLS, PoolLimits, PoolName
from app.tokenizer import Tokenizer

logger = logging.getLogger("ray.serve")

POLL_PERIOD_S = 1.0
STARTING_POLL_PERIOD_S = 0.2  # until the first snapshot


class Version:
    """One application of pools. Raises CheckpointError if its tokenizer cannot be read."""

    def __init__(self, config: VersionConfig) -> None:
        self.app = config.app
        self.model = config.model.name
        self.tokenizer = Tokenizer(config.model.folder)
        self.limits: dict[PoolName, PoolLimits] = {}  # of every pool that ever reported
        self._snapshot = VersionSnapshot({}, ())
        self._snapshot_s = -STALE_AFTER_S
        self._pools = {pool: PoolClient(config.app, pool) for pool in POOLS}
        self._monitor = serve.get_deployment_handle("monitor", app_name=config.app)

    @property
    def ready_pools(self) -> set[PoolName]:
        """Pools with a replica, as the monitor last said: an unreachable monitor does not make them unready."""
        return {report.pool for _, report in self._snapshot.replicas}

    def series(self) -> list[ReplicaSeries]:
        """Every replica's snapshot for /metrics, stale ones left out."""
        since_s = time.monotonic() - self._snapshot_s
        return [
            ReplicaSeries((self.model, self.app, report.pool, report.replica_id), age_s + since_s, report.stats)
            for age_s, report in self._snapshot.replicas
            if age_s + since_s < STALE_AFTER_S
        ]

    async def poll_forever(self) -> None:
        """Keep the snapshot fresh. An unreachable monitor leaves the old one: no data is not zero."""
        while True:
            try:
                self._snapshot = await self._monitor.snapshot.remote()
                self._snapshot_s = time.monotonic()
                self.limits.update(self._snapshot.limits)
            except Exception as error:  # not deployed yet, restarting, or its node is gone
                logger.debug("no snapshot of %s: %s", self.app, type(error).__name__)
            await asyncio.sleep(POLL_PERIOD_S if self.limits else STARTING_POLL_PERIOD_S)

    def generate(self, pool: PoolName, requests: Sequence[GenerateRequest]) -> AsyncGenerator[list[TokenChunk], None]:
        """Run the sequences of one prompt on a replica of `pool`: see PoolClient."""
        return self._pools[pool].generate(requests)
