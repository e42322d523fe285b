"""What it costs a step that several ranks run it: rank 0's plan, broadcast, laid out by every rank, and a sync."""

from __future__ import annotations

import multiprocessing
import socket
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from app.engine.channel import Channel, Kind
from app.engine.plan import StepPlan, to_model_input
from app.model.parallel import RankPlace, Ranks

NUM_SEQS, CONTEXT_TOKENS, BLOCK_SIZE = 8, 2048, 64
WARM_STEPS, STEPS = 50, 500
MAX_P50_MS = 1.0
JOIN_TIMEOUT_S = 30.0


def plan_share(num_ranks: int, runs: int, report: Callable[[str], None]) -> dict[str, Any]:
    """Medians over the steps of each run, in processes of one thread; passed if the median run's is in time."""
    medians_ms = []
    for index in range(runs):
        steps_s = _run(num_ranks)
        medians_ms.append(1e3 * statistics.median(steps_s))
        p90_ms = 1e3 * statistics.quantiles(steps_s, n=10)[-1]
        report(f"run {index + 1}: {num_ranks} ranks, batch {NUM_SEQS}: p50 {medians_ms[-1]:.3f} ms, p90 {p90_ms:.3f}")
    p50_ms = statistics.median(medians_ms)
    return {
        "passed": p50_ms <= MAX_P50_MS, "p50_ms": p50_ms, "runs_p50_ms": medians_ms,
        "ranks": num_ranks, "batch": NUM_SEQS, "context_tokens": CONTEXT_TOKENS,
    }  # fmt: skip


def _run(num_ranks: int) -> list[float]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        method = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    context = multiprocessing.get_context("spawn")
    places = [RankPlace(rank, tensor=num_ranks, expert=1, init_method=method) for rank in range(num_ranks)]
    processes = [context.Process(target=_follow, args=(place,), daemon=True) for place in places[1:]]
    for process in processes:
        process.start()
    try:
        return _lead(places[0])
    finally:
        for process in processes:
            process.join(JOIN_TIMEOUT_S)
            process.kill()


def _lead(place: RankPlace) -> list[float]:
    torch.set_num_threads(1)
    cpu = torch.device("cpu")
    ranks = Ranks.join(place, cpu)
    channel = Channel(ranks)
    steps_s = []
    for step in range(WARM_STEPS + STEPS):
        plan = _plan(step)
        start = time.perf_counter()
        channel.send(Kind.STEP, plan.pack())
        to_model_input(plan, BLOCK_SIZE, cpu)
        channel.answer_beat()
        steps_s.append(time.perf_counter() - start)
    channel.send(Kind.STOP)
    ranks.leave(cpu)
    return steps_s[WARM_STEPS:]


def _follow(place: RankPlace) -> None:
    torch.set_num_threads(1)
    cpu = torch.device("cpu")
    ranks = Ranks.join(place, cpu)
    channel = Channel(ranks)
    while True:
        kind, words = channel.receive()
        if kind == Kind.STOP:
            break
        to_model_input(StepPlan.unpack(words), BLOCK_SIZE, cpu)
        channel.answer_beat()
    ranks.leave(cpu)


def _plan(step: int) -> StepPlan:
    width = -(-(CONTEXT_TOKENS + WARM_STEPS + STEPS) // BLOCK_SIZE)
    return StepPlan(
        num_new_tokens=np.ones(NUM_SEQS, dtype=np.int32),
        context_lens=np.full(NUM_SEQS, CONTEXT_TOKENS + step, dtype=np.int32),
        token_ids=np.arange(NUM_SEQS, dtype=np.int32),
        block_tables=np.arange(NUM_SEQS * width, dtype=np.int32).reshape(NUM_SEQS, width),
    )
