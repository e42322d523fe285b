"""`longspan plan`: what a deployment would need and do, computed rather than measured."""

from __future__ import annotations

import argparse

from app.planning.sharding import SHAPES, Accelerator, ShardingCost, best, sharding_cost, shardings

HEAD = "ranks  tensor x expert  weights GB  cache Mtok  all-reduce MB  all-to-all MB  compute ms  collect. ms  step ms"
NOTES = """\
weights and cache per rank, where each rank has the whole cache; MB sent per rank and step; the step is the sum of
compute and collectives, none hidden; * is the fastest that holds the batch"""


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


def sharding_lines(name: str, num_ranks: int, batch: int, context: int) -> list[str]:
    device, shape = Accelerator(), SHAPES[name]
    costs = [
        sharding_cost(shape, tensor, expert, batch=batch, context=context, device=device)
        for tensor, expert in shardings(shape, num_ranks, device)
    ]
    chosen = best(costs, batch * context)
    return [_line(cost) + (" *" if cost is chosen else "") for cost in costs]


def _line(cost: ShardingCost) -> str:
    cache = f"{cost.cache_tokens / 1e6:.1f}" if cost.fits else "no room"
    return (
        f"{cost.tensor * cost.expert:5}  {f'{cost.tensor} x {cost.expert}':>15}  {cost.weight_bytes / 1e9:10.1f}"
        f"  {cache:>10}  {cost.all_reduce_bytes / 1e6:13.1f}  {cost.all_to_all_bytes / 1e6:13.1f}"
        f"  {cost.compute_s * 1e3:10.1f}  {cost.collective_s * 1e3:11.1f}  {cost.step_s * 1e3:7.1f}"
    )
