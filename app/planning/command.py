"""`longspan plan`: what a deployment would need and do, computed rather than measured."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

from app.planning.scaling import Costs, read_scenario, report_json, report_lines
from app.planning.sharding import SHAPES, Accelerator, ShardingCost, sharding_cost, shardings
from app.planning.simulator import simulate
from app.planning.trace import read_jsonl
from app.serving.routing import POOLS

HEAD = (
    "ranks  replicas  tensor x expert  weights GB  cache Mtok  all-reduce MB  all-to-all MB"
    "  compute ms  collect. ms  step ms"
)
NOTES = """\
weights and cache per rank, where each rank has the replica's whole cache; MB sent per rank and step; replicas share
the sequences; the step is the sum of compute and collectives, none hidden; * is the fastest that holds the sequences"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "plan", help="compute what a deployment would need", description="Plan a deployment without running it."
    )
    kinds = parser.add_subparsers(metavar="WHAT", required=True)
    sharding = kinds.add_parser(
        "sharding",
        help="tensor and expert parallelism of large models",
        description="Bytes per rank, bytes exchanged and time of a decoding step, for every way to spread a model over"
        " nodes of eight H200s, from the weights' own formats (FP8, FP4 experts) and nominal link rates.",
    )
    sharding.add_argument("--model", choices=sorted(SHAPES), action="append", help="(default: all)")
    sharding.add_argument("--accelerators", type=_count, action="append", metavar="N", help="(default: 8 and 16)")
    sharding.add_argument("--batch", type=_count, default=64, help="sequences in a step (default: %(default)s)")
    sharding.add_argument("--context", type=_count, default=8192, help="tokens of each (default: %(default)s)")
    sharding.set_defaults(run=_sharding)
    scaling = kinds.add_parser(
        "scaling",
        help="what routing and scaling make of recorded traffic",
        description="Run a trace through a Serve config's pools in virtual time: the router's and the scaling policy's"
        " own functions over replicas whose speed is given. An hour takes seconds.",
    )
    scaling.add_argument("config", type=Path, metavar="CONFIG.yaml", help="a Serve config with app.main:pools")
    scaling.add_argument("--trace", type=Path, metavar="FILE.jsonl", required=True,
                         help='lines of {"at_s": 0.5, "prompt_tokens": 120, "output_tokens": 64}')  # fmt: skip
    scaling.add_argument("--app", help="the application of pools (default: the first)")
    scaling.add_argument("--nodes-hold", type=_amount, default=math.inf, metavar="N",
                         help="replica_cost that the cluster has room for (default: no bound)")  # fmt: skip
    for pool in POOLS:
        scaling.add_argument(f"--{pool}", type=_costs, default={}, metavar="NAME=VALUE,...",
                             help=f"speed of a replica of the {pool} pool: start_delay_s, prefill_tokens_per_s,"
                             " step_base_s, decode_seq_s, context_token_s, kv_capacity_tokens")  # fmt: skip
    scaling.add_argument("--json", type=Path, metavar="FILE", help="write the timeline and every request's times")
    scaling.set_defaults(run=_scaling)


def _scaling(options: argparse.Namespace) -> int:
    costs: Costs = {"short": options.short, "long": options.long}
    scenario = read_scenario(options.config, options.app, costs, nodes_hold=options.nodes_hold)
    result = simulate(read_jsonl(options.trace), scenario)
    for line in report_lines(result):
        print(line)
    if options.json is not None:
        options.json.write_text(json.dumps(report_json(result)) + "\n", encoding="utf-8")
    return 0


def _sharding(options: argparse.Namespace) -> int:
    for name in options.model or sorted(SHAPES):
        print(f"{name}, {options.batch} sequences of {options.context} tokens\n{HEAD}")
        for num_ranks in options.accelerators or (8, 16):
            for line in sharding_lines(name, num_ranks, options.batch, options.context):
                print(line)
        print()
    print(NOTES)
    return 0


def _count(text: str) -> int:
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {count}")
    return count


def _amount(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be greater than 0, got {text}")
    return value


def _costs(text: str) -> dict[str, float]:
    """NAME=VALUE,...; the names are ReplicaCost's to check."""
    costs = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        try:
            costs[name.strip()] = float(value)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected NAME=VALUE,..., got {part!r}") from None
    return costs


def sharding_lines(name: str, num_ranks: int, batch: int, context: int) -> list[str]:
    """A line for each way to use so many accelerators: as one replica, or as one of each node."""
    device, shape = Accelerator(), SHAPES[name]
    rows = []
    for replicas in sorted({1, max(1, num_ranks // device.per_node)}):
        for tensor, expert in shardings(shape, num_ranks // replicas, device):
            share = -(-batch // replicas)
            rows.append((replicas, sharding_cost(shape, tensor, expert, batch=share, context=context, device=device)))
    holding = [row for row in rows if row[1].cache_tokens >= batch / row[0] * context]
    chosen = min(holding, key=lambda row: row[1].step_s, default=None)
    return [_line(replicas, cost) + (" *" if (replicas, cost) == chosen else "") for replicas, cost in rows]


def _line(replicas: int, cost: ShardingCost) -> str:
    cache = f"{cost.cache_tokens / 1e6:.1f}" if cost.fits else "no room"
    return (
        f"{replicas * cost.tensor * cost.expert:5}  {replicas:8}  {f'{cost.tensor} x {cost.expert}':>15}"
        f"  {cost.weight_bytes / 1e9:10.1f}  {cache:>10}  {cost.all_reduce_bytes / 1e6:13.1f}"
        f"  {cost.all_to_all_bytes / 1e6:13.1f}"
        f"  {cost.compute_s * 1e3:10.1f}  {cost.collective_s * 1e3:11.1f}  {cost.step_s * 1e3:7.1f}"
    )
