"""Streams cancelled all at once, and how soon the replicas have every cache block back."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

import ray
from ray import serve

from app.bench.client import Client, PromptMaker, RequestRecord
from app.bench.cluster import join_cluster
from app.bench.traffic import PlannedRequest
from app.errors import UnavailableError
from app.protocol import EngineStats

STREAMS = 50
PROMPT_TOKENS = 96
OUTPUT_TOKENS = 1024  # far more than are made before the cancellation
START_TIMEOUT_S = 120.0
FREE_TIMEOUT_S = 30.0
_POLL_S = 0.01
_POOLS = ("short", "long")


@dataclass(frozen=True, slots=True)
class CancelRound:
    baseline_blocks: int  # free before the round
    held_blocks: int  # held at the moment of the cancellation
    freed_s: float | None  # from the cancellation to the baseline; None if it was not reached in time


@dataclass(frozen=True, slots=True)
class PoolState:
    free_blocks: int
    sequences: int  # running and waiting


class PoolStats:
    """The engines' own figures, asked of the replicas; /metrics is up to two seconds old."""

    def __init__(self, address: str, application: str = "pools") -> None:
        """Raises UnavailableError if the cluster cannot be joined."""
        join_cluster(address)
        self._handles = [serve.get_deployment_handle(pool, app_name=application) for pool in _POOLS]

    async def state(self) -> PoolState:
        """Sums over both pools; each pool is taken to have one replica."""
        stats: list[EngineStats] = await asyncio.gather(*(handle.stats.remote() for handle in self._handles))
        return PoolState(
            free_blocks=sum(each.num_free_blocks for each in stats),
            sequences=sum(each.num_requests_running + each.num_requests_waiting for each in stats),
        )

    def close(self) -> None:
        ray.shutdown()


async def cancel_rounds(url: str, address: str, runs: int, report: Callable[[str], None]) -> list[CancelRound]:
    """`runs` rounds against the server at `url` whose cluster is at `address`.

    Raises UnavailableError if the streams do not start.
    """
    stats = PoolStats(address)
    try:
        rounds = []
        async with Client(url, timeout_s=600.0) as client:
            for index in range(runs):
                rounds.append(await _round(client, stats, seed=index))
                freed_s = rounds[-1].freed_s
                outcome = "not all freed" if freed_s is None else f"freed after {1000 * freed_s:.0f} ms"
                report(f"round {index + 1}: {rounds[-1].held_blocks} blocks held by {STREAMS} streams, {outcome}")
        return rounds
    finally:
        stats.close()


async def _round(client: Client, stats: PoolStats, seed: int) -> CancelRound:
    baseline = (await stats.state()).free_blocks
    planned = PlannedRequest(0.0, PROMPT_TOKENS, OUTPUT_TOKENS)
    prompts = PromptMaker(None, stream=True, seed=seed)
    records = [RequestRecord(planned) for _ in range(STREAMS)]
    start_s = time.perf_counter()
    tasks = [asyncio.create_task(client.send(prompts.body(planned), record, start_s)) for record in records]
    try:
        await _until_streaming(stats, records, baseline)
        held = baseline - (await stats.state()).free_blocks
    finally:
        cancelled_s = time.perf_counter()
        for task in tasks:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)
    while (state := await stats.state()).sequences or state.free_blocks < baseline:
        if time.perf_counter() - cancelled_s > FREE_TIMEOUT_S:
            return CancelRound(baseline, held, None)
        await asyncio.sleep(_POLL_S)
    return CancelRound(baseline, held, time.perf_counter() - cancelled_s)


async def _until_streaming(stats: PoolStats, records: list[RequestRecord], baseline: int) -> None:
    """Wait until every stream has a token, or until as many as fit have and none starts for a second."""
    deadline_s = time.perf_counter() + START_TIMEOUT_S
    streaming = -1
    while True:
        if failed := next((record.error for record in records if record.error), None):
            raise UnavailableError(f"a stream failed before it was cancelled: {failed}")
        if time.perf_counter() > deadline_s:
            raise UnavailableError(f"only {streaming} of {STREAMS} streams started in {START_TIMEOUT_S:g} s")
        now = sum(bool(record.event_times_s) for record in records)
        if now == len(records) or (now == streaming and now > 0 and (await stats.state()).free_blocks < baseline):
            return
        streaming = now
        await asyncio.sleep(1.0)
