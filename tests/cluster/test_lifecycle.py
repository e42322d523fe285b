"""Requests that end early, and what the server says about itself afterwards."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import Any

import httpx
import pytest

from tests.cluster.conftest import ANSWER_TIMEOUT_S, Scrape, Server, eventually, settle

pytestmark = pytest.mark.timeout(400)

LONG_ANSWER: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 2000, "ignore_eos": True}
ENDLESS_ANSWER: dict[str, Any] = {**LONG_ANSWER, "max_tokens": 15_000}  # many times longer than any deadline here


def post(server: Server, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=ANSWER_TIMEOUT_S)


async def start_and_leave(server: Server, count: int, *, stream: bool) -> None:
    """Open `count` requests at once, wait until they run, and drop their connections."""

    def num_running() -> float:
        seen = Scrape(server.url)
        return seen.total("num_requests_running") + seen.total("num_requests_waiting")

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=ANSWER_TIMEOUT_S, limits=limits) as client:

        async def one(index: int) -> None:
            body = {**LONG_ANSWER, "prompt": f"Story {index}", "stream": stream}
            async with client.stream("POST", f"{server.url}/v1/completions", json=body) as response:
                async for _ in response.aiter_lines():
                    pass

        tasks = [asyncio.create_task(one(index)) for index in range(count)]
        await asyncio.to_thread(eventually, lambda: num_running() == count)
        assert not any(task.done() for task in tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize(("stream", "count"), [(True, 50), (False, 8)], ids=["streams", "whole"])
def test_leaving_frees_every_block_without_new_traffic(server: Server, stream: bool, count: int) -> None:
    def are_blocks_free(seen: Scrape) -> bool:
        return seen.is_idle and seen.values("num_free_blocks") == num_blocks

    num_blocks = settle(server.url).values("num_blocks")
    assert len(num_blocks) == 2
    for _ in range(2 if stream else 1):
        asyncio.run(start_and_leave(server, count, stream=stream))
        # `longspan bench scenario cancel` holds the second; a busy machine and reports each second need more.
        eventually(lambda: are_blocks_free(Scrape(server.url)))


def test_deadline_before_the_first_byte_is_504(server: Server) -> None:
    for stream in (False, True):
        response = post(server, **LONG_ANSWER, stream=stream, timeout_s=0.001)
        assert response.status_code == 504, response.text
        assert response.json()["error"]["code"] == "deadline_exceeded"
        assert int(response.headers["retry-after"]) >= 1


def test_deadline_of_a_whole_answer_is_504(server: Server) -> None:
    def count(seen: Scrape, reason: str) -> float:
        return seen.total("request_success_total", finished_reason=reason)

    def num_late(seen: Scrape) -> float:
        return count(seen, "deadline") + count(seen, "abort")

    before = settle(server.url)
    for _ in range(5):  # the engine ends it, unless a busy machine keeps it from its clock for a second
        ended = num_late(Scrape(server.url)) + 1
        assert post(server, **ENDLESS_ANSWER, timeout_s=2.0).status_code == 504
        eventually(lambda ended=ended: num_late(Scrape(server.url)) == ended)  # type: ignore[misc]
        if count(Scrape(server.url), "deadline") > count(before, "deadline"):
            return
    raise AssertionError("five late requests were counted as aborted")


def test_deadline_in_mid_stream_is_an_error_event(server: Server) -> None:
    for timeout_s in (2.0, 8.0, 30.0):  # a busy machine may need longer to begin
        response = post(server, **ENDLESS_ANSWER, stream=True, timeout_s=timeout_s)
        if response.status_code != 504:
            break
    assert response.status_code == 200
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    assert len(events) > 1 and events[0]["choices"][0]["text"]
    assert events[-1]["error"]["code"] == "deadline_exceeded"
    assert "[DONE]" not in response.text


def test_metrics_after_traffic(server: Server) -> None:
    before = settle(server.url)
    response = post(server, prompt="Hello there", max_tokens=12, ignore_eos=True)
    usage = response.json()["usage"]
    assert usage["completion_tokens"] == 12
    after = settle(server.url)

    def grown(name: str, **labels: str) -> float:
        return after.total(name, **labels) - before.total(name, **labels)

    assert grown("request_success_total", finished_reason="length") == 1
    assert grown("generation_tokens_total") == 12
    assert grown("prompt_tokens_total") == usage["prompt_tokens"]
    assert grown("time_to_first_token_seconds_count") == 1
    for pool in ("short", "long"):
        assert after.total("num_blocks", pool=pool) > 0
        assert 0.0 <= after.total("snapshot_age_seconds", pool=pool) < 10.0
        assert after.total("kv_cache_usage_perc", pool=pool) == 0.0


def test_no_prompt_reaches_a_log(server: Server) -> None:
    secret = "xyzzy-plugh-4711"
    for body in ({"prompt": secret, "max_tokens": 2}, {"prompt": secret, "max_tokens": 0}, {"prompt": [secret]}):
        post(server, **body)
    paths = [path for path in server.log_dir.rglob("*") if path.is_file()]
    assert paths
    for path in paths:
        with suppress(FileNotFoundError):  # Ray may have taken it away meanwhile
            assert secret.encode() not in path.read_bytes(), path
