"""The engine beside transformers' generate: same checkpoint, dtype, threads and prompts, one process, alternating."""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil  # type: ignore[import-untyped]
import torch

from app.config import EngineConfig, ModelSource
from app.engine.engine import Engine
from app.engine.loading import load_engine
from app.errors import PreflightError
from app.protocol import GenerateRequest, SamplingParams
from app.tokenizer import Tokenizer

EXPERTS_BACKENDS = ("eager", "grouped_mm", "batched_mm")
TRIAL_TOKENS = 8
QUIET_CORES = 0.1  # what an idle machine's services may use
HOPELESS = 4.0  # times the best trial: a warm-up this slow needs no trial of its own
# Real text: on random ids a model's two best logits are often too close to tell two correct programs apart.
PASSAGE = """\
The harbour was quiet when the ferry came in. A man in a grey coat walked up the stone steps and asked the keeper of \
the inn whether a letter had arrived for him. There was none, she said, but a lady had called twice and left no name. \
He thanked her, took the key, and went to the window of his room, from which one could see the whole bay, the two \
lighthouses and the long road to the north. In the morning he would have to decide which of them to follow. Rain began \
to fall on the roofs. He opened the map, laid his watch beside it, and counted the hours that were left: nineteen, if \
the clock in the tower was right, and it had never been right. Downstairs somebody laughed, a door was shut, and the \
smell of bread rose through the floor. He remembered that he had eaten nothing since the day before."""


class Generator(Protocol):
    """Something that continues prompts greedily, `num_tokens` each, and returns the new ids."""

    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]: ...


class EngineGenerator:
    """Engine.step in a loop: no thread, no Ray, no HTTP. Prefixes are forgotten between calls."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        num_tokens: int | Sequence[int],
        *,
        ignore_eos: bool = False,
        concurrency: int | None = None,
    ) -> list[list[int]]:
        """num_tokens: of every answer, or of each.

        ignore_eos: an end may be generated and is passed over; else none is generated
        concurrency: so many prompts at a time, the next one when one has ended; None: all together
        """
        counts = [num_tokens] * len(prompts) if isinstance(num_tokens, int) else num_tokens
        requests = []
        for index, (prompt, count) in enumerate(zip(prompts, counts, strict=True)):
            min_tokens = 0 if ignore_eos else count
            sampling = SamplingParams(max_tokens=count, min_tokens=min_tokens, ignore_eos=ignore_eos, temperature=0.0)
            requests.append(GenerateRequest(f"bench-{index}", tuple(prompt), sampling))
        outputs: dict[str, list[int]] = {request.request_id: [] for request in requests}
        num_free = concurrency or len(requests)
        while requests or self._engine.has_work:
            starting, requests = requests[:num_free], requests[num_free:]
            for request in starting:
                self._engine.add(request)
            num_free -= len(starting)
            for chunk in self._engine.step():
                outputs[chunk.request_id].extend(chunk.token_ids)
                num_free += chunk.finish_reason is not None
        return list(outputs.values())


class TransformersGenerator:
    """AutoModelForCausalLM.generate, batched and padded on the left. `experts` is its experts implementation."""

    def __init__(self, model: Any, experts: str | None) -> None:
        self.model, self.experts = model, experts
        self._pad_id = model.config.pad_token_id or 0

    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
        if self.experts is not None:
            self.model.set_experts_implementation(self.experts)
        width = max(map(len, prompts))
        ids = torch.tensor([[self._pad_id] * (width - len(prompt)) + list(prompt) for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        with torch.inference_mode():
            output = self.model.generate(
                input_ids=ids, attention_mask=mask, do_sample=False, use_cache=True, pad_token_id=self._pad_id,
                max_new_tokens=num_tokens, min_new_tokens=num_tokens,
            )  # fmt: skip
        new_ids: list[list[int]] = output[:, width:].tolist()
        return new_ids


@dataclass(frozen=True, slots=True)
class StreamsResult:
    """Output tokens per second, prefill included, of both sides in each round; ratio of the medians."""

    streams: int
    prompt_tokens: list[int]
    output_tokens: int
    experts: str | None
    engine_tokens_per_s: list[float]
    transformers_tokens_per_s: list[float]
    ratio: float
    same_tokens: int  # sequences whose greedy ids are equal on both sides
    first_mismatch: str | None


def compare_transformers(
    folder: Path | None,
    *,
    threads: int,
    streams: Sequence[int],
    output_tokens: int,
    runs: int,
    report: Callable[[str], None],
) -> dict[str, Any]:
    """Raises PreflightError without transformers, CheckpointError on an unusable folder."""
    torch.set_num_threads(threads)
    source = ModelSource() if folder is None else ModelSource(path=str(folder), name=folder.name)
    engine = load_engine(
        source,
        EngineConfig(
            device="cpu", dtype="float32", num_threads=threads, prefix_caching=False, max_num_seqs=max(16, *streams)
        ),
    )
    model = _load_transformers(source.folder)
    ids = Tokenizer(source.folder).encode(PASSAGE)
    neighbours = Neighbours()
    results = []
    for count in streams:
        prompts = passage_prompts(ids, count)
        theirs = _fastest(model, prompts, report)
        result = _alternate(EngineGenerator(engine), theirs, prompts, output_tokens, runs)
        report(describe(result))
        results.append(result)
    other_cores = neighbours.cores()
    if other_cores > QUIET_CORES:
        report(f"warning: other processes used {other_cores:.2f} cores meanwhile; repeat on a quiet machine")
    return {
        "model": str(source.folder), "dtype": "float32", "threads": threads, "other_cores": other_cores,
        "results": results,
    }  # fmt: skip


class Neighbours:
    """CPU that other processes of this machine use from now on."""

    def __init__(self) -> None:
        self._start = self._read()

    def cores(self) -> float:
        """Cores' worth of their use since the construction."""
        (wall_s, others_s), (start_wall_s, start_others_s) = self._read(), self._start
        return max(0.0, others_s - start_others_s) / (wall_s - start_wall_s)

    @staticmethod
    def _read() -> tuple[float, float]:
        times = psutil.cpu_times()
        return time.perf_counter(), times.user + times.nice + times.system - time.process_time()


