"""Pools that follow their load on real Serve. Bounds are generous: `longspan bench scenario scale-up` measures."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from itertools import groupby
from typing import Any

import httpx
import pytest
import ray
import yaml

from app.bench.scale_up import Watch, from_zero, overload, watching
from app.bench.server import LocalServer
from app.serving.autoscaling import CLOSE_S
from app.serving.signals import ARRIVAL_WINDOW_S
from tests.cluster.conftest import ANSWER_TIMEOUT_S, ROOT, START_TIMEOUT_S, eventually

CONFIG = ROOT / "serve_configs" / "autoscale.yaml"
DECISION_S = 60.0
RUNNING_S = 120.0
# A busy machine computes and starts slowly: nothing is refused for that here, and no start given up again.
ROUTER = {"short": {"max_ttft_s": 600.0}, "long": {"max_ttft_s": 600.0}, "max_hold_s": 200.0}
DOWN_WINDOW_S = 12.0
LONG = {"prompt": [10] * 2500, "max_tokens": 2, "temperature": 0}
SHORT = {"prompt": "Good morning", "max_tokens": 2}

pytestmark = pytest.mark.timeout(600)


def local_server(*, budget: float = 3, long: dict[str, Any] | None = None, **pools: dict[str, Any]) -> LocalServer:
    """serve_configs/autoscale.yaml with other settings for pools, and `long` in place of the long pool's args."""
    document = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    (args,) = (application["args"] for application in document["applications"] if application["name"] == "pools")
    settings = {name: {**args["scaling"][name], **pools.get(f"{name}_pool", {})} for name in ("short", "long")}
    changed = {"scaling": {**settings, "budget": budget}, "long": long or args["long"]}
    return LocalServer(CONFIG, args={"pools": changed, "router": {"settings": ROUTER}}, start_timeout_s=START_TIMEOUT_S)


def controller_log(server: LocalServer) -> str:
    (path,) = server.log_path.parent.glob("ray/session_2*/logs/serve/controller_[0-9]*.log")
    return path.read_text(encoding="utf-8")


def decisions(server: LocalServer, pool: str) -> list[dict[str, Any]]:
    """What the policy logged."""
    lines = [line for line in controller_log(server).splitlines() if '"event": "scaling"' in line]
    return [one for line in lines if (one := json.loads(line[line.index("{") :]))["pool"] == pool]


def changes(server: LocalServer, pool: str) -> list[dict[str, Any]]:
    """Each once, however many ticks Serve takes to follow."""
    changing = [one for one in decisions(server, pool) if one["granted"] != one["values"]["target"]]
    return [next(same) for _, same in groupby(changing, key=lambda one: one["granted"])]


def test_overload_starts_a_second_replica_which_goes_again() -> None:
    async def run(server: LocalServer) -> None:
        async with watching(server.ray_address) as watch:
            result = await overload(server.url, watch)
        assert result.decision_s < DECISION_S
        assert result.running_s < RUNNING_S
        assert result.num_failed == 0
        assert {sample.granted for sample in watch.samples["short"]} == {1, 2}
        assert {sample.granted for sample in watch.samples["long"]} == {1}

    def are_shown(server: LocalServer) -> bool:
        metrics = httpx.get(f"{server.url}/metrics", timeout=ANSWER_TIMEOUT_S).text
        wanted = 'longspan:scaling_replicas{app="pools",kind="wanted",model="longspan-tiny",pool="short"}'
        return wanted in metrics and 'signal="arrival_seqs_per_s"' in metrics

    with local_server(short_pool={"down_window_s": DOWN_WINDOW_S}, long_pool={"min_replicas": 1}) as server:
        asyncio.run(run(server))
        eventually(lambda: are_shown(server))
        up, down = changes(server, "short")
    assert (up["granted"], down["granted"]) == (2, 1)
    # By sequences or by prompt tokens, whichever passed its target first: chance decides.
    assert "queue at" in up["reasons"][0] and up["values"]["waiting_seqs"] > 0
    assert "fitted 1" in down["reasons"][0]


def http_client(server: LocalServer) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=server.url, timeout=2 * ANSWER_TIMEOUT_S)


async def wait_for_zero(watch: Watch) -> None:
    await watch.until("long", lambda sample: sample.running + sample.granted == 0, time.perf_counter())


