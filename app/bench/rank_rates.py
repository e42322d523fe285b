"""Engines over several GPUs beside one: the same tokens, how fast, and the share of collectives. Random weights.

Each split of the model runs in processes of its own, one a GPU. The engine on one GPU is the reference: the others
are fed its tokens and must give its logits.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from app.bench.arguments import grid
from app.bench.engine_rates import GRID, measure
from app.bench.random_engine import STEP_TOKENS, shape_config
from app.config import EngineConfig
from app.engine.engine import Engine
from app.engine.loading import build_engine, build_runner
from app.engine.sampler import PendingSample
from app.engine.sequence import Sequence as EngineSequence
from app.model.config import ModelConfig
from app.model.parallel import RankPlace, Ranks
from app.model.sharding import Shard
from app.model.transformer import Transformer
from app.model.weights import random_weights
from app.protocol import GenerateRequest, SamplingParams
from kernels import invariance

PROMPT_TOKENS = (5, 64, 100, 129, 200, 257, 300, 511)
NUM_OUTPUTS = 64
PROFILED_STEPS = 8
MAX_SPLIT_S, MAX_PROBE_S = 240.0, 75.0  # of one split, and of one with few layers; then it has failed
CONFIG = EngineConfig(max_num_seqs=len(PROMPT_TOKENS), max_batched_tokens=1024, max_model_len=1024, cache_blocks=128)
INVARIANT_CONFIG = CONFIG.model_copy(update={"batch_invariant": True})
# 20,480 blocks: 128 sequences of 8k, and what the first decode while the last are computed; 42 GB at V2-Lite's shape.
RATES_CONFIG = EngineConfig(
    max_num_seqs=128, max_batched_tokens=STEP_TOKENS, max_chunk_tokens=STEP_TOKENS, cache_blocks=20_480
)
INVARIANT = "invariant-"  # of a kind's dtype


@dataclass(frozen=True, slots=True)
class Kind:
    """What is compared over all splits."""

    dtype: str
    num_layers: int | None  # None: all
    is_invariant: bool = False

    @classmethod
    def parse(cls, text: str) -> Kind:
        """[invariant-]DTYPE[:LAYERS]"""
        name, _, num_layers = text.partition(":")
        dtype = name.removeprefix(INVARIANT)
        return cls(dtype, int(num_layers) if num_layers else None, is_invariant=dtype != name)

    def __str__(self) -> str:
        layers = f" {self.num_layers} layers" if self.num_layers else ""
        return f"{INVARIANT if self.is_invariant else ''}{self.dtype}{layers}"

    @property
    def is_rated(self) -> bool:
        return self == Kind("bfloat16", None)

    @property
    def engine_config(self) -> EngineConfig:
        if self.is_rated:
            return RATES_CONFIG
        return INVARIANT_CONFIG if self.is_invariant else CONFIG


@dataclass(frozen=True, slots=True)
class Split:
    """What one set of processes does."""

    tensor: int
    expert: int
    kind: Kind
    grid: tuple[tuple[int, int], ...]  # of the rates; empty: parity alone
    reference: Path  # logits of the split 1 x 1, which writes them
    place: RankPlace | None = None

    @property
    def name(self) -> str:
        return f"T={self.tensor} E={self.expert} {self.kind}"


def rank_rates(
    shape: str, splits: Sequence[Split], report: Callable[[str], None], keep: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Run the splits one after the other; one that fails or hangs is noted, and the same one is not tried again."""
    results: dict[str, Any] = {}
    sizes, failed = {(split.tensor, split.expert) for split in splits}, set[tuple[int, int]]()
    for split in splits:
        if len(failed) + 1 >= len(sizes) > 1 or (split.tensor, split.expert) in failed:
            continue  # with nothing left to compare there is no use in going on
        start = time.perf_counter()
        results[split.name] = result = _run_split(shape, split)
        if "failed" in result:
            failed.add((split.tensor, split.expert))
        report(f"{split.name} ({time.perf_counter() - start:.0f} s): {json.dumps(result)}")
        keep(results)
    return results


def _run_split(shape: str, split: Split) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    with socket.socket() as probe, tempfile.NamedTemporaryFile(suffix=".json") as answer:
        probe.bind(("127.0.0.1", 0))
        method = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
        probe.close()
        places = [RankPlace(rank, split.tensor, split.expert, method) for rank in range(split.tensor * split.expert)]
        processes: list[BaseProcess] = [
            context.Process(target=_run_process, args=(shape, replace(split, place=place), answer.name))
            for place in places
        ]
        for process in processes:
            process.start()
        deadline_s = time.monotonic() + (MAX_PROBE_S if split.kind.num_layers else MAX_SPLIT_S)
        while any(process.is_alive() for process in processes) and time.monotonic() < deadline_s:
            if any(process.exitcode for process in processes):  # the others wait for it in vain
                break
            time.sleep(0.1)
        codes = [process.exitcode for process in processes]
        for process in processes:
            process.kill()
            process.join()
        text = Path(answer.name).read_text()
        result: dict[str, Any] = json.loads(text) if text else {}
        return result if codes == [0] * len(codes) else {**result, "failed": codes}


