"""One request to an OpenAI-compatible server and the moments of its answer.

The client shares the machine with what it measures, so a streamed event is neither parsed nor copied: its arrival is
noted, and only the usage event is read.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from app.bench.traffic import PlannedRequest

# Prompts are random ids: nothing is shared, so no prefix is found cached. Every vocabulary holds this range.
_LOW_ID, _HIGH_ID = 256, 8000
_POOL_SIZE = 1 << 16
_DONE = b"[DONE]"
_NO_CHOICES = (b'"choices":[]', b'"choices": []')
_ERROR_PREFIXES = (b'{"error"', b'{ "error"')


class EventParser:
    """Server-sent events out of a byte stream that is cut anywhere."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The payloads of the events that `data` completes."""
        data = self._rest + data
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        *events, self._rest = data.split(b"\n\n")
        return [event[6:] if event.startswith(b"data: ") else _payload(event) for event in events if b"data:" in event]


def _payload(event: bytes) -> bytes:
    """The data lines of an event that has other fields too, or no space after the colon."""
    lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines)


@dataclass(slots=True)
class RequestRecord:
    """What became of one request. Times are seconds since the run's start; latencies count from `planned.at_s`."""

    planned: PlannedRequest
    sent_s: float = 0.0
    event_times_s: array[float] = field(default_factory=lambda: array("d"))  # of every event that carried tokens
    ended_s: float = 0.0
    output_tokens: int = 0
    cached_tokens: int = 0
    retry_after_s: float | None = None  # of a refusal
    error: str | None = None  # its kind: http_429, connect, timeout, disconnected, stream_error:..., truncated

    @property
    def ttft_s(self) -> float | None:
        return self.event_times_s[0] - self.planned.at_s if self.event_times_s else None

    @property
    def e2e_s(self) -> float:
        return self.ended_s - self.planned.at_s

    @property
    def inter_token_s(self) -> float | None:
        """Mean time per token after the first: events may carry several tokens."""
        if self.output_tokens < 2 or len(self.event_times_s) < 2:
            return None
        return (self.event_times_s[-1] - self.event_times_s[0]) / (self.output_tokens - 1)


class PromptMaker:
    """Bodies of /v1/completions with prompts of an exact number of random token ids."""

    def __init__(self, model: str | None, *, stream: bool, seed: int) -> None:
        rng = random.Random(seed)
        self._ids = [str(rng.randrange(_LOW_ID, _HIGH_ID)) for _ in range(_POOL_SIZE)]
        self._rng = rng
        fields: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "stream": stream}
        if stream:
            fields["stream_options"] = {"include_usage": True}
        if model is not None:
            fields["model"] = model
        self._fields = json.dumps(fields)[1:]

    def ids(self, count: int) -> list[str]:
        start = self._rng.randrange(_POOL_SIZE)
        ids = self._ids[start : start + count]
        while len(ids) < count:
            ids += self._ids[: count - len(ids)]
        return ids

    def body(self, planned: PlannedRequest, prefix: Sequence[str] = ()) -> bytes:
        """`prefix` is what the prompt begins with, and part of its length."""
        ids = [*prefix, *self.ids(planned.prompt_tokens - len(prefix))]
        return f'{{"prompt":[{",".join(ids)}],"max_tokens":{planned.output_tokens},{self._fields}'.encode()


class Client:
    """Sends requests over one connection pool without a limit. An async context manager."""

    def __init__(self, url: str, *, timeout_s: float, api_key: str | None = None) -> None:
        self._url = url.rstrip("/")
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    async def __aenter__(self) -> Client:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=self._timeout, headers=self._headers
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def send(self, body: bytes, record: RequestRecord, start_s: float) -> None:
        """Fill `record`; whatever goes wrong becomes its `error`. `start_s` is the run's start by perf_counter."""
        record.sent_s = time.perf_counter() - start_s
        try:
            async with self._session.post(f"{self._url}/v1/completions", data=body) as response:
                if response.status != 200:
                    await response.read()
                    record.error = f"http_{response.status}"
                    record.retry_after_s = float(response.headers.get("Retry-After", "nan"))
                elif response.content_type == "text/event-stream":
                    record.error = await _read_stream(response, record, start_s)
                else:
                    _read_usage(await response.read(), record)
        except TimeoutError:
            record.error = "timeout"
        except aiohttp.ClientConnectorError:
            record.error = "connect"
        except (aiohttp.ClientError, ConnectionError):
            record.error = "disconnected"
        except asyncio.CancelledError:
            record.error = "cancelled"
            raise
        finally:
            record.ended_s = time.perf_counter() - start_s

    async def get(self, path: str) -> tuple[int, str]:
        """Status and text of a GET. Raises aiohttp.ClientError or TimeoutError."""
        async with self._session.get(f"{self._url}{path}") as response:
            return response.status, await response.text()


async def _read_stream(response: aiohttp.ClientResponse, record: RequestRecord, start_s: float) -> str | None:
    """Note the events of a stream; returns the kind of error, if it ended with one."""
    parser = EventParser()
    error: str | None = "truncated"
    # Read to the end even after [DONE], so that the connection can be used again.
    async for data in response.content.iter_any():
        now = time.perf_counter() - start_s
        for payload in parser.feed(data):
            if payload == _DONE:
                error = None
            elif payload.startswith(_ERROR_PREFIXES):
                return _error_kind(payload)
            elif _NO_CHOICES[0] in payload or _NO_CHOICES[1] in payload:
                _read_usage(payload, record)
            else:
                record.event_times_s.append(now)
    return error


def _read_usage(payload: bytes, record: RequestRecord) -> None:
    usage = json.loads(payload).get("usage") or {}
    record.output_tokens = usage.get("completion_tokens", 0)
    record.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)


def _error_kind(payload: bytes) -> str:
    try:
        error = json.loads(payload)["error"]
        return f"stream_error:{error.get('code') or error.get('type')}"
    except (ValueError, KeyError, AttributeError, TypeError):
        return "stream_error"
