"""Offline rates of one engine with random weights of a named shape: time per output token and prefill throughput."""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import random
import statistics
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from app.bench.engine_start import start_times
from app.bench.random_engine import SHAPES, random_engine, random_request, shape_config
from app.config import EngineConfig
from app.engine.engine import Engine
from app.errors import ConfigError

LEAST_PREFILL_STEP = 1024  # tokens that any step of a prefill computes, however slow the device


@dataclass(frozen=True, slots=True)
class Rate:
    """One point of the grid. Times are host wall clock of whole engine steps, scheduling and sampling included, with
    every graph captured beforehand, as an engine does while it has nothing to do."""

    batch: int
    context: int
    prefill_tokens_per_s: float
    tpot_ms: float  # median over the decode steps
    tpot_p90_ms: float


@dataclass(frozen=True, slots=True)
class MixedLoad:
    """Short requests at a fixed rate, alone or beside one long prompt every few seconds."""

    short_ttft_ms: dict[str, float]
    short_tpot_ms: dict[str, float]
    largest_gap_ms: dict[str, float]
    long_ttft_ms: dict[str, float]


def measure(engine: Engine, batch: int, context: int, *, decode_steps: int = 32) -> Rate:
    """Fill `batch` distinct prompts of `context` tokens, then decode them together."""
    rng = random.Random(batch * 1_000_003 + context)
    # The first prompts decode while the last ones are computed, and all of them must run to the end.
    prefill_steps = batch * -(-context // LEAST_PREFILL_STEP)
    for index in range(batch):
        engine.add(random_request(engine, rng, f"rate-{index}", context, prefill_steps + decode_steps + 8))
    start = time.perf_counter()
    seen: set[str] = set()
    while len(seen) < batch:
        seen |= {chunk.request_id for chunk in engine.step()}
    prefill_s = time.perf_counter() - start
    steps = [_timed_step(engine) for _ in range(decode_steps + 4)][4:]
    if (num_running := engine.stats().num_requests_running) != batch:
        raise RuntimeError(f"{batch} x {context}: {num_running} sequences left at the end")
    for index in range(batch):
        engine.abort(f"rate-{index}")
    engine.reset()
    return Rate(
        batch, context, batch * context / prefill_s, 1e3 * statistics.median(steps), 1e3 * _percentile(steps, 90)
    )


def _timed_step(engine: Engine) -> float:
    start = time.perf_counter()
    engine.step()
    return time.perf_counter() - start


def offline_throughput(engine: Engine, num_requests: int, input_tokens: int, output_tokens: int) -> float:
    """Output tokens per second of a queue of distinct requests, all there from the start."""
    rng = random.Random(num_requests)
    for index in range(num_requests):
        engine.add(random_request(engine, rng, f"offline-{index}", input_tokens, output_tokens))
    start = time.perf_counter()
    while engine.has_work:
        engine.step()
    engine.reset()
    return num_requests * output_tokens / (time.perf_counter() - start)


async def mixed_load(
    engine: Engine,
    *,
    seconds: float,
    short_rate: float,
    short_tokens: tuple[int, int],
    long_tokens: int,
    long_every_s: float,
) -> MixedLoad:
    """Open loop on a started engine; long_tokens 0 sends the short requests alone."""
    rng = random.Random(1)
    shorts: list[list[float]] = []
    longs: list[list[float]] = []

    async def one(name: str, num_input: int, num_output: int, times: list[list[float]]) -> None:
        """Appends when the request left and when its chunks came."""
        request = random_request(engine, rng, name, num_input, num_output)
        stamps = [time.perf_counter()]
        async for _ in engine.generate(request):
            stamps.append(time.perf_counter())
        times.append(stamps)

    arrivals = [("short", index / short_rate) for index in range(int(seconds * short_rate))]
    if long_tokens:
        arrivals += [("long", 0.5 + index * long_every_s) for index in range(int(seconds / long_every_s))]
    start, tasks = time.perf_counter(), []
    for index, (kind, at_s) in enumerate(sorted(arrivals, key=lambda arrival: arrival[1])):
        await asyncio.sleep(max(0.0, start + at_s - time.perf_counter()))
        lengths, times = (short_tokens, shorts) if kind == "short" else ((long_tokens, 16), longs)
        tasks.append(asyncio.create_task(one(f"{kind}-{index}", *lengths, times)))
    await asyncio.gather(*tasks)
    return MixedLoad(
        short_ttft_ms=_summary([stamps[1] - stamps[0] for stamps in shorts]),
        short_tpot_ms=_summary([(stamps[-1] - stamps[1]) / (short_tokens[1] - 1) for stamps in shorts]),
        largest_gap_ms=_summary([max(b - a for a, b in itertools.pairwise(stamps[1:])) for stamps in shorts]),
        long_ttft_ms=_summary([stamps[1] - stamps[0] for stamps in longs]),
    )


async def idle_ttft(engine: Engine, num_tokens: int, num_requests: int) -> dict[str, float]:
    """Milliseconds to the first token of distinct prompts, each alone on a started engine."""
    rng = random.Random(2)
    times = []
    for index in range(num_requests):
        request = random_request(engine, rng, f"i-{index}", num_tokens, 2)
        start = time.perf_counter()
        stamps = [time.perf_counter() - start async for _ in engine.generate(request)]
        times.append(stamps[0])
        await asyncio.sleep(0.02)
    return _summary(times)


def _summary(seconds: Seq[float]) -> dict[str, float]:
    if not seconds:
        return {}
    return {f"p{q}": round(1e3 * _percentile(seconds, q), 2) for q in (50, 90, 99)}


def _percentile(values: Seq[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * q / 100))]


