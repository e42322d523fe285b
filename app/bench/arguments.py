"""The options of `longspan bench`, and how their values are read."""

from __future__ import annotations

import argparse
from pathlib import Path

from app.bench.server import LOCAL_CONFIG


def add_load(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--url", default="http://127.0.0.1:8000", help="the server (default: %(default)s)")
    group.add_argument("--model", help="model name to ask for, or with --compare the checkpoint's folder")
    group.add_argument("--api-key", help="sent as a bearer token")
    group.add_argument("--prompt-tokens", default="128", metavar="DIST",
                       help="N, uniform:LOW:HIGH, lognormal:MEDIAN:SIGMA, exponential:MEAN, or a mix such as"
                       " 0.9*uniform:32:256,0.1*4096 (default: %(default)s)")  # fmt: skip
    group.add_argument("--output-tokens", metavar="DIST", help="likewise (default: 64)")
    group.add_argument("--stream", action=argparse.BooleanOptionalAction, default=True,
                       help="stream the answers; without it there is no TTFT")  # fmt: skip
    group.add_argument("--timeout-s", type=positive_float, default=600.0, help="per request (default: %(default)g)")
    group.add_argument("--slo-ttft-ms", type=positive_float, help="goodput counts answers whose first token is in time")
    group.add_argument("--slo-itl-ms", type=positive_float, help="... and whose mean time per later token is, too")
    group.add_argument("--buckets", type=edges, default=[2048], metavar="N,N,...",
                       help="upper bounds of the length buckets, prompt + output tokens (default: 2048)")  # fmt: skip
    group.add_argument("--plot", type=Path, metavar="FILE", help="the timeline (default: beside the JSON)")


def add_arrivals(group: argparse._ArgumentGroup) -> None:
    arrivals = group.add_mutually_exclusive_group()
    arrivals.add_argument("--rate", type=positive_float, metavar="R", help="Poisson, R requests per second")
    arrivals.add_argument("--bursts", type=pair, metavar="N:S", help="N requests at once, every S seconds")
    arrivals.add_argument(
        "--ramp", type=pair, metavar="R1:R2", help="Poisson, from R1 to R2 per second over --duration"
    )
    arrivals.add_argument("--trace", type=Path, metavar="FILE.jsonl",
                          help='lines of {"at_s": 0.5, "prompt_tokens": 120, "output_tokens": 64}')  # fmt: skip
    group.add_argument("--duration", type=positive_float, metavar="S", help="seconds in which requests leave")
    group.add_argument("--num-requests", type=positive_int, metavar="N", help="at most N requests")


def add_comparisons(group: argparse._ArgumentGroup) -> None:
    kinds = group.add_mutually_exclusive_group()
    kinds.add_argument(
        "--compare", choices=["transformers"], help="beside transformers' generate on the same checkpoint"
    )
    kinds.add_argument("--engine", type=words, metavar="PART,...",
                       help="start, rates, offline, mixed: the engine alone, random weights of --shape")  # fmt: skip
    kinds.add_argument(
        "--http", action="store_true", help="the engine alone beside the same engine through Serve and HTTP"
    )
    kinds.add_argument(
        "--expert-load", type=Path, metavar="FILE",
        help="write where routed experts should lie, by what the server at --url counted (parallel.expert_placement)",
    )  # fmt: skip
    group.add_argument("--expert-ranks", type=positive_int, default=2, help="of --expert-load (default: %(default)s)")
    group.add_argument(
        "--expert-copies", type=int, default=0, metavar="N", help="slots per layer for second copies (default: 0)"
    )
    group.add_argument(
        "--serve-config", type=Path, default=LOCAL_CONFIG, metavar="FILE", help="of --http (default: %(default)s)"
    )
    group.add_argument(
        "--shape", default="deepseek-v2-lite", help="of --engine, or a checkpoint's folder (default: %(default)s)"
    )
    group.add_argument("--grid", type=grid, metavar="BxC,...", help="batch x context points of --engine rates")
    group.add_argument("--threads", type=positive_int, help="torch threads of both sides (default: all CPUs)")
    group.add_argument("--streams", type=edges, default=[1, 8], metavar="N,N,...", help="batch sizes (default: 1,8)")
    group.add_argument("--requests-per-stream", type=positive_int, default=1, metavar="N",
                       help="of --http, on average, one after the other (default: 1, all at once)")  # fmt: skip
    group.add_argument(
        "--runs", type=positive_int, default=3, help="alternating rounds; medians are shown (default: 3)"
    )


def positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def positive_float(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be positive, got {text}")
    return value


def pair(text: str) -> tuple[float, float]:
    first, _, second = text.partition(":")
    return positive_float(first), positive_float(second)


def edges(text: str) -> list[int]:
    return [positive_int(part) for part in text.split(",")]


def words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def grid(text: str) -> list[tuple[int, int]]:
    """`32x1024,1x8192` -> [(32, 1024), (1, 8192)], batch by context."""
    try:
        points = [tuple(int(part) for part in point.split("x")) for point in words(text)]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected BATCHxCONTEXT,..., got {text!r}") from None
    if not points or any(len(point) != 2 or min(point) < 1 for point in points):
        raise argparse.ArgumentTypeError(f"expected BATCHxCONTEXT,..., got {text!r}")
    return [(batch, context) for batch, context in points]
