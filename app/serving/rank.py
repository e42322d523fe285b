"""One rank of a replica besides the first: the actor, where it is placed, and where the ranks meet."""

from __future__ import annotations

import logging
import os
import random
import socket
import threading
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

    def ping(self) -> None:
        """An answer says that the process is scheduled."""


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
    ).remote()


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
