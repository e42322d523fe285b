"""`longspan bench`: arguments, and which measurement they ask for."""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from app.bench import arguments, report, traffic
from app.bench.load import LoadRun, Progress, Target, run_load
from app.bench.summary import Slo, summarize
from app.errors import ConfigError

LOG_PERIOD_S = 10  # of progress lines where stderr is no terminal

DESCRIPTION = """\
Measure a server, the engine, or a named scenario.

  longspan bench --rate 4 --duration 60            open-loop load on a running server
  longspan bench --compare transformers            the engine beside transformers' generate, in this process
  longspan bench --engine start,rates,...          the engine alone with random weights of a named shape
  longspan bench --expert-load FILE                where routed experts should lie, by what a server counted
  longspan bench --http                            through Serve and HTTP, beside the engine alone
  longspan bench scenario NAME                     a named scenario; `longspan bench scenario --help` lists them

Results go to .bench/ as JSON (and a timeline as PNG), or to the file given with --json.
"""


def add_parser(commands: Any) -> None:
    """Add `bench` to the command line."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "bench",
        help="measure a server, the engine, or a named scenario",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=_run)
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the result goes (default: a file in .bench/)")
    parser.add_argument("--seed", type=int, default=0, help="of arrival times, lengths and prompts (default: 0)")
    arguments.add_load(parser.add_argument_group("load on a server"))
    arguments.add_arrivals(parser.add_argument_group("when requests leave (one of --rate, --bursts, --ramp, --trace)"))
    arguments.add_comparisons(parser.add_argument_group("the engine beside something else"))
    modes = parser.add_subparsers(metavar="scenario", required=False)
    _add_scenario_parser(modes)


def _add_scenario_parser(modes: Any) -> None:
    from app.bench.scenarios import SCENARIOS, summary_line

    listing = "\n".join(f"  {name:<12} {summary_line(scenario)}" for name, scenario in SCENARIOS.items())
    parser: argparse.ArgumentParser = modes.add_parser(
        "scenario",
        description=f"Run a named scenario on a server that it starts itself, or on --url.\n\n{listing}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=sorted(SCENARIOS), metavar="NAME")
    parser.add_argument("--url", default=None, help="a running server, where the scenario allows one")
    parser.add_argument("--config", type=Path, default=None, help="(default: the scenario's own)")
    parser.add_argument(
        "--runs", type=arguments.positive_int, default=None, help="repetitions (default: the scenario's own)"
    )
    parser.add_argument("--json", type=Path, default=None, metavar="FILE")
    parser.set_defaults(run=_run_scenario)


def _run(options: argparse.Namespace) -> int:
    if options.compare:
        return _run_compare(options)
    if options.engine:
        return _run_engine(options)
    if options.http:
        return _run_http(options)
    if options.expert_load:
        return _run_expert_load(options)
    return _run_load(options)


def _run_load(options: argparse.Namespace) -> int:
    requests = _plan(options)
    edges: list[int] = options.buckets
    slo = Slo(_seconds(options.slo_ttft_ms), _seconds(options.slo_itl_ms))
    target = Target(options.url, options.model, options.api_key, options.stream, options.timeout_s)
    run = asyncio.run(run_load(requests, target, seed=options.seed, on_progress=_show_progress))
    _end_progress()
    summary = summarize(run, slo, edges)
    path = report.result_path("load", options.json)
    report.write_result(path, "load", {"summary": summary, "requests": _rows(run), "timeline": run.samples})
    print(report.load_table(summary))
    plot_path = options.plot or path.with_suffix(".png")
    from app.bench.plot import draw_timeline  # matplotlib takes a second to import

    draw_timeline(run, plot_path)
    print(f"\nresult in {path}, timeline in {plot_path}")
    return 0 if summary.succeeded else 1


def _rows(run: LoadRun) -> list[dict[str, Any]]:
    return [
        {
            "at_s": record.planned.at_s,
            "prompt_tokens": record.planned.prompt_tokens,
            "output_tokens": record.output_tokens,
            "ttft_s": record.ttft_s,
            "inter_token_s": record.inter_token_s,
            "e2e_s": record.e2e_s,
            "error": record.error,
        }
        for record in run.records
    ]


def _plan(options: argparse.Namespace) -> list[traffic.PlannedRequest]:
    if options.trace:
        return traffic.read_trace(options.trace)[: options.num_requests]
    if options.duration is None and (options.num_requests is None or options.ramp):
        what = "--duration" if options.ramp else "--duration or --num-requests"
        raise ConfigError(f"{what}: needed to know when the load ends", field="--duration")
    rng = random.Random(options.seed)
    return traffic.plan(
        _arrivals(options, rng),
        traffic.parse_lengths(options.prompt_tokens, "--prompt-tokens"),
        traffic.parse_lengths(options.output_tokens or "64", "--output-tokens"),
        rng,
        duration_s=options.duration,
        num_requests=options.num_requests,
    )


def _arrivals(options: argparse.Namespace, rng: random.Random) -> Iterator[float]:
    # Arrivals draw from their own generator: other lengths must not move them.
    own = random.Random(rng.random())
    if options.bursts:
        return traffic.bursts(max(1, int(options.bursts[0])), options.bursts[1])
    if options.ramp:
        return traffic.ramp(options.ramp[0], options.ramp[1], options.duration, own)
    return traffic.poisson(options.rate or 1.0, own)


def _show_progress(progress: Progress) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{progress}", end="", file=sys.stderr, flush=True)
    elif round(progress.at_s) % LOG_PERIOD_S == 0:
        print(progress, file=sys.stderr, flush=True)


def _end_progress() -> None:
    if sys.stderr.isatty():
        print(file=sys.stderr)


def _run_compare(options: argparse.Namespace) -> int:
    from app.bench.compare import compare_transformers  # torch and transformers

    result = compare_transformers(
        Path(options.model) if options.model else None,
        threads=options.threads or len(os.sched_getaffinity(0)),
        streams=options.streams,
        output_tokens=_count(options),
        runs=options.runs,
        report=_say,
    )
    return _keep("compare-transformers", options.json, result)


def _run_engine(options: argparse.Namespace) -> int:
    from app.bench.engine_rates import GRID, engine_rates  # torch
    from app.bench.random_engine import ENGINE_CONFIG

    result = engine_rates(options.shape, ENGINE_CONFIG, options.engine, options.grid or GRID, _say)
    return _keep("engine", options.json, result)


def _run_expert_load(options: argparse.Namespace) -> int:
    from app.bench.expert_load import write_placement  # torch

    copies: int = max(0, options.expert_copies)
    result = write_placement(options.url, options.expert_ranks, copies, options.expert_load, _say)
    return _keep("expert-load", options.json, result)


def _run_http(options: argparse.Namespace) -> int:
    from app.bench.http_cost import http_cost

    cost = http_cost(
        options.serve_config,
        streams=max(options.streams),
        requests_per_stream=options.requests_per_stream,
        output_tokens=traffic.parse_lengths(options.output_tokens or "64", "--output-tokens"),
        runs=options.runs,
        report=_say,
    )
    print(cost)
    return _keep("http", options.json, cost)


def _run_scenario(options: argparse.Namespace) -> int:
    from app.bench.scenarios import SCENARIOS, ScenarioOptions

    result = SCENARIOS[options.name](ScenarioOptions(options.config, options.url, options.runs, _say))
    _say(f"{options.name}: {'passed' if result['passed'] else 'FAILED'}")
    _keep(options.name, options.json, result)
    return 0 if result["passed"] else 1


def _keep(name: str, chosen: Path | None, result: Any) -> int:
    path = report.result_path(name, chosen)
    report.write_result(path, name, result)
    print(f"result in {path}")
    return 0


def _say(line: str) -> None:
    print(line, flush=True)


def _count(options: argparse.Namespace) -> int:
    """--output-tokens as one number, for the comparisons. Raises ConfigError on a distribution."""
    lengths = traffic.parse_lengths(options.output_tokens or "64", "--output-tokens")
    if not isinstance(lengths, traffic.Uniform) or lengths.low != lengths.high:
        raise ConfigError("--output-tokens: a comparison needs one number", field="--output-tokens")
    return lengths.low


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000