def _run_process(shape: str, split: Split, answer: str) -> None:
    if split.place is None:
        raise ValueError("split: no place")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", split.place.rank)
        torch.cuda.set_device(device)
    config = shape_config(shape)
    if split.kind.num_layers:
        config = replace(config, num_layers=split.kind.num_layers)
    start = time.perf_counter()
    model = _model(config, split, device)
    if split.place.rank:
        build_runner(model, split.kind.engine_config)[0].follow()
        os._exit(0)  # without closing what graphs use
    engine = build_engine(model, split.kind.engine_config, version="random")
    result: dict[str, Any] = {"start_s": time.perf_counter() - start}

    def keep() -> None:
        Path(answer).write_text(json.dumps(result))

    engine.warm_up(is_complete=True)
    result["warm_s"] = time.perf_counter() - start
    result["parity"] = _parity(engine, model.expert_counts, split)
    keep()
    if split.grid:
        result["rates"] = []
        for batch, context in split.grid:
            measure(engine, batch, min(context, 300), decode_steps=4)
            result["rates"].append(asdict(measure(engine, batch, context)))
            keep()
        if device.type == "cuda":
            result["collectives"] = {f"{batch}x1024": _collectives(engine, batch) for batch in (1, 32, 128)}
        keep()
    engine.stop()
    os._exit(0)


def _model(config: ModelConfig, split: Split, device: torch.device) -> Transformer:
    place, dtype, is_invariant = split.place, getattr(torch, split.kind.dtype), split.kind.is_invariant
    if place is None:
        raise ValueError("split: no place")
    shard = Shard.of(config, place.rank, place.tensor, place.expert)
    invariance.require(is_invariant and device.type == "cuda")
    ranks = Ranks.join(place, device)
    weights = random_weights(config, seed=0, dtype=dtype, device=device, shard=shard)
    return Transformer(config, weights, device=device, dtype=dtype, absorbed_prefill=is_invariant, ranks=ranks)


def _parity(engine: Engine, choices: torch.Tensor, split: Split) -> dict[str, Any]:
    """The logits of 8 prompts and 64 tokens each: kept by the split 1 x 1, compared with them by the others.

    choices: [layers, experts], how often each expert was chosen, as the engine counts
    """
    is_reference = split.tensor == split.expert == 1
    expected = None if is_reference else torch.load(split.reference)
    engine.reset()  # without what the warm-up chose
    logits = _forced_logits(engine, expected and expected["tokens"])
    chosen = choices.cpu().clone()
    engine.reset()
    tokens = {name: [int(row.argmax()) for row in rows] for name, rows in logits.items()}
    if expected is None:
        torch.save({"tokens": tokens, "logits": logits, "chosen": chosen}, split.reference)
        return {"tokens": sum(map(len, tokens.values()))}
    pairs = [(a, b) for name, rows in expected["logits"].items() for a, b in zip(rows, logits[name], strict=True)]
    same = [x == y for name in tokens for x, y in zip(tokens[name], expected["tokens"][name], strict=True)]
    divergence = [
        torch.nn.functional.kl_div(b.log_softmax(-1), a.log_softmax(-1), log_target=True, reduction="sum")
        for a, b in pairs
    ]
    return {
        "max_logit": max(float(a.abs().max()) for a, _ in pairs),
        "max_logit_diff": max(float((a - b).abs().max()) for a, b in pairs),
        "mean_logit_diff": sum(float((a - b).abs().mean()) for a, b in pairs) / len(pairs),
        "greedy_equal": sum(same), "greedy_of": len(same),
        # Two that went the other way in one layer do not show.
        "choices_moved_at_least": int((chosen - expected["chosen"]).abs().sum()) / 2, "choices": int(chosen.sum()),
        "mean_kl": float(torch.stack(divergence).mean()), "max_kl": float(torch.stack(divergence).max()),
    }  # fmt: skip


