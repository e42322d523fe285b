"""Percentiles, buckets, goodput."""

from __future__ import annotations

import math
from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.bench.client import RequestRecord
from app.bench.load import LoadRun
from app.bench.summary import Latency, Slo, percentile, summarize
from app.bench.traffic import PlannedRequest


def record(
    at_s: float,
    *,
    prompt: int = 100,
    tokens: int = 11,
    ttft_s: float = 0.1,
    step_s: float = 0.02,
    error: str | None = None,
) -> RequestRecord:
    times = array("d", (at_s + ttft_s + index * step_s for index in range(tokens)))
    return RequestRecord(
        PlannedRequest(at_s, prompt, tokens), sent_s=at_s + 0.001, event_times_s=times, ended_s=times[-1] + 0.005,
        output_tokens=tokens, cached_tokens=prompt // 2, error=error,
    )  # fmt: skip


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50), st.floats(0, 100))
def test_percentile_is_numpys(values: list[float], percent: float) -> None:
    expected = float(np.percentile(values, percent))
    assert percentile(sorted(values), percent) == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_no_values() -> None:
    assert math.isnan(percentile([], 50))
    assert Latency.of([None, None]) is None


def test_latencies_of_a_request() -> None:
    one = record(2.0)
    assert one.ttft_s == pytest.approx(0.1)
    assert one.inter_token_s == pytest.approx(0.02)
    assert one.e2e_s == pytest.approx(0.305)


def test_inter_token_time_counts_tokens_not_events() -> None:
    coalesced = RequestRecord(
        PlannedRequest(0.0, 1, 21), event_times_s=array("d", [0.1, 0.3, 0.5]), ended_s=0.5, output_tokens=21
    )
    assert coalesced.inter_token_s == pytest.approx(0.4 / 20)


def test_buckets_split_by_planned_cost() -> None:
    records = [record(0, prompt=89), record(0, prompt=90), record(0, prompt=500), record(0, prompt=90, error="timeout")]
    summary = summarize(LoadRun(records, [], wall_s=2.0, client_cpu_s=0.1), Slo(), [100, 400])
    assert [(bucket.name, bucket.requests, bucket.failed) for bucket in summary.buckets] == [
        ("<= 100 tokens", 1, 0),
        ("<= 400 tokens", 2, 1),
        ("> 400 tokens", 1, 0),
    ]
    assert summary.errors == {"timeout": 1}
    assert summary.requests_per_s == pytest.approx(1.5)
    assert summary.output_tokens_per_s == pytest.approx(3 * 11 / 2)
    assert summary.cached_prompt_share == pytest.approx(0.5, abs=0.01)
    assert summary.send_lag is not None
    assert summary.send_lag.mean_s == pytest.approx(0.001)


@pytest.mark.parametrize(
    ("slo", "good"),
    [
        (Slo(), 3),
        (Slo(ttft_s=0.15), 2),
        (Slo(inter_token_s=0.03), 2),
        (Slo(ttft_s=0.15, inter_token_s=0.03), 1),
    ],
)
def test_goodput_needs_every_target_and_no_error(slo: Slo, good: int) -> None:
    records = [record(0), record(0, ttft_s=0.2), record(0, step_s=0.05), record(0, error="http_429")]
    summary = summarize(LoadRun(records, [], wall_s=2.0, client_cpu_s=0.0), slo, [])
    assert summary.good_share == pytest.approx(good / 4)
    assert summary.goodput_per_s == pytest.approx(good / 2)
    assert [(bucket.name, bucket.good) for bucket in summary.buckets] == [("all", good)]