@pytest.mark.full
def test_to_zero_and_back_without_a_lost_request() -> None:
    async def run(server: LocalServer) -> None:
        async with watching(server.ray_address) as watch, http_client(server) as client:
            result = await from_zero(server.url, watch)
            assert result.first_token_s is not None
            assert result.decision_s < DECISION_S and result.start_s < RUNNING_S
            # About when the pool closes and stops: whichever it meets, a request is answered.
            for pause_s in (-1.0, 1.0):
                await asyncio.sleep(ARRIVAL_WINDOW_S + CLOSE_S + pause_s)
                answer = await client.post("/v1/completions", json=LONG)
                assert answer.status_code == 200, answer.text
            await wait_for_zero(watch)
            await asyncio.sleep(2.0)
            assert (await client.get("/ready")).status_code == 200
            # Refused, as a start is known to take longer; it has begun when the client comes back.
            answer = await client.post("/v1/completions", json={**LONG, "timeout_s": 0.5})
            assert answer.status_code == 503, answer.text
            assert int(answer.headers["retry-after"]) >= 1
            await watch.until("long", lambda sample: sample.running == 1, time.perf_counter())
            assert {sample.granted for sample in watch.samples["short"]} == {1}

    with local_server(long_pool={"down_window_s": 1}) as server:
        asyncio.run(run(server))
        # Each start was the policy's: none by Serve for a request that waited in a handle.
        started = [one for one in changes(server, "long") if "wake" in str(one["reasons"])]
        # Of replicas: Serve may say twice that it scales up, as the policy says it until Serve has followed.
        lines = controller_log(server).splitlines()
        num_started = sum("Starting Replica(" in line and "deployment='long'" in line for line in lines)
        # The first and the last; those between met the pool open or closed.
        assert 2 <= num_started <= len(started)


async def until_answered(server: LocalServer) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=30) as client:
        for _ in range(1200):
            server.check_alive()
            try:
                if (await client.post("/v1/completions", json=SHORT)).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            await asyncio.sleep(0.1)
    pytest.fail("no answer")


@pytest.mark.full
def test_a_replica_no_node_can_place_is_explained_and_gives_its_budget_back() -> None:
    async def run(server: LocalServer) -> None:
        await until_answered(server)
        async with watching(server.ray_address) as watch, http_client(server) as client:
            await wait_for_zero(watch)
            answer = await client.post("/v1/completions", json=LONG)
            assert answer.status_code == 503, answer.text
            assert int(answer.headers["retry-after"]) >= 1
            # The budget of two is free for the other pool.
            result = await overload(server.url, watch)
            assert result.num_failed == 0
            metrics = (await client.get("/metrics")).text
        assert 'pool="long",reason="no node placed more than N in N s; next try in N s"' in metrics

    server = local_server(
        budget=2,
        short_pool={"down_window_s": DOWN_WINDOW_S},
        long_pool={"start_timeout_s": 5, "retry_s": 300},
        long={"num_cpus": 64},
    )
    try:
        server.launch()
        asyncio.run(run(server))
        first = next(one for one in changes(server, "long") if one["granted"] == 0)
        assert "no node placed more than 0 in 5 s" in str(first["reasons"])
        assert max(one["granted"] for one in decisions(server, "short")) == 2
    finally:
        server.stop()


@pytest.mark.full
def test_settings_change_while_it_runs() -> None:
    """`serve deploy` with other settings of the monitor: nothing restarts, and the pools follow. A replica that must go
    first ends what it runs, and is shown until then.
    """
    stream = {"prompt": "Good morning", "max_tokens": 2500, "ignore_eos": True}

    def deploy(server: LocalServer, short: dict[str, int]) -> None:
        document = yaml.safe_load((server.log_path.parent / "config.yaml").read_text(encoding="utf-8"))
        (pools,) = (application for application in document["applications"] if application["name"] == "pools")
        settings = {**pools["args"]["scaling"], "short": short}
        pools["deployments"] = [{"name": "monitor", "user_config": settings}]
        path = server.log_path.parent / "changed.yaml"
        path.write_text(yaml.safe_dump(document), encoding="utf-8")
        dashboard = ray.init(ignore_reinit_error=True).dashboard_url
        command = [sys.executable, "-m", "ray.serve.scripts", "deploy", "-a", f"http://{dashboard}", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    async def run(server: LocalServer) -> None:
        async with watching(server.ray_address) as watch:
            await watch.until("short", lambda sample: sample.running == sample.granted == 1, time.perf_counter())
            await asyncio.to_thread(deploy, server, {"min_replicas": 2, "max_replicas": 2})
            await watch.until("short", lambda sample: sample.running == sample.granted == 2, time.perf_counter())
            async with http_client(server) as client, asyncio.TaskGroup() as group:
                answers = [group.create_task(client.post("/v1/completions", json=stream)) for _ in range(8)]
                await asyncio.to_thread(deploy, server, {"max_replicas": 1})
                await watch.until("short", lambda sample: sample.running == sample.granted == 1, time.perf_counter())
                shown = 'model="longspan-tiny",pool="short",signal="draining"}'
                while f"{shown} 1.0" not in (metrics := (await client.get("/metrics")).text):
                    assert shown in metrics and not all(answer.done() for answer in answers)
                    await asyncio.sleep(0.2)
            assert [answer.result().status_code for answer in answers] == [200] * 8

    with local_server(long_pool={"min_replicas": 1}) as server:
        asyncio.run(run(server))
        log = controller_log(server)
        assert log.count("Starting Replica") == 5  # router, monitor, long, and two of short: none twice