def _forced_logits(engine: Engine, tokens: dict[str, list[int]] | None) -> dict[str, list[torch.Tensor]]:
    """The logits at each output token of each prompt, on the host; `tokens` replace what would be sampled."""
    logits: dict[str, list[torch.Tensor]] = {}
    sampler, launch = engine._sampler, engine._sampler.launch

    def record(rows: torch.Tensor, sequences: Sequence[EngineSequence], *, num_pending: int = 0) -> PendingSample:
        sample = launch(rows, sequences, num_pending=num_pending)
        for row, seq in zip(rows.float().cpu(), sequences, strict=True):
            logits.setdefault(seq.request_id, []).append(row.clone())
        if tokens is None:
            return sample
        forced = torch.tensor([tokens[seq.request_id][len(logits[seq.request_id]) - 1] for seq in sequences])
        return PendingSample(forced.to(rows.device), forced, None, sample.logprobs)

    sampler.launch = record  # type: ignore[assignment, method-assign]
    sampling = SamplingParams(max_tokens=NUM_OUTPUTS, temperature=0.0, ignore_eos=True)
    for length in PROMPT_TOKENS:
        prompt = tuple(2 + (length * 31 + 97 * index) % (engine.limits.vocab_size - 2) for index in range(length))
        engine.add(GenerateRequest(f"r{length}", prompt, sampling))
        engine.step()  # by itself, beside the earlier ones' decodes: in graphs of all sizes
    while engine.has_work:
        engine.step()
    sampler.launch = launch  # type: ignore[method-assign]
    return {name: rows[:NUM_OUTPUTS] for name, rows in logits.items()}


def _collectives(engine: Engine, batch: int) -> dict[str, float]:
    """What collectives take of the device's time in decode steps, and how much of that nothing else ran in."""
    sampling = SamplingParams(max_tokens=PROFILED_STEPS * 4 + 200, temperature=0.0, ignore_eos=True)
    for index in range(batch):
        prompt = tuple(1000 + (index * 7919 + 31 * at) % 90000 for at in range(1024))
        engine.add(GenerateRequest(f"profile-{index}", prompt, sampling))
    seen: set[str] = set()
    while len(seen) < batch:
        seen |= {chunk.request_id for chunk in engine.step()}
    for _ in range(4):
        engine.step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        start = time.perf_counter()
        for _ in range(PROFILED_STEPS):
            engine.step()
        wall_ms = 1e3 * (time.perf_counter() - start)
        torch.cuda.synchronize()
    for index in range(batch):
        engine.abort(f"profile-{index}")
    engine.reset()
    kernels = [event for event in profile.events() or () if str(event.device_type) == "DeviceType.CUDA"]
    spans = {
        is_shared: _union([(e.time_range.start, e.time_range.end) for e in kernels if _is_collective(e) == is_shared])
        for is_shared in (True, False)
    }
    busy = _union(spans[True] + spans[False])
    collectives, other, both = (_length(part) / 1e3 / PROFILED_STEPS for part in (spans[True], spans[False], busy))
    return {
        "step_ms": wall_ms / PROFILED_STEPS, "collectives_ms": collectives, "other_kernels_ms": other,
        "collectives_alone_ms": both - other, "collectives": sum(map(_is_collective, kernels)) / PROFILED_STEPS,
    }  # fmt: skip


def _is_collective(event: Any) -> bool:
    return "nccl" in event.name or "_exchange_kernel" in event.name


def _union(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    joined: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return joined


def _length(spans: list[tuple[float, float]]) -> float:
    return sum(end - start for start, end in spans)


def splits_of(num_gpus: int, folder: Path, kinds: Sequence[Kind], grid: tuple[tuple[int, int], ...]) -> list[Split]:
    """Rates are measured in bf16 of all layers."""
    sizes = [(1, 1), *((t, num_gpus // t) for t in range(num_gpus, 0, -1) if num_gpus % t == 0 and num_gpus > 1)]
    return [
        Split(t, e, kind, grid if kind.is_rated else (), folder / f"{kind}.pt")
        for kind, (t, e) in itertools.product(kinds, sizes)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="deepseek-v2-lite")
    parser.add_argument("--gpus", type=int, default=max(1, torch.cuda.device_count()))
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument(
        "--kinds",
        default="float32:3,float32,bfloat16",
        help="[invariant-]DTYPE[:LAYERS],..., the first under batch_invariant (default: %(default)s)",
    )
    parser.add_argument("--grid", type=grid, default=GRID, metavar="BxC,...", help="batch x context of the rates")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        kinds = [Kind.parse(kind) for kind in options.kinds.split(",")]
        splits = splits_of(options.gpus, Path(folder), kinds, tuple(options.grid))
        rank_rates(
            options.shape, splits, lambda line: print(line, flush=True),
            lambda results: options.json.write_text(json.dumps(results, indent=1)) and None,
        )  # fmt: skip


if __name__ == "__main__":
    main()
