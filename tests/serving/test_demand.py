"""When a router holds requests back from a pool, and when it says at once that holding cannot help."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

import pytest

from app.errors import UnavailableError
from app.protocol import EngineStats
from app.serving import dispatch as module
from app.serving.board import PoolDecision
from app.serving.demand import UNPLACED_RETRY_S, ZeroGate
from app.serving.dispatch import Dispatcher
from app.serving.monitor import ReplicaReport
from app.serving.scaling_view import PoolStart
from tests.serving.test_dispatch import LIMITS, answer, build, prompt, texts

RUNNING = PoolDecision(running=1, target=1, wanted=1, granted=1)
CLOSING = PoolDecision(running=1, target=0, wanted=0, granted=0)
ASLEEP = PoolDecision(running=0, target=0, wanted=0, granted=0)
STARTING = PoolDecision(running=0, target=1, wanted=1, granted=1)
START = PoolStart(cold_start_s=8.0, waited_s=0.0, timeout_s=600.0)


def gate(decision: PoolDecision | None, start: PoolStart | None = START) -> ZeroGate:
    gate = ZeroGate("long")
    gate.update(decision, start, 100.0)
    return gate


@pytest.mark.parametrize(
    ("decision", "is_open", "is_asleep"),
    [
        (None, True, False),  # does not scale, or nobody could say
        (RUNNING, True, False),
        (CLOSING, False, True),
        (ASLEEP, False, True),
        (STARTING, False, False),
    ],
)
def test_it_is_open_while_a_replica_stays(decision: PoolDecision | None, is_open: bool, is_asleep: bool) -> None:
    assert (gate(decision).is_open, gate(decision).is_asleep) == (is_open, is_asleep)


def test_who_has_time_waits() -> None:
    for deadline_s in (math.inf, 109.0):
        gate(ASLEEP).check(deadline_s, 100.0)
    gate(RUNNING).check(100.1, 100.0)
    assert not gate(ASLEEP).is_wanted(100.0)


def test_a_deadline_before_the_start_ends_is_refused_and_starts_a_replica_all_the_same() -> None:
    zero = gate(ASLEEP)
    with pytest.raises(UnavailableError, match="about 8 s") as caught:
        zero.check(103.0, 100.0)
    assert caught.value.retry_after_s == pytest.approx(8.0)
    assert zero.is_wanted(100.0) and zero.is_wanted(115.0) and not zero.is_wanted(117.0)
    zero.update(RUNNING, START, 101.0)
    assert not zero.is_wanted(101.0)


def test_the_time_a_start_has_taken_so_far_counts() -> None:
    gate(STARTING, PoolStart(8.0, waited_s=6.0, timeout_s=600.0)).check(103.0, 100.0)
    with pytest.raises(UnavailableError, match="about 2 s"):
        gate(STARTING, PoolStart(8.0, waited_s=5.0, timeout_s=600.0)).check(102.0, 101.0)


def test_before_the_first_start_nobody_is_refused() -> None:
    gate(ASLEEP, None).check(100.1, 100.0)


def test_a_replica_without_room_is_not_waited_for() -> None:
    blocked = PoolDecision(0, 0, wanted=0, granted=0, values={"next_try_s": 240.0})
    with pytest.raises(UnavailableError, match="no node has room") as caught:
        gate(blocked).check(math.inf, 100.0)
    assert caught.value.retry_after_s == UNPLACED_RETRY_S


# ---- in the router ----


async def in_time(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30.0):
        while not condition():
            await asyncio.sleep(0.001)


def tell(dispatcher: Dispatcher, decision: PoolDecision) -> None:
    """The monitor's word; the replica reports on until the end, and a little longer."""
    report = ReplicaReport("short", "a", LIMITS, EngineStats())
    dispatcher.update([(0.0, report)], decision, PoolStart(cold_start_s=8.0, waited_s=0.0, timeout_s=600.0))


@pytest.mark.asyncio
async def test_a_request_waits_for_a_pool_that_closes_and_is_reported_at_once() -> None:
    dispatcher, client = build(answer, "a")
    told: list[None] = []
    dispatcher._on_hold = lambda: told.append(None)
    tell(dispatcher, CLOSING)
    task = asyncio.create_task(texts(dispatcher, prompt("x")))
    await in_time(lambda: bool(told))
    for decision in (CLOSING, ASLEEP, STARTING):
        assert dispatcher.traffic.router_requests_held == 1
        tell(dispatcher, decision)
        await asyncio.sleep(0.005)
    assert client.sent == [] and len(told) == 1
    tell(dispatcher, RUNNING)
    assert await task == ["1", "2"]
    assert client.sent == ["a"] and dispatcher.traffic.router_requests_held == 0


@pytest.mark.asyncio
async def test_who_was_told_to_come_back_counts_as_held_until_a_replica_is_there() -> None:
    dispatcher, client = build(answer, "a")
    tell(dispatcher, ASLEEP)
    with pytest.raises(UnavailableError):
        await texts(dispatcher, prompt("x"), asyncio.get_running_loop().time() + 1.0)
    assert client.sent == [] and dispatcher.traffic.router_requests_held == 1
    tell(dispatcher, RUNNING)
    assert dispatcher.traffic.router_requests_held == 0


@pytest.mark.asyncio
async def test_a_start_longer_than_the_router_holds_is_said_at_once() -> None:
    dispatcher, client = build(answer, "a", max_hold_s=5.0)
    tell(dispatcher, ASLEEP)
    with pytest.raises(UnavailableError, match="about 8 s"):
        await texts(dispatcher, prompt("x"))
    assert client.sent == [] and dispatcher.traffic.router_requests_held == 1
    assert dispatcher.traffic.router_holds_ended == {"late_start": 1}


@pytest.mark.asyncio
async def test_serve_never_chooses_for_a_pool_at_zero_though_the_monitor_is_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "INFORMED_S", 0.0)
    monkeypatch.setattr(module, "RECHECK_S", 0.01)
    dispatcher, client = build(answer, max_hold_s=0.2)
    dispatcher.update([], ASLEEP)
    with pytest.raises(UnavailableError, match="has no replica") as caught:
        await texts(dispatcher, prompt("x"))
    assert caught.value.retry_after_s >= 1.0
    assert client.sent == [] and dispatcher.traffic.router_holds_ended == {"max_hold": 1}
    # Once it starts, Serve has been asked for a replica and may be left to find it.
    dispatcher.update([], STARTING)
    assert await texts(dispatcher, prompt("x")) == ["1", "2"]
    assert client.sent == [None]


@pytest.mark.asyncio
async def test_while_the_monitor_is_silent_the_replicas_known_last_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "INFORMED_S", 0.0)
    dispatcher, client = build(answer)
    tell(dispatcher, RUNNING)
    await asyncio.sleep(0.05)
    assert await texts(dispatcher, prompt("x")) == ["1", "2"]
    assert client.sent == ["a"]
