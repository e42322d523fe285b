"""Every metric, declared once, and the Prometheus text made of the monitors' snapshots."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from app.protocol import EngineStats, Histogram
from app.serving.board import PoolDecision
from app.serving.monitor import PoolTraffic

PREFIX = "longspan:"
LABELS = ("model", "app", "pool", "replica")


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """`name` is also the EngineStats attribute. Names are the field's, so that dashboards and alerts carry over."""

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    help: str
    label: str | None = None  # the value is a mapping from this label to a number


EXPERT_TOKENS = MetricSpec("expert_tokens", "counter", "Tokens routed to each expert, as layer.expert.", label="expert")
METRICS = (
    MetricSpec("num_requests_running", "gauge", "Sequences in the running batch."),
    MetricSpec("num_requests_waiting", "gauge", "Sequences waiting to run, preempted ones too."),
    MetricSpec("num_waiting_prefill_tokens", "gauge", "Prompt tokens not computed yet."),
    MetricSpec("num_blocks", "gauge", "KV cache blocks."),
    MetricSpec("num_free_blocks", "gauge", "KV cache blocks never used or evictable."),
    MetricSpec("num_cached_blocks", "gauge", "Evictable KV cache blocks that hold a reusable prefix."),
    MetricSpec("kv_cache_usage_perc", "gauge", "Share of KV cache blocks held by live sequences, 0 to 1."),
    MetricSpec("oldest_waiting_s", "gauge", "Seconds the oldest waiting sequence has waited."),
    MetricSpec("weight_bytes_read", "gauge", "Bytes of weights read from files by the replica's first rank."),
    MetricSpec("prompt_tokens", "counter", "Prompt tokens admitted."),
    MetricSpec("generation_tokens", "counter", "Tokens generated."),
    MetricSpec(
        "prefill_tokens_computed", "counter", "Prompt tokens computed, recomputation after preemption included."
    ),
    MetricSpec("prefill_step_tokens", "counter", "Prompt tokens of steps that computed many of them."),
    MetricSpec("prefill_step_seconds", "counter", "Seconds of these steps: both give the prefill rate."),
    MetricSpec("prefix_cache_queries", "counter", "Prompt tokens looked up in the prefix cache."),
    MetricSpec("prefix_cache_hits", "counter", "Prompt tokens found in the prefix cache."),
    MetricSpec("num_preemptions", "counter", "Sequences preempted."),
    MetricSpec("num_steps", "counter", "Engine steps."),
    MetricSpec("request_success", "counter", "Requests that ended, by reason.", label="finished_reason"),
    EXPERT_TOKENS,
    MetricSpec("time_to_first_token_seconds", "histogram", "Arrival at the engine to the first token."),
    MetricSpec("inter_token_latency_seconds", "histogram", "Between consecutive tokens of a sequence."),
    MetricSpec("e2e_request_latency_seconds", "histogram", "Arrival at the engine to the last token."),
    MetricSpec("request_queue_time_seconds", "histogram", "Arrival at the engine to the first step."),
    MetricSpec("step_time_seconds", "histogram", "Duration of an engine step."),
)
ROUTER_LABELS = ("model", "app", "pool", "router")
ROUTER_METRICS = (  # attributes of PoolTraffic
    MetricSpec("router_requests_held", "gauge", "Sequences in the router while the pool has no replica."),
    MetricSpec("router_requests_rejected", "counter", "Sequences refused because too much waits."),
    MetricSpec("router_tokens_rejected", "counter", "Prompt tokens of the sequences refused."),
    MetricSpec("router_retries", "counter", "Sequences sent once more because a replica was lost."),
    MetricSpec("router_requests_lost", "counter", "Sequences that ended in an error because a replica was lost."),
    MetricSpec("router_requests_spilled", "counter", "Sequences sent here though predicted for the other pool."),
    MetricSpec("router_holds_ended", "counter", "Sequences that found no replica, by how that ended.", label="reason"),
)
SCALING_LABELS = ("model", "app", "pool")
SCALING_METRICS = (  # of PoolDecision; the label is a field of it or a key of one
    MetricSpec("scaling_replicas", "gauge", "Replicas running, targeted, wanted by the load, granted.", label="kind"),
    MetricSpec("scaling_signal", "gauge", "Figures the scaling policy decided on.", label="signal"),
    MetricSpec(
        "scaling_reason", "gauge", "1 for each reason of the last decision, its numbers left out.", label="reason"
    ),
)
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
SNAPSHOT_AGE = MetricSpec("snapshot_age_seconds", "gauge", "Seconds since the replica's last report.")
_FAMILIES: dict[str, type[GaugeMetricFamily | CounterMetricFamily | HistogramMetricFamily]] = {
    "gauge": GaugeMetricFamily,
    "counter": CounterMetricFamily,
    "histogram": HistogramMetricFamily,
}


