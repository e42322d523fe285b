"""A router's side of a pool, with scripted calls in place of Serve's handles."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ObjectLostError
from ray.serve.exceptions import BackPressureError

from app.errors import (
    EngineError,
    InvalidRequestError,
    LongspanError,
    OverloadedError,
    ReplicaLostError,
    UnavailableError,
)
from app.protocol import GenerateRequest, SamplingParams, TokenChunk
from app.serving import pool_client
from app.serving.board import PoolDecision
from app.serving.demand import ZeroGate
from app.serving.pool_client import PoolClient
from app.serving.streaming import StreamItem


class Call:
    """A streaming call: what is put into it comes out; an exception is raised; None ends it."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[Any] = asyncio.Queue()
        self.is_cancelled = False

    def put(self, *items: Any) -> None:
        for item in items:
            self.queue.put_nowait(item)

    async def __aiter__(self) -> AsyncIterator[Any]:
        while (item := await self.queue.get()) is not None:
            if isinstance(item, Exception) and not isinstance(item, LongspanError):
                raise item
            yield item

    def cancel(self) -> None:
        self.is_cancelled = True


class Handle:
    """Hands out the calls of one method, in order."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.arguments: list[tuple[Any, ...]] = []
        self.failure: Exception | None = None

    def remote(self, *arguments: Any) -> Call:
        if self.failure is not None:
            raise self.failure
        self.calls.append(Call())
        self.arguments.append(arguments)
        return self.calls[-1]


class Pool:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.generate, self.channel = Handle(), Handle()
        monkeypatch.setattr(pool_client.serve, "get_deployment_handle", lambda *_args, **_kwargs: self)
        self.gate = ZeroGate("short")
        self.client = PoolClient("pools", "short", self.gate)
        self.replica_id: str | None = "r1"  # asked for
        self.asked: list[str] = []
        self.taken: list[str] = []

    def options(self, *, method_name: str, stream: bool, session_id: str) -> Handle:
        assert stream
        self.asked.append(session_id)
        return self.generate if method_name == "generate" else self.channel


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Pool:
    return Pool(monkeypatch)


def requests(*names: str) -> list[GenerateRequest]:
    return [GenerateRequest(name, (1,), SamplingParams()) for name in names]


def chunk(name: str, text: str, finish: Any = None) -> TokenChunk:
    return TokenChunk(name, (1,), text=text, finish_reason=finish)


async def read(pool: Pool, *names: str) -> str:
    """The texts of a generation, each prefixed by its sequence's name."""
    items = [item async for item in pool.client.generate(requests(*names), pool.replica_id, pool.taken.append)]
    return " ".join(f"{chunk.request_id}:{chunk.text}" for item in items for chunk in item)


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def open_channel(pool: Pool) -> tuple[Call, str]:
    """Run a request to its end so that the client opens a channel."""
    task = asyncio.create_task(read(pool, "z"))
    await settle()
    pool.generate.calls[-1].put(StreamItem((chunk("z", "x", "stop"),)), None)
    await task
    call = pool.channel.calls[-1]
    call.put(())
    await settle()
    return call, pool.channel.arguments[-1][1]


@pytest.mark.asyncio
async def test_without_a_channel_all_comes_by_the_own_stream(pool: Pool) -> None:
    task = asyncio.create_task(read(pool, "a"))
    await settle()
    pool.generate.calls[0].put(StreamItem((chunk("a", "1"),)), StreamItem((chunk("a", "2", "stop"),)), None)
    assert await task == "a:1 a:2"
    assert len(pool.channel.calls) == 1  # one attempt per CHANNEL_RETRY_S
    assert not pool.generate.calls[0].is_cancelled


@pytest.mark.asyncio
async def test_no_channel_is_opened_to_a_pool_that_stops(pool: Pool) -> None:
    """It would wait in Serve's handle, and Serve would start a replica for it."""
    pool.gate.update(PoolDecision(running=1, target=1, wanted=0, granted=0), None, 0.0)
    task = asyncio.create_task(read(pool, "a"))
    await settle()
    pool.generate.calls[0].put(StreamItem((chunk("a", "1"),)), StreamItem((chunk("a", "2", "stop"),)), None)
    assert await task == "a:1 a:2"
    assert not pool.channel.calls


@pytest.mark.asyncio
async def test_after_the_move_tokens_come_by_the_channel(pool: Pool) -> None:
    channel, channel_id = await open_channel(pool)
    first, second = (asyncio.create_task(read(pool, name)) for name in "ab")
    await settle()
    for name, call in zip("ab", pool.generate.calls[1:], strict=True):
        call.put(StreamItem((chunk(name, "1"),), channel_id))
    await settle()
    channel.put((chunk("a", "2"), chunk("b", "2"), chunk("gone", "9")), (chunk("b", "3", "stop"),))
    assert await second == "b:1 b:2 b:3"
    channel.put((chunk("a", "3", "length"),))
    assert await first == "a:1 a:2 a:3"
    assert not any(call.is_cancelled for call in pool.generate.calls)


@pytest.mark.asyncio
async def test_tokens_that_overtake_the_move_keep_their_order(pool: Pool) -> None:
    channel, channel_id = await open_channel(pool)
    task = asyncio.create_task(read(pool, "a"))
    await settle()
    channel.put((chunk("a", "2", "stop"),))
    await settle()
    pool.generate.calls[1].put(StreamItem((chunk("a", "1"),), channel_id), None)
    assert await task == "a:1 a:2"


