"""How often a running server's requests chose each routed expert, and a placement on ranks that evens that out."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from app.bench.client import Client
from app.errors import ConfigError
from app.model.placement import ExpertPlacement, LayerPlacement

FIELD = "--expert-load"
METRIC = "longspan:expert_tokens"
TIMEOUT_S = 30.0


def write_placement(
    url: str, num_ranks: int, num_copies: int, path: Path, report: Callable[[str], None]
) -> dict[str, Any]:
    """Read the counters of `url`'s /metrics, write the placement to `path`: JSON-ready loads and imbalances.

    num_copies: further slots per layer, for copies of its busiest experts
    Raises ConfigError if the server has counted nothing.
    """
    loads = parse_loads(asyncio.run(_metrics(url)))
    if not any(map(sum, loads.values())):
        problem = f"{url}/metrics counts no {METRIC}_total: the model has no routed experts, or has met no tokens yet"
        raise ConfigError(f"{FIELD}: {problem}", field=FIELD)
    num_experts = len(next(iter(loads.values())))
    placement = ExpertPlacement.balanced(loads, num_experts, num_ranks, num_copies)
    placement.write(path)
    even = LayerPlacement.even(num_experts, num_ranks)
    layers = {
        layer: {
            "tokens": sum(load), "even_imbalance": even.imbalance(load),
            "imbalance": placement.layer(layer).imbalance(load), "loads": load,
        }
        for layer, load in sorted(loads.items())
    }  # fmt: skip
    for layer, figures in layers.items():
        report(
            f"layer {layer}: {figures['tokens']:.0f} choices; the busiest of {num_ranks} ranks has"
            f" {figures['even_imbalance']:.2f} x the mean, {figures['imbalance']:.2f} x as placed"
        )
    report(f"placement in {path}")
    return {"num_ranks": num_ranks, "num_copies": num_copies, "layers": layers}


def parse_loads(text: str) -> dict[int, list[float]]:
    """Tokens by layer and expert, over all replicas of Prometheus text."""
    counts: defaultdict[int, defaultdict[int, float]] = defaultdict(lambda: defaultdict(float))
    for family in text_string_to_metric_families(text):
        for sample in family.samples if family.name == METRIC else ():
            layer, expert = map(int, sample.labels["expert"].split("."))
            counts[layer][expert] += sample.value
    return {layer: [experts[expert] for expert in sorted(experts)] for layer, experts in counts.items()}


async def _metrics(url: str) -> str:
    async with Client(url, timeout_s=TIMEOUT_S) as client:
        status, text = await client.get("/metrics")
    if status != 200:
        raise ConfigError(f"--url: {url}/metrics answers {status}", field="--url")
    return text
