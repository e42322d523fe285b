"""Inside a replica: text, stop strings, coalescing and aborts, with an engine of scripted tokens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest

from app.errors import EngineError, OverloadedError
from app.protocol import GenerateRequest, TokenChunk, join_chunks
from app.serving import streaming
from app.serving.streaming import MAX_WINDOW_S, MIN_WINDOW_S, Collector, Pacer, TextStream
from tests.serving.scripted import TEXT, TOKENIZER, ScriptedEngine, join_all, request, run


async def collect(engine: ScriptedEngine, *requests: GenerateRequest) -> tuple[dict[str, TokenChunk], int]:
    async with aclosing(run(engine, *requests)) as items:
        batches = [item.chunks async for item in items]
    return join_all(batches), len(batches)


@pytest.mark.asyncio
async def test_text_is_whole_and_items_are_few() -> None:
    engine = ScriptedEngine(delay_s=0.001)
    start_s = time.monotonic()
    joined, num_items = await collect(engine, request("a"), request("b", "Short."))
    windows = (time.monotonic() - start_s) / MIN_WINDOW_S
    assert joined["a"].text == TEXT and joined["b"].text == "Short."
    assert joined["a"].token_ids == request("a").prompt_token_ids
    assert joined["a"].logprobs is not None and len(joined["a"].logprobs) == len(joined["a"].token_ids)
    assert num_items <= windows + 4  # one per window, and two firsts and two ends
    assert not engine.running


@pytest.mark.asyncio
async def test_first_tokens_leave_at_once_and_the_end_is_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "MIN_WINDOW_S", 60.0)
    monkeypatch.setattr(streaming, "MAX_WINDOW_S", 60.0)
    async with asyncio.timeout(30.0):
        joined, num_items = await collect(ScriptedEngine(delay_s=0.001), request("a"))
    assert joined["a"].text == TEXT
    assert num_items == 2  # what the window held came with the end


@pytest.mark.parametrize("stop", ["hello", "o, then it", "猫", "."])
@pytest.mark.asyncio
async def test_stop_string_across_chunks(stop: str) -> None:
    engine = ScriptedEngine()
    joined, _ = await collect(engine, request("a", stop=("never", stop)))
    chunk = joined["a"]
    assert chunk.text == TEXT[: TEXT.index(stop)]
    assert (chunk.finish_reason, chunk.stop_reason) == ("stop", stop)
    assert chunk.num_output_tokens == len(chunk.token_ids) == len(chunk.logprobs or ())
    assert chunk.num_output_tokens < len(request("a").prompt_token_ids)
    assert not engine.running and engine.aborted == {"a": "stop"}


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_stop_cuts_at_the_same_token_for_any_chunking(size: int) -> None:
    ids = request("a").prompt_token_ids
    stream = TextStream(TOKENIZER, request("a", stop=("then",)))
    total: TokenChunk | None = None
    for start in range(0, len(ids), size):
        part = ids[start : start + size]
        chunk = stream.add(TokenChunk("a", part, num_output_tokens=start + len(part)))
        total = chunk if total is None else join_chunks([total, chunk])
        if chunk.finish_reason:
            break
    assert total is not None
    assert total.text == "The cat said hello, "
    assert total.num_output_tokens == len(total.token_ids)
    text_with_stop = TOKENIZER.decode(total.token_ids)
    assert "then" in text_with_stop and "then" not in TOKENIZER.decode(total.token_ids[:-1])


def test_the_token_that_stops_is_not_text() -> None:
    stream = TextStream(TOKENIZER, request("a"))
    ids = tuple(TOKENIZER.encode("a b"))
    assert stream.add(TokenChunk("a", ids, finish_reason="stop", stop_reason=ids[-1])).text == TOKENIZER.decode(
        ids[:-1]
    )


@pytest.mark.asyncio
async def test_a_failure_comes_after_what_was_gathered_and_ends_all() -> None:
    class OneFails(ScriptedEngine):
        """ "a" and "b" give three tokens each, of which two are gathered; then "b" fails and "a" hangs."""

        async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
            async for chunk in super().generate(request):
                if chunk.num_output_tokens == 4:
                    if request.request_id == "a":
                        has_hung.set()
                        await asyncio.sleep(30.0)
                    await has_hung.wait()
                    raise EngineError("scripted")
                yield chunk

    engine, has_hung = OneFails(delay_s=0.002), asyncio.Event()
    num_tokens = {"a": 0, "b": 0}
    items = run(engine, request("a"), request("b"))
    error = None
    try:
        async for item in items:
            for chunk in item.chunks:
                num_tokens[chunk.request_id] += len(chunk.token_ids)
    except EngineError as caught:
        error = caught
    assert error is not None and error.message == "scripted"
    assert num_tokens == {"a": 3, "b": 3}
    assert not engine.running


@pytest.mark.asyncio
async def test_a_fault_before_the_first_token_is_an_error_and_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_args: object) -> TextStream:
        raise RuntimeError("a bug")

    monkeypatch.setattr(streaming, "TextStream", broken)
    async with asyncio.timeout(30.0):
        with pytest.raises(EngineError, match="RuntimeError"):
            await collect(ScriptedEngine(), request("a"))


@pytest.mark.asyncio
async def test_refusal_of_one_refuses_all() -> None:
    class Full(ScriptedEngine):
        async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
            if request.request_id == "b":
                raise OverloadedError("full")
            async for chunk in super().generate(request):
                yield chunk

    engine = Full(delay_s=0.01)
    with pytest.raises(OverloadedError):
        await collect(engine, request("a"), request("b"))
    await asyncio.sleep(0)
    assert not engine.running


@pytest.mark.parametrize("how", ["close", "cancel"])
@pytest.mark.asyncio
async def test_leaving_aborts_at_once(how: str) -> None:
    engine = ScriptedEngine(delay_s=0.005)
    pacer = Pacer()
    started = asyncio.Event()

    async def read() -> None:
        async with aclosing(run(engine, request("a"), request("b"), pacer=pacer)) as items:
            async for _ in items:
                started.set()
                if how == "close":
                    return

    task = asyncio.create_task(read())
    await started.wait()
    assert pacer.num_streams == 2 or how == "close"
    if how == "cancel":
        task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert not engine.running
    assert pacer.num_streams == 0


def test_window_grows_with_streams_up_to_a_bound() -> None:
    pacer = Pacer()
    assert pacer.window_s == MIN_WINDOW_S
    pacer.num_streams = 10
    assert pacer.window_s == pytest.approx(0.05)
    pacer.num_streams = 1000
    assert pacer.window_s == MAX_WINDOW_S


@pytest.mark.asyncio
async def test_many_sequences_leave_in_parts_each_once_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes for a new request waits behind a part, not behind all of them, and an end takes only itself along."""
    monkeypatch.setattr(streaming, "MIN_WINDOW_S", 0.05)  # parts of 1/4: a window is 0.2 s
    pacer = Pacer()
    pacer.num_streams = 48
    collector = Collector(pacer, in_parts=True)
    for index in range(48):
        collector.add(TokenChunk(f"s{index}", (1,)))
    parts = [await collector.batch()]
    collector.add(TokenChunk("s0", (2,)))  # back in the queue, behind those that have not left yet
    collector.add(TokenChunk("s47", (2,), finish_reason="length"))
    ended = await collector.batch()
    assert [(chunk.request_id, chunk.token_ids) for chunk in ended] == [("s47", (1, 2))]
    while not collector.is_empty:
        parts.append(await collector.batch())
    assert max(map(len, parts)) == 12
    names = [chunk.request_id for part in parts for chunk in part]
    assert names == [f"s{index}" for index in range(47)] + ["s0"]


