"""A peer for the client: an asyncio server that streams completions, fails in chosen ways and shows metrics."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

METRICS = """\
# HELP longspan:num_blocks KV cache blocks.
# TYPE longspan:num_blocks gauge
longspan:num_blocks{model="m",app="pools",pool="short",replica="r1"} 100.0
longspan:num_free_blocks{model="m",app="pools",pool="short",replica="r1"} 25.0
longspan:num_requests_running{model="m",app="pools",pool="short",replica="r1"} 3.0
longspan:num_blocks{model="m",app="pools",pool="short",replica="r2"} 100.0
longspan:num_free_blocks{model="m",app="pools",pool="short",replica="r2"} 75.0
longspan:num_blocks{model="m",app="pools",pool="long",replica="r3"} 50.0
longspan:num_free_blocks{model="m",app="pools",pool="long",replica="r3"} 50.0
longspan:request_success_total{app="pools",finished_reason="stop",model="m",pool="short",replica="r1"} 4.0
longspan:request_success_total{app="pools",finished_reason="length",model="m",pool="short",replica="r1"} 2.0
longspan:request_success_total{app="pools",finished_reason="length",model="m",pool="long",replica="r3"} 1.0
longspan:step_time_seconds_bucket{le="0.1",model="m",app="pools",pool="long",replica="r3"} 50.0
"""
CHUNK = b'data: {"choices":[{"index":0,"text":" word","logprobs":null,"finish_reason":null}]}\n\n'


@dataclass
class SseServer:
    """What it did, and how it answers. `failure`: None, status, error_event, truncated, reset, json_error or hang."""

    failure: str | None = None
    event_delay_s: float = 0.0
    num_noted: Callable[[], int] | None = None  # events the client has: the delay begins when it has them all
    write_size: int | None = None  # cut the stream into pieces of so many bytes
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await self._head(reader):
                request_line, length = head
                body = await reader.readexactly(length)
                if request_line.startswith("GET /metrics"):
                    _respond(writer, 200, METRICS.encode(), "text/plain")
                else:
                    self.bodies.append(json.loads(body))
                    await self._complete(writer, self.bodies[-1])
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    async def _head(self, reader: asyncio.StreamReader) -> tuple[str, int] | None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
        except asyncio.IncompleteReadError:
            return None
        lengths = [line.split(":")[1] for line in head.splitlines() if line.lower().startswith("content-length:")]
        return head.splitlines()[0], int(lengths[0]) if lengths else 0

    async def _complete(self, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        usage = {"completion_tokens": body["max_tokens"], "prompt_tokens_details": {"cached_tokens": 2}}
        if self.failure == "hang":
            await asyncio.sleep(60)
        if self.failure == "status":
            _respond(writer, 429, b'{"error": {"message": "full"}}', "application/json\r\nRetry-After: 7")
        elif self.failure == "reset":
            writer.transport.abort()
        elif not body["stream"]:
            _respond(writer, 200, json.dumps({"choices": [{"text": "x"}], "usage": usage}).encode(), "application/json")
        else:
            await self._stream(writer, body["max_tokens"], usage)

    async def _stream(self, writer: asyncio.StreamWriter, num_events: int, usage: dict[str, Any]) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        for index in range(num_events):
            self._write(writer, CHUNK)
            if self.event_delay_s:
                await writer.drain()
                while self.num_noted is not None and self.num_noted() <= index:
                    await asyncio.sleep(0.001)
                await asyncio.sleep(self.event_delay_s)
        if self.failure == "error_event":
            self._write(writer, b'data: {"error":{"message":"lost","type":"internal_error","code":null}}\n\n')
        elif self.failure != "truncated":
            self._write(writer, b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n")
            self._write(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")

    def _write(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        size = self.write_size or len(data)
        for start in range(0, len(data), size):
            piece = data[start : start + size]
            writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")


def _respond(writer: asyncio.StreamWriter, status: int, body: bytes, content_type: str) -> None:
    head = f"HTTP/1.1 {status} X\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)


@asynccontextmanager
async def serving(server: SseServer) -> AsyncIterator[SseServer]:
    """Run `server` on a free port."""
    listener = await asyncio.start_server(server.handle, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    try:
        yield server
    finally:
        listener.close()
