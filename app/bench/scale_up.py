"""Pools that follow their load: overload -> decision -> second replica -> back, and a pool to zero and back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import ray

from app.bench.client import Client, PromptMaker, RequestRecord
from app.bench.cluster import join_cluster
from app.bench.load import Target, run_load
from app.bench.scrape import repeating
from app.bench.traffic import PlannedRequest
from app.errors import UnavailableError
from app.serving import board

RATE = 30.0  # requests per second, three times what one replica on one core takes
OVERLOAD_S = 4.5  # so few that a replica's batch and queue hold them all, however slow the machine
SHORT_TOKENS, OUTPUT_TOKENS = 64, 64
LONG_TOKENS = 2500  # goes to the long pool
PERIOD_S = 0.05
TIMEOUT_S = 120.0
# Windows short enough for several runs; a pool may stop as soon as nothing arrives.
QUICK_SCALING = {
    "budget": 3,
    "short": {"max_replicas": 2, "max_waiting_seqs": 4, "ttft_target_s": 1.0, "up_window_s": 0.25, "down_window_s": 4},
    "long": {"min_replicas": 0, "max_replicas": 1, "down_window_s": 1},
}
_APP = "pools"


@dataclass(frozen=True, slots=True)
class PoolSample:
    """A pool's replicas as the scaling policy sees them."""

    at_s: float  # of perf_counter
    running: int
    granted: int


@dataclass(frozen=True, slots=True)
class ZeroRun:
    """A pool at zero that gets a request while the machine is idle."""

    decision_s: float  # request to decision
    start_s: float  # decision to RUNNING
    first_token_s: float | None  # request to first token; None: it failed


@dataclass(frozen=True, slots=True)
class OverloadRun:
    """A pool that gets more than its replica can do. Seconds from the first request on."""

    decision_s: float
    running_s: float  # to the second replica RUNNING
    back_to_min_s: float  # from the last answer on
    num_requests: int
    num_failed: int
    has_other_moved: bool  # the other pool meanwhile


class Watch:
    """Every pool's replicas over time."""

    def __init__(self) -> None:
        self.samples: dict[str, list[PoolSample]] = {"short": [], "long": []}

    def take(self) -> None:
        posted = board.read(_APP)
        now = time.perf_counter()
        for pool, samples in self.samples.items():
            if posted is not None and pool in posted[1]:
                samples.append(PoolSample(now, posted[1][pool].running, posted[1][pool].granted))

    async def until(self, pool: str, condition: Callable[[PoolSample], bool], since_s: float) -> float:
        """When the pool was first seen like that after `since_s`. Raises UnavailableError after a while."""
        deadline_s = time.perf_counter() + TIMEOUT_S
        while time.perf_counter() < deadline_s:
            for sample in self.samples[pool]:
                if sample.at_s >= since_s and condition(sample):
                    return sample.at_s
            await asyncio.sleep(PERIOD_S)
        raise UnavailableError(f"the {pool} pool did not get there in {TIMEOUT_S:g} s: {self.samples[pool][-1:]}")


@asynccontextmanager
async def watching(address: str) -> AsyncIterator[Watch]:
    """Raises UnavailableError if the cluster cannot be joined."""
    join_cluster(address)
    watch = Watch()
    try:
        async with repeating(lambda: asyncio.to_thread(watch.take), PERIOD_S):
            yield watch
    finally:
        ray.shutdown()


async def from_zero(url: str, watch: Watch) -> ZeroRun:
    """Wait until the long pool has stopped, then ask it for something."""
    await watch.until("long", lambda sample: sample.running + sample.granted == 0, time.perf_counter())
    await asyncio.sleep(1.0)
    planned = PlannedRequest(0.0, LONG_TOKENS, 4)
    record = RequestRecord(planned)
    asked_s = time.perf_counter()
    async with Client(url, timeout_s=TIMEOUT_S) as client:
        await client.send(PromptMaker(None, stream=True, seed=0).body(planned), record, asked_s)
    decided_s = await watch.until("long", lambda sample: sample.granted > 0, asked_s)
    running_s = await watch.until("long", lambda sample: sample.running > 0, asked_s)
    has_answer = record.error is None and bool(record.event_times_s)
    return ZeroRun(decided_s - asked_s, running_s - decided_s, record.event_times_s[0] if has_answer else None)


async def overload(url: str, watch: Watch) -> OverloadRun:
    """Flood the short pool, which has one replica, until a second one is asked for, and wait until it is gone again."""
    start_s = time.perf_counter()
    planned = [PlannedRequest(index / RATE, SHORT_TOKENS, OUTPUT_TOKENS) for index in range(int(RATE * OVERLOAD_S))]
    load = asyncio.create_task(run_load(planned, Target(url)))
    try:
        decided_s = await watch.until("short", lambda sample: sample.granted > 1, start_s)
        running_s = await watch.until("short", lambda sample: sample.running > 1, start_s)
        records = (await load).records
    except UnavailableError:
        if load.done():
            load.result()  # raises what ended the load, if that is why nothing happened
        load.cancel()
        raise
    end_s = time.perf_counter()
    back_s = await watch.until("short", lambda sample: sample.running == sample.granted == 1, end_s)
    others = {sample.granted for sample in watch.samples["long"] if start_s <= sample.at_s <= end_s}
    return OverloadRun(
        decision_s=decided_s - start_s,
        running_s=running_s - start_s,
        back_to_min_s=back_s - end_s,
        num_requests=len(records),
        num_failed=sum(record.error is not None for record in records),
        has_other_moved=len(others) > 1,
    )


async def scale_up_runs(
    url: str, address: str, runs: int, report: Callable[[str], None]
) -> list[tuple[ZeroRun, OverloadRun]]:
    """Against a server with the pools of serve_configs/autoscale.yaml. Raises UnavailableError if a pool is stuck."""
    found = []
    async with watching(address) as watch:
        for index in range(runs):
            zero, load = await from_zero(url, watch), await overload(url, watch)
            report(
                f"run {index + 1}: idle start {zero.start_s:.1f} s; overload: decision after {load.decision_s:.2f} s,"
                f" second replica after {load.running_s:.1f} s, back {load.back_to_min_s:.1f} s after the load,"
                f" {load.num_failed} of {load.num_requests} lost"
            )
            found.append((zero, load))
    return found