PARTS = ("start", "rates", "offline", "mixed")
GRID = ((1, 1024), (1, 32768), (1, 131072), (32, 1024), (128, 1024), (32, 8192), (128, 8192), (16, 32768))


def engine_rates(
    shape: str, config: EngineConfig, parts: Seq[str], grid: Seq[tuple[int, int]], report: Callable[[str], None]
) -> dict[str, object]:
    """The parts asked for, measured one after the other on one engine; JSON-ready.

    Raises ConfigError on an unknown shape or part.
    """
    if shape not in SHAPES and not Path(shape).is_dir():
        raise ConfigError(f"--shape: {shape} is not one of {', '.join(SHAPES)}", field="--shape")
    if unknown := sorted(set(parts) - set(PARTS)):
        raise ConfigError(f"--engine: {unknown[0]} is not one of {', '.join(PARTS)}", field="--engine")
    result: dict[str, object] = {"shape": shape, "device": _device_name(), "torch": torch.__version__}
    if "start" in parts:  # before this process takes the device's memory
        result["start"] = start_times(shape, report)
        if len(parts) == 1:
            return result
    start = time.perf_counter()
    engine = random_engine(shape_config(shape), config)
    engine.warm_up(is_complete=True)
    elapsed_s = time.perf_counter() - start
    report(f"{shape}: weights, cache and graphs in {elapsed_s:.1f} s, {engine.stats().num_blocks} blocks")
    if "rates" in parts:
        result["rates"] = [asdict(_warm_measure(engine, batch, context, report)) for batch, context in grid]
    if "offline" in parts:
        offline_throughput(engine, min(64, engine.limits.max_num_seqs), 1024, 8)
        result["offline_512x1024x256_tokens_per_s"] = rate = offline_throughput(engine, 512, 1024, 256)
        report(f"offline, 512 requests of 1024 in and 256 out: {rate:,.0f} output tok/s")
    if "mixed" in parts:
        result["mixed"] = _mixed(engine, report)
    return result


def _device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def _warm_measure(engine: Engine, batch: int, context: int, report: Callable[[str], None]) -> Rate:
    measure(engine, batch, min(context, 300), decode_steps=4)  # compiles the kernels of steps without a graph
    rate = measure(engine, batch, context)
    report(
        f"{batch:4d} x {context:6d}: TPOT {rate.tpot_ms:7.2f} ms (p90 {rate.tpot_p90_ms:.2f}), "
        f"prefill {rate.prefill_tokens_per_s:9,.0f} tok/s"
    )
    return rate


def _mixed(engine: Engine, report: Callable[[str], None]) -> dict[str, object]:
    load = functools.partial(mixed_load, engine, short_rate=8.0, short_tokens=(512, 64), long_every_s=4.0)
    runs: dict[str, object] = {}
    engine.start()
    try:
        asyncio.run(load(seconds=2.0, long_tokens=16384))
        engine.reset()
        runs["idle_ttft_512_ms"] = asyncio.run(idle_ttft(engine, 512, 40))
        report(f"one prompt of 512 tokens on an idle engine, ms: {json.dumps(runs['idle_ttft_512_ms'])}")
        for name, long_tokens in (("alone", 0), ("beside 64k prompts", 65536)):
            engine.reset()  # the runs' prompts are the same, and none may find its prefix cached
            runs[name] = asdict(asyncio.run(load(seconds=20.0, long_tokens=long_tokens)))
            report(f"shorts {name}: {json.dumps(runs[name])}")
    finally:
        engine.stop()
    return runs
