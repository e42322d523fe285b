"""`python -m kernels.tune --kernel NAME --out FILE`: measure launch configurations on this card, write them as a table.

From the configuration in use, one setting after another is replaced by whatever runs fastest, until nothing improves;
a candidate that does not compile, does not fit the card or gives another result is passed over. The file keeps what
it holds for other kernels. Put it into kernels/tuning/ under the card's name, or name it in engine.tuning_table.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.runtime.errors import OutOfResources, PTXASError

from kernels import bench, tuning

_MAX_ERROR = 2e-2  # relative to the first configuration's result: 16-bit rounding in another order, no more
_MIN_GAIN = 0.01  # below it a candidate is as fast as the one it would replace
_FACTS = {"bits": 16, "num_heads": 16, "row_bytes": 1152}  # of the benchmark's shapes
Axes = Mapping[str, Sequence[Any]]
Measure = Callable[[tuning.Config], float]


@dataclass(frozen=True, slots=True)
class Problem:
    """One entry of the table to be: where it holds, and the call that stands for it."""

    up_to: Mapping[str, float]
    facts: Mapping[str, float]  # of that call
    run: Callable[[], Any]  # -> its result, a tensor


def _gemm(columns: Sequence[int], depths: Sequence[int]) -> list[dict[str, int]]:
    shapes = [(c, d, w, s) for c in columns for d in depths for w in (4, 8) for s in (3, 4) if c * d <= 16384]
    walks = [(16, 1), (16, 8), (1, 8)]
    names = ("columns", "depth", "num_warps", "num_stages", "programs", "group")
    return [dict(zip(names, (*shape, *walk), strict=True)) for shape in shapes for walk in walks]


AXES: dict[str, Axes] = {
    "fused_experts": {"rows": (16, 32, 64, 128), "gate_up": _gemm((64, 128), (64, 128)),
                      "down": _gemm((64, 128, 256), (64, 128))},
    "fp8_experts": {"rows": (16, 32, 64, 128), "gate_up": _gemm((128,), (128,)), "down": _gemm((64, 128), (128,))},
    "mla_decode": {"tile": (16, 32, 64), "num_warps": (4, 8), "num_stages": (1, 2, 3)},
    "mla_prefill": {"queries": (64, 128), "keys": (32, 64, 128), "num_warps": (4, 8), "num_stages": (2, 3)},
    "gather_blocks": {"tokens": (4, 8, 16, 32), "num_warps": (1, 2, 4, 8)},
}  # fmt: skip


def search(start: tuning.Config, axes: Axes, measure: Measure) -> tuple[dict[str, Any], float]:
    """Coordinate descent from `start`: (best configuration, its time). `measure` gives infinity for what cannot run.

    Raises ValueError if `start` itself cannot run.
    """
    best, best_time = dict(start), measure(start)
    if best_time == float("inf"):
        raise ValueError(f"the configuration in use does not run: {best}")
    improved = True
    while improved:
        improved = False
        for name, values in axes.items():
            for value in values:
                if value == best[name]:
                    continue
                candidate = best | {name: value}
                elapsed = measure(candidate)
                if elapsed < best_time * (1 - _MIN_GAIN):
                    best, best_time, improved = candidate, elapsed, True
    return best, best_time


def measure_on_card(kernel: str, problem: Problem) -> Measure:
    """Microseconds of the problem's call under a configuration."""
    expected = problem.run()
    norm = expected.double().norm()
    seen: dict[str, float] = {}

    def measure(config: tuning.Config) -> float:
        key = json.dumps(config, sort_keys=True)
        if key not in seen:
            tuning.use(
                tuning.Table.of({"card": "candidate", "kernels": {kernel: [{"up_to": {}, "use": dict(config)}]}})
            )
            try:
                error = (problem.run().double() - expected.double()).norm() / norm
                seen[key] = bench.median_us(problem.run) if error.item() <= _MAX_ERROR else float("inf")
            except (OutOfResources, PTXASError):
                seen[key] = float("inf")
            finally:
                tuning.use(None)
        return seen[key]

    return measure


def _problems(kernel: str) -> Iterator[Problem]:
    """From the shapes of the benchmark, those that tell this kernel's entries apart."""
    works: Mapping[str, Callable[[], Iterator[bench.Work]]] = bench.WORKS
    if kernel in ("fused_experts", "fp8_experts"):
        # Tokens that bring half the bound's rows to each expert; the last entry has no bound.
        sizes = {16: 4, 64: 16, 512: 96, 2048: 400, 8192: None}
        make = bench.expert_works if kernel == "fused_experts" else bench.fp8_expert_works
        for (num_tokens, bound), work in zip(sizes.items(), make(tuple(sizes)), strict=True):
            facts = {"rows_per_expert": num_tokens * 6 / 64, "dim": 2048, "inter": 1408}
            up_to = {"rows_per_expert": float(bound)} if bound else {}
            if kernel == "fused_experts":
                facts, up_to = {"bits": 16, **facts}, {"bits": 16.0, **up_to}
            yield Problem(up_to, facts, work.run)
        return
    work = next(work for work in works[kernel]() if "128 x 8192" in work.shape or kernel != "mla_decode")
    facts = {name: value for name, value in _FACTS.items() if name in tuning.FACTS[kernel]}
    yield Problem({"bits": 16} if "bits" in facts else {}, facts, work.run)


def tune(kernel: str, report: Callable[[str], None]) -> list[dict[str, Any]]:
    """The kernel's entries for this card."""
    entries = []
    device = torch.device("cuda", torch.cuda.current_device())
    for problem in _problems(kernel):
        start = tuning.find(kernel, device, **problem.facts)
        measure = measure_on_card(kernel, problem)
        use, time_us = search(start, AXES[kernel], measure)
        report(f"{kernel} up to {dict(problem.up_to)}: {measure(start):.1f} -> {time_us:.1f} us with {use}")
        entries.append({"up_to": dict(problem.up_to), "use": use})
    return entries


def write_table(path: Path, card: str, kernel: str, entries: list[dict[str, Any]], measured: str) -> None:
    """Put the kernel's entries into the file. Raises ValueError if it is another card's or no table."""
    values: dict[str, Any] = {"card": card, "kernels": {}}
    if path.exists():
        if (table := tuning.Table.read(path)).card != card:
            raise ValueError(f"{path}: is a table of {table.card}, this is {card}")
        values = json.loads(path.read_text(encoding="utf-8"))
    values["kernels"][kernel] = entries
    values["measured"] = measured
    tuning.Table.of(values)
    kernels = ",\n".join(
        f'    "{name}": [\n' + ",\n".join(f"      {json.dumps(entry)}" for entry in rows) + "\n    ]"
        for name, rows in values["kernels"].items()
    )
    head = f'  "card": {json.dumps(card)},\n  "measured": {json.dumps(measured)}'
    path.write_text(f'{{\n{head},\n  "kernels": {{\n{kernels}\n  }}\n}}\n', encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernel", action="append", choices=sorted(AXES), required=True, help="may be repeated")
    parser.add_argument("--out", type=Path, required=True, help="the table; made, or extended")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("error: torch sees no CUDA device to measure", file=sys.stderr)
        return 1
    card = torch.cuda.get_device_name()
    measured = f"{time.strftime('%Y-%m-%d')}, torch {torch.__version__}, triton {triton.__version__}"
    for kernel in arguments.kernel:
        write_table(arguments.out, card, kernel, tune(kernel, print), measured)
    print(f"table in {arguments.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
