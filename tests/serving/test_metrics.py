"""The Prometheus text: every metric once, values and labels as reported, stale replicas gone."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from app.protocol import EngineStats, Histogram
from app.serving import monitor as monitor_module
from app.serving.board import PoolDecision
from app.serving.metrics import (
    METRICS,
    PREFIX,
    ROUTER_METRICS,
    SCALING_METRICS,
    ReplicaSeries,
    RouterSeries,
    ScalingSeries,
    render,
)
from app.serving.monitor import Monitor, PoolTraffic, ReplicaReport, RouterReport
from app.serving.routing import PoolLimits

STATS = EngineStats(
    num_requests_running=2,
    num_blocks=10,
    num_free_blocks=4,
    generation_tokens=50,
    request_success={"stop": 3, "length": 1},
    time_to_first_token_seconds=Histogram((0.1, 1.0), (2, 1, 4), 9.5),
)
LABELS = ("m", "pools", "short", "r1")


def samples(*series: ReplicaSeries) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    text = render(series).decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def key(name: str, **extra: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    labels = {"model": "m", "app": "pools", "pool": "short", "replica": "r1", **extra}
    return PREFIX + name, tuple(sorted(labels.items()))


def test_values_and_labels() -> None:
    got = samples(ReplicaSeries(LABELS, 0.5, STATS))
    assert got[key("num_requests_running")] == 2
    assert got[key("kv_cache_usage_perc")] == pytest.approx(0.6)
    assert got[key("generation_tokens_total")] == 50
    assert got[key("request_success_total", finished_reason="stop")] == 3
    assert got[key("snapshot_age_seconds")] == 0.5
    assert got[key("time_to_first_token_seconds_bucket", le="1.0")] == 3
    assert got[key("time_to_first_token_seconds_bucket", le="+Inf")] == 7
    assert got[key("time_to_first_token_seconds_count")] == 7
    assert got[key("time_to_first_token_seconds_sum")] == 9.5


def test_replicas_keep_their_own_series() -> None:
    got = samples(ReplicaSeries(LABELS, 0.0, STATS), ReplicaSeries(("m", "pools", "long", "r2"), 0.0, EngineStats()))
    assert got[key("num_requests_running")] == 2
    assert got[key("num_requests_running", pool="long", replica="r2")] == 0


def test_experts_are_counted_by_layer_whatever_the_labels_hold() -> None:
    labels = ('m "x"\\n\n', "pools", "short", "r1")
    stats = EngineStats(expert_tokens={"1.0": 5, "1.1": 0, "26.63": 10**15})
    got = samples(ReplicaSeries(labels, 0.0, stats), ReplicaSeries(LABELS, 0.0, EngineStats(expert_tokens={"1.0": 7})))
    for expert, count in stats.expert_tokens.items():
        assert got[key("expert_tokens_total", model=labels[0], expert=expert)] == count
    assert got[key("expert_tokens_total", expert="1.0")] == 7


def test_no_replica_still_declares_every_metric() -> None:
    text = render([]).decode()
    for spec in (*METRICS, *ROUTER_METRICS, *SCALING_METRICS):
        assert f"# TYPE {PREFIX}{spec.name}" in text


def test_every_field_of_engine_stats_is_declared_once() -> None:
    names = [spec.name for spec in METRICS]
    assert len(names) == len(set(names))
    assert {field.name for field in fields(EngineStats)} <= set(names)


def test_a_routers_traffic() -> None:
    assert {field.name for field in fields(PoolTraffic)} == {spec.name for spec in ROUTER_METRICS}
    traffic = PoolTraffic(router_requests_held=3, router_retries=2, router_holds_ended={"max_hold": 4})
    text = render([], [RouterSeries(("m", "pools", "long", "x"), traffic)]).decode()
    labels = '{app="pools",model="m",pool="long",router="x"}'
    assert f"{PREFIX}router_requests_held{labels} 3.0" in text
    assert f"{PREFIX}router_retries_total{labels} 2.0" in text
    ended = 'router_holds_ended_total{app="pools",model="m",pool="long",reason="max_hold",router="x"}'
    assert f"{PREFIX}{ended} 4.0" in text


def test_decisions_of_the_scaling_policy() -> None:
    reasons = ("queue at 1.5 x the target; the load needs 3", "over the budget of 2")
    decision = PoolDecision(1, 1, wanted=3, granted=2, reasons=reasons, values={"waiting_seqs": 12.0})
    text = render([], scaling=[ScalingSeries(("m", "pools", "short"), decision)]).decode()
    for kind, value in (("running", 1), ("target", 1), ("wanted", 3), ("granted", 2)):
        assert f'{PREFIX}scaling_replicas{{app="pools",kind="{kind}",model="m",pool="short"}} {value}.0' in text
    assert f'{PREFIX}scaling_signal{{app="pools",model="m",pool="short",signal="waiting_seqs"}} 12.0' in text
    for reason in ("queue at N x the target; the load needs N", "over the budget of N"):
        assert f'{PREFIX}scaling_reason{{app="pools",model="m",pool="short",reason="{reason}"}} 1.0' in text


def report(replica_id: str) -> ReplicaReport:
    return ReplicaReport("short", replica_id, PoolLimits(10, 20, "v"), STATS)


@pytest.mark.asyncio
async def test_monitor_drops_stale_reports_and_keeps_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(monitor_module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monitor = Monitor()
    await monitor.report(report("r1"))
    clock[0] += 6.0
    await monitor.report(report("r2"))
    clock[0] += 3.0
    snapshot = await monitor.snapshot()
    assert sorted((age_s, held.replica_id) for age_s, held in snapshot.replicas) == [(3.0, "r2"), (9.0, "r1")]
    clock[0] += 2.0
    assert [held.replica_id for _, held in (await monitor.snapshot()).replicas] == ["r2"]
    clock[0] += 60.0
    assert (await monitor.snapshot()).replicas == ()
    assert (await monitor.snapshot()).limits["short"].max_model_len == 10


@pytest.mark.asyncio
async def test_monitor_keeps_what_routers_tell_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(monitor_module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monitor = Monitor()
    first, second = (RouterReport(name, {"short": PoolTraffic()}) for name in "ab")
    assert (await monitor.exchange(first)).routers == (first,)
    clock[0] += 6.0
    assert (await monitor.exchange(second)).routers == (first, second)
    clock[0] += 6.0
    assert (await monitor.snapshot()).routers == (second,)
