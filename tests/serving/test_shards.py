"""A replica's other ranks without Ray: which loss is noticed how, and what follows."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from app.config import EngineConfig, ModelSource, ParallelConfig
from app.engine import loading
from app.errors import CheckpointError, EngineError, RankLostError
from app.serving import shards as module
from app.serving.rank import RankProcess
from app.serving.shards import Shards
from app.serving.streaming import Pacer

TIMEOUT_S = 0.4
WAIT_S = 30.0  # on a busy machine


class Call:
    """What a remote call gives: a reference whose result comes when the test says so."""

    def __init__(self) -> None:
        self.result: Future[Any] = Future()

    def future(self) -> Future[Any]:
        return self.result


class Actor:
    """A rank whose process answers until it is frozen."""

    def __init__(self) -> None:
        self.is_frozen = False
        self.num_pings = 0
        self.ping = SimpleNamespace(remote=self._ping)
        self.run = SimpleNamespace(remote=lambda *_: self.running)
        self.running = Call()

    def _ping(self) -> Call:
        call = Call()
        self.num_pings += 1
        if not self.is_frozen:
            call.result.set_result(None)
        return call


class Engine:
    def __init__(self) -> None:
        self.fatal: str | None = None

    def fail(self, message: str) -> None:
        self.fatal = self.fatal or message

    def check_health(self, _stall_s: float) -> None:
        if self.fatal:
            raise EngineError(self.fatal)


class Ray:
    """The part of ray that Shards uses."""

    def __init__(self) -> None:
        self.killed: list[Actor] = []

    def kill(self, actor: Actor) -> None:
        self.killed.append(actor)

    def get(self, call: Call | list[RankProcess], timeout: float = 0.0) -> Any:
        return call.result.result(timeout) if isinstance(call, Call) else call

    def wait(self, calls: list[Call], timeout: float, num_returns: int = 1) -> tuple[list[Call], list[Call]]:
        time.sleep(timeout / 10)
        done = [call for call in calls if call.result.done()][:num_returns]
        return done, [call for call in calls if call not in done]

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_node_id=lambda: "here")


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Ray:
    ray = Ray()
    monkeypatch.setattr(module, "ray", ray)
    return ray


def shards_of(*actors: Actor, processes: list[RankProcess] | None = None) -> Any:
    """Shards whose constructor, which starts actors, has not run."""
    shards: Any = Shards.__new__(Shards)
    shards._parallel = ParallelConfig(tensor=len(actors) + 1, collective_timeout_s=TIMEOUT_S)
    shards._actors, shards._runs = list(actors), [actor.running for actor in actors]
    shards._prepared, shards._processes, shards._guard = list(processes or ()), list(processes or ()), None
    return shards


def task_error(cause: Exception) -> RayTaskError:
    return RayTaskError("run", "traceback", cause)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (task_error(RankLostError("a collective failed")), "rank 2 failed: RankLostError: a collective failed"),
        (ActorDiedError(), "rank 2 was lost: ActorDiedError"),
        (None, "rank 2 ended"),
    ],
)
@pytest.mark.asyncio
async def test_the_first_rank_that_ends_is_named(error: Exception | None, reason: str) -> None:
    actors = [Actor(), Actor()]
    watch = asyncio.create_task(shards_of(*actors).until_lost())
    async with asyncio.timeout(WAIT_S):
        while actors[0].num_pings < 8:  # over more than the timeout
            await asyncio.sleep(0.01)
    assert not watch.done()
    actors[1].running.result.set_exception(error) if error else actors[1].running.result.set_result(None)
    assert await asyncio.wait_for(watch, WAIT_S) == reason


@pytest.mark.asyncio
async def test_a_frozen_rank_is_found_within_the_collective_timeout() -> None:
    actor = Actor()
    watch = asyncio.create_task(shards_of(actor).until_lost())
    await asyncio.sleep(TIMEOUT_S / 2)
    actor.is_frozen, num_answered = True, actor.num_pings
    assert await asyncio.wait_for(watch, WAIT_S) == f"rank 1 has not answered for {TIMEOUT_S:g} s"
    assert actor.num_pings == num_answered + 1  # the first without an answer is enough


@pytest.mark.parametrize("by", ["rank", "engine"])
@pytest.mark.asyncio
async def test_the_process_leaves_after_its_streams_have_ended(
    monkeypatch: pytest.MonkeyPatch, ray: Ray, by: str
) -> None:
    actor, engine, pacer = Actor(), Engine(), Pacer()
    left: list[int] = []
    monkeypatch.setattr(module.os, "_exit", lambda _code: left.append(pacer.num_streams))
    monkeypatch.setattr(module, "PING_PERIOD_S", 0.05)
    pacer.num_streams = 2
    shards = shards_of(actor)
    shards.guard(engine, pacer)
    await asyncio.sleep(0.1)
    assert engine.fatal is None
    if by == "rank":
        actor.running.result.set_exception(ActorDiedError())
    else:
        engine.fail("a collective failed")
    async with asyncio.timeout(WAIT_S):
        while not ray.killed:
            await asyncio.sleep(0.01)
    assert engine.fatal == ("rank 1 was lost: ActorDiedError" if by == "rank" else "a collective failed")
    assert not left  # the streams are still sending their error
    pacer.num_streams = 0
    await asyncio.wait_for(shards._guard, WAIT_S)
    assert left == [0] and ray.killed == [actor]


@pytest.mark.asyncio
async def test_a_replica_that_stops_by_itself_is_not_a_loss(monkeypatch: pytest.MonkeyPatch, ray: Ray) -> None:
    left: list[int] = []
    monkeypatch.setattr(module.os, "_exit", left.append)
    actor = Actor()
    shards = shards_of(actor)
    shards.guard(Engine(), Pacer())
    await asyncio.sleep(0.05)
    shards.kill()
    actor.running.result.set_exception(ActorDiedError())
    with pytest.raises(asyncio.CancelledError):
        await shards._guard
    assert not left and ray.killed == [actor]


@pytest.fixture
def stopped() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "60"])
    os.kill(process.pid, signal.SIGSTOP)
    yield process
    process.kill()
    process.wait()


def test_a_stopped_process_of_this_node_is_killed(ray: Ray, stopped: subprocess.Popen[bytes]) -> None:
    far_away = RankProcess("there", os.getpid())
    shards_of(Actor(), processes=[RankProcess("here", stopped.pid), far_away]).kill()
    assert stopped.wait(WAIT_S) == -signal.SIGKILL


def test_a_rank_that_cannot_load_ends_the_start_with_its_own_error(monkeypatch: pytest.MonkeyPatch, ray: Ray) -> None:
    actor = Actor()

    def load_engine(*_: object) -> None:
        actor.running.result.set_exception(task_error(CheckpointError("is too short", file="model.safetensors")))
        time.sleep(0.1)
        raise RankLostError("connection closed by peer")

    monkeypatch.setattr(loading, "load_engine", load_engine)
    monkeypatch.setattr(module, "talk_over_own_interface", lambda: None)
    monkeypatch.setattr(module, "meeting_point", lambda: "tcp://127.0.0.1:1")
    with pytest.raises(CheckpointError, match="is too short"):
        shards_of(actor).load(ModelSource(), EngineConfig())
    assert ray.killed == [actor]


def test_a_rank_that_freezes_while_loading_ends_the_start(monkeypatch: pytest.MonkeyPatch, ray: Ray) -> None:
    actors = [Actor(), Actor()]
    released = threading.Event()

    def load_engine(*_: object) -> None:
        actors[1].is_frozen = True
        released.wait(30)

    monkeypatch.setattr(loading, "load_engine", load_engine)
    monkeypatch.setattr(module, "talk_over_own_interface", lambda: None)
    monkeypatch.setattr(module, "meeting_point", lambda: "tcp://127.0.0.1:1")
    monkeypatch.setattr(module, "LOADING_SILENCE_S", 0.2)
    with pytest.raises(EngineError, match=r"rank 2 has not answered for 0\.2 s while loading"):
        shards_of(*actors).load(ModelSource(), EngineConfig())
    released.set()
    assert ray.killed == actors
