"""An engine over several processes: rank 0 here, the others spawned, on a CPU."""

from __future__ import annotations

import multiprocessing
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from app.config import EngineConfig, ModelSource
from app.engine.engine import Engine
from app.engine.loading import load_engine
from app.engine.ranks import RankPlace, run_rank

JOIN_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Sharded:
    engine: Engine
    followers: list[BaseProcess]


def engine_config(**fields: object) -> EngineConfig:
    return EngineConfig(device="cpu", num_threads=1, **{"cache_blocks": 64, **fields})  # type: ignore[arg-type]


@contextmanager
def sharded_engine(
    folder: Path | str, config: EngineConfig, tensor: int, expert: int, *,
    timeout_s: float = 60.0, placement: Path | None = None,
) -> Iterator[Sharded]:  # fmt: skip
    """Loaded, not started; its other ranks must have ended well when it is stopped here, unless they were killed."""
    source = ModelSource(path=str(folder))
    method = f"tcp://127.0.0.1:{_free_port()}"
    file = None if placement is None else str(placement)
    places = [RankPlace(rank, tensor, expert, method, timeout_s, file) for rank in range(tensor * expert)]
    context = multiprocessing.get_context("spawn")
    followers: list[BaseProcess] = [
        context.Process(target=_follow, args=(source, config, place), daemon=True) for place in places[1:]
    ]
    for follower in followers:
        follower.start()
    try:
        engine = load_engine(source, config, places[0])
        yield Sharded(engine, followers)
        engine.stop()
        for follower in followers:
            follower.join(JOIN_TIMEOUT_S)
            assert follower.exitcode is not None and follower.exitcode <= 0
    finally:
        for follower in followers:
            follower.kill()


def _follow(source: ModelSource, config: EngineConfig, place: RankPlace) -> None:
    torch.set_num_threads(1)
    run_rank(source, config, place)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
