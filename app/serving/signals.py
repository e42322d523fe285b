"""What the scaling policy needs to know of a replica, measured from its engine's counters."""

from __future__ import annotations

import math

from app.protocol import EngineStats, Histogram
from app.serving.scaling import ReplicaSignals

ARRIVAL_WINDOW_S = 30.0  # time constant of the arrival rates
RESIDENCE_WINDOW_S = 120.0
SPEED_WINDOW_S = 30.0


class SignalMeter:
    """Call `update` about once a second with the engine's stats.

    The speed of prefill shows only while prompts queue up. Until they do, the best second so far stands for it: too
    low, so the load looks greater than it is and no replica is stopped by mistake.
    """

    def __init__(self, max_running_seqs: int) -> None:
        self._max_running_seqs = max_running_seqs
        self._last: tuple[float, EngineStats] | None = None
        self._weight = 0.0  # of what the averages have seen, 0 to 1
        self._seqs_per_s = 0.0
        self._tokens_per_s = 0.0
        self._speed: float | None = None
        self._finished = 0.0
        self._residence_s = 0.0  # sum over `_finished`, both decaying

    def update(self, stats: EngineStats, now: float) -> ReplicaSignals:
        """Signals at `now`, in seconds of any clock that runs evenly."""
        if self._last is not None and now > self._last[0]:
            self._average(self._last[1], stats, now - self._last[0])
        if self._last is None or now > self._last[0]:
            self._last = now, stats
        weight = self._weight or 1.0
        return ReplicaSignals(
            waiting_seqs=stats.num_requests_waiting,
            waiting_prefill_tokens=stats.num_waiting_prefill_tokens,
            running_seqs=stats.num_requests_running,
            max_running_seqs=self._max_running_seqs,
            kv_usage=stats.kv_cache_usage_perc,
            arrival_seqs_per_s=max(0.0, self._seqs_per_s / weight),
            arrival_tokens_per_s=max(0.0, self._tokens_per_s / weight),
            prefill_tokens_per_s=self._speed,
            residence_s=self._residence_s / self._finished if self._finished > 0.0 else None,
        )

    def _average(self, before: EngineStats, after: EngineStats, elapsed_s: float) -> None:
        part = 1.0 - math.exp(-elapsed_s / ARRIVAL_WINDOW_S)
        self._weight += part * (1.0 - self._weight)
        # Work done plus work in hand grows by what arrived, and shrinks by what proves cached or is cancelled.
        seqs = (_num_arrived(after) - _num_arrived(before)) / elapsed_s
        tokens = (_tokens_arrived(after) - _tokens_arrived(before)) / elapsed_s
        self._seqs_per_s += part * (seqs - self._seqs_per_s)
        self._tokens_per_s += part * (tokens - self._tokens_per_s)

        speed = (after.prefill_tokens_computed - before.prefill_tokens_computed) / elapsed_s
        is_saturated = min(before.num_waiting_prefill_tokens, after.num_waiting_prefill_tokens) > 0
        if self._speed is None or speed > self._speed:
            self._speed = speed or self._speed
        elif is_saturated:
            self._speed += (1.0 - math.exp(-elapsed_s / SPEED_WINDOW_S)) * (speed - self._speed)

        keep = math.exp(-elapsed_s / RESIDENCE_WINDOW_S)
        finished, total_s = _grown(before.e2e_request_latency_seconds, after.e2e_request_latency_seconds)
        started, queued_s = _grown(before.request_queue_time_seconds, after.request_queue_time_seconds)
        mean_queue_s = queued_s / started if started else 0.0
        self._finished = self._finished * keep + finished
        self._residence_s = self._residence_s * keep + max(0.0, total_s - finished * mean_queue_s)


def _num_arrived(stats: EngineStats) -> int:
    return sum(stats.request_success.values()) + stats.num_requests_running + stats.num_requests_waiting


def _tokens_arrived(stats: EngineStats) -> int:
    return stats.prefill_tokens_computed + stats.num_waiting_prefill_tokens


def _grown(before: Histogram | None, after: Histogram | None) -> tuple[int, float]:
    """How many values a histogram gained, and their sum."""
    if after is None:
        return 0, 0.0
    count, total = sum(after.counts), after.sum
    return (count, total) if before is None else (count - sum(before.counts), total - before.sum)
