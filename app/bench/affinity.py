"""Prompts that share a prefix, sent at once to a pool of several replicas: do they spread, and do they hit?"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass

from app.bench.client import Client, PromptMaker, RequestRecord
from app.bench.traffic import PlannedRequest

PROMPTS = 64
SHARED_TOKENS = 512
PLANNED = PlannedRequest(0.0, SHARED_TOKENS + 32, 8)
REPORT_TIMEOUT_S = 60.0  # until /metrics shows what has happened: replicas report each second, routers ask likewise


@dataclass(frozen=True, slots=True)
class AffinityRun:
    requests_by_replica: dict[str, int]  # without those that spilled into the other pool
    max_over_mean: float
    cached_share: float  # of the shared tokens
    failed: int
    wall_s: float


async def burst(url: str, pool: str, num_replicas: int, seed: int, num_prompts: int = PROMPTS) -> AffinityRun:
    """All prompts at once; their prefix is new for every seed."""
    prompts = PromptMaker(None, stream=True, seed=seed)
    prefix = prompts.ids(SHARED_TOKENS)
    bodies = [prompts.body(PLANNED, prefix) for _ in range(num_prompts)]
    records = [RequestRecord(PLANNED) for _ in bodies]
    async with Client(url, timeout_s=600.0) as client:
        before = await requests_by_replica(client)
        start_s = time.perf_counter()
        await asyncio.gather(
            *(client.send(body, record, start_s) for body, record in zip(bodies, records, strict=True))
        )
        wall_s = time.perf_counter() - start_s
        counts: dict[str, int] = {}
        total = 0
        while total < num_prompts and time.perf_counter() - start_s - wall_s < REPORT_TIMEOUT_S:
            await asyncio.sleep(0.5)
            after = await requests_by_replica(client)
            total = sum(after.values()) - sum(before.values())
            counts = {
                replica: count - before[pool, replica] for (name, replica), count in after.items() if name == pool
            }
    return AffinityRun(
        requests_by_replica=counts,
        max_over_mean=max(counts.values()) * num_replicas / sum(counts.values()),
        cached_share=sum(min(record.cached_tokens, SHARED_TOKENS) for record in records)
        / (num_prompts * SHARED_TOKENS),
        failed=sum(record.error is not None for record in records),
        wall_s=wall_s,
    )


async def requests_by_replica(client: Client) -> Counter[tuple[str, str]]:
    """How many requests each (pool, replica) has finished, as /metrics says."""
    _, text = await client.get("/metrics")
    counts: Counter[tuple[str, str]] = Counter()
    for line in text.splitlines():
        if line.startswith("longspan:request_success_total{"):
            pool, replica = (line.partition(f'{label}="')[2].partition('"')[0] for label in ("pool", "replica"))
            counts[pool, replica] += int(float(line.rpartition(" ")[2]))
    return counts
