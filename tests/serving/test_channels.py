"""One channel carries the tokens of all of a router's requests: nothing is lost when it opens, ends or breaks."""

from __future__ import annotations

import asyncio
import time

import pytest

from app.errors import UnavailableError
from app.protocol import TokenChunk
from app.serving import streaming
from app.serving.streaming import Channel, Pacer, SequenceGroup, StreamItem
from tests.serving.scripted import TEXT, TOKENIZER, ScriptedEngine, join_all, request, run


@pytest.mark.asyncio
async def test_with_a_channel_only_the_first_tokens_leave_by_the_own_stream() -> None:
    engine, pacer = ScriptedEngine(delay_s=0.001), Pacer()
    channel = Channel("c", pacer)
    shared = channel.items()
    assert await anext(shared) == ()
    own: list[StreamItem] = []

    async def read_own(name: str) -> None:
        own.extend([item async for item in run(engine, request(name), pacer=pacer, channel=channel)])

    readers = [asyncio.create_task(read_own(name)) for name in "ab"]
    batches: list[tuple[TokenChunk, ...]] = []
    while sum(chunk.finish_reason is not None for batch in batches for chunk in batch) < 2:
        batches.append(await anext(shared))
    await asyncio.gather(*readers)
    await shared.aclose()
    assert [item.moved_to for item in own] == ["c", "c"]
    joined = join_all([item.chunks for item in own] + batches)
    assert joined["a"].text == joined["b"].text == TEXT
    assert not channel.groups and not engine.running


@pytest.mark.asyncio
async def test_a_channel_that_opens_later_takes_over_without_loss() -> None:
    engine, pacer = ScriptedEngine(delay_s=0.004), Pacer()
    channel = Channel("c", pacer)
    found: list[Channel] = []
    group = SequenceGroup([request("a")], TOKENIZER, pacer)
    items: list[StreamItem] = []
    async for item in group.run(engine, lambda: found[0] if found else None):
        items.append(item)
        if len(items) == 2:
            found.append(channel)
    assert [item.moved_to for item in items] == [None, None, "c"]
    rest = channel.collector.take()
    assert join_all([item.chunks for item in items] + [rest])["a"].text == TEXT


@pytest.mark.asyncio
async def test_a_broken_channel_fails_its_requests() -> None:
    engine, pacer = ScriptedEngine(delay_s=0.01), Pacer()
    channel = Channel("c", pacer)
    items = run(engine, request("a"), pacer=pacer, channel=channel)
    assert (await anext(items)).moved_to == "c"
    channel.close()
    with pytest.raises(UnavailableError):
        await anext(items)
    assert not engine.running


@pytest.mark.asyncio
async def test_an_idle_channel_ends_and_a_used_one_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "CHANNEL_IDLE_S", 0.02)
    channel = Channel("c", Pacer())
    channel.groups.add(SequenceGroup([], TOKENIZER, Pacer()))
    items = channel.items()
    assert await anext(items) == ()
    waiting = asyncio.ensure_future(anext(items, None))
    await asyncio.sleep(0.1)
    assert not waiting.done() and channel.is_open
    channel.groups.clear()
    assert await waiting is None and not channel.is_open


@pytest.mark.asyncio
async def test_an_end_that_moves_to_a_channel_leaves_no_tokens_of_the_others_behind() -> None:
    pacer = Pacer()
    pacer.num_streams = 1000  # a long window: much of "a" waits when "b" ends
    engine, channel = ScriptedEngine(delay_s=0.002), Channel("c", pacer)
    group = SequenceGroup([request("a"), request("b", "Short.")], TOKENIZER, pacer)
    items: list[StreamItem] = []
    async for item in group.run(engine, lambda: channel if "b" not in engine.running else None):
        items.append(item)
    assert items[-1].moved_to == "c"
    joined = join_all([item.chunks for item in items] + [channel.collector.take()])
    assert joined["a"].text == TEXT and joined["b"].text == "Short."


@pytest.mark.asyncio
async def test_a_channel_spreads_its_sequences_over_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "MIN_WINDOW_S", 0.05)  # a quarter of a window of 0.2 s
    pacer = Pacer()
    pacer.num_streams = 48
    channel = Channel("c", pacer)
    items = channel.items()
    assert await anext(items) == ()
    for index in range(48):
        channel.collector.add(TokenChunk(f"s{index}", (1,)))
    start_s = time.monotonic()
    assert [len(await anext(items)) for _ in range(4)] == [12] * 4
    assert time.monotonic() - start_s >= 0.14
    await items.aclose()
