"""HTTP plumbing of the router: bodies within bounds, error bodies, event streams, disconnects."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from app.errors import (
    EngineError,
    InvalidRequestError,
    LongspanError,
    MethodNotAllowedError,
    NotFoundError,
    PayloadTooLargeError,
    RequestError,
    RetryableError,
)
from app.serving.responses import dump, error_body

logger = logging.getLogger("ray.serve")

Result = TypeVar("Result")


class ClientDisconnected(Exception):
    """The client went away before the answer was complete."""


class JSONBody(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return dump(content)


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Raises PayloadTooLargeError as soon as the body is known to be longer than `max_bytes`."""
    too_large = PayloadTooLargeError(f"body: must be at most {max_bytes} bytes", param="body")
    declared = request.headers.get("content-length", "0")
    if declared.isascii() and declared.isdigit() and int(declared) > max_bytes:
        raise too_large
    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            if len(body) > max_bytes:
                raise too_large
    except ClientDisconnect:
        raise ClientDisconnected from None
    if not body:
        raise InvalidRequestError("body: must be a JSON object, got nothing", param="body")
    return bytes(body)


def error_response(error: LongspanError) -> Response:
    headers = {}
    if isinstance(error, RetryableError):
        headers["Retry-After"] = str(math.ceil(error.retry_after_s))
    return JSONBody(error_body(error), error.status, headers)


async def handle_longspan_error(_request: Request, error: Exception) -> Response:
    if not isinstance(error, LongspanError):
        raise error
    if not isinstance(error, (RequestError, RetryableError)):
        logger.error("request failed: %s: %s", type(error).__name__, error.message)
    return error_response(error)


async def handle_http_exception(request: Request, error: Exception) -> Response:
    """Starlette's own 404 and 405."""
    if not isinstance(error, HTTPException):
        raise error
    if error.status_code == 405:
        response = error_response(MethodNotAllowedError(f"{request.method} is not allowed on {request.url.path}"))
        response.headers.update(error.headers or {})
        return response
    if error.status_code == 404:
        return error_response(NotFoundError(f"no route {request.url.path}"))
    return error_response(InvalidRequestError(error.detail))


async def handle_any_error(_request: Request, error: Exception) -> Response:
    """A fault of ours: Starlette re-raises it after this answer, so Serve logs the traceback."""
    return error_response(EngineError(f"internal error: {type(error).__name__}"))


async def handle_disconnect(_request: Request, _error: Exception) -> Response:
    return Response(status_code=499)  # for the access log; nobody reads it


class EventStream(Response):
    """Server-sent events. Calls `close` when they end, when the client leaves however early, or when sending fails."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], close: Callable[[], Awaitable[None]]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_all() -> None:
            async with aclosing(self._events) as events:
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                async for data in events:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})

        try:
            with suppress(ClientDisconnected, OSError):
                await until_disconnect(receive, send_all())
        finally:
            # Events that were never asked for have closed nothing.
            await self._close()


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Run `work`, and cancel it if the client goes away first. Raises ClientDisconnected."""
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_wait_for_disconnect(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnected
        return task.result()
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
