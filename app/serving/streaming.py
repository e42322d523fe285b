r"""Inside a replica: an engine's tokens -> text chunks, gathered so that few items cross processes.

    engine --> TextStream --> Collector of the request's own stream --+--> router
                         \-> Collector of the router's channel     --+

An item on its way from a replica through the router to the proxy costs some 2.5 ms of CPU. So the first tokens leave at
once by the request's own stream, and as soon as the router has a channel to this replica, the rest of all its requests
leave by that, a part of them at a time. The request's own stream then stays open, silent: cancelling it aborts it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from itertools import islice
from typing import Protocol

from app.errors import EngineError, LongspanError, UnavailableError
from app.protocol import FinishReason, GenerateRequest, TokenChunk, join_chunks
from app.tokenizer import Detokenizer, Tokenizer

MIN_WINDOW_S = 0.020
STREAM_WINDOW_S = 0.005  # per live stream: the proxy's share of the cost stays within half a core
MAX_WINDOW_S = 0.200
PART_SEQS = 12  # with fewer a part is not worth an item: a new request waits some 10 ms behind so many
CHANNEL_IDLE_S = 5.0  # a channel ends after that long without sequences, so that a replica can drain


@dataclass(frozen=True, slots=True)
class StreamItem:
    """One item of a request's own stream."""

    chunks: tuple[TokenChunk, ...]  # at most one per sequence
    moved_to: str | None = None  # the channel that carries all later chunks
    replica_id: str = ""  # filled by the replica


class Generator(Protocol):
    """The part of Engine that streams."""

    def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]: ...

    def abort(self, request_id: str, reason: FinishReason = "abort") -> None: ...


class Pacer:
    """The window shared by all streams of a replica."""

    def __init__(self) -> None:
        self.num_streams = 0

    @property
    def window_s(self) -> float:
        return min(MAX_WINDOW_S, max(MIN_WINDOW_S, STREAM_WINDOW_S * self.num_streams))


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


class Collector:
    """Chunks that wait to leave. First tokens leave at once, later ones a window apart, a sequence's end at once.

    In parts, if asked for: the router spends a millisecond on each sequence, and what comes for a new request must not
    wait until it is through with all of them. So each part of a window takes as many, those that have waited longest.
    """

    def __init__(self, pacer: Pacer, *, in_parts: bool = False) -> None:
        self._pacer, self._in_parts = pacer, in_parts
        self._chunks: dict[str, TokenChunk] = {}  # longest waiting first
        self._ended: list[str] = []
        self._wake = asyncio.Event()
        self._urgent = asyncio.Event()
        self._next_s = 0.0

    def add(self, chunk: TokenChunk) -> None:
        earlier = self._chunks.get(chunk.request_id)
        self._chunks[chunk.request_id] = chunk if earlier is None else join_chunks([earlier, chunk])
        self._wake.set()
        if chunk.finish_reason is not None:
            self._ended.append(chunk.request_id)
            self._urgent.set()

    def flush(self) -> None:
        """Let `batch` return at once, even nothing."""
        self._wake.set()
        self._urgent.set()

    @property
    def is_empty(self) -> bool:
        return not self._chunks

    async def batch(self) -> tuple[TokenChunk, ...]:
        """Wait for what is to leave next."""
        loop = asyncio.get_running_loop()
        await self._wake.wait()
        delay_s = self._next_s - loop.time()
        is_early = delay_s > 0.0 and await _wait_at_most(self._urgent, delay_s)
        num_due = 0
        if not is_early:
            num_due = num_seqs = max(1, self._pacer.num_streams, len(self._chunks))
            if self._in_parts:
                num_due = min(num_seqs, max(PART_SEQS, math.ceil(MIN_WINDOW_S / self._pacer.window_s * num_seqs)))
            self._next_s = loop.time() + self._pacer.window_s * num_due / num_seqs
        return self.take(num_due)

    def take(self, num_due: int | None = None) -> tuple[TokenChunk, ...]:
        """The chunks of sequences that have ended, and of so many others; None: of all."""
        names = dict.fromkeys((*self._ended, *islice(self._chunks, num_due)))
        batch = tuple(self._chunks.pop(name) for name in names)
        self._ended.clear()
        self._urgent.clear()
        if not self._chunks:
            self._wake.clear()
        return batch