@dataclass(frozen=True, slots=True)
class ReplicaSeries:
    """One replica's snapshot and the labels it is shown under."""

    labels: tuple[str, str, str, str]  # LABELS
    age_s: float
    stats: EngineStats


@dataclass(frozen=True, slots=True)
class RouterSeries:
    """One router's traffic to a pool and the labels it is shown under."""

    labels: tuple[str, str, str, str]  # ROUTER_LABELS
    traffic: PoolTraffic


@dataclass(frozen=True, slots=True)
class ScalingSeries:
    """What the scaling policy last decided for a pool and the labels it is shown under."""

    labels: tuple[str, str, str]  # SCALING_LABELS
    decision: PoolDecision

    def values(self, name: str) -> dict[str, float]:
        """Of one of SCALING_METRICS, by its extra label."""
        one = self.decision
        if name == "scaling_signal":
            return dict(one.values)
        if name == "scaling_reason":
            # A label with numbers in it would start a new series at each decision.
            return {_NUMBER.sub("N", reason): 1.0 for reason in one.reasons}
        return {"running": one.running, "target": one.target, "wanted": one.wanted, "granted": one.granted}


class _Snapshots(Collector):
    def __init__(
        self, series: Iterable[ReplicaSeries], routers: Iterable[RouterSeries], scaling: Iterable[ScalingSeries]
    ) -> None:
        self._series = tuple(series)
        self._routers = tuple(routers)
        self._scaling = tuple(scaling)

    def collect(self) -> Iterator[Metric]:
        yield _family(SNAPSHOT_AGE, LABELS, [(replica.labels, replica.age_s) for replica in self._series])
        for spec in METRICS:
            if spec is EXPERT_TOKENS:
                continue  # see _expert_text
            yield _family(spec, LABELS, [(one.labels, getattr(one.stats, spec.name)) for one in self._series])
        for spec in ROUTER_METRICS:
            yield _family(spec, ROUTER_LABELS, [(one.labels, getattr(one.traffic, spec.name)) for one in self._routers])
        for spec in SCALING_METRICS:
            yield _family(spec, SCALING_LABELS, [(one.labels, one.values(spec.name)) for one in self._scaling])


def _family(spec: MetricSpec, labels: tuple[str, ...], values: Iterable[tuple[tuple[str, ...], Any]]) -> Metric:
    """values: of each holder its labels, and a number, a histogram (None: empty), or numbers by the spec's label"""
    names = labels if spec.label is None else (*labels, spec.label)
    family = _FAMILIES[spec.kind](PREFIX + spec.name, spec.help, labels=names)
    for own, value in values:
        if isinstance(family, HistogramMetricFamily):
            if value is not None:
                family.add_metric(own, _cumulative(value), value.sum)
        elif spec.label is None:
            family.add_metric(own, value)
        else:
            for key, number in value.items():
                family.add_metric((*own, key), number)
    return family


def _cumulative(histogram: Histogram) -> list[tuple[str, float]]:
    buckets, total = [], 0
    for bound, count in zip((*map(str, histogram.bounds), "+Inf"), histogram.counts, strict=True):
        total += count
        buckets.append((bound, float(total)))
    return buckets


def render(
    series: Iterable[ReplicaSeries], routers: Iterable[RouterSeries] = (), scaling: Iterable[ScalingSeries] = ()
) -> bytes:
    """Prometheus text format, for CONTENT_TYPE_LATEST."""
    registry, series = CollectorRegistry(), tuple(series)
    registry.register(_Snapshots(series, routers, scaling))
    return generate_latest(registry) + _expert_text(series)


def _expert_text(series: Iterable[ReplicaSeries]) -> bytes:
    """The family of EXPERT_TOKENS, written here: the library takes 24 ms for a model with 26 x 64 experts in two pools,
    in which the router would answer nobody, this 1."""
    name = f"{PREFIX}{EXPERT_TOKENS.name}_total"
    lines = [f"# HELP {name} {EXPERT_TOKENS.help}", f"# TYPE {name} counter"]
    for one in series:
        model, app, pool, replica = map(_escaped, one.labels)
        before, after = f'{name}{{app="{app}",expert="', f'",model="{model}",pool="{pool}",replica="{replica}"}} '
        lines += [f"{before}{expert}{after}{count}.0" for expert, count in one.stats.expert_tokens.items()]
    return "\n".join((*lines, "")).encode("utf-8")


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