@pytest.mark.asyncio
async def test_few_sequences_leave_together() -> None:
    """Parts of them would cost more items than what comes for a new request is worth."""
    pacer = Pacer()
    pacer.num_streams = 8
    collector = Collector(pacer, in_parts=True)
    for index in range(8):
        collector.add(TokenChunk(f"s{index}", (1,)))
    assert len(await collector.batch()) == 8


@pytest.mark.asyncio
async def test_a_part_is_due_though_the_clock_has_not_quite_come_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop whose clock counts milliseconds wakes a hair before the time asked for: no reason for an empty item."""

    async def too_early(_event: asyncio.Event, _delay_s: float) -> bool:
        return False

    monkeypatch.setattr(streaming, "_wait_at_most", too_early)
    monkeypatch.setattr(streaming, "MIN_WINDOW_S", 60.0)
    monkeypatch.setattr(streaming, "MAX_WINDOW_S", 60.0)
    collector = Collector(Pacer())
    for count in (1, 2):
        collector.add(TokenChunk("a", (count,)))
        assert [chunk.token_ids for chunk in await collector.batch()] == [(count,)]


@pytest.mark.asyncio
async def test_a_failure_does_not_wait_until_the_others_end() -> None:
    """Whoever reads slowly finds tokens of the other sequence each time."""

    class OneFails(ScriptedEngine):
        async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
            async for chunk in super().generate(request):
                if request.request_id == "a" and chunk.num_output_tokens == 3:
                    raise EngineError("scripted")
                yield chunk

    items = run(OneFails(delay_s=0.002), request("long", TEXT * 40), request("a"))
    error, num_items = None, 0
    try:
        async for _ in items:
            num_items += 1
            await asyncio.sleep(0.02)
    except EngineError as caught:
        error = caught
    assert error is not None and error.message == "scripted"
    assert num_items < 10
