"""Short requests beside long ones: in pools of their own, and in one replica."""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import psutil  # type: ignore[import-untyped]

from app.bench.client import Client, PromptMaker, RequestRecord
from app.bench.load import Target, run_load
from app.bench.server import LocalServer
from app.bench.summary import percentile
from app.bench.traffic import PlannedRequest, Uniform, plan, poisson
from app.errors import UnavailableError

SHORTS = 100  # in a round
RATE = 3.5  # short requests per second
SHORT_TOKENS, SHORT_OUTPUT_TOKENS = Uniform(48, 96), Uniform(8, 16)
LONG = PlannedRequest(0.0, 6000, 16)
LONGS_AT_ONCE = 2
SETTLE_S = 1.0
WORKER_NICE = 15  # of Ray's workers


@dataclass(frozen=True, slots=True)
class ShortRun:
    """Time to first token of the shorts, in seconds, and how long the longs beside them took to theirs."""

    ttfts_s: list[float]
    long_ttfts_s: list[float]
    failed: int

    @property
    def median_s(self) -> float:
        return statistics.median(self.ttfts_s)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Shorts beside longs over the same shorts beside a spinner, all rounds together."""

    median_ratio: float
    p95_ratio: float
    rounds: list[tuple[ShortRun, ShortRun]]  # (spinner, longs)

    @classmethod
    def of(cls, rounds: list[tuple[ShortRun, ShortRun]]) -> Comparison:
        alone, beside = (sorted(ttft for run in side for ttft in run.ttfts_s) for side in zip(*rounds, strict=True))
        return cls(
            median_ratio=percentile(beside, 50) / percentile(alone, 50),
            p95_ratio=percentile(beside, 95) / percentile(alone, 95),
            rounds=rounds,
        )

    @property
    def num_failed(self) -> int:
        return sum(run.failed for pair in self.rounds for run in pair)

    @property
    def slowest_long_s(self) -> float:
        return max(ttft for _, run in self.rounds for ttft in run.long_ttfts_s)


def pin_to_last_core(processes: Sequence[psutil.Process]) -> int:
    """Keep every thread of these processes on one core; returns its number."""
    core = max(os.sched_getaffinity(0))
    for process in processes:
        for thread in process.threads():
            os.sched_setaffinity(thread.id, {core})
    return core


@contextmanager
def spinning(core: int) -> Iterator[None]:
    """A process that takes all of a core's time, as politely as a replica would."""
    code = f"import os; os.nice({WORKER_NICE}); os.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        yield
    finally:
        process.kill()
        process.wait()


async def measure_shorts(url: str, seed: int, *, beside_longs: bool) -> ShortRun:
    """Poisson shorts, the same for one `seed`; longs, if any, follow each other without a pause."""
    rng = random.Random(seed)
    planned = plan(poisson(RATE, rng), SHORT_TOKENS, SHORT_OUTPUT_TOKENS, rng, duration_s=None, num_requests=SHORTS)
    longs: list[RequestRecord] = []
    async with Client(url, timeout_s=600.0) as client:
        tasks = [
            asyncio.create_task(_send_longs(client, longs, 100 + 10 * seed + index))
            for index in range(LONGS_AT_ONCE if beside_longs else 0)
        ]
        try:
            await asyncio.sleep(SETTLE_S)
            shorts = (await run_load(planned, Target(url), seed=seed)).records
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    failed = [record for record in (*shorts, *longs) if record.error not in (None, "cancelled")]
    ttfts = [record.ttft_s for record in shorts if record.error is None and record.ttft_s is not None]
    return ShortRun(ttfts, [record.event_times_s[0] for record in longs if record.event_times_s], len(failed))


async def _send_longs(client: Client, records: list[RequestRecord], seed: int) -> None:
    prompts = PromptMaker(None, stream=True, seed=seed)
    while True:
        records.append(RequestRecord(LONG))
        await client.send(prompts.body(LONG), records[-1], time.perf_counter())


async def long_alone_s(url: str) -> float:
    """Seconds to the first token of a long prompt that has the replica to itself. Raises UnavailableError."""
    record = RequestRecord(LONG)
    async with Client(url, timeout_s=600.0) as client:
        await client.send(PromptMaker(None, stream=True, seed=1).body(LONG), record, time.perf_counter())
    if not record.event_times_s:
        raise UnavailableError(f"a long prompt failed: {record.error}")
    return record.event_times_s[0]


def compare(server: LocalServer, pinned_pool: str, rounds: int) -> Comparison:
    """Alternate between a spinner on the core of `pinned_pool`'s replica and long prompts."""
    core = pin_to_last_core(server.replica_processes(pinned_pool))
    pairs = []
    for index in range(rounds):

        def run(*, beside_longs: bool, seed: int = index) -> ShortRun:
            return asyncio.run(measure_shorts(server.url, seed, beside_longs=beside_longs))

        with spinning(core):
            spinner = run(beside_longs=False)
        pairs.append((spinner, run(beside_longs=True)))
    return Comparison.of(pairs)
