"""Inside a replica: text, stop strings, coalescing and aborts, with an engine of scripted tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest

from app.config import EMBEDDED_MODEL
from app.errors import EngineError, OverloadedError
from app.protocol import GenerateRequest, SamplingParams, TokenChunk, TokenLogprob
from app.serving.streaming import MAX_WINDOW_S, MIN_WINDOW_S, Pacer, TextStream, join_chunks, stream_text
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


async def collect(engine: ScriptedEngine, *requests: GenerateRequest) -> tuple[dict[str, TokenChunk], int]:
    joined: dict[str, TokenChunk] = {}
    num_items = 0
    async with aclosing(stream_text(engine, TOKENIZER, requests, Pacer())) as items:
        async for item in items:
            num_items += 1
            assert len({chunk.request_id for chunk in item}) == len(item)
            for chunk in item:
                earlier = joined.get(chunk.request_id)
                joined[chunk.request_id] = chunk if earlier is None else join_chunks(earlier, chunk)
    return joined, num_items


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
    async with aclosing(stream_text(ScriptedEngine(), TOKENIZER, [request("a", "x")], Pacer())) as items:
        first = await anext(items)
        assert loop.time() - started < MIN_WINDOW_S
        assert first[0].finish_reason == "length"
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
    items = stream_text(engine, TOKENIZER, [request("a"), request("b")], Pacer())
    error = None
    try:
        async for item in items:
            texts += "".join(chunk.text for chunk in item if chunk.request_id == "a")
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
        async with aclosing(stream_text(engine, TOKENIZER, [request("a"), request("b")], pacer)) as items:
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
