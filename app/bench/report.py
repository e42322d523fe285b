"""Where results go: a JSON file that says where and how it was made, and a table for the terminal."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from app.bench.summary import PERCENTILES, Latency, LoadSummary
from app.errors import ConfigError

RESULTS_FOLDER = Path(".bench")
_PACKAGES = ("longspan", "torch", "triton", "ray", "transformers")


def result_path(name: str, chosen: Path | None = None) -> Path:
    """`chosen`, or a file in .bench/ named after the measurement and the moment."""
    return chosen or RESULTS_FOLDER / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}.json"


def write_result(path: Path, name: str, result: Any) -> None:
    """Write {name, command, environment, result}; NaN becomes null. Raises ConfigError if it cannot be written."""
    document = {
        "name": name,
        "command": ["longspan", *sys.argv[1:]],
        "environment": environment(),
        "result": _plain(result),
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json: {path} cannot be written ({error.strerror})", field="--json") from None


def environment() -> dict[str, Any]:
    """What a figure depends on besides the code."""
    return {
        "when": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "machine": platform.machine(),
        "cpus": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
        "packages": {name: found for name in _PACKAGES if (found := _version(name))},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else None
    return value


def load_table(summary: LoadSummary) -> str:
    """The summary of a load run, as lines of text."""
    lines = [
        f"{summary.requests} requests in {summary.wall_s:.1f} s: {summary.succeeded} answered"
        f" ({summary.requests_per_s:.2f}/s), {summary.output_tokens_per_s:.1f} output tokens/s,"
        f" {summary.prompt_tokens_per_s:.1f} prompt tokens/s ({summary.cached_prompt_share:.0%} cached)",
        f"goodput {summary.goodput_per_s:.2f} requests/s ({summary.good_share:.1%} of those sent met the SLO)",
        "errors: " + (", ".join(f"{kind} x {n}" for kind, n in summary.errors.items()) or "none"),
    ]
    for bucket in summary.buckets:
        lines += ["", f"{bucket.name}: {bucket.requests} requests, {bucket.failed} failed, {bucket.good} good"]
        lines.append("  ms".ljust(14) + "".join(f"{name:>10}" for name in ("mean", *(f"p{p}" for p in PERCENTILES))))
        rows = {
            "TTFT": bucket.ttft,
            "inter-token": bucket.inter_token,
            "event gap": bucket.event_gap,
            "end to end": bucket.e2e,
        }
        lines += [_latency_row(name, latency) for name, latency in rows.items() if latency]
    if warning := client_warning(summary):
        lines += ["", warning]
    return "\n".join(lines)


def _latency_row(name: str, latency: Latency) -> str:
    values = (latency.mean_s, *latency.percentiles_s.values())
    return f"  {name:<12}" + "".join(f"{1000 * value:>10.1f}" for value in values)


def client_warning(summary: LoadSummary) -> str | None:
    """A sentence if the client, not the server, shaped the figures."""
    lag = summary.send_lag
    if lag is not None and lag.percentiles_s["p99"] > 0.05:
        return f"warning: requests left up to {1000 * lag.percentiles_s['p99']:.0f} ms late (p99): the client was slow"
    if summary.client_cpu_share > 0.8:
        return f"warning: the client used {summary.client_cpu_share:.0%} of a core and may have been the bottleneck"
    return None