def passage_prompts(ids: Sequence[int], count: int) -> list[list[int]]:
    """`count` different pieces of the passage, 33 to 96 tokens long."""
    prompts = []
    for index in range(count):
        length = 33 + (index * 27) % 64
        start = (index * 17) % max(1, len(ids) - length)
        prompts.append(list(ids[start : start + length]))
    return prompts


def _load_transformers(folder: Path) -> Any:
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError:
        raise PreflightError("--compare transformers: the package transformers is not installed") from None
    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def _fastest(model: Any, prompts: Sequence[Sequence[int]], report: Callable[[str], None]) -> TransformersGenerator:
    """The experts backend with the shortest trial; each is run once, as a warm-up, before it is timed."""
    trials: dict[str, float] = {}
    for experts in EXPERTS_BACKENDS:
        generator = TransformersGenerator(model, experts)
        try:
            trials[experts] = _timed(generator, prompts, TRIAL_TOKENS)[0]
            if trials[experts] < HOPELESS * min(trials.values()):
                trials[experts] = min(_timed(generator, prompts, TRIAL_TOKENS)[0] for _ in range(2))
        except (RuntimeError, ValueError, ImportError) as error:
            report(f"transformers' experts backend {experts} does not run here: {str(error).splitlines()[0]}")
    if not trials:
        return TransformersGenerator(model, None)
    report(f"{len(prompts)} streams, trial of {TRIAL_TOKENS} tokens: "
           + ", ".join(f"{name} {seconds:.2f} s" for name, seconds in trials.items()))  # fmt: skip
    return TransformersGenerator(model, min(trials, key=trials.__getitem__))


def _timed(generator: Generator, prompts: Sequence[Sequence[int]], num_tokens: int) -> tuple[float, list[list[int]]]:
    start_s = time.perf_counter()
    outputs = generator.generate(prompts, num_tokens)
    return time.perf_counter() - start_s, outputs


def _alternate(
    ours: Generator, theirs: TransformersGenerator, prompts: list[list[int]], num_tokens: int, runs: int
) -> StreamsResult:
    """Rounds in the order AB, BA, AB, ... after a short warm-up of ours (theirs was warmed by the trial)."""
    ours.generate(prompts, TRIAL_TOKENS)
    rates: dict[str, list[float]] = {"engine": [], "transformers": []}
    outputs: dict[str, list[list[int]]] = {}
    sides: list[tuple[str, Generator]] = [("engine", ours), ("transformers", theirs)]
    for _ in range(runs):
        for name, generator in sides:
            elapsed_s, outputs[name] = _timed(generator, prompts, num_tokens)
            rates[name].append(len(prompts) * num_tokens / elapsed_s)
        sides.reverse()
    mismatch = first_mismatch(outputs["engine"], outputs["transformers"])
    return StreamsResult(
        streams=len(prompts),
        prompt_tokens=[len(prompt) for prompt in prompts],
        output_tokens=num_tokens,
        experts=theirs.experts,
        engine_tokens_per_s=rates["engine"],
        transformers_tokens_per_s=rates["transformers"],
        ratio=statistics.median(rates["engine"]) / statistics.median(rates["transformers"]),
        same_tokens=sum(a == b for a, b in zip(outputs["engine"], outputs["transformers"], strict=True)),
        first_mismatch=mismatch,
    )


def first_mismatch(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> str | None:
    """Where the outputs first differ, or None."""
    for index, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        for position, (a, b) in enumerate(zip(mine, other, strict=False)):
            if a != b:
                return f"stream {index}, token {position}: {a}, transformers {b}"
        if len(mine) != len(other):
            return f"stream {index}: {len(mine)} tokens, transformers {len(other)}"
    return None


def describe(result: StreamsResult) -> str:
    same = f"{result.same_tokens} of {result.streams} outputs equal"
    mismatch = f" (first difference: {result.first_mismatch})" if result.first_mismatch else ""
    return (
        f"{result.streams} streams x {result.output_tokens} tokens:"
        f" engine {statistics.median(result.engine_tokens_per_s):.1f} tokens/s,"
        f" transformers ({result.experts}) {statistics.median(result.transformers_tokens_per_s):.1f},"
        f" ratio {result.ratio:.2f}; {same}{mismatch}"
    )
