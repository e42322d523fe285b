"""An engine of scripted tokens, and what the streaming tests share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from pathlib import Path

from app.config import EMBEDDED_MODEL
from app.errors import EngineError
from app.protocol import FinishReason, GenerateRequest, SamplingParams, TokenChunk, TokenLogprob, join_chunks
from app.serving.streaming import Channel, Pacer, SequenceGroup, StreamItem
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
        self.aborted: dict[str, FinishReason] = {}

    def abort(self, request_id: str, reason: FinishReason = "abort") -> None:
        self.aborted[request_id] = reason

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
            joined[chunk.request_id] = chunk if earlier is None else join_chunks([earlier, chunk])
    return joined
