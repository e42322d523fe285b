"""Records of a load run -> percentiles per length bucket, goodput, throughput, errors by kind."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from app.bench.client import RequestRecord
from app.bench.load import LoadRun

PERCENTILES = (50, 90, 95, 99)


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear interpolation between the closest ranks of sorted `values` (numpy's default); NaN if there are none."""
    if not values:
        return math.nan
    rank = (len(values) - 1) * percent / 100
    low = math.floor(rank)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (rank - low)


@dataclass(frozen=True, slots=True)
class Latency:
    """Percentiles of one latency, in seconds."""

    count: int
    mean_s: float
    percentiles_s: dict[str, float]  # p50, p90, ...

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Latency | None:
        """None if there are no values."""
        known = sorted(value for value in values if value is not None)
        if not known:
            return None
        return cls(len(known), sum(known) / len(known), {f"p{p}": percentile(known, p) for p in PERCENTILES})


@dataclass(frozen=True, slots=True)
class Slo:
    """Latency targets in seconds; None means that one does not count."""

    ttft_s: float | None = None
    inter_token_s: float | None = None

    def is_met(self, record: RequestRecord) -> bool:
        if record.error is not None:
            return False
        return _within(record.ttft_s, self.ttft_s) and _within(record.inter_token_s, self.inter_token_s)


def _within(value: float | None, limit: float | None) -> bool:
    # An answer of one token has no inter-token time to miss.
    return limit is None or value is None or value <= limit


@dataclass(frozen=True, slots=True)
class BucketSummary:
    """Requests whose prompt + asked output tokens fall in one bucket."""

    name: str
    requests: int
    failed: int
    good: int  # within the SLO
    ttft: Latency | None
    inter_token: Latency | None  # of each request's mean
    event_gap: Latency | None  # between consecutive streamed events
    e2e: Latency | None

    @classmethod
    def of(cls, name: str, records: Sequence[RequestRecord], slo: Slo) -> BucketSummary:
        succeeded = [record for record in records if record.error is None]
        return cls(
            name=name,
            requests=len(records),
            failed=len(records) - len(succeeded),
            good=sum(slo.is_met(record) for record in records),
            ttft=Latency.of(record.ttft_s for record in succeeded),
            inter_token=Latency.of(record.inter_token_s for record in succeeded),
            event_gap=Latency.of(gap for record in succeeded for gap in _gaps(record.event_times_s)),
            e2e=Latency.of(record.e2e_s for record in succeeded),
        )


def _gaps(times_s: Sequence[float]) -> Iterable[float]:
    return (later - earlier for earlier, later in pairwise(times_s))


@dataclass(frozen=True, slots=True)
class LoadSummary:
    wall_s: float
    requests: int
    succeeded: int
    errors: dict[str, int]  # by kind
    requests_per_s: float
    output_tokens_per_s: float
    prompt_tokens_per_s: float
    cached_prompt_share: float
    goodput_per_s: float  # requests within the SLO
    good_share: float  # of all requests sent; a failed one is not good
    send_lag: Latency | None  # how late requests left: the client's own fault
    client_cpu_share: float  # of one core
    buckets: list[BucketSummary]


def summarize(run: LoadRun, slo: Slo, bucket_edges: Sequence[int]) -> LoadSummary:
    """`bucket_edges` are upper bounds in prompt + asked output tokens; the last bucket is open."""
    records = run.records
    succeeded = [record for record in records if record.error is None]
    good = sum(slo.is_met(record) for record in records)
    prompt_tokens = sum(record.planned.prompt_tokens for record in succeeded)
    return LoadSummary(
        wall_s=run.wall_s,
        requests=len(records),
        succeeded=len(succeeded),
        errors=dict(Counter(record.error for record in records if record.error is not None).most_common()),
        requests_per_s=len(succeeded) / run.wall_s,
        output_tokens_per_s=sum(record.output_tokens for record in succeeded) / run.wall_s,
        prompt_tokens_per_s=prompt_tokens / run.wall_s,
        cached_prompt_share=sum(record.cached_tokens for record in succeeded) / max(1, prompt_tokens),
        goodput_per_s=good / run.wall_s,
        good_share=good / max(1, len(records)),
        send_lag=Latency.of(record.sent_s - record.planned.at_s for record in records),
        client_cpu_share=run.client_cpu_s / run.wall_s,
        buckets=_buckets(records, slo, sorted(bucket_edges)),
    )


def _buckets(records: Sequence[RequestRecord], slo: Slo, edges: Sequence[int]) -> list[BucketSummary]:
    buckets = []
    for low, high in zip((0, *edges), (*edges, math.inf), strict=True):
        name = f"<= {high} tokens" if high != math.inf else f"> {low} tokens" if low else "all"
        inside = [r for r in records if low < r.planned.prompt_tokens + r.planned.output_tokens <= high]
        if inside:
            buckets.append(BucketSummary.of(name, inside, slo))
    return buckets
