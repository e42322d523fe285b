"""One HTTP request's way through the pools: the sequences of all its choices, merged into one answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from app.errors import LongspanError
from app.protocol import TokenChunk
from app.serving.dispatch import Items, PromptRun
from app.serving.responses import DONE_EVENT, Choice, ResponseHead, chunk_error, error_body, event, timed_out, usage
from app.serving.versions import Version

# The engine ends a request whose time is up and counts it so, after its current step. Only if it does not, the router
# cancels the call, which the engine takes for a client that left.
DEADLINE_GRACE_S = 1.0


class Generation:
    """Collects or streams the choices. Call `start` first, then exactly one of `events` and `whole`."""

    def __init__(
        self, version: Version, head: ResponseHead, runs: Sequence[PromptRun], *, n: int, deadline_s: float | None
    ) -> None:
        self._head = head
        self._n = n
        self._deadline_s = deadline_s  # of the event loop's clock
        self._items = merge([version.generate(run, deadline_s) for run in runs])
        self._first: list[TokenChunk] = []
        self._choices: dict[str, Choice] = {}
        for run in runs:
            for request in run.requests:
                choice = Choice(len(self._choices), head.is_chat, version.tokenizer.token_bytes, run.prompt_text)
                self._choices[request.request_id] = choice

    async def start(self) -> None:
        """Wait for the first tokens, so that a refusal still gets its status. Raises LongspanError."""
        try:
            self._first = await self._next() or []
            _raise_failure(self._first)
            if self._is_late():
                await self._fail_late()
        except BaseException:
            await self.close()
            raise

    def _is_late(self) -> bool:
        return self._deadline_s is not None and asyncio.get_running_loop().time() >= self._deadline_s

    async def _fail_late(self) -> None:
        """Let the engine end what begins only after its deadline. Raises LongspanError."""
        while (item := await self._next()) is not None:
            _raise_failure(item)
        raise timed_out()

    async def close(self) -> None:
        """Abort what still runs."""
        await self._items.aclose()

    async def whole(self) -> dict[str, Any]:
        """The body of a response that is not streamed. Raises LongspanError."""
        async with aclosing(self._items):
            item: list[TokenChunk] | None = self._first
            while item is not None:
                _raise_failure(item)
                for chunk in item:
                    self._choices[chunk.request_id].add(chunk)
                item = await self._next()
        choices = list(self._choices.values())
        body = self._head.body([choice.whole() for choice in choices], streamed=False)
        return {**body, "usage": usage(choices, self._n)}

    async def events(self, *, include_usage: bool) -> AsyncGenerator[bytes, None]:
        """Server-sent events. A failure on the way becomes an error event, and no [DONE] follows it."""
        async with aclosing(self._items):
            try:
                item: list[TokenChunk] | None = self._first
                while item is not None:
                    _raise_failure(item)
                    if data := b"".join(self._event(chunk, include_usage) for chunk in item):
                        yield data
                    item = await self._next()
            except LongspanError as error:
                yield event(error_body(error))
                return
        last = b""
        if include_usage:
            body = self._head.body([], streamed=True)
            last = event({**body, "usage": usage(self._choices.values(), self._n)})
        yield last + DONE_EVENT

    def _event(self, chunk: TokenChunk, include_usage: bool) -> bytes:
        choice = self._choices[chunk.request_id]
        is_first = not choice.is_started  # carries the role, or the echoed prompt
        delta = choice.add(chunk)
        if not (is_first or chunk.text or chunk.logprobs is not None or chunk.finish_reason is not None):
            return b""  # the detokenizer holds the text back
        body = self._head.body([delta], streamed=True)
        return event({**body, "usage": None} if include_usage else body)

    async def _next(self) -> list[TokenChunk] | None:
        """The next item, or None after the last. Raises LongspanError."""
        limit_s = None if self._deadline_s is None else self._deadline_s + DEADLINE_GRACE_S
        try:
            async with asyncio.timeout_at(limit_s):
                return await anext(self._items, None)
        except TimeoutError:
            raise timed_out() from None


def _raise_failure(item: Sequence[TokenChunk]) -> None:
    for chunk in item:
        if (error := chunk_error(chunk)) is not None:
            raise error


async def merge(streams: Sequence[Items]) -> Items:
    """Interleave streams; the first item comes when every stream has one or has ended, so all were admitted.

    Closing it closes them all; so does a failure of one, which is raised.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as items:
            async for item in items:
                yield item
        return
    queue: asyncio.Queue[tuple[int, list[TokenChunk] | Exception | None]] = asyncio.Queue()

    async def pump(index: int, stream: Items) -> None:
        try:
            async with aclosing(stream) as items:
                async for item in items:
                    queue.put_nowait((index, item))
            queue.put_nowait((index, None))
        except Exception as error:
            queue.put_nowait((index, error))

    tasks = [asyncio.create_task(pump(index, stream)) for index, stream in enumerate(streams)]
    try:
        silent, num_open = set(range(len(streams))), len(streams)
        held: list[TokenChunk] = []
        while num_open:
            index, outcome = await queue.get()
            silent.discard(index)
            if isinstance(outcome, Exception):
                raise outcome
            if outcome is None:
                num_open -= 1
            else:
                held.extend(outcome)
            if held and not silent:
                yield held
                held = []
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
