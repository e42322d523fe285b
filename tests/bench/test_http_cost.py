"""Streams that start together, against a local server: their rate and moments, and that none may fail."""

from __future__ import annotations

import asyncio

import pytest

from app.bench.http_cost import StreamsRun, run_streams
from app.errors import UnavailableError
from tests.bench.sse_server import SseServer, serving


def streams(server: SseServer) -> StreamsRun:
    async def run() -> StreamsRun:
        async with serving(server):
            return await run_streams(server.url, 4, [5, 4, 6, 5, 3, 4, 2, 3], seed=0)

    return asyncio.run(run())


def test_streams_are_timed_together() -> None:
    server = SseServer(event_delay_s=0.02)
    run = streams(server)
    (first_s, last_first_s), (end_s, last_end_s) = run.first_token_s, run.ended_s
    assert 0.0 < first_s <= last_first_s < end_s <= last_end_s
    assert last_end_s <= 4 * 8 / run.tokens_per_s <= 5.0 + last_end_s  # the whole run takes a little longer
    assert 0.0 < run.client_cpu_share <= 1.5  # this process serves them, too
    prompts = [tuple(body["prompt"]) for body in server.bodies]
    assert len(set(prompts)) == 8 and {len(prompt) for prompt in prompts} == {64}


@pytest.mark.parametrize("failure", ["status", "error_event", "truncated"])
def test_a_stream_that_fails_is_no_rate(failure: str) -> None:
    with pytest.raises(UnavailableError, match="a stream ended with"):
        streams(SseServer(failure=failure))
