"""Which streams wake when: those that begin or end at once, the others a period apart."""

from __future__ import annotations

import asyncio

import pytest

from app.config import EngineConfig, ModelSource
from app.engine.engine import EARLY_DELIVERY_S, MAX_DELIVERY_PERIOD_S, MIN_DELIVERY_PERIOD_S, Engine, _Stream
from app.engine.loading import load_engine
from app.protocol import TokenChunk


def chunk(name: str, count: int, **ending: str) -> TokenChunk:
    """The `count`th token of a sequence."""
    return TokenChunk(name, (count,), num_output_tokens=count, **ending)  # type: ignore[arg-type]


async def received(streams: dict[str, _Stream]) -> dict[str, list[tuple[int, ...]]]:
    await asyncio.sleep(0)  # what was handed to the loop runs
    return {name: [stream.queue.get_nowait().token_ids for _ in range(stream.queue.qsize())]
            for name, stream in streams.items() if stream.queue.qsize()}  # fmt: skip


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the engine takes for the time: seconds, in its only entry."""
    now_s = [100.0]
    monkeypatch.setattr("app.engine.engine.time.monotonic", lambda: now_s[0])
    return now_s


def test_one_stream_that_begins_or_ends_does_not_wake_the_others(clock: list[float]) -> None:
    engine = load_engine(ModelSource(), EngineConfig(cache_blocks=4))

    async def go(engine: Engine) -> None:
        streams = {name: _Stream(asyncio.get_running_loop(), asyncio.Queue()) for name in "ab"}
        engine._streams.update(streams)
        engine._deliver([chunk("a", 1), chunk("gone", 2)])
        assert await received(streams) == {"a": [(1,)]}
        engine._deliver([chunk("a", 2), chunk("b", 1)])
        engine._deliver([chunk("a", 3), chunk("b", 2)])
        assert await received(streams) == {"b": [(1,)]}
        engine._deliver([chunk("a", 4, finish_reason="length"), chunk("b", 3)])
        assert await received(streams) == {"a": [(2, 3, 4)]}
        clock[0] += MIN_DELIVERY_PERIOD_S
        engine._deliver([chunk("b", 4)])
        assert await received(streams) == {"b": [(2, 3, 4)]}
        assert not any(stream.undelivered for stream in streams.values())

    asyncio.run(go(engine))


def test_streams_that_are_nearly_due_come_along(clock: list[float]) -> None:
    """Two that began 5 ms apart wake the loop once a period, not twice."""
    engine = load_engine(ModelSource(), EngineConfig(cache_blocks=4))

    async def go(engine: Engine) -> None:
        streams = {name: _Stream(asyncio.get_running_loop(), asyncio.Queue()) for name in "ab"}
        engine._streams.update(streams)
        engine._deliver([chunk("a", 1)])
        clock[0] += EARLY_DELIVERY_S / 2
        engine._deliver([chunk("a", 2), chunk("b", 1)])
        assert await received(streams) == {"a": [(1,)], "b": [(1,)]}
        clock[0] += MIN_DELIVERY_PERIOD_S - EARLY_DELIVERY_S
        engine._deliver([chunk("b", 2)])
        assert await received(streams) == {}, "none is due: nearly due alone does not wake"
        clock[0] += EARLY_DELIVERY_S / 2
        engine._deliver([])
        assert await received(streams) == {"a": [(2,)], "b": [(2,)]}

    asyncio.run(go(engine))


def test_a_first_token_is_handed_over_before_the_others(clock: list[float]) -> None:
    engine = load_engine(ModelSource(), EngineConfig(cache_blocks=4))

    async def go(engine: Engine) -> None:
        queue: asyncio.Queue[TokenChunk] = asyncio.Queue()
        streams = {name: _Stream(asyncio.get_running_loop(), queue) for name in "abc"}
        engine._streams.update(streams)
        engine._deliver([chunk("a", 1), chunk("b", 1)])
        clock[0] += MIN_DELIVERY_PERIOD_S
        engine._deliver([chunk("a", 2), chunk("b", 2), chunk("c", 1)])
        await asyncio.sleep(0)
        assert [queue.get_nowait().request_id for _ in range(queue.qsize())] == ["a", "b", "c", "a", "b"]

    asyncio.run(go(engine))


def test_each_stream_has_its_own_period_and_waits_no_longer_than_for_a_step(clock: list[float]) -> None:
    engine = load_engine(ModelSource(), EngineConfig(cache_blocks=4))

    async def go(engine: Engine) -> None:
        streams = {f"s{index}": _Stream(asyncio.get_running_loop(), asyncio.Queue()) for index in range(1000)}
        engine._streams.update(streams)
        engine._deliver([chunk("s0", 1)])
        clock[0] += MAX_DELIVERY_PERIOD_S / 2
        engine._deliver([chunk("s0", 2), chunk("s1", 1)])
        assert await received(streams) == {"s0": [(1,)], "s1": [(1,)]}
        clock[0] += MAX_DELIVERY_PERIOD_S / 2
        engine._deliver([chunk("s1", 2)])  # a step without "s0", which was preempted
        assert await received(streams) == {"s0": [(2,)]}
        clock[0] += 2 * MAX_DELIVERY_PERIOD_S  # a long step
        engine._deliver([chunk("s0", 3)])
        assert await received(streams) == {"s0": [(3,)], "s1": [(2,)]}

    asyncio.run(go(engine))
