"""What the scaling policy needs to know of a replica, measured from its engine's counters."""

from __future__ import annotations

import math

from app.protocol import EngineStats, Histogram
from app.serving.load import ReplicaSignals

ARRIVAL_WINDOW_S = 30.0  # time constant of the arrival rates
DECODE_WINDOW_S = 60.0
SPEED_WINDOW_S = 30.0
PERIOD_S = 0.99  # rates over less are noise: a step counts its prompt tokens all at once
NEARLY_FULL = 0.9  # of the KV cache; prompts may wait for blocks rather than for compute


class SignalMeter:
    """Call `update` once a second or more often with the engine's stats.

    The speed of prefill shows only while prompts queue up with room to run. Until they do, the best second so far
    stands for it: too low, so the load looks greater than it is and no replica is stopped by mistake.
    """

    def __init__(self, max_running_seqs: int) -> None:
        self._max_running_seqs = max_running_seqs
        self._last: tuple[float, EngineStats] | None = None
        self._busy_s = -math.inf
        self._seqs_per_s = 0.0
        self._tokens_per_s = 0.0
        self._speed: float | None = None
        self._passed = 0.0
        self._decode_s = 0.0  # sum over `_passed`, both decaying

    def update(self, stats: EngineStats, now: float) -> ReplicaSignals:
        """Signals at `now`, in seconds of any clock that runs evenly."""
        if self._last is None:
            self._last = now, stats
        elif now - self._last[0] >= PERIOD_S:
            self._average(self._last[1], stats, now - self._last[0])
            in_hand = stats.num_requests_running + stats.num_requests_waiting
            if in_hand or _num_arrived(stats) > _num_arrived(self._last[1]):
                self._busy_s = now
            elif now - self._busy_s >= ARRIVAL_WINDOW_S:
                # An average never gets there, and a pool may stop only if nothing arrives.
                self._seqs_per_s = self._tokens_per_s = 0.0
            self._last = now, stats
        return ReplicaSignals(
            waiting_seqs=stats.num_requests_waiting,
            waiting_prefill_tokens=stats.num_waiting_prefill_tokens,
            running_seqs=stats.num_requests_running,
            max_running_seqs=self._max_running_seqs,
            kv_usage=stats.kv_cache_usage_perc,
            arrival_seqs_per_s=max(0.0, self._seqs_per_s),
            arrival_tokens_per_s=max(0.0, self._tokens_per_s),
            prefill_tokens_per_s=self._speed,
            decode_s=self._decode_s / self._passed if self._passed > 0.0 else None,
        )

    def _average(self, before: EngineStats, after: EngineStats, elapsed_s: float) -> None:
        # From zero: a new replica's average rises as its neighbours', who share with it, fall; the sum stays right.
        part = 1.0 - math.exp(-elapsed_s / ARRIVAL_WINDOW_S)
        # Work done plus work in hand grows by what arrived, and shrinks by what proves cached or is cancelled.
        seqs = (_num_arrived(after) - _num_arrived(before)) / elapsed_s
        tokens = (_tokens_arrived(after) - _tokens_arrived(before)) / elapsed_s
        self._seqs_per_s += part * (seqs - self._seqs_per_s)
        self._tokens_per_s += part * (tokens - self._tokens_per_s)

        speed = (after.prefill_tokens_computed - before.prefill_tokens_computed) / elapsed_s
        if self._speed is None or speed > self._speed:
            self._speed = speed or self._speed
        elif self._is_prefill_bound(before) and self._is_prefill_bound(after):
            self._speed += (1.0 - math.exp(-elapsed_s / SPEED_WINDOW_S)) * (speed - self._speed)

        # Little's law over a window: places held x time / sequences that passed, those at its two edges counted half.
        # Beside prefill a sequence stays longer; without it, it would have taken the time that prefill left.
        prefill_share = min(1.0, speed / self._speed) if self._speed else 0.0
        running = (before.num_requests_running + after.num_requests_running) / 2
        passed = _grown(before.request_queue_time_seconds, after.request_queue_time_seconds)
        passed += sum(after.request_success.values()) - sum(before.request_success.values())
        keep = math.exp(-elapsed_s / DECODE_WINDOW_S)
        self._passed = self._passed * keep + max(0, passed) / 2
        self._decode_s = self._decode_s * keep + running * elapsed_s * (1.0 - prefill_share)

    def _is_prefill_bound(self, stats: EngineStats) -> bool:
        has_room = stats.num_requests_running < self._max_running_seqs and stats.kv_cache_usage_perc < NEARLY_FULL
        return stats.num_waiting_prefill_tokens > 0 and has_room


def _num_arrived(stats: EngineStats) -> int:
    return sum(stats.request_success.values()) + stats.num_requests_running + stats.num_requests_waiting


def _tokens_arrived(stats: EngineStats) -> int:
    return stats.prefill_tokens_computed + stats.num_waiting_prefill_tokens


def _grown(before: Histogram | None, after: Histogram | None) -> int:
    """How many values a histogram gained."""
    return sum(after.counts if after else ()) - sum(before.counts if before else ())
