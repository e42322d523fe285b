"""A pool of two replicas on real Serve: bursts spread, a killed replica's requests go on, too many are refused."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from app.bench.affinity import burst
from app.bench.client import Client, PromptMaker, RequestRecord
from app.bench.replica_kill import kill_under_load
from app.bench.traffic import PlannedRequest
from tests.cluster.conftest import ANSWER_TIMEOUT_S, Scrape, Server, eventually

pytestmark = pytest.mark.timeout(400)

APP = "two-replicas"
MAX_NUM_SEQS = 4
MAX_WAITING_SEQS = 8
ROOM = 2 * MAX_WAITING_SEQS  # what two replicas take in any case; more, once some of it is in their batches
OUTPUT_TOKENS = 150  # long enough that a replica still has requests waiting when it is killed


@pytest.fixture(scope="module")
def pools(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a second router with pools of its own, beside what the cluster serves already."""
    engine = {"device": "cpu", "num_threads": 1, "max_model_len": 4096, "max_num_seqs": MAX_NUM_SEQS}
    short: dict[str, Any] = {"num_cpus": 0.1, "num_replicas": 2, "engine": engine}
    # Tokens that wait, and replicas that start, may take a busy machine long: only the number bounds what is let in.
    bounds = {"max_waiting_seqs": MAX_WAITING_SEQS, "max_ttft_s": 600.0}
    settings = {"short": bounds, "spills": False, "max_hold_s": 140.0}
    config = yaml.safe_load(server.config_file.read_text())
    config["applications"] += [
        {
            "name": f"{APP}-router",
            "route_prefix": f"/{APP}",
            "import_path": "app.main:router",
            "args": {"num_cpus": 0.1, "versions": [{"app": APP}], "settings": settings},
        },
        {
            "name": APP,
            "route_prefix": None,
            "import_path": "app.main:pools",
            "args": {"short": short, "long": {"num_cpus": 0.1, "engine": {"device": "cpu", "num_threads": 1}}},
        },
    ]
    path: Path = tmp_path_factory.mktemp("routing") / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    url = f"{server.url}/{APP}"
    server.deploy(path)
    try:
        yield url
    finally:
        server.deploy(server.config_file)


def until_both_serve(server: Server, url: str) -> None:
    """Wait for two idle replicas that the router sends to: it leaves one out that Serve does not yet send to."""

    def served() -> dict[str, float]:
        seen = Scrape(url)
        counts = seen.values("request_success_total", pool="short")
        return {replica: counts.get(replica, 0.0) for replica in seen.values("num_blocks", pool="short")}

    def are_two() -> bool:
        with suppress(httpx.HTTPError):  # the route is not there yet
            return len(served()) == 2 == len(server.replicas(APP, "short"))
        return False

    def have_both_served() -> bool:
        body = {"prompt": [7], "max_tokens": 1}
        httpx.post(f"{url}/v1/completions", json=body, timeout=ANSWER_TIMEOUT_S).raise_for_status()
        now = served()
        return len(now) == 2 and all(count > before.get(replica, 0.0) for replica, count in now.items())

    eventually(are_two, timeout_s=150.0)
    before = served()
    eventually(have_both_served, timeout_s=150.0)
    eventually(lambda: Scrape(url).is_idle)


def test_a_burst_with_a_shared_prefix_spreads_and_hits(server: Server, pools: str) -> None:
    until_both_serve(server, pools)
    run = asyncio.run(burst(pools, "short", 2, seed=1, num_prompts=ROOM))
    assert run.failed == 0
    # At most a batch of each replica begins before the prefix is cached there.
    assert run.max_over_mean <= 1.5 and run.cached_share >= 0.9 * (ROOM - 2 * MAX_NUM_SEQS) / ROOM, run


def test_too_many_are_refused_and_the_others_finish(server: Server, pools: str) -> None:
    until_both_serve(server, pools)
    planned = PlannedRequest(0.0, 64, 80)  # long enough that few end while the others arrive

    async def send(count: int) -> list[RequestRecord]:
        records, prompts = [RequestRecord(planned) for _ in range(count)], PromptMaker(None, stream=True, seed=2)
        async with Client(pools, timeout_s=120.0) as client:
            await asyncio.gather(*(client.send(prompts.body(planned), record, 0.0) for record in records))
        return records

    records = asyncio.run(send(60))
    ends = Counter(record.error for record in records)
    assert set(ends) == {None, "http_429"} and ROOM <= ends[None] < 60
    assert all(1.0 <= (record.retry_after_s or 0.0) <= 60.0 for record in records if record.error is not None)
    assert all(record.output_tokens == planned.output_tokens for record in records if record.error is None)
    # The queue is empty, and the router has heard of it: as many go in as before.
    eventually(lambda: Scrape(pools).is_idle)
    assert Counter(record.error for record in asyncio.run(send(ROOM))) == {None: ROOM}


def test_what_a_killed_replica_had_not_begun_goes_on_elsewhere(server: Server, pools: str) -> None:
    # As many as are taken in any case, of which eight run at once.
    load = {"num_streams": ROOM - 4, "num_whole": 4, "output_tokens": OUTPUT_TOKENS, "num_begun": 5}
    num_retries = 0.0
    for seed in range(3, 6):
        until_both_serve(server, pools)
        victim = server.replicas(APP, "short")[0]
        run = asyncio.run(kill_under_load(pools, lambda victim=victim: victim, seed=seed, **load))  # type: ignore[misc]
        assert run.is_passed, run
        assert run.begun.get("stream_error:unavailable", 0) + run.begun.get("done", 0) >= 5
        until_both_serve(server, pools)  # Serve has replaced it, and the router has reported meanwhile
        if num_retries := Scrape(pools).total("router_retries_total"):
            break
    assert num_retries >= 1, "Serve sent on what had not reached the replica, three times"


@pytest.mark.full
def test_requests_wait_for_the_pools_replicas_to_come_back(server: Server, pools: str) -> None:
    until_both_serve(server, pools)
    first, second = server.replicas(APP, "short")

    def kill_both() -> Any:
        first.kill()
        return second

    run = asyncio.run(
        kill_under_load(pools, kill_both, seed=4, num_streams=9, num_whole=3, output_tokens=OUTPUT_TOKENS)
    )
    assert run.is_passed, run
    assert sum(run.not_begun.values()) + sum(run.whole.values()) > 0
    until_both_serve(server, pools)
