"""Counters and histograms of one engine, and their snapshot as EngineStats."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Sequence as Seq

from app.cache.blocks import BlockPool
from app.engine.sequence import Sequence
from app.protocol import EngineStats, Histogram

LATENCY_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
MIN_PREFILL_STEP_TOKENS = 64  # a step with fewer says little about the speed of longer ones


class Recorder:
    """An exact histogram that grows; `snapshot` freezes it."""

    def __init__(self, bounds: tuple[float, ...] = LATENCY_BOUNDS_S) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect.bisect_left(self._bounds, value)] += 1
        self._sum += value

    def snapshot(self) -> Histogram:
        return Histogram(self._bounds, tuple(self._counts), self._sum)


class StatsRecorder:
    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()  # by name in EngineStats
        self._finished: Counter[str] = Counter()
        self._prefill_step_s = 0.0
        self._ttft, self._itl, self._e2e, self._queue, self._step = (Recorder() for _ in range(5))

    def count_preemption(self) -> None:
        self._counts["num_preemptions"] += 1

    def count_step(self) -> None:
        self._counts["num_steps"] += 1

    def record_step_time(self, seconds: float, num_prefill_tokens: int) -> None:
        self._step.add(seconds)
        if num_prefill_tokens >= MIN_PREFILL_STEP_TOKENS:
            self._counts["prefill_step_tokens"] += num_prefill_tokens
            self._prefill_step_s += seconds

    def record_admission(self, seq: Sequence) -> None:
        self._counts["prompt_tokens"] += seq.num_prompt_tokens
        self._counts["prefix_cache_queries"] += seq.num_prompt_tokens
        self._counts["prefix_cache_hits"] += seq.num_cached_tokens
        if seq.scheduled_s is not None:
            self._queue.add(seq.scheduled_s - seq.arrival_s)

    def record_computed(self, seq: Sequence, num_tokens: int) -> None:
        if seq.num_new_tokens > 1:
            self._counts["prefill_tokens_computed"] += num_tokens

    def record_token(self, seq: Sequence, now: float) -> None:
        self._counts["generation_tokens"] += 1
        if seq.last_token_s is None:
            self._ttft.add(now - seq.arrival_s)
        else:
            self._itl.add(now - seq.last_token_s)
        seq.last_token_s = now

    def record_finish(self, seq: Sequence, now: float) -> None:
        self._finished[seq.finish_reason or "error"] += 1
        self._e2e.add(now - seq.arrival_s)

    def snapshot(self, waiting: Seq[Sequence], running: Seq[Sequence], pool: BlockPool, now: float) -> EngineStats:
        return EngineStats(
            num_requests_running=len(running),
            num_requests_waiting=len(waiting),
            num_waiting_prefill_tokens=sum(
                seq.num_new_tokens for seq in (*waiting, *running) if seq.num_new_tokens > 1
            ),
            num_blocks=pool.num_blocks,
            num_free_blocks=pool.num_free,
            num_cached_blocks=pool.num_cached,
            oldest_waiting_s=max((now - seq.waiting_since_s for seq in waiting), default=0.0),
            **self._counts,
            prefill_step_seconds=self._prefill_step_s,
            request_success=dict(self._finished),
            expert_tokens={},  # counted where the experts are
            time_to_first_token_seconds=self._ttft.snapshot(),
            inter_token_latency_seconds=self._itl.snapshot(),
            e2e_request_latency_seconds=self._e2e.snapshot(),
            request_queue_time_seconds=self._queue.snapshot(),
            step_time_seconds=self._step.snapshot(),
        )
