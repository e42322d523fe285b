"""Named scenarios: each starts what it needs, measures one promise, and stops what it started."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.bench.client import Client, PromptMaker, RequestRecord
from app.bench.server import LocalServer
from app.bench.traffic import PlannedRequest
from app.errors import ConfigError

MEGABYTE = 2**20


@dataclass(frozen=True, slots=True)
class ScenarioOptions:
    config: Path
    url: str | None  # a server that runs already; the scenario starts its own if None
    runs: int | None  # None: the scenario's own
    report: Callable[[str], None]


Scenario = Callable[[ScenarioOptions], dict[str, Any]]


def cancel(options: ScenarioOptions) -> dict[str, Any]:
    """50 streams cancelled at once, five times over: seconds until every block is free again, without new traffic.

    The limit is 1 s each time. On --url the cluster must be the one this machine belongs to, because the replicas
    themselves are asked.
    """
    from app.bench.cancel import cancel_rounds  # ray

    runs = options.runs or 5
    if options.url is not None:
        rounds = asyncio.run(cancel_rounds(options.url, "auto", runs, options.report))
    else:
        with LocalServer(options.config) as server:
            rounds = asyncio.run(cancel_rounds(server.url, server.ray_address, runs, options.report))
    worst_s = max(seconds for round_ in rounds if (seconds := round_.freed_s) is not None)
    return {"passed": all(round_.is_free for round_ in rounds) and worst_s <= 1.0, "worst_s": worst_s, "rounds": rounds}


def cold_start(options: ScenarioOptions) -> dict[str, Any]:
    """`serve run` from nothing: seconds to the first streamed token, median of the runs. The limit is 40 s."""
    times = []
    for index in range(options.runs or 3):
        server = LocalServer(_own_server(options, "cold-start"))
        start_s = time.perf_counter()
        try:
            server.launch()
            asyncio.run(_wait_first_token(server))
            times.append(time.perf_counter() - start_s)
        finally:
            server.stop()
        options.report(f"run {index + 1}: first token after {times[-1]:.1f} s")
    median_s = statistics.median(times)
    return {"passed": median_s <= 40.0, "median_s": median_s, "runs_s": times}


def memory(options: ScenarioOptions) -> dict[str, Any]:
    """Unique memory (USS) of every process of the cluster, idle and after 16 streams. The limit is 4 GB."""
    runs = []
    for index in range(options.runs or 1):
        with LocalServer(_own_server(options, "memory")) as server:
            idle_bytes = server.unique_memory_bytes()
            asyncio.run(_stream_together(server.url, streams=16, output_tokens=64))
            used_bytes = server.unique_memory_bytes()
            processes = len(server.processes())
        options.report(
            f"run {index + 1}: {processes} processes, {idle_bytes / MEGABYTE:.0f} MiB idle,"
            f" {used_bytes / MEGABYTE:.0f} MiB after 16 streams"
        )
        runs.append({"processes": processes, "idle_bytes": idle_bytes, "used_bytes": used_bytes})
    worst_bytes = max(max(run["idle_bytes"], run["used_bytes"]) for run in runs)
    return {"passed": worst_bytes <= 4e9, "worst_bytes": worst_bytes, "runs": runs}


SCENARIOS: dict[str, Scenario] = {"cancel": cancel, "cold-start": cold_start, "memory": memory}


def summary_line(scenario: Scenario) -> str:
    """The first line of the scenario's docstring."""
    return (scenario.__doc__ or "").strip().splitlines()[0]


def _own_server(options: ScenarioOptions, name: str) -> Path:
    if options.url is not None:
        raise ConfigError(f"--url: {name} starts its own server", field="--url")
    return options.config


async def _wait_first_token(server: LocalServer) -> None:
    """Ask for a streamed token until one comes. Raises PreflightError if the server ends."""
    planned = PlannedRequest(0.0, 16, 1)
    body = PromptMaker(None, stream=True, seed=0).body(planned)
    async with Client(server.url, timeout_s=10.0) as client:
        while True:
            server.check_alive()
            record = RequestRecord(planned)
            await client.send(body, record, time.perf_counter())
            if record.event_times_s:
                return
            await asyncio.sleep(0.05)


async def _stream_together(url: str, *, streams: int, output_tokens: int) -> None:
    planned = PlannedRequest(0.0, 64, output_tokens)
    prompts = PromptMaker(None, stream=True, seed=0)
    start_s = time.perf_counter()
    async with Client(url, timeout_s=120.0) as client:
        sends = (client.send(prompts.body(planned), RequestRecord(planned), start_s) for _ in range(streams))
        await asyncio.gather(*sends)
