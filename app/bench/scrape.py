"""What a server's /metrics says over time: replicas, sequences, cache blocks of each pool."""

from __future__ import annotations

import asyncio
import re
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp

from app.bench.client import Client

_PREFIX = "longspan:"
_SERIES = re.compile(r"longspan:(\w+)\{([^}]*)\} (\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_FIELDS = {
    "num_requests_running": "running",
    "num_requests_waiting": "waiting",
    "num_blocks": "blocks",
    "num_free_blocks": "free_blocks",
    "num_cached_blocks": "cached_blocks",
    "snapshot_age_seconds": "age_s",
}


@dataclass(frozen=True, slots=True)
class ReplicaSample:
    """A replica's gauges as one scrape saw them."""

    pool: str  # application/pool where there are several applications' pools
    running: float = 0.0
    waiting: float = 0.0
    blocks: float = 0.0
    free_blocks: float = 0.0
    cached_blocks: float = 0.0
    age_s: float = 0.0  # since the replica reported them


@dataclass(frozen=True, slots=True)
class Sample:
    at_s: float
    replicas: Mapping[str, ReplicaSample]  # by replica id

    def pools(self) -> dict[str, list[ReplicaSample]]:
        pools: dict[str, list[ReplicaSample]] = defaultdict(list)
        for replica in self.replicas.values():
            pools[replica.pool].append(replica)
        return dict(pools)

    def kv_usage(self, pool: str) -> float:
        """Share of the pool's blocks that live sequences hold, 0 to 1."""
        replicas = self.pools().get(pool, [])
        total = sum(replica.blocks for replica in replicas)
        return 1.0 - sum(replica.free_blocks for replica in replicas) / total if total else 0.0


def parse_metrics(text: str, at_s: float) -> Sample:
    """The gauges of every replica in Prometheus text; other series are passed over."""
    values: dict[str, dict[str, float]] = defaultdict(dict)
    pools: dict[str, str] = {}
    for line in text.splitlines():
        if not line.startswith(_PREFIX):
            continue
        match = _SERIES.match(line)
        if match is None or match[1] not in _FIELDS:
            continue
        labels = dict(_LABEL.findall(match[2]))
        replica = f"{labels.get('app')}/{labels.get('replica')}"
        values[replica][_FIELDS[match[1]]] = float(match[3])
        pools[replica] = f"{labels.get('app')}/{labels.get('pool')}"
    return Sample(at_s, {replica: ReplicaSample(pools[replica], **fields) for replica, fields in values.items()})


async def scrape(client: Client, start_s: float) -> Sample | None:
    """One sample, or None if the server does not answer with metrics."""
    try:
        status, text = await client.get("/metrics")
    except (aiohttp.ClientError, TimeoutError, ConnectionError):
        return None
    return parse_metrics(text, time.perf_counter() - start_s) if status == 200 else None


@asynccontextmanager
async def scraping(client: Client, start_s: float, period_s: float) -> AsyncIterator[list[Sample]]:
    """A list that grows by a sample each period; a failed scrape leaves a gap, never a zero."""
    samples: list[Sample] = []

    async def take() -> None:
        if sample := await scrape(client, start_s):
            samples.append(sample)

    async with repeating(take, period_s):
        yield samples


@asynccontextmanager
async def repeating(work: Callable[[], Awaitable[None]], period_s: float) -> AsyncIterator[None]:
    """Do `work` over and over meanwhile, with a pause after each time."""

    async def run() -> None:
        while True:
            await work()
            await asyncio.sleep(period_s)

    task = asyncio.create_task(run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
