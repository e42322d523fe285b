"""A rank that is killed, frozen or raises ends the engine at once; its streams end with an error."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from app.engine.engine import Engine
from app.errors import EngineError, UnavailableError
from tests.checkpoints import save_random_checkpoint
from tests.engine.sharded import engine_config, greedy, prompt_of, sharded_engine

TIMEOUT_S = 4.0
SLACK_S = 60.0  # of a busy machine


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_random_checkpoint(tmp_path, "v2_lite", vocab_size=97)


def kill(follower: BaseProcess) -> None:
    follower.kill()


def freeze(follower: BaseProcess) -> None:
    os.kill(follower.pid or 0, signal.SIGSTOP)


async def until_dead(engine: Engine) -> float:
    start = time.monotonic()
    while time.monotonic() - start < TIMEOUT_S + SLACK_S:
        try:
            engine.check_health()
        except EngineError:
            return time.monotonic() - start
        await asyncio.sleep(0.05)
    raise AssertionError("the engine does not notice")


@pytest.mark.parametrize("harm", [kill, freeze])
def test_a_rank_lost_under_load_ends_streams_and_engine(folder: Path, harm: Callable[[BaseProcess], None]) -> None:
    with sharded_engine(folder, engine_config(), 1, 2, timeout_s=TIMEOUT_S) as sharded:
        engine = sharded.engine

        async def go() -> None:
            stream = engine.generate(greedy("r", prompt_of(20, 3, 97), 500))
            await anext(stream)
            harm(sharded.followers[0])
            async for _ in stream:
                pass

        engine.start()
        with pytest.raises(UnavailableError, match="collective failed"):
            asyncio.run(asyncio.wait_for(go(), TIMEOUT_S + SLACK_S))
        with pytest.raises(EngineError, match="collective failed"):
            engine.check_health()
        with pytest.raises(UnavailableError):
            asyncio.run(anext(engine.generate(greedy("late", prompt_of(20, 3, 97), 5))))
        sharded.followers[0].kill()


def test_rank_0_that_fails_within_a_step_ends_the_engine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank waits for that step's collectives: the next step's must not be taken for them."""
    with sharded_engine(folder, engine_config(), 2, 1, timeout_s=TIMEOUT_S) as sharded:
        engine = sharded.engine

        def out_of_memory(*_args: object) -> None:
            raise MemoryError("no room")

        async def go() -> None:
            stream = engine.generate(greedy("r", prompt_of(20, 3, 97), 500))
            await anext(stream)
            monkeypatch.setattr(engine._runner._model._layers[-1], "forward", out_of_memory)
            async for _ in stream:
                pass

        engine.start()
        with pytest.raises(UnavailableError, match="rank 0 failed within a step: MemoryError: no room"):
            asyncio.run(asyncio.wait_for(go(), TIMEOUT_S + SLACK_S))
        with pytest.raises(EngineError, match="failed within a step"):
            engine.check_health()
        sharded.followers[0].kill()


@pytest.mark.full
@pytest.mark.parametrize("harm", [kill, freeze])
def test_a_rank_lost_while_nothing_runs_is_noticed(folder: Path, harm: Callable[[BaseProcess], None]) -> None:
    with sharded_engine(folder, engine_config(), 1, 2, timeout_s=TIMEOUT_S) as sharded:
        sharded.engine.start()
        time.sleep(1.5 * TIMEOUT_S)  # beats keep the ranks together
        sharded.engine.check_health()
        harm(sharded.followers[0])
        asyncio.run(until_dead(sharded.engine))
        sharded.followers[0].kill()
