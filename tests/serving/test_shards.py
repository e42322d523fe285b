"""A replica's other ranks without Ray: which loss is noticed how, and what follows."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from app.config import EngineConfig, ModelSource, ParallelConfig
from app.engine import loading
from app.errors import CheckpointError, EngineError, RankLostError
from app.serving import rank as rank_module
from app.serving import shards as module
from app.serving.rank import Rank, RankProcess
from app.serving.shards import Shards
from app.serving.streaming import Pacer

TIMEOUT_S = 0.4
Loads = Callable[[Callable[[], None]], None]
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

    def _ping(self, *, is_loading: bool = False) -> Call:
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

    def get(self, call: Call | list[Call]) -> Any:
        return call.result.result(0) if isinstance(call, Call) else [one.result.result(0) for one in call]

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
    monkeypatch.setattr(rank_module, "ray", ray)
    return ray


def shards_of(*actors: Actor, processes: list[RankProcess] | None = None) -> Any:
    """Shards whose constructor, which starts actors, has not run."""
    shards: Any = Shards.__new__(Shards)
    shards._parallel = ParallelConfig(tensor=len(actors) + 1, collective_timeout_s=TIMEOUT_S)
    shards._actors, shards._runs = list(actors), [actor.running for actor in actors]
    shards._prepared, shards._processes, shards._guard = [Call() for _ in actors], list(processes or ()), None
    for prepared in shards._prepared:
        prepared.result.set_result(RankProcess("there", 0))
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


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch, ray: Ray) -> Loads:
    """Called with what rank 0 does while it loads."""
    monkeypatch.setattr(module, "talk_over_own_interface", lambda: None)
    monkeypatch.setattr(module, "meeting_point", lambda: "tcp://127.0.0.1:1")
    return lambda load: monkeypatch.setattr(loading, "load_engine", lambda *_: load())


def test_a_rank_that_cannot_load_ends_the_start_with_its_own_error(ray: Ray, loads: Loads) -> None:
    actor = Actor()

    def load() -> None:
        actor.running.result.set_exception(task_error(CheckpointError("is too short", file="model.safetensors")))
        time.sleep(0.1)
        raise RankLostError("connection closed by peer")

    loads(load)
    with pytest.raises(CheckpointError, match="is too short"):
        shards_of(actor).load(ModelSource(), EngineConfig())
    assert ray.killed == [actor]


def test_a_rank_that_freezes_while_loading_ends_the_start(ray: Ray, loads: Loads) -> None:
    actors = [Actor(), Actor()]
    released = threading.Event()

    def load() -> None:
        time.sleep(2 * TIMEOUT_S)  # that long it answers
        actors[1].is_frozen = True
        released.wait(30)

    loads(load)
    start_s = time.monotonic()
    with pytest.raises(EngineError, match=rf"rank 2 has not answered for {TIMEOUT_S:g} s while loading"):
        shards_of(*actors).load(ModelSource(), EngineConfig())
    released.set()
    assert time.monotonic() - start_s >= 3 * TIMEOUT_S
    assert ray.killed == actors and actors[0].num_pings > 2


def test_a_rank_that_dies_while_loading_ends_the_start_at_once(ray: Ray, loads: Loads) -> None:
    actors = [Actor(), Actor()]
    released = threading.Event()

    def load() -> None:
        actors[1].running.result.set_exception(ActorDiedError())
        released.wait(30)

    loads(load)
    with pytest.raises(EngineError, match="rank 2 was lost: ActorDiedError while loading"):
        shards_of(*actors).load(ModelSource(), EngineConfig())
    released.set()
    assert ray.killed == actors


def test_a_rank_that_freezes_or_dies_before_it_loads_ends_the_start(ray: Ray, loads: Loads) -> None:
    loads(lambda: None)
    slow, frozen = shards_of(Actor()), shards_of(Actor(), Actor())
    slow._prepared[0] = Call()
    threading.Timer(3 * TIMEOUT_S, slow._prepared[0].result.set_result, (RankProcess("there", 0),)).start()
    slow.load(ModelSource(), EngineConfig())  # whoever answers may take its time
    frozen._prepared[1] = Call()
    threading.Timer(TIMEOUT_S, lambda: setattr(frozen._actors[1], "is_frozen", True)).start()
    with pytest.raises(EngineError, match="rank 2 has not answered"):
        frozen.load(ModelSource(), EngineConfig())
    frozen._prepared[1].result.set_exception(ActorDiedError())
    with pytest.raises(EngineError, match="rank 2 was lost: ActorDiedError while it started"):
        frozen.load(ModelSource(), EngineConfig())


class Watched:
    """Ranks that watch their replica by a clock that the test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        monkeypatch.setattr(rank_module, "time", SimpleNamespace(monotonic=lambda: self.now_s, sleep=self._sleep))
        self._num_looks = 0

    def _sleep(self, _period_s: float) -> None:
        self._num_looks += 1
        time.sleep(0.001)

    def look(self) -> None:
        """Let every rank look several times at what the clock says now."""
        enough, end_s = self._num_looks + 20, time.monotonic() + WAIT_S
        while self._num_looks < enough:
            assert time.monotonic() < end_s
            time.sleep(0.001)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch, ray: Ray) -> Iterator[Watched]:
    """Depends on `ray`, which is there until the watching has ended."""
    yield Watched(monkeypatch)
    for thread in [thread for thread in threading.enumerate() if thread.name == "longspan-watch"]:
        thread.join(WAIT_S)
        assert not thread.is_alive()


def test_a_replica_that_freezes_while_loading_is_ended_by_its_ranks(ray: Ray, watched: Watched) -> None:
    replica: Any = Actor()
    rank = Rank(replica, TIMEOUT_S)
    for _ in range(10):
        rank.ping(is_loading=True)
        watched.now_s += 0.9 * TIMEOUT_S
        watched.look()
    assert not ray.killed
    watched.now_s += 0.2 * TIMEOUT_S
    watched.look()
    assert ray.killed[0] is replica
    rank.ping()


def test_a_replica_that_has_loaded_is_for_serve_to_watch(ray: Ray, watched: Watched) -> None:
    replica, left_alone = cast(Any, Actor()), cast(Any, Actor())
    rank, unasked = Rank(replica, TIMEOUT_S), Rank(left_alone, TIMEOUT_S)  # which never gets as far as asking
    rank.ping(is_loading=True)
    rank.ping()
    watched.now_s += 0.9 * rank_module.START_TIMEOUT_S
    watched.look()
    assert not ray.killed
    watched.now_s += 0.2 * rank_module.START_TIMEOUT_S
    watched.look()
    assert set(ray.killed) == {left_alone}
    unasked.ping()