@pytest.mark.asyncio
async def test_a_move_may_overtake_the_channels_first_item(pool: Pool) -> None:
    task = asyncio.create_task(read(pool, "a"))
    await settle()
    pool.generate.calls[0].put(StreamItem((chunk("a", "1"),)))
    await settle()
    pool.generate.calls[0].put(StreamItem((chunk("a", "2"),), pool.channel.arguments[0][1]))
    await settle()
    pool.channel.calls[0].put((), (chunk("a", "3", "stop"),))
    assert await task == "a:1 a:2 a:3"


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.asyncio
async def test_a_call_that_ends_early_is_a_loss(pool: Pool, monkeypatch: pytest.MonkeyPatch, moved: bool) -> None:
    monkeypatch.setattr(pool_client, "LAST_TOKENS_TIMEOUT_S", 0.01)
    _, channel_id = await open_channel(pool)
    task = asyncio.create_task(read(pool, "a"))
    await settle()
    pool.generate.calls[1].put(StreamItem((chunk("a", "1"),), channel_id if moved else None), None)
    async with asyncio.timeout(30.0):
        with pytest.raises(UnavailableError):
            await task


@pytest.mark.asyncio
async def test_a_call_that_cannot_be_made_leaves_nothing_behind(pool: Pool) -> None:
    pool.generate.failure = BackPressureError(num_queued_requests=1, max_queued_requests=1)
    with pytest.raises(OverloadedError):
        await read(pool, "a")
    assert not pool.client._inboxes


@pytest.mark.parametrize(
    ("broken", "error"), [(RuntimeError("lost"), UnavailableError), (ActorDiedError(), ReplicaLostError)]
)
@pytest.mark.asyncio
async def test_a_broken_channel_fails_those_who_moved_to_it(
    pool: Pool, broken: Exception, error: type[Exception]
) -> None:
    channel, channel_id = await open_channel(pool)
    task = asyncio.create_task(read(pool, "a"))
    await settle()
    pool.generate.calls[1].put(StreamItem((chunk("a", "1"),), channel_id))
    await settle()
    channel.put(broken)
    with pytest.raises(UnavailableError) as caught:
        await task
    assert type(caught.value) is error
    assert pool.generate.calls[1].is_cancelled


@pytest.mark.asyncio
async def test_a_failure_after_the_move_is_passed_on(pool: Pool) -> None:
    _, channel_id = await open_channel(pool)
    task = asyncio.create_task(read(pool, "a"))
    await settle()
    pool.generate.calls[1].put(StreamItem((chunk("a", "1"),), channel_id), EngineError("boom"))
    with pytest.raises(EngineError, match="boom"):
        await task


@pytest.mark.asyncio
async def test_a_move_to_an_unknown_channel_is_a_loss(pool: Pool) -> None:
    task = asyncio.create_task(read(pool, "a"))
    await settle()
    pool.generate.calls[0].put(StreamItem((chunk("a", "1"),), "another"))
    with pytest.raises(UnavailableError):
        await task


@pytest.mark.parametrize(
    ("raised", "error"),
    [
        (InvalidRequestError("no", param="prompt"), InvalidRequestError),
        (BackPressureError(num_queued_requests=1, max_queued_requests=1), OverloadedError),
        (ActorDiedError(), ReplicaLostError),
        (ObjectLostError("0" * 56, None, ""), ReplicaLostError),
        (RuntimeError("a bug"), EngineError),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else type(value).__name__,
)
@pytest.mark.asyncio
async def test_whatever_goes_wrong_is_a_longspan_error(pool: Pool, raised: Exception, error: type[Exception]) -> None:
    task = asyncio.create_task(read(pool, "a"))
    await settle()
    pool.generate.calls[0].put(raised)
    with pytest.raises(error):
        await task


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.asyncio
async def test_closing_cancels_the_call(pool: Pool, moved: bool) -> None:
    _, channel_id = await open_channel(pool)
    items = pool.client.generate(requests("a", "b"), "r1", pool.taken.append)
    first = asyncio.ensure_future(anext(items))
    await settle()
    pool.generate.calls[1].put(StreamItem((chunk("a", "1"), chunk("b", "1")), channel_id if moved else None))
    assert len(await first) == 2
    await items.aclose()
    assert pool.generate.calls[1].is_cancelled


@pytest.mark.asyncio
async def test_a_call_names_its_replica_and_the_channel_goes_where_it_was_taken(pool: Pool) -> None:
    task = asyncio.create_task(read(pool, "a"))
    await settle()
    pool.generate.calls[0].put(StreamItem((chunk("a", "1", "stop"),), replica_id="r2"), None)
    await task
    await settle()
    assert (pool.asked, pool.taken) == (["r1", "r2"], ["r2"])
    pool.replica_id = None
    task = asyncio.create_task(read(pool, "b"))
    await settle()
    pool.generate.calls[1].put(StreamItem((chunk("b", "1", "stop"),), replica_id="r3"), None)
    await task
    await settle()
    assert (pool.asked[2:], pool.taken[1:]) == (["", "r3"], ["r3"])
