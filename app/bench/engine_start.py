"""From process start to the first token, in processes of their own: with an empty kernel cache, then with a full one.

Weights are drawn at random on the device; the time that takes is left out, as reading them from a disk would be.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

MAX_START_S = 300.0
PROMPT_TOKENS = 512


def start_times(shape: str, report: Callable[[str], None]) -> dict[str, dict[str, float]]:
    """Seconds of each part of a start, by name of the run: `cold`, then `kernel cache`.

    Raises subprocess.CalledProcessError or TimeoutExpired if a start fails.
    """
    times = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("cold", "kernel cache"):
            times[name] = parts = _start(shape, folder)
            listed = ", ".join(f"{part.removesuffix('_s')} {seconds:.1f}" for part, seconds in parts.items())
            report(f"start, {name}: {listed} s")
    return times


def _start(shape: str, kernel_cache: str) -> dict[str, float]:
    command = [sys.executable, "-m", "app.bench.engine_start", shape, kernel_cache, repr(time.time())]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=MAX_START_S)
    parts: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return parts


def run_start(shape: str, kernel_cache: str, started_at: float) -> dict[str, float]:
    """Start in this process, begun at `started_at` (time.time()): seconds of its parts, `total_s` without weights."""
    import torch

    from app.bench.random_engine import ENGINE_CONFIG, engine_around, shape_config
    from app.engine.loading import prepare_kernels, self_test
    from app.model.weights import random_weights
    from app.protocol import GenerateRequest, SamplingParams

    marks = {"start": started_at}

    def mark(name: str) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        marks[name] = time.time()

    config = ENGINE_CONFIG.model_copy(update={"kernel_cache": kernel_cache})
    prepare_kernels(config)
    marks["imports_s"] = time.time()
    model_config = shape_config(shape)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.ones(1, device=device)
    mark("device_s")
    weights = random_weights(model_config, seed=0, dtype=dtype, device=device)
    mark("weights_s")
    engine = engine_around(weights, model_config, config)
    mark("engine_s")
    engine.warm_up()
    mark("warm_up_s")
    self_test(engine, must_be_invariant=False)
    mark("self_test_s")
    prompt = tuple(index % engine.limits.vocab_size for index in range(PROMPT_TOKENS))
    engine.add(GenerateRequest("first", prompt, SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)))
    while not engine.step():
        pass
    mark("first_token_s")
    names = list(marks)
    parts = {name: marks[name] - marks[before] for before, name in itertools.pairwise(names)}
    return {**parts, "total_s": sum(parts.values()) - parts["weights_s"]}


if __name__ == "__main__":
    print(json.dumps(run_start(sys.argv[1], str(Path(sys.argv[2])), float(sys.argv[3]))))