async def _wait_at_most(event: asyncio.Event, delay_s: float) -> bool:
    """True if the event was set in time."""
    try:
        async with asyncio.timeout(delay_s):
            return await event.wait()
    except TimeoutError:
        return False


class Channel:
    """What carries the chunks of one router's sequences on this replica."""

    def __init__(self, channel_id: str, pacer: Pacer) -> None:
        self.channel_id = channel_id
        self.collector = Collector(pacer, in_parts=True)
        self.groups: set[SequenceGroup] = set()
        self.is_open = True

    async def items(self) -> AsyncGenerator[tuple[TokenChunk, ...], None]:
        """An empty item that says the channel is open, then batches, until it has been idle."""
        yield ()
        while True:
            try:
                async with asyncio.timeout(CHANNEL_IDLE_S):
                    batch = await self.collector.batch()
            except TimeoutError:
                if not self.groups:
                    self.is_open = False
                    return
                continue
            yield batch

    def close(self) -> None:
        """Fail the requests that depend on it: what was under way is lost."""
        self.is_open = False
        for group in tuple(self.groups):
            group.fail(UnavailableError("the stream to the router broke"))


class SequenceGroup:
    """The sequences of one prompt, run together; what one of them fails with ends all."""

    def __init__(self, requests: Sequence[GenerateRequest], tokenizer: Tokenizer, pacer: Pacer) -> None:
        self._requests = requests
        self._tokenizer = tokenizer
        self._pacer = pacer
        self._own = Collector(pacer)
        self._target = self._own
        self._num_running = len(requests)
        self._failure: LongspanError | None = None
        self._ended = asyncio.Event()

    def fail(self, error: LongspanError) -> None:
        self._failure = self._failure or error
        self._ended.set()
        self._own.flush()

    async def run(
        self, engine: Generator, find_channel: Callable[[], Channel | None]
    ) -> AsyncGenerator[StreamItem, None]:
        """Items of the request's own stream. Closing it aborts what still runs.

        Raises LongspanError if a sequence fails; what the others gathered until then is yielded first.
        """
        tasks = [asyncio.create_task(self._pump(engine, request)) for request in self._requests]
        self._pacer.num_streams += len(tasks)
        channel: Channel | None = None
        try:
            while channel is None and not (self._ended.is_set() and self._own.is_empty):
                chunks = await self._own.batch()
                channel = None if self._ended.is_set() else find_channel()
                if channel is not None or self._ended.is_set():
                    chunks += self._own.take()  # nothing comes this way any more
                if channel is not None:
                    channel.groups.add(self)
                    self._target = channel.collector
                    yield StreamItem(chunks, channel.channel_id)
                elif chunks:
                    yield StreamItem(chunks)
                if self._failure is not None:
                    break  # the others may go on for long
            await self._ended.wait()
            if self._failure is not None:
                raise self._failure
        finally:
            if channel is not None:
                channel.groups.discard(self)
            self._pacer.num_streams -= len(tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _pump(self, engine: Generator, request: GenerateRequest) -> None:
        try:
            texts = TextStream(self._tokenizer, request)
            async with aclosing(engine.generate(request)) as chunks:  # type: ignore[type-var]
                async for chunk in chunks:
                    added = texts.add(chunk)
                    self._target.add(added)
                    if added.finish_reason is not None:
                        if chunk.finish_reason is None:
                            engine.abort(request.request_id, added.finish_reason)
                        break
        except LongspanError as error:
            self.fail(error)
        except Exception as error:
            self.fail(EngineError(f"internal error: {type(error).__name__}"))
            raise
        self._num_running -= 1
        if self._num_running == 0:
            self._ended.set()
            self._own.flush()
