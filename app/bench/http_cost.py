"""What Serve and HTTP cost: streams through the whole path beside the engine alone, same limits, alternating."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import yaml

from app.bench.client import Client, PromptMaker, RequestRecord
from app.bench.compare import EngineGenerator
from app.bench.server import LocalServer
from app.bench.traffic import PlannedRequest
from app.config import PoolsConfig, load_config
from app.engine.loading import load_engine
from app.errors import ConfigError, UnavailableError

PROMPT_TOKENS = 64
WARM_UP_TOKENS = 8
APPLICATION = "pools"


@dataclass(frozen=True, slots=True)
class HttpCost:
    """Output tokens per second in each round; `ratio` is HTTP's median over the engine's."""

    streams: int
    output_tokens: int
    threads: int | None
    engine_tokens_per_s: list[float]
    http_tokens_per_s: list[float]
    ratio: float

    def __str__(self) -> str:
        return (
            f"{self.streams} streams x {self.output_tokens} tokens: engine alone"
            f" {statistics.median(self.engine_tokens_per_s):.1f} tokens/s, through HTTP"
            f" {statistics.median(self.http_tokens_per_s):.1f}, ratio {self.ratio:.3f} (costs {1 - self.ratio:.1%})"
        )


def pools_config(path: Path) -> PoolsConfig:
    """The args of the file's application of pools. Raises ConfigError."""
    for application in yaml.safe_load(path.read_text(encoding="utf-8"))["applications"]:
        if application["name"] == APPLICATION:
            return load_config(PoolsConfig, application.get("args") or {}, where="args")
    raise ConfigError(f"{path}: has no application {APPLICATION!r}")


def http_cost(config: Path, *, streams: int, output_tokens: int, runs: int, report: Callable[[str], None]) -> HttpCost:
    """Starts a server of `config`, and an engine with its short pool's limits in this process.

    Raises LongspanError if the server does not start, UnavailableError if a stream fails.
    """
    pools = pools_config(config)
    engine_config = pools.short.engine
    loaded = load_engine(pools.model, engine_config)
    loaded.warm_up(is_complete=True)  # the server's engines have the time for it between their requests
    engine = EngineGenerator(loaded)
    rng = random.Random(0)
    rates: dict[str, list[float]] = {"engine": [], "http": []}
    with LocalServer(config) as server:

        def run_engine(num_tokens: int) -> float:
            # New random ids each time: neither side finds a prefix cached.
            prompts = [[rng.randrange(256, 8000) for _ in range(PROMPT_TOKENS)] for _ in range(streams)]
            start_s = time.perf_counter()
            engine.generate(prompts, num_tokens, ignore_eos=True)  # as the clients ask for
            return streams * num_tokens / (time.perf_counter() - start_s)

        def run_http(num_tokens: int) -> float:
            return asyncio.run(stream_rate(server.url, streams, num_tokens, seed=rng.randrange(2**32)))

        sides = [("engine", run_engine), ("http", run_http)]
        for _, run in sides:
            run(WARM_UP_TOKENS)
        for index in range(runs):
            for name, run in sides:
                rates[name].append(run(output_tokens))
            sides.reverse()
            report(f"round {index + 1}: engine {rates['engine'][-1]:.1f} tokens/s, HTTP {rates['http'][-1]:.1f}")
    ratio = statistics.median(rates["http"]) / statistics.median(rates["engine"])
    return HttpCost(streams, output_tokens, engine_config.num_threads, rates["engine"], rates["http"], ratio)


async def stream_rate(url: str, streams: int, output_tokens: int, *, seed: int) -> float:
    """Output tokens per second of `streams` streams that start together. Raises UnavailableError if one fails."""
    prompts = PromptMaker(None, stream=True, seed=seed)
    planned = PlannedRequest(0.0, PROMPT_TOKENS, output_tokens)
    records = [RequestRecord(planned) for _ in range(streams)]
    bodies = [prompts.body(planned) for _ in range(streams)]
    async with Client(url, timeout_s=300.0) as client:
        start_s = time.perf_counter()
        sends = [client.send(body, record, start_s) for body, record in zip(bodies, records, strict=True)]
        await asyncio.gather(*sends)
        elapsed_s = time.perf_counter() - start_s
    for record in records:
        if record.error is not None or record.output_tokens != output_tokens:
            ended = record.error or f"{record.output_tokens} of {output_tokens} tokens"
            raise UnavailableError(f"a stream ended with {ended}")
    return streams * output_tokens / elapsed_s
