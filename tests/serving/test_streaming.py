"""Inside a replica: text, stop strings, coalescing and aborts, with an engine of scripted tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import aclosing
from pathlib import Path

import pytest

from app.config import EMBEDDED_MODEL
from app.errors import EngineError, OverloadedError, UnavailableError
from app.protocol import GenerateRequest, SamplingParams, TokenChunk, TokenLogprob
from app.serving import streaming
from app.serving.streaming import (
    MAX_WINDOW_S,
    MIN_WINDOW_S,
    Channel,
    Pacer,
    SequenceGroup,
    StreamItem,
    TextStream,
    join_chunks,
)
from app.tokenizer import Tokenizer

TOKENIZER = Tokenizer(Path(EMBEDDED_MODEL))
TEXT = "The cat said hello, then it left. Grüße, 猫! And on it went."


class ScriptedEngine:
    """Yields each request's prompt as its output, one token per chunk."""

    def __init__(self, delay_s: float = 0.0, fail_after: int | None = None) -> None:
        self.delay_s = delay_s
        self.fail_after = fail_after
        self.running: set[str] = set()
        self.num_yielded = 0

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        self.running.add(request.request_id)
        ids = request.prompt_token_ids
        try:
            for index, token_id in enumerate(ids):
                await asyncio.sleep(self.delay_s)
                if index == self.fail_after:
                    raise EngineError("scripted")
                self.num_yielded += 1
                last = index == len(ids) - 1
                yield TokenChunk(
                    request.request_id,
                    (token_id,),
                    logprobs=(TokenLogprob(token_id, -1.0),),
                    finish_reason="length" if last else None,
                    num_output_tokens=index + 1,
                )
        finally:
            self.running.discard(request.request_id)


def request(name: str, text: str = TEXT, stop: tuple[str, ...] = (), min_tokens: int = 0) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=500, stop=stop, min_tokens=min_tokens)
    return GenerateRequest(name, tuple(TOKENIZER.encode(text)), sampling)


def run(
    engine: ScriptedEngine, *requests: GenerateRequest, pacer: Pacer | None = None, channel: Channel | None = None
) -> AsyncGenerator[StreamItem, None]:
    return SequenceGroup(requests, TOKENIZER, pacer or Pacer()).run(engine, lambda: channel)


def join_all(batches: Iterable[tuple[TokenChunk, ...]]) -> dict[str, TokenChunk]:
    joined: dict[str, TokenChunk] = {}
    for batch in batches:
        assert len({chunk.request_id for chunk in batch}) == len(batch)
        for chunk in batch:
            earlier = joined.get(chunk.request_id)
            joined[chunk.request_id] = chunk if earlier is None else join_chunks(earlier, chunk)
    return joined


async def collect(engine: ScriptedEngine, *requests: GenerateRequest) -> tuple[dict[str, TokenChunk], int]:
    async with aclosing(run(engine, *requests)) as items:
        batches = [item.chunks async for item in items]
    return join_all(batches), len(batches)


@pytest.mark.asyncio
async def test_text_is_whole_and_items_are_few() -> None:
    engine = ScriptedEngine(delay_s=0.001)
    joined, num_items = await collect(engine, request("a"), request("b", "Short."))
    assert joined["a"].text == TEXT and joined["b"].text == "Short."
    assert joined["a"].token_ids == request("a").prompt_token_ids
    assert joined["a"].logprobs is not None and len(joined["a"].logprobs) == len(joined["a"].token_ids)
    assert num_items < engine.num_yielded / 2
    assert not engine.running


@pytest.mark.asyncio
async def test_first_tokens_leave_at_once_and_the_end_is_not_held() -> None:
    loop = asyncio.get_running_loop()
    started = loop.time()
    async with aclosing(run(ScriptedEngine(), request("a", "x"))) as items:
        first = await anext(items)
        assert loop.time() - started < MIN_WINDOW_S
        assert first.chunks[0].finish_reason == "length"
        assert await anext(items, None) is None
        assert loop.time() - started < MIN_WINDOW_S


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
    assert not engine.running


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_stop_cuts_at_the_same_token_for_any_chunking(size: int) -> None:
    ids = request("a").prompt_token_ids
    stream = TextStream(TOKENIZER, request("a", stop=("then",)))
    total: TokenChunk | None = None
    for start in range(0, len(ids), size):
        part = ids[start : start + size]
        chunk = stream.add(TokenChunk("a", part, num_output_tokens=start + len(part)))
        total = chunk if total is None else join_chunks(total, chunk)
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
    engine = ScriptedEngine(delay_s=0.002, fail_after=3)
    texts = ""
    items = run(engine, request("a"), request("b"))
    error = None
    try:
        async for item in items:
            texts += "".join(chunk.text for chunk in item.chunks if chunk.request_id == "a")
    except EngineError as caught:
        error = caught
    assert error is not None and error.message == "scripted"
    assert TEXT.startswith(texts) and texts
    assert not engine.running


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


def test_window_grows_with_streams_up_to_a_bound() -> None:
    pacer = Pacer()
    assert pacer.window_s == MIN_WINDOW_S
    pacer.num_streams = 10
    assert pacer.window_s == pytest.approx(0.05)
    pacer.num_streams = 1000
    assert pacer.window_s == MAX_WINDOW_S
