"""What Serve and HTTP cost: streams through the whole path beside the engine alone, same limits, alternating.

Both give answers of the same lengths, so many at a time, the next one when one has ended. Answers of one length end
together: the engine alone computes all prompts at once and then decodes undisturbed, as no server can. With several
requests of each stream, give lengths that differ.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from app.bench.client import Client, PromptMaker, RequestRecord
from app.bench.compare import EngineGenerator
from app.bench.server import LocalServer, pools_config
from app.bench.traffic import Lengths, PlannedRequest
from app.config import PoolsConfig
from app.engine.loading import load_engine
from app.errors import UnavailableError

PROMPT_TOKENS = 64
WARM_UP_TOKENS = 8
SETTLE_S = 4.0  # in which the server's idle engines capture what graphs they lack


@dataclass(frozen=True, slots=True)
class StreamsRun:
    """Streams that start together. Times are seconds since then, of the earliest and the latest stream."""

    tokens_per_s: float
    first_token_s: tuple[float, float]  # of each stream's first answer
    ended_s: tuple[float, float]  # of its last one
    client_cpu_share: float  # of one core: this process is the client

    def __str__(self) -> str:
        (first_s, last_first_s), (end_s, last_end_s) = self.first_token_s, self.ended_s
        return (
            f"{self.tokens_per_s:.1f}, first tokens after {first_s:.3f} to {last_first_s:.3f} s, ends after {end_s:.3f}"
            f" to {last_end_s:.3f} s, client {self.client_cpu_share:.0%} of a core"
        )


@dataclass(frozen=True, slots=True)
class HttpCost:
    """Output tokens per second in each round; `ratio` is HTTP's median over the engine's."""

    streams: int
    requests_per_stream: int
    output_tokens: Lengths
    threads: int | None
    engine_tokens_per_s: list[float]
    http_tokens_per_s: list[float]
    ratio: float
    http_runs: list[StreamsRun]

    def __str__(self) -> str:
        return (
            f"{self.streams} streams x {self.requests_per_stream} answers: engine alone"
            f" {statistics.median(self.engine_tokens_per_s):.1f} tokens/s, through HTTP"
            f" {statistics.median(self.http_tokens_per_s):.1f}, ratio {self.ratio:.3f} (costs {1 - self.ratio:.1%})"
        )


def http_cost(
    config: Path,
    *,
    streams: int,
    requests_per_stream: int,
    output_tokens: Lengths,
    runs: int,
    report: Callable[[str], None],
) -> HttpCost:
    """Starts a server of `config`, and an engine with its short pool's limits in this process.

    requests_per_stream: on average; with one, the rate includes how all of them start at once
    Raises LongspanError if the server does not start, UnavailableError if a stream fails.
    """
    pools = pools_config(config)
    rng = random.Random(0)
    engine_rates: list[float] = []
    http_runs: list[StreamsRun] = []
    with engine_beside_server(config, pools) as (engine, server):

        def run_engine(counts: Sequence[int]) -> float:
            # New random ids each time: neither side finds a prefix cached.
            prompts = [[rng.randrange(256, 8000) for _ in range(PROMPT_TOKENS)] for _ in counts]
            start_s = time.perf_counter()
            engine.generate(prompts, counts, ignore_eos=True, concurrency=streams)  # as the clients ask for
            return sum(counts) / (time.perf_counter() - start_s)

        def run_http(counts: Sequence[int]) -> StreamsRun:
            return asyncio.run(run_streams(server.url, streams, counts, seed=rng.randrange(2**32)))

        warm_up = [WARM_UP_TOKENS] * streams
        run_engine(warm_up)
        run_http(warm_up)
        time.sleep(SETTLE_S)
        for index in range(runs):
            counts = [output_tokens.draw(rng) for _ in range(streams * requests_per_stream)]
            if index % 2 == 0:
                engine_rates.append(run_engine(counts))
            http_runs.append(run_http(counts))
            if index % 2 == 1:
                engine_rates.append(run_engine(counts))
            report(f"round {index + 1}: engine {engine_rates[-1]:.1f} tokens/s, HTTP {http_runs[-1]}")
    http_rates = [run.tokens_per_s for run in http_runs]
    ratio = statistics.median(http_rates) / statistics.median(engine_rates)
    return HttpCost(
        streams=streams,
        requests_per_stream=requests_per_stream,
        output_tokens=output_tokens,
        threads=pools.short.engine.num_threads,
        engine_tokens_per_s=engine_rates,
        http_tokens_per_s=http_rates,
        ratio=ratio,
        http_runs=http_runs,
    )


@contextmanager
def engine_beside_server(config: Path, pools: PoolsConfig) -> Iterator[tuple[EngineGenerator, LocalServer]]:
    """Both load at the same time. Where there are several GPUs the engine takes the last: Ray begins with the first."""
    server = LocalServer(config)
    try:
        server.launch()
        if pools.short.engine.device != "cpu" and torch.cuda.device_count() > 1:
            torch.cuda.set_device(torch.cuda.device_count() - 1)
        loaded = load_engine(pools.model, pools.short.engine)
        loaded.warm_up(is_complete=True)  # the server's engines have the time for it between their requests
        server.wait_ready()
        yield EngineGenerator(loaded), server
    finally:
        server.stop()


async def run_streams(url: str, streams: int, output_tokens: Sequence[int], *, seed: int) -> StreamsRun:
    """Answers of so many tokens, `streams` at a time: whose has ended sends the next. Raises UnavailableError if one
    fails."""
    prompts = PromptMaker(None, stream=True, seed=seed)
    records = [RequestRecord(PlannedRequest(0.0, PROMPT_TOKENS, count)) for count in output_tokens]
    waiting = iter([(record, prompts.body(record.planned)) for record in records])
    async with Client(url, timeout_s=300.0) as client:
        start_s, start_cpu_s = time.perf_counter(), time.process_time()

        async def stream() -> float:
            ended_s = 0.0
            for record, body in waiting:  # shared by all
                await client.send(body, record, start_s)
                ended_s = record.ended_s
            return ended_s

        ends = await asyncio.gather(*(stream() for _ in range(streams)))
        elapsed_s, cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
    for record in records:
        if record.error is not None or record.output_tokens != record.planned.output_tokens:
            ended = record.error or f"{record.output_tokens} of {record.planned.output_tokens} tokens"
            raise UnavailableError(f"a stream ended with {ended}")
    firsts = [record.event_times_s[0] for record in records[:streams]]
    return StreamsRun(
        tokens_per_s=sum(output_tokens) / elapsed_s,
        first_token_s=(min(firsts), max(firsts)),
        ended_s=(min(ends), max(ends)),
        client_cpu_share=cpu_s / elapsed_s,
    )
