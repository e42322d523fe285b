"""Which streams wake when: those that begin or end at once, the others together, a period apart."""

from __future__ import annotations

import asyncio
import math

from app.config import EngineConfig, ModelSource
from app.engine.engine import Engine, _Stream
from app.engine.loading import load_engine
from app.protocol import TokenChunk


def chunk(name: str, count: int, **ending: str) -> TokenChunk:
    """The `count`th token of a sequence."""
    return TokenChunk(name, (count,), num_output_tokens=count, **ending)  # type: ignore[arg-type]


async def received(streams: dict[str, _Stream]) -> dict[str, list[tuple[int, ...]]]:
    await asyncio.sleep(0)  # what was handed to the loop runs
    return {name: [stream.queue.get_nowait().token_ids for _ in range(stream.queue.qsize())]
            for name, stream in streams.items() if stream.queue.qsize()}  # fmt: skip


def test_one_stream_that_begins_or_ends_does_not_wake_the_others() -> None:
    engine = load_engine(ModelSource(), EngineConfig(cache_blocks=4))

    async def go(engine: Engine) -> None:
        streams = {name: _Stream(asyncio.get_running_loop(), asyncio.Queue()) for name in "ab"}
        engine._streams.update(streams)
        engine._next_delivery_s = math.inf
        engine._deliver([chunk("a", 1), chunk("gone", 2)])
        assert await received(streams) == {"a": [(1,)]}
        engine._deliver([chunk("a", 2), chunk("b", 1)])
        engine._deliver([chunk("a", 3), chunk("b", 2)])
        assert await received(streams) == {"b": [(1,)]}
        engine._deliver([chunk("a", 4, finish_reason="length"), chunk("b", 3)])
        assert await received(streams) == {"a": [(2, 3, 4)]}
        engine._next_delivery_s = 0.0
        engine._deliver([chunk("b", 4)])
        assert await received(streams) == {"b": [(2, 3, 4)]}
        assert not engine._undelivered

    asyncio.run(go(engine))
