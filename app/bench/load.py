"""Open-loop load: every request leaves at its planned moment, however slowly the server answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from app.bench.client import Client, PromptMaker, RequestRecord
from app.bench.scrape import Sample, scraping
from app.bench.traffic import PlannedRequest

PROGRESS_PERIOD_S = 1.0
SCRAPE_PERIOD_S = 1.0


@dataclass(frozen=True, slots=True)
class Target:
    url: str
    model: str | None = None  # None: the server's default
    api_key: str | None = None
    stream: bool = True
    timeout_s: float = 600.0


@dataclass(frozen=True, slots=True)
class LoadRun:
    records: list[RequestRecord]
    samples: list[Sample]
    wall_s: float
    client_cpu_s: float  # CPU this process used meanwhile


@dataclass(frozen=True, slots=True)
class Progress:
    at_s: float
    planned: int
    sent: int
    ended: int
    failed: int
    events_per_s: float  # streamed events since the last report

    def __str__(self) -> str:
        return (
            f"{self.at_s:6.1f} s  sent {self.sent}/{self.planned}  in flight {self.sent - self.ended}"
            f"  done {self.ended - self.failed}  failed {self.failed}  {self.events_per_s:.0f} events/s"
        )


async def run_load(
    requests: Sequence[PlannedRequest],
    target: Target,
    *,
    seed: int = 0,
    on_progress: Callable[[Progress], None] | None = None,
) -> LoadRun:
    """Send `requests`, wait for every answer, and sample the server's metrics meanwhile.

    Cancelling it cancels what is in flight.
    """
    prompts = PromptMaker(target.model, stream=target.stream, seed=seed)
    records = [RequestRecord(request) for request in requests]
    async with Client(target.url, timeout_s=target.timeout_s, api_key=target.api_key) as client:
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        async with scraping(client, start_s, SCRAPE_PERIOD_S) as samples, _reporting(records, start_s, on_progress):
            async with asyncio.TaskGroup() as tasks:
                for record in records:
                    # Made before the wait: a long prompt's body must not delay its departure.
                    body = prompts.body(record.planned)
                    await asyncio.sleep(max(0.0, record.planned.at_s - (time.perf_counter() - start_s)))
                    tasks.create_task(client.send(body, record, start_s))
            wall_s, cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
    return LoadRun(records, samples, wall_s, cpu_s)


@asynccontextmanager
async def _reporting(
    records: Sequence[RequestRecord], start_s: float, on_progress: Callable[[Progress], None] | None
) -> AsyncIterator[None]:
    if on_progress is None:
        yield
        return
    report = on_progress

    async def run() -> None:
        last_events, last_s = 0, 0.0
        while True:
            await asyncio.sleep(PROGRESS_PERIOD_S)
            now = time.perf_counter() - start_s
            events = sum(len(record.event_times_s) for record in records)
            report(
                Progress(
                    at_s=now,
                    planned=len(records),
                    sent=sum(record.sent_s > 0 for record in records),
                    ended=sum(record.ended_s > 0 for record in records),
                    failed=sum(record.error is not None for record in records),
                    events_per_s=(events - last_events) / (now - last_s),
                )
            )
            last_events, last_s = events, now

    task = asyncio.create_task(run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
