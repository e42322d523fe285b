"""An engine over several processes: rank 0 here, the others spawned, on a CPU."""

from __future__ import annotations

import multiprocessing
import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from app.config import EngineConfig, ModelSource
from app.engine.engine import Engine
from app.engine.loading import load_engine
from app.engine.ranks import RankPlace, run_rank
from app.model import spread_experts
from app.protocol import GenerateRequest, SamplingParams, TokenChunk

JOIN_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Sharded:
    engine: Engine
    followers: list[BaseProcess]


def engine_config(**fields: object) -> EngineConfig:
    return EngineConfig(device="cpu", num_threads=1, **{"cache_blocks": 64, "max_chunk_tokens": 96, **fields})  # type: ignore[arg-type]


@contextmanager
def sharded_engine(
    folder: Path | str, config: EngineConfig, tensor: int, expert: int, *,
    timeout_s: float = 60.0, placement: Path | None = None, padded_rows: int = 0,
) -> Iterator[Sharded]:  # fmt: skip
    """Loaded, not started. The other ranks must end well when it stops, unless the test ended them.

    padded_rows: up to how many rows expert ranks take the path of CUDA graphs
    """
    source = ModelSource(path=str(folder))
    file = None if placement is None else str(placement)
    method = f"tcp://127.0.0.1:{_free_port()}"
    places = [RankPlace(rank, tensor, expert, method, timeout_s, file) for rank in range(tensor * expert)]
    context = multiprocessing.get_context("spawn")
    followers: list[BaseProcess] = [
        context.Process(target=_follow, args=(source, config, place, padded_rows), daemon=True) for place in places[1:]
    ]
    for follower in followers:
        follower.start()
    before, spread_experts.MAX_PADDED_ROWS["cpu"] = spread_experts.MAX_PADDED_ROWS["cpu"], padded_rows
    try:
        engine = load_engine(source, config, places[0])
        yield Sharded(engine, followers)
        engine.stop()
        for follower in followers:
            follower.join(JOIN_TIMEOUT_S)
            assert follower.exitcode is not None and follower.exitcode <= 0
    finally:
        spread_experts.MAX_PADDED_ROWS["cpu"] = before
        for follower in followers:
            follower.kill()
            follower.join()


def _follow(source: ModelSource, config: EngineConfig, place: RankPlace, padded_rows: int) -> None:
    torch.set_num_threads(1)
    spread_experts.MAX_PADDED_ROWS["cpu"] = padded_rows
    run_rank(source, config, place)


def _free_port() -> int:
    """Outside the range from which Linux takes ports by itself: one of those could be gone before rank 0 listens."""
    for port in random.sample(range(20_000, 23_000), 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("no free port")


# ---- what engines say to the same requests ----


@dataclass(frozen=True)
class Answers:
    tokens: dict[str, list[int]]
    logits: dict[str, list[torch.Tensor]]  # [vocab] before each token
    num_cached: dict[str, int]


def answer(engine: Engine, requests: list[GenerateRequest]) -> Answers:
    """Step an engine that has not started; its books are checked after every step."""
    logits: dict[str, list[torch.Tensor]] = {request.request_id: [] for request in requests}
    chunks: dict[str, list[TokenChunk]] = {request.request_id: [] for request in requests}
    launch = engine._sampler.launch

    def recording(rows: torch.Tensor, sequences: list[object], *, num_pending: int = 0) -> object:
        for row, seq in zip(rows, sequences, strict=True):
            logits[seq.request_id].append(row.clone())  # type: ignore[attr-defined]
        return launch(rows, sequences, num_pending=num_pending)  # type: ignore[arg-type]

    engine._sampler.launch = recording  # type: ignore[assignment, method-assign]
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for chunk in engine.step():
            chunks[chunk.request_id].append(chunk)
        engine.check_integrity()
    engine._sampler.launch = launch  # type: ignore[method-assign]
    return Answers(
        {name: [token for chunk in found for token in chunk.token_ids] for name, found in chunks.items()},
        logits,
        {name: found[-1].num_cached_tokens for name, found in chunks.items()},
    )


def check_same_logits(found: Answers, expected: Answers) -> None:
    """To the bit."""
    for name, rows in expected.logits.items():
        differences = [float((x - y).abs().max()) for x, y in zip(found.logits[name], rows, strict=True)]
        assert max(differences) == 0.0, f"{name}: {differences}"


def greedy(name: str, prompt: tuple[int, ...], num_tokens: int, salt: str = "") -> GenerateRequest:
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    return GenerateRequest(name, prompt, sampling, cache_salt=salt)


def prompt_of(length: int, start: int, vocab_size: int) -> tuple[int, ...]:
    return tuple(6 + (start * 31 + 97 * index) % (vocab_size - 6) for index in range(length))
