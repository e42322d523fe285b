"""Offline rates of one engine with random weights of a named shape: time per output token and prefill throughput."""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from app.bench.engine_start import start_times
from app.config import EngineConfig
from app.engine.engine import Engine
from app.engine.loading import build_engine, is_batch_invariant
from app.errors import ConfigError
from app.model.config import ModelConfig
from app.model.transformer import Transformer
from app.model.weights import ModelWeights, random_weights
from app.protocol import GenerateRequest, SamplingParams
from kernels import invariance

# Architecture figures of public checkpoints; weights are drawn from N(0, 0.02).
SHAPES: dict[str, dict[str, object]] = {
    "deepseek-v2-lite": {
        "model_type": "deepseek_v2", "vocab_size": 102400, "hidden_size": 2048, "intermediate_size": 10944,
        "moe_intermediate_size": 1408, "num_hidden_layers": 27, "num_attention_heads": 16, "n_shared_experts": 2,
        "n_routed_experts": 64, "num_experts_per_tok": 6, "first_k_dense_replace": 1, "moe_layer_freq": 1,
        "routed_scaling_factor": 1.0, "topk_method": "greedy", "scoring_func": "softmax", "norm_topk_prob": False,
        "kv_lora_rank": 512, "q_lora_rank": None, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
        "max_position_embeddings": 163840, "rms_norm_eps": 1e-6, "eos_token_id": 100001, "bos_token_id": 100000,
        "rope_theta": 10000,
        "rope_scaling": {
            "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
            "mscale": 0.707, "mscale_all_dim": 0.707,
        },
    },
}  # fmt: skip


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


def shape_config(name: str) -> ModelConfig:
    """The architecture of SHAPES[name], or of the checkpoint in the folder `name`. Raises KeyError on neither."""
    if name not in SHAPES and Path(name).is_dir():
        return ModelConfig.from_folder(name)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(SHAPES[name]))
        return ModelConfig.from_folder(folder)


def random_engine(model_config: ModelConfig, config: EngineConfig) -> Engine:
    """An engine around random weights: on CUDA in bfloat16 where there is a device, else on CPU in float32."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return engine_around(random_weights(model_config, seed=0, dtype=dtype, device=device), model_config, config)


def engine_around(weights: ModelWeights, model_config: ModelConfig, config: EngineConfig) -> Engine:
    device, dtype = weights.embedding.device, weights.embedding.dtype
    absorbed = is_batch_invariant(config, device, dtype)
    invariance.require(absorbed and device.type == "cuda")
    model = Transformer(model_config, weights, device=device, dtype=dtype, absorbed_prefill=absorbed)
    return build_engine(model, model_config, config, device=device, dtype=dtype, version="random")


def measure(engine: Engine, batch: int, context: int, *, decode_steps: int = 32) -> Rate:
    """Fill `batch` distinct prompts of `context` tokens, then decode them together."""
    rng = random.Random(batch * 1_000_003 + context)
    # The first prompts decode while the last ones are computed: all of them must still run when the clock starts.
    prefill_steps = batch * -(-context // engine.limits.max_chunk_tokens)
    sampling = SamplingParams(max_tokens=prefill_steps + decode_steps + 8, temperature=0.0, ignore_eos=True)
    for index in range(batch):
        prompt = tuple(rng.randrange(1000, engine.limits.vocab_size) for _ in range(context))
        engine.add(GenerateRequest(f"rate-{index}", prompt, sampling))
    start = time.perf_counter()
    seen: set[str] = set()
    while len(seen) < batch:
        seen |= {chunk.request_id for chunk in engine.step()}
    prefill_s = time.perf_counter() - start
    steps = [_timed_step(engine) for _ in range(decode_steps + 4)][4:]
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
    sampling = SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True)
    for index in range(num_requests):
        prompt = tuple(rng.randrange(1000, engine.limits.vocab_size) for _ in range(input_tokens))
        engine.add(GenerateRequest(f"offline-{index}", prompt, sampling))
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
    vocab = engine.limits.vocab_size
    shorts: list[list[float]] = []
    longs: list[list[float]] = []

    async def one(name: str, num_input: int, num_output: int, times: list[list[float]]) -> None:
        prompt = tuple(rng.randrange(1000, vocab) for _ in range(num_input))
        sampling = SamplingParams(max_tokens=num_output, temperature=0.0, ignore_eos=True)
        stamps = [time.perf_counter()]
        async for _ in engine.generate(GenerateRequest(name, prompt, sampling)):
            stamps.append(time.perf_counter())
        times.append(stamps)

    arrivals = [("short", index / short_rate) for index in range(int(seconds * short_rate))]
    if long_tokens:
        arrivals += [("long", 0.5 + index * long_every_s) for index in range(int(seconds / long_every_s))]
    start, tasks = time.perf_counter(), []
    for index, (kind, at_s) in enumerate(sorted(arrivals, key=lambda arrival: arrival[1])):
        await asyncio.sleep(max(0.0, start + at_s - time.perf_counter()))
        work = (
            one(f"{kind}-{index}", *short_tokens, shorts)
            if kind == "short"
            else one(f"{kind}-{index}", long_tokens, 16, longs)
        )
        tasks.append(asyncio.ensure_future(work))
    await asyncio.gather(*tasks)
    return MixedLoad(
        short_ttft_ms=_summary([stamps[1] - stamps[0] for stamps in shorts]),
        short_tpot_ms=_summary([(stamps[-1] - stamps[1]) / (len(stamps) - 2) for stamps in shorts]),
        largest_gap_ms=_summary([max(b - a for a, b in itertools.pairwise(stamps[1:])) for stamps in shorts]),
        long_ttft_ms=_summary([stamps[1] - stamps[0] for stamps in longs]),
    )


async def idle_ttft(engine: Engine, num_tokens: int, num_requests: int) -> dict[str, float]:
    """Milliseconds to the first token of distinct prompts, each alone on a started engine."""
    rng = random.Random(2)
    times = []
    for index in range(num_requests):
        prompt = tuple(rng.randrange(1000, engine.limits.vocab_size) for _ in range(num_tokens))
        sampling = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
        start = time.perf_counter()
        stamps = [
            time.perf_counter() - start async for _ in engine.generate(GenerateRequest(f"i-{index}", prompt, sampling))
        ]
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
ENGINE_CONFIG = EngineConfig(max_num_seqs=512, max_batched_tokens=16384, max_chunk_tokens=8192, max_waiting_seqs=1024)
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
