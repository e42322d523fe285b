"""The router's HTTP behaviour without Ray: routes, bodies, errors, admission, disconnects."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from starlette.requests import Request
from starlette.types import Message

from app.errors import InvalidRequestError, OverloadedError, PayloadTooLargeError
from app.serving.admission import Admission, ConcurrencyLimit
from app.serving.http import ClientDisconnected, EventStream, error_response, read_body, until_disconnect


def request_with(*parts: bytes, length: str | None = None) -> Request:
    messages = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    messages.append({"type": "http.request", "body": b"", "more_body": False})
    queue = iter(messages)

    async def receive() -> Message:
        return next(queue)

    headers = [] if length is None else [(b"content-length", length.encode())]
    return Request({"type": "http", "method": "POST", "path": "/", "headers": headers}, receive)


@pytest.mark.asyncio
async def test_bodies_are_bounded_by_length_and_by_count() -> None:
    assert await read_body(request_with(b"ab", b"cd"), 4) == b"abcd"
    for bad in (request_with(b"abc", b"de"), request_with(b"a", length="5")):
        with pytest.raises(PayloadTooLargeError):
            await read_body(bad, 4)
    assert await read_body(request_with(b"a", length="nonsense"), 4) == b"a"
    with pytest.raises(InvalidRequestError):
        await read_body(request_with(), 4)


@pytest.mark.asyncio
async def test_a_client_that_leaves_during_its_upload_is_no_fault_of_ours() -> None:
    messages = iter([{"type": "http.request", "body": b"a", "more_body": True}, {"type": "http.disconnect"}])

    async def receive() -> Message:
        return next(messages)

    with pytest.raises(ClientDisconnected):
        await read_body(Request({"type": "http", "method": "POST", "path": "/", "headers": []}, receive), 4)


def test_retryable_errors_say_when() -> None:
    response = error_response(OverloadedError("full", retry_after_s=1.2))
    assert (response.status_code, response.headers["retry-after"]) == (429, "2")
    assert json.loads(bytes(response.body))["error"]["type"] == "rate_limit_error"
    assert "retry-after" not in error_response(InvalidRequestError("no")).headers


class Client:
    """An ASGI client that reads a number of messages and then leaves."""

    def __init__(self, num_messages: int = 10**9, *, send_fails: bool = False) -> None:
        self.sent: list[Message] = []
        self._num_messages = num_messages
        self._left = asyncio.Event()
        self._send_fails = send_fails

    async def receive(self) -> Message:
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.sent.append(message)
        if len(self.sent) >= self._num_messages:
            self._left.set()
            if self._send_fails:
                raise OSError("broken pipe")


class Source:
    """Events that know whether they were closed."""

    def __init__(self, count: int) -> None:
        self.is_closed = False
        self.num_closes = 0
        self._count = count

    async def close(self) -> None:
        self.num_closes += 1

    async def events(self) -> AsyncGenerator[bytes, None]:
        try:
            for index in range(self._count):
                yield f"data: {index}\n\n".encode()
                await asyncio.sleep(0.001)
        finally:
            self.is_closed = True


SCOPE: Any = {"type": "http"}


@pytest.mark.asyncio
async def test_event_stream_to_the_end() -> None:
    client, source = Client(), Source(2)
    await EventStream(source.events(), source.close)(SCOPE, client.receive, client.send)
    start, *bodies = client.sent
    assert (b"content-type", b"text/event-stream; charset=utf-8") in start["headers"]
    assert not any(name == b"content-length" for name, _ in start["headers"])
    assert b"".join(body["body"] for body in bodies) == b"data: 0\n\ndata: 1\n\n"
    assert bodies[-1]["more_body"] is False and source.is_closed


@pytest.mark.parametrize("send_fails", [False, True])
@pytest.mark.asyncio
async def test_a_client_that_leaves_closes_the_events(send_fails: bool) -> None:
    client, source = Client(3, send_fails=send_fails), Source(10_000)
    async with asyncio.timeout(30.0):
        await EventStream(source.events(), source.close)(SCOPE, client.receive, client.send)
    assert source.is_closed and len(client.sent) < 100


@pytest.mark.asyncio
async def test_a_client_that_left_before_the_first_event_closes_their_source() -> None:
    client, source = Client(), Source(1)
    client._left.set()
    response = EventStream(source.events(), source.close)
    await response(SCOPE, client.receive, client.send)
    assert source.num_closes == 1
    started = Client()
    await EventStream(source.events(), source.close)(SCOPE, started.receive, started.send)
    assert source.num_closes == 2


@pytest.mark.asyncio
async def test_until_disconnect() -> None:
    client = Client()
    assert await until_disconnect(client.receive, asyncio.sleep(0, "done")) == "done"
    cancelled = asyncio.Event()

    async def work() -> None:
        try:
            client._left.set()
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    with pytest.raises(ClientDisconnected):
        await until_disconnect(client.receive, work())
    assert cancelled.is_set()


@pytest.mark.asyncio
async def test_admission_holds_a_place_until_the_answer_is_out() -> None:
    limit = ConcurrencyLimit(lambda: 1)
    release = asyncio.Event()

    async def slow(_scope: Any, _receive: Any, _send: Any) -> None:
        await release.wait()

    app = Admission(slow, limit)
    client = Client()
    first = asyncio.create_task(app(SCOPE, client.receive, client.send))
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError):
        await app(SCOPE, client.receive, client.send)
    release.set()
    await first
    assert limit.num_ongoing == 0
    await app(SCOPE, client.receive, client.send)
