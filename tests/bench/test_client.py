"""The event parser, and single requests against a local server that fails in every way the client tells apart."""

from __future__ import annotations

import asyncio
import json
import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.bench.client import Client, EventParser, PromptMaker, RequestRecord
from app.bench.traffic import PlannedRequest
from tests.bench.sse_server import CHUNK, SseServer, serving

STREAM = (
    CHUNK
    + b": keep-alive\n\n"
    + b"event: x\ndata:two\ndata: lines\n\n"
    + CHUNK.replace(b"\n", b"\r\n")
    + b"data: [DONE]\n\n"
)
PAYLOADS = [CHUNK[6:-2], b"two\nlines", CHUNK[6:-2], b"[DONE]"]


@given(st.lists(st.integers(1, len(STREAM) - 1), max_size=12))
def test_events_do_not_depend_on_where_the_stream_is_cut(cuts: list[int]) -> None:
    parser = EventParser()
    bounds = [0, *sorted(cuts), len(STREAM)]
    events = [event for start, end in pairwise(bounds) for event in parser.feed(STREAM[start:end])]
    assert events == PAYLOADS


def send(
    server: SseServer, *, stream: bool = True, timeout_s: float = 60.0, record: RequestRecord | None = None
) -> RequestRecord:
    planned = PlannedRequest(0.0, 12, 5)
    record = record or RequestRecord(planned)

    async def run() -> None:
        async with serving(server), Client(server.url, timeout_s=timeout_s) as client:
            await client.send(PromptMaker("m", stream=stream, seed=3).body(planned), record, time.perf_counter())

    asyncio.run(run())
    return record


@pytest.mark.parametrize("write_size", [None, 1, 7])
def test_stream_is_timed_event_by_event(write_size: int | None) -> None:
    record = RequestRecord(PlannedRequest(0.0, 12, 5))
    server = SseServer(event_delay_s=0.02, write_size=write_size, num_noted=lambda: len(record.event_times_s))
    send(server, record=record)
    assert record.error is None
    assert (len(record.event_times_s), record.output_tokens, record.cached_tokens) == (5, 5, 2)
    assert record.ttft_s is not None
    assert record.inter_token_s is not None
    assert record.inter_token_s >= 0.99 * 0.02  # clocks have their grain
    assert record.e2e_s >= record.ttft_s + 0.99 * 4 * 0.02


def test_the_body_asks_for_what_was_planned() -> None:
    server = SseServer()
    send(server)
    body = server.bodies[0]
    assert len(body["prompt"]) == 12
    assert all(256 <= token_id < 8000 for token_id in body["prompt"])
    del body["prompt"]
    assert body == {
        "model": "m", "max_tokens": 5, "temperature": 0, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip


def test_without_streaming_only_the_end_is_known() -> None:
    record = send(SseServer(), stream=False)
    assert (record.error, record.output_tokens, record.ttft_s) == (None, 5, None)
    assert record.e2e_s > 0


@pytest.mark.parametrize(
    ("failure", "error"),
    [
        ("status", "http_429"),
        ("reset", "disconnected"),
        ("truncated", "truncated"),
        ("error_event", "stream_error:internal_error"),
        ("hang", "timeout"),
    ],
)
def test_errors_are_told_apart(failure: str, error: str) -> None:
    record = send(SseServer(failure=failure), timeout_s=0.3 if failure == "hang" else 60.0)
    assert record.error == error
    assert record.ended_s > 0
    assert record.retry_after_s == (7.0 if failure == "status" else None)


def test_nobody_listens() -> None:
    record = RequestRecord(PlannedRequest(0.0, 1, 1))

    async def run() -> None:
        async with Client("http://127.0.0.1:9", timeout_s=60.0) as client:
            await client.send(b"{}", record, time.perf_counter())

    asyncio.run(run())
    assert record.error == "connect"


def test_long_prompts_have_their_length() -> None:
    prompts = PromptMaker(None, stream=True, seed=0)
    for tokens in (1, 70_000, 200_000):
        assert prompts.body(PlannedRequest(0.0, tokens, 1)).count(b",") == tokens - 1 + 5


def test_prompts_may_share_a_prefix() -> None:
    prompts = PromptMaker(None, stream=True, seed=0)
    prefix = prompts.ids(30)
    bodies = [json.loads(prompts.body(PlannedRequest(0.0, 40, 1), prefix))["prompt"] for _ in range(2)]
    assert [len(body) for body in bodies] == [40, 40]
    assert bodies[0][:30] == bodies[1][:30] == [int(token_id) for token_id in prefix] and bodies[0] != bodies[1]
