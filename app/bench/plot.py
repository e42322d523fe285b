"""A load run over time, as a picture: requests in flight, tokens per second, replicas and KV usage of each pool."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from app.bench.client import RequestRecord
from app.bench.load import LoadRun
from app.bench.scrape import Sample
from app.errors import ConfigError


def in_flight(records: Sequence[RequestRecord]) -> tuple[list[float], list[int]]:
    """Times at which a request left or ended, and how many were in flight from then on."""
    changes = sorted([(r.sent_s, 1) for r in records] + [(r.ended_s, -1) for r in records])
    counts, now = [], 0
    for _, change in changes:
        now += change
        counts.append(now)
    return [at_s for at_s, _ in changes], counts


def tokens_per_second(records: Sequence[RequestRecord], wall_s: float) -> list[float]:
    """Output tokens in each second of the run; a request's tokens are spread evenly over its events."""
    rates = [0.0] * max(1, math.ceil(wall_s))
    for record in records:
        if record.event_times_s and record.output_tokens:
            share = record.output_tokens / len(record.event_times_s)
            for at_s in record.event_times_s:
                rates[min(int(at_s), len(rates) - 1)] += share
    return rates


def draw_timeline(run: LoadRun, path: Path) -> None:
    """Write a PNG. Raises ConfigError if the file cannot be written."""
    figure = Figure(figsize=(10, 9), layout="constrained")
    FigureCanvasAgg(figure)
    axes: list[Axes] = list(figure.subplots(4, 1, sharex=True))
    axes[0].step(*in_flight(run.records), where="post")
    axes[0].set_ylabel("requests in flight")
    rates = tokens_per_second(run.records, run.wall_s)
    axes[1].step(range(len(rates)), rates, where="post")
    axes[1].set_ylabel("output tokens/s")
    _draw_pools(axes[2], axes[3], run.samples)
    axes[3].set_xlabel("seconds")
    for axis in axes:
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="png", dpi=100)
    except OSError as error:
        raise ConfigError(f"--plot: {path} cannot be written ({error.strerror})", field="--plot") from None


def _draw_pools(replicas: Axes, usage: Axes, samples: Sequence[Sample]) -> None:
    times = [sample.at_s for sample in samples]
    pools = sorted({pool for sample in samples for pool in sample.pools()})
    counts = [[len(sample.pools().get(pool, [])) for sample in samples] for pool in pools]
    if counts:
        replicas.stackplot(times, counts, labels=pools, step="post", alpha=0.7)
    for pool in pools:
        usage.plot(times, [sample.kv_usage(pool) for sample in samples], label=pool)
    replicas.set_ylabel("replicas")
    replicas.yaxis.set_major_locator(MaxNLocator(integer=True))
    usage.set_ylabel("KV usage")
    usage.set_ylim(0, 1)
    for axis in (replicas, usage):
        if pools:
            axis.legend(loc="upper right")
        else:
            axis.text(0.5, 0.5, "the server shows no metrics", ha="center", transform=axis.transAxes)
