"""The other ranks of a replica: actors in its placement group, watched for as long as the replica lives.

    replica = rank 0 --- Shards --> actor Rank 1 .. N-1, each in `run_rank` until rank 0 says stop
                            ^------ the first that ends, fails, or does not answer

Tensors and step plans go over the process group; Ray carries the start, one ping a second, and the news of a death.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import signal
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import ray
from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, get_current_placement_group

from app.config import EngineConfig, ModelSource, PoolConfig
from app.errors import EngineError, LongspanError
from app.serving.rank import (
    START_TIMEOUT_S,
    Pulse,
    RankProcess,
    meeting_point,
    rank_places,
    start_rank,
    talk_over_own_interface,
)
from app.serving.streaming import Pacer

if TYPE_CHECKING:
    from app.engine.engine import Engine

logger = logging.getLogger("ray.serve")

POLL_S = 0.1  # while ranks load
PING_PERIOD_S = 1.0
LEAVE_TIMEOUT_S = 2.0  # for open streams to end with an error
FLUSH_S = 0.3  # for their last items to leave the process


class Shards:
    """Ranks 1 and up of one replica."""

    def __init__(self, name: str, config: PoolConfig, group: PlacementGroup) -> None:
        """Start the actors, which are seen in the cluster as NAME:rank-N, and return at once."""
        self._parallel = config.parallel
        self._actors = [
            start_rank(f"{name}:rank-{rank}", rank, config, group) for rank in range(1, config.parallel.num_ranks)
        ]
        self._prepared = [actor.prepare.remote() for actor in self._actors]
        self._processes: list[RankProcess] = []
        self._runs: list[Any] = []  # the long-lived calls, as object references
        self._guard: asyncio.Task[None] | None = None

    def load(self, source: ModelSource, config: EngineConfig) -> Engine:
        """Every rank joins the process group and loads its part; the engine is rank 0's.

        Raises EngineError or what a rank failed with, at the first failure; the other ranks are gone then.
        """
        try:
            return self._load(source, config)
        except BaseException:
            self.kill()
            raise

    def _load(self, source: ModelSource, config: EngineConfig) -> Engine:
        from app.engine.loading import load_engine

        talk_over_own_interface()
        pulse = Pulse(self._actors, self._parallel.collective_timeout_s)
        self._wait_until_prepared(pulse)
        places = rank_places(self._parallel, meeting_point())
        self._runs = [
            actor.run.remote(source, config, place) for actor, place in zip(self._actors, places[1:], strict=True)
        ]
        loading: Future[Engine] = Future()

        def load_rank_0() -> None:
            try:
                loading.set_result(load_engine(source, config, places[0]))
            except BaseException as error:
                loading.set_exception(error)

        # In a thread of its own: when another rank fails, this one may be stuck in a collective.
        threading.Thread(target=load_rank_0, name="longspan-load", daemon=True).start()
        while not loading.done():
            self._raise_if_ended(timeout_s=POLL_S)
            pulse.check()
        if isinstance(loading.exception(), EngineError):
            # A collective that failed: the rank whose fault it was says more.
            self._raise_if_ended(timeout_s=1.0)
        return loading.result()

    def _wait_until_prepared(self, pulse: Pulse) -> None:
        deadline_s, pending = time.monotonic() + START_TIMEOUT_S, self._prepared
        while pending:
            ended, pending = ray.wait(pending, num_returns=len(pending), timeout=POLL_S)
            for call in ended:
                if (error := _error_of(call)) is not None:
                    raise EngineError(f"rank {self._prepared.index(call) + 1} {_reason(error)} while it started")
            if pending and time.monotonic() > deadline_s:
                raise EngineError(f"the other ranks did not start within {START_TIMEOUT_S:g} s")
            pulse.check()
        self._processes = ray.get(self._prepared)
        logger.info(
            "ranks 1 to %d run as processes %s", len(self._actors), ", ".join(str(each.pid) for each in self._processes)
        )

    def _raise_if_ended(self, timeout_s: float) -> None:
        ended, _ = ray.wait(self._runs, timeout=timeout_s)
        for run in ended:
            error = _error_of(run)
            if isinstance(error, RayTaskError) and isinstance(error.cause, LongspanError):
                raise error.cause
            raise EngineError(f"rank {self._runs.index(run) + 1} {_reason(error)} while loading")

    def guard(self, engine: Engine, pacer: Pacer) -> None:
        """From now on the replica's process ends with its first rank."""
        self._guard = asyncio.create_task(self._leave_when_lost(engine, pacer))

    async def _leave_when_lost(self, engine: Engine, pacer: Pacer) -> None:
        """When a rank is lost, or the engine by a failed collective: end every stream with an error, then the process.

        Serve sees that at its next health check, frees the placement group and starts another replica.
        """
        lost = asyncio.create_task(self.until_lost())
        reason: str | None = None
        while reason is None:
            await asyncio.wait({lost}, timeout=PING_PERIOD_S)
            reason = lost.result() if lost.done() else _failure(engine)
        logger.error("%s: this replica ends, Serve starts another", reason)
        engine.fail(reason)
        self._end_processes()
        deadline_s = time.monotonic() + LEAVE_TIMEOUT_S
        while pacer.num_streams and time.monotonic() < deadline_s:
            await asyncio.sleep(0.02)
        await asyncio.sleep(FLUSH_S)
        os._exit(1)

    async def until_lost(self) -> str:
        """Wait for the first rank that ends, fails or does not answer within the collective timeout; says which."""
        watches = [
            asyncio.create_task(self._until_rank_is_lost(rank, actor, run))
            for rank, (actor, run) in enumerate(zip(self._actors, self._runs, strict=True), start=1)
        ]
        try:
            done, _ = await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for watch in watches:
                watch.cancel()

    async def _until_rank_is_lost(self, rank: int, actor: Any, run: Any) -> str:
        running = asyncio.wrap_future(run.future())
        period_s = min(PING_PERIOD_S, self._parallel.collective_timeout_s / 4)
        while True:
            ping = asyncio.wrap_future(actor.ping.remote().future())
            silence_s = self._parallel.collective_timeout_s - period_s
            await asyncio.wait({running, ping}, timeout=silence_s, return_when=asyncio.FIRST_COMPLETED)
            if not ping.done() and not running.done():
                return f"rank {rank} has not answered for {self._parallel.collective_timeout_s:g} s"
            if ping.done():
                ping.exception()  # of a dead process, whose call fails too
            await asyncio.wait({running}, timeout=period_s)
            if running.done():
                return f"rank {rank} {_reason(running.exception())}"

    def kill(self) -> None:
        """End the other ranks, whatever state they are in; the replica itself stays."""
        if self._guard is not None:
            self._guard.cancel()
        self._end_processes()

    def _end_processes(self) -> None:
        here = ray.get_runtime_context().get_node_id()
        for actor in self._actors:
            with suppress(RayError):
                ray.kill(actor)
        for process in self._processes:
            if process.node_id == here:
                # Ray gives a process that does not react five seconds; the next replica wants its GPU sooner.
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
        self._processes = []


def start_shards(config: PoolConfig) -> Shards | None:
    """Called in a replica's constructor; None for a replica of one rank."""
    if config.parallel.num_ranks == 1:
        return None
    context = serve.get_replica_context()
    group = get_current_placement_group()
    if group is None:
        raise EngineError("a replica of several ranks needs a placement group")
    return Shards(f"{context.app_name}:{context.deployment}:{context.replica_id.unique_id}", config, group)


def _failure(engine: Engine) -> str | None:
    try:
        engine.check_health(math.inf)
    except EngineError as error:
        return error.message
    return None


def _error_of(run: Any) -> Exception | None:
    try:
        ray.get(run)
    except RayError as error:
        return error
    return None


def _reason(error: BaseException | None) -> str:
    """What happened to a rank, as a predicate in one line."""
    if error is None:
        return "ended"
    if isinstance(error, RayTaskError):
        return f"failed: {type(error.cause).__name__}: {error.cause}"
    return f"was lost: {type(error).__name__}"
