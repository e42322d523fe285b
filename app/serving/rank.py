"""One rank of a replica besides the first: the actor, where it is placed, and where the ranks meet."""

from __future__ import annotations

import logging
import math
import os
import random
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil  # type: ignore[import-untyped]
import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from app.config import EngineConfig, ModelSource, ParallelConfig, PoolConfig
from app.errors import EngineError

if TYPE_CHECKING:
    from app.model.parallel import RankPlace

logger = logging.getLogger("ray.serve")

SERVE_NAMESPACE = "serve"
START_TIMEOUT_S = 120.0  # for the ranks' processes, and their imports
WATCH_PERIOD_S = 0.5
REPLICA_PATIENCE = 2  # of the collective timeout: rank 0 itself finds another rank that is frozen after one
EXIT_DELAY_S = 2.0  # of a rank that failed, whose replica may be frozen
# Between the ports Ray gives its workers and those Linux gives outgoing connections.
PORTS = range(24_000, 32_000)


@dataclass(frozen=True, slots=True)
class RankProcess:
    """Where a rank runs."""

    node_id: str
    pid: int


class Rank:
    """The actor class of ranks 1 and up. `run` takes one of its two threads, the other answers."""

    def __init__(self, replica: Any, timeout_s: float) -> None:
        """replica: the actor whose process is rank 0, which may be silent for `timeout_s` while it loads"""
        self._replica, self._silence_s, self._timeout_s = replica, START_TIMEOUT_S, timeout_s
        self.is_loading, self._asked_s = False, time.monotonic()
        threading.Thread(target=self._watch_replica, name="longspan-watch", daemon=True).start()

    def prepare(self) -> RankProcess:
        """Import what `run` needs, so that all ranks then join the process group at about the same time."""
        import app.engine.ranks  # noqa: F401

        # Serve's logging is for replicas; this goes to the worker's own file in Ray's log folder.
        logging.basicConfig(level=logging.INFO, format="%(levelname)s %(asctime)s %(name)s -- %(message)s")
        talk_over_own_interface()
        return RankProcess(ray.get_runtime_context().get_node_id(), os.getpid())

    def run(self, source: ModelSource, config: EngineConfig, place: RankPlace) -> None:
        """Returns when rank 0 stops. Raises LongspanError, as `run_rank` does."""
        from app.engine.ranks import run_rank

        try:
            run_rank(source, config, place)
        except Exception:
            logger.exception("rank %d failed", place.rank)
            # The process is of no use and may hold a GPU; first the error goes to the replica.
            timer = threading.Timer(EXIT_DELAY_S, os._exit, (1,))
            timer.daemon = True
            timer.start()
            raise

    def ping(self, *, is_loading: bool = False) -> None:
        """An answer says that the process is scheduled; the question says so of rank 0's."""
        self.is_loading, self._asked_s = is_loading, time.monotonic()
        self._silence_s = self._timeout_s if is_loading else math.inf

    def _watch_replica(self) -> None:
        """Serve asks for a replica's health only once it has started: until then a frozen one is for us to end."""
        while not math.isinf(self._silence_s):
            time.sleep(WATCH_PERIOD_S)
            if time.monotonic() - self._asked_s > self._silence_s:
                logger.error("rank 0 has asked for nothing for %g s while loading: it is killed", self._silence_s)
                ray.kill(self._replica)  # Ray ends this process then


class Pulse:
    """Whether ranks that load are alive: from its first answer on, each must answer within the timeout.

    Compiling and reading leave the interpreter to others now and then: an answer takes a second at most.
    """

    def __init__(self, actors: Sequence[Any], timeout_s: float) -> None:
        self._actors, self._timeout_s = actors, timeout_s
        self._pings = [actor.ping.remote(is_loading=True) for actor in actors]
        self._heard_s: list[float | None] = [None] * len(actors)

    def check(self) -> None:
        """Raises EngineError that names a rank without a pulse. The answer of one that ended is its call's error."""
        now = time.monotonic()
        answered, _ = ray.wait(self._pings, num_returns=len(self._pings), timeout=0)
        for index, (actor, ping, heard_s) in enumerate(zip(self._actors, self._pings, self._heard_s, strict=True)):
            if ping in answered:
                self._pings[index], self._heard_s[index] = actor.ping.remote(is_loading=True), now
            elif heard_s is not None and now - heard_s > self._timeout_s:
                raise EngineError(f"rank {index + 1} has not answered for {self._timeout_s:g} s while loading")


def start_rank(name: str, rank: int, config: PoolConfig, group: PlacementGroup) -> Any:
    """The actor of a rank, seen in the cluster under `name`; returns at once."""
    actor: Any = ray.remote(Rank)
    return actor.options(
        name=name,
        namespace=SERVE_NAMESPACE,
        num_cpus=config.num_cpus,
        num_gpus=config.num_gpus,
        max_restarts=0,
        max_concurrency=2,
        scheduling_strategy=PlacementGroupSchedulingStrategy(
            group, placement_group_bundle_index=rank // config.parallel.ranks_per_bundle
        ),
    ).remote(ray.get_runtime_context().current_actor, REPLICA_PATIENCE * config.parallel.collective_timeout_s)


def rank_places(parallel: ParallelConfig, init_method: str) -> list[RankPlace]:
    """Where each rank stands, by rank."""
    from app.engine.ranks import RankPlace

    return [
        RankPlace(
            rank=rank,
            tensor=parallel.tensor,
            expert=parallel.expert,
            init_method=init_method,
            timeout_s=parallel.collective_timeout_s,
            expert_placement=parallel.expert_placement,
            peer_memory=parallel.peer_memory,
        )
        for rank in range(parallel.num_ranks)
    ]


def meeting_point() -> str:
    """Where rank 0, in this process, lets the others find it: a URL for torch.distributed."""
    return f"tcp://{_own_address()}:{_free_port()}"


def talk_over_own_interface() -> None:
    """Process groups use the network interface that Ray uses on this node, unless the environment names another.

    Left alone they take what the host's name resolves to, which on many hosts is the loopback interface.
    """
    address = _own_address()
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", name)


def _own_address() -> str:
    address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    return address


def _free_port() -> int:
    for port in random.sample(PORTS, 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return port
    raise EngineError(f"no free port in {PORTS.start}-{PORTS.stop - 1}")
