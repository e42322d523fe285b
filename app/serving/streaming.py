"""Inside a replica: an engine's tokens -> text chunks, coalesced so that one item crosses processes per window.

An item on its way from a replica through the router to the proxy costs some 2.5 ms of CPU, so the first tokens leave
at once and later ones gather for a window that grows with the number of live streams.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Protocol

from app.errors import LongspanError
from app.protocol import GenerateRequest, TokenChunk
from app.tokenizer import Detokenizer, Tokenizer

MIN_WINDOW_S = 0.020
STREAM_WINDOW_S = 0.005  # per live stream: half a core at most
MAX_WINDOW_S = 0.200


class Generator(Protocol):
    """The part of Engine that streams."""

    def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]: ...


class TextStream:
    """Fills the text of one sequence's chunks and ends it at a stop string."""

    def __init__(self, tokenizer: Tokenizer, request: GenerateRequest) -> None:
        sampling = request.sampling
        self._detokenizer = Detokenizer(tokenizer, sampling.stop, min_tokens=sampling.min_tokens)

    def add(self, chunk: TokenChunk) -> TokenChunk:
        """The chunk with text; cut and finished where a stop string was completed. Feed nothing after a finish."""
        consumed_before = self._detokenizer.num_tokens
        # The token that ends a sequence is no part of its text.
        is_stop_token = chunk.finish_reason == "stop"
        text = self._detokenizer.add(chunk.token_ids[:-1] if is_stop_token else chunk.token_ids)
        if chunk.finish_reason is not None:
            text += self._detokenizer.finish()
        if self._detokenizer.stopped_by is None:
            return replace(chunk, text=text)
        num_kept = self._detokenizer.num_tokens - consumed_before
        return replace(
            chunk,
            token_ids=chunk.token_ids[:num_kept],
            logprobs=None if chunk.logprobs is None else chunk.logprobs[:num_kept],
            finish_reason="stop",
            stop_reason=self._detokenizer.stopped_by,
            num_output_tokens=chunk.num_output_tokens - len(chunk.token_ids) + num_kept,
            text=text,
        )


class Pacer:
    """The window shared by all streams of a replica."""

    def __init__(self) -> None:
        self.num_streams = 0

    @property
    def window_s(self) -> float:
        return min(MAX_WINDOW_S, max(MIN_WINDOW_S, STREAM_WINDOW_S * self.num_streams))


async def stream_text(
    engine: Generator, tokenizer: Tokenizer, requests: Sequence[GenerateRequest], pacer: Pacer
) -> AsyncGenerator[list[TokenChunk], None]:
    """Run `requests` together; each item holds at most one chunk per request. Closing it aborts what still runs.

    Raises LongspanError if a sequence fails; what the others gathered until then is yielded first.
    """
    pending: dict[str, TokenChunk] = {}
    wake = asyncio.Event()
    all_ended = asyncio.Event()
    failures: list[LongspanError] = []

    async def pump(request: GenerateRequest) -> None:
        texts = TextStream(tokenizer, request)
        try:
            async with aclosing(engine.generate(request)) as chunks:  # type: ignore[type-var]
                async for chunk in chunks:
                    added = texts.add(chunk)
                    earlier = pending.get(request.request_id)
                    pending[request.request_id] = added if earlier is None else join_chunks(earlier, added)
                    wake.set()
                    if added.finish_reason is not None:
                        return
        except LongspanError as error:
            failures.append(error)

    tasks = {asyncio.create_task(pump(request)) for request in requests}

    def on_done(task: asyncio.Task[None]) -> None:
        tasks.discard(task)
        if not tasks or failures or (not task.cancelled() and task.exception() is not None):
            all_ended.set()
            wake.set()

    for task in tuple(tasks):
        task.add_done_callback(on_done)
    pacer.num_streams += len(requests)
    running = tuple(tasks)
    try:
        while True:
            await wake.wait()
            wake.clear()
            if pending:
                item = list(pending.values())
                pending.clear()
                yield item
            if all_ended.is_set() and not pending:
                break
            await _sleep_unless(all_ended, pacer.window_s)
        for task in running:
            if task.done() and not task.cancelled():
                task.result()
        if failures:
            raise failures[0]
    finally:
        pacer.num_streams -= len(requests)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _sleep_unless(event: asyncio.Event, delay_s: float) -> None:
    try:
        async with asyncio.timeout(delay_s):
            await event.wait()
    except TimeoutError:
        pass


def join_chunks(first: TokenChunk, second: TokenChunk) -> TokenChunk:
    """Two consecutive chunks of one sequence as one."""
    logprobs = first.logprobs if second.logprobs is None else (first.logprobs or ()) + second.logprobs
    return replace(
        second, token_ids=first.token_ids + second.token_ids, logprobs=logprobs, text=first.text + second.text
    )
