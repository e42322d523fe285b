"""Far more requests than a pool can serve: throughput must hold, refusals must be quick, the accepted must finish."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass

from app.bench.client import Client, PromptMaker, RequestRecord
from app.bench.load import Target, run_load
from app.bench.summary import percentile
from app.bench.traffic import PlannedRequest, Uniform, plan, poisson

PLANNED = PlannedRequest(0.0, 96, 32)
CLOSED_LOOP_STREAMS = 16  # the batch of the pool
PEAK_S = 15.0
OVERLOAD_S = 25.0
FILL_S = 5.0  # until the queue is full; not counted
OVERLOAD = 3.0  # times the peak
DRAIN_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class OverloadRun:
    peak_per_s: float  # requests, of a closed loop that keeps the batch full
    offered_per_s: float
    served_per_s: float  # once the queue is full
    throughput_ratio: float
    refused: int
    refusal_p50_s: float
    refusal_p99_s: float
    slow_refusals: list[tuple[float, float]]  # (sent, took), those above the median of the slowest twentieth
    retry_after_s: list[float]  # distinct values
    client_cpu_share: float  # of one core
    errors: dict[str, int]  # other than 429
    accepted_again_s: float | None  # after the last accepted one ended


async def overload_run(url: str, seed: int) -> OverloadRun:
    peak = await _closed_loop(url, seed)
    rng = random.Random(seed)
    lengths = (
        Uniform(PLANNED.prompt_tokens, PLANNED.prompt_tokens),
        Uniform(PLANNED.output_tokens, PLANNED.output_tokens),
    )
    planned = plan(poisson(OVERLOAD * peak, rng), *lengths, rng, duration_s=OVERLOAD_S, num_requests=None)
    run = await run_load(planned, Target(url), seed=seed)
    records = run.records
    again_s = await _accepted_again(url, seed)
    served = [record for record in records if record.error is None and FILL_S <= record.ended_s <= OVERLOAD_S]
    refused = [record for record in records if record.error == "http_429"]
    delays = sorted(record.ended_s - record.sent_s for record in refused)
    served_per_s = len(served) / (OVERLOAD_S - FILL_S)
    return OverloadRun(
        peak_per_s=peak,
        offered_per_s=len(planned) / OVERLOAD_S,
        served_per_s=served_per_s,
        throughput_ratio=served_per_s / peak,
        refused=len(refused),
        refusal_p50_s=percentile(delays, 50),
        refusal_p99_s=percentile(delays, 99),
        slow_refusals=[
            (record.sent_s, record.ended_s - record.sent_s)
            for record in refused
            if record.ended_s - record.sent_s > percentile(delays, 97.5)
        ],
        client_cpu_share=run.client_cpu_s / run.wall_s,
        retry_after_s=sorted({record.retry_after_s for record in refused if record.retry_after_s is not None}),
        errors=dict(Counter(record.error for record in records if record.error not in (None, "http_429"))),
        accepted_again_s=again_s,
    )


async def _closed_loop(url: str, seed: int) -> float:
    """Requests per second while the batch is kept full; the first and the last seconds do not count."""
    ends: list[float] = []
    prompts = PromptMaker(None, stream=True, seed=seed + 1)
    start_s = time.perf_counter()
    async with Client(url, timeout_s=60.0) as client:

        async def run() -> None:
            while time.perf_counter() - start_s < PEAK_S:
                record = RequestRecord(PLANNED)
                await client.send(prompts.body(PLANNED), record, start_s)
                if record.error is None:
                    ends.append(record.ended_s)

        await asyncio.gather(*(run() for _ in range(CLOSED_LOOP_STREAMS)))
    return sum(FILL_S <= end_s <= PEAK_S for end_s in ends) / (PEAK_S - FILL_S)


async def _accepted_again(url: str, seed: int) -> float | None:
    """Seconds until a request is accepted, from the moment the last one ended; None: not in time."""
    prompts = PromptMaker(None, stream=True, seed=seed + 2)
    start_s = time.perf_counter()
    async with Client(url, timeout_s=60.0) as client:
        while (asked_s := time.perf_counter() - start_s) < DRAIN_TIMEOUT_S:
            record = RequestRecord(PLANNED)
            await client.send(prompts.body(PLANNED), record, start_s)
            if record.error is None:
                return asked_s
            await asyncio.sleep(0.1)
    return None
