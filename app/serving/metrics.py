"""Every metric, declared once, and the Prometheus text made of the monitors' snapshots."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

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


METRICS = (
    MetricSpec("num_requests_running", "gauge", "Sequences in the running batch."),
    MetricSpec("num_requests_waiting", "gauge", "Sequences waiting for their first step."),
    MetricSpec("num_waiting_prefill_tokens", "gauge", "Prompt tokens of waiting sequences not computed yet."),
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
    MetricSpec("expert_tokens", "counter", "Tokens routed to each expert, as layer.expert.", label="expert"),
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
SNAPSHOT_AGE = "snapshot_age_seconds"  # gauge: time since a replica's snapshot reached its monitor


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
        age = GaugeMetricFamily(PREFIX + SNAPSHOT_AGE, "Seconds since the replica's last report.", labels=LABELS)
        for replica in self._series:
            age.add_metric(replica.labels, replica.age_s)
        yield age
        replicas = [(replica.labels, replica.stats) for replica in self._series]
        yield from (_family(spec, LABELS, replicas) for spec in METRICS)
        routers = [(router.labels, router.traffic) for router in self._routers]
        yield from (_family(spec, ROUTER_LABELS, routers) for spec in ROUTER_METRICS)
        for spec in SCALING_METRICS:
            gauge = GaugeMetricFamily(PREFIX + spec.name, spec.help, labels=(*SCALING_LABELS, str(spec.label)))
            for pool in self._scaling:
                for label, value in pool.values(spec.name).items():
                    gauge.add_metric((*pool.labels, label), value)
            yield gauge


def _family(
    spec: MetricSpec, labels: tuple[str, ...], sources: Iterable[tuple[tuple[str, ...], EngineStats | PoolTraffic]]
) -> Metric:
    """One metric of every source, which is given with the values of `labels`."""
    name = PREFIX + spec.name
    if spec.kind == "histogram":
        histogram = HistogramMetricFamily(name, spec.help, labels=labels)
        for shown, source in sources:
            value = getattr(source, spec.name)
            if value is not None:
                histogram.add_metric(shown, _cumulative(value), value.sum)
        return histogram
    family = (GaugeMetricFamily if spec.kind == "gauge" else CounterMetricFamily)(
        name, spec.help, labels=labels if spec.label is None else (*labels, spec.label)
    )
    for shown, source in sources:
        value = getattr(source, spec.name)
        for extra, number in [((), value)] if spec.label is None else [((key,), n) for key, n in value.items()]:
            family.add_metric((*shown, *extra), number)
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
    registry = CollectorRegistry()
    registry.register(_Snapshots(series, routers, scaling))
    return generate_latest(registry)
