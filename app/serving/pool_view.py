"""What a router knows of one pool: the replicas' last reports, and what it has under way there itself.

reports of all replicas, each second ---+
                                        +--> ReplicaLoad of each, PoolLoad of all, as of this very moment
tickets of this router's own prompts ---+

A report is up to two seconds old. This router's own share is known at once, so only what exceeds it is taken from the
report: that came by other routers.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable
from dataclasses import dataclass

from app.protocol import EngineStats
from app.serving.monitor import ReplicaReport
from app.serving.routing import PoolLoad, ReplicaLoad

SPEED_WINDOW_S = 10.0  # of computing prompts, over which their speed is averaged
ADMISSION_WINDOW_S = 5.0


@dataclass(slots=True)
class Share:
    """What this router has in one place: on a replica, or held because there is none."""

    num_seqs: int = 0
    num_prefill_tokens: int = 0  # of prompts without a first token
    peak_seqs: int = 0  # since the peaks were last taken
    peak_tokens: int = 0

    def add(self, num_seqs: int, num_prefill_tokens: int) -> None:
        self.num_seqs += num_seqs
        self.num_prefill_tokens += num_prefill_tokens
        self.peak_seqs = max(self.peak_seqs, self.num_seqs)
        self.peak_tokens = max(self.peak_tokens, self.num_prefill_tokens)

    def take_peaks(self) -> tuple[int, int]:
        peaks = self.peak_seqs, self.peak_tokens
        self.peak_seqs, self.peak_tokens = self.num_seqs, self.num_prefill_tokens
        return peaks


class Ticket:
    """One prompt's sequences on their way. Held until `send`; `close` it in any case."""

    def __init__(self, view: PoolView, num_seqs: int, num_prefill_tokens: int) -> None:
        self._view = view
        self._num_seqs = num_seqs
        self._num_tokens = 0
        self._place: Share | None = None
        self._move(view.held, num_prefill_tokens)

    def hold(self, num_prefill_tokens: int) -> None:
        self._move(self._view.held, num_prefill_tokens)

    def send(self, replica_id: str, num_prefill_tokens: int) -> None:
        self._move(self._view.share_of(replica_id), num_prefill_tokens)

    def close(self) -> None:
        self._move(None, 0)

    def _move(self, place: Share | None, num_tokens: int) -> None:
        if self._place is not None:
            self._place.add(-self._num_seqs, -self._num_tokens)
        self._place, self._num_tokens = place, num_tokens
        if place is not None:
            place.add(self._num_seqs, num_tokens)


@dataclass(slots=True)
class _Known:
    """A replica as its reports show it."""

    report: ReplicaReport
    arrived_s: float
    own_peaks: tuple[int, int] = (0, 0)  # sequences and tokens before the last report came
    other_seqs: int = 0  # running and waiting, of other routers
    other_tokens: int = 0
    prefill_tokens: float = 0.0  # over a window that decays, as is the next
    prefill_s: float = 0.0
    admitted_seqs_per_s: float = 0.0

    def follow(self, report: ReplicaReport, arrived_s: float, own: Share) -> None:
        """Take the next report. It was made since the one before was, and the own share at its highest is assumed."""
        stats = report.stats
        self.measure(self.report.stats, stats, arrived_s - self.arrived_s)
        self.report, self.arrived_s = report, arrived_s
        peaks = own.take_peaks()
        own_seqs, own_tokens = (max(pair) for pair in zip(peaks, self.own_peaks, strict=True))
        self.other_seqs = max(0, stats.num_requests_running + stats.num_requests_waiting - own_seqs)
        self.other_tokens = max(0, stats.num_waiting_prefill_tokens - own_tokens)
        self.own_peaks = peaks

    def measure(self, before: EngineStats, after: EngineStats, elapsed_s: float) -> None:
        spent_s = max(0.0, after.prefill_step_seconds - before.prefill_step_seconds)
        keep = math.exp(-spent_s / SPEED_WINDOW_S)
        self.prefill_s = keep * self.prefill_s + spent_s
        self.prefill_tokens = keep * self.prefill_tokens + after.prefill_step_tokens - before.prefill_step_tokens
        if elapsed_s > 0.0:
            rate = (_num_admitted(after) - _num_admitted(before)) / elapsed_s
            self.admitted_seqs_per_s += (1.0 - math.exp(-elapsed_s / ADMISSION_WINDOW_S)) * (
                rate - self.admitted_seqs_per_s
            )


def _num_admitted(stats: EngineStats) -> int:
    histogram = stats.request_queue_time_seconds
    return 0 if histogram is None else sum(histogram.counts)


class PoolView:
    def __init__(self) -> None:
        self.held = Share()  # no replica to send it to
        self._known: dict[str, _Known] = {}
        self._shares: dict[str, Share] = {}  # by replica
        self._avoided_until_s: dict[str, float] = {}
        self._changed = asyncio.Event()

    def share_of(self, replica_id: str) -> Share:
        return self._shares.setdefault(replica_id, Share())

    def update(self, reports: Iterable[tuple[float, ReplicaReport]], now: float) -> None:
        """Take the monitor's snapshot of this pool: (age in seconds, report) of every replica it has heard of."""
        known: dict[str, _Known] = {}
        for age_s, report in reports:
            replica_id, arrived_s = report.replica_id, now - age_s
            held = self._known.get(replica_id)
            own = self._shares.get(replica_id, Share())
            if held is None:
                held = _Known(report, arrived_s)
                held.measure(EngineStats(), report.stats, 0.0)
                held.follow(report, arrived_s, own)
            elif report.stats != held.report.stats:
                held.follow(report, arrived_s, own)
            else:
                held.arrived_s = arrived_s
            known[replica_id] = held
        self._known = known
        self._shares = {key: share for key, share in self._shares.items() if key in known or share.num_seqs}
        self._avoided_until_s = {key: until_s for key, until_s in self._avoided_until_s.items() if until_s > now}
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_for_update(self) -> None:
        await self._changed.wait()

    def avoid(self, replica_id: str, until_s: float) -> None:
        """Leave a replica out until then."""
        self._avoided_until_s[replica_id] = until_s

    def replicas(self, now: float) -> list[ReplicaLoad]:
        """Every replica to choose from."""
        return [
            ReplicaLoad(
                replica_id,
                num_seqs=known.other_seqs,
                waiting_prefill_tokens=known.other_tokens,
                kv_usage=known.report.stats.kv_cache_usage_perc,
                age_s=now - known.arrived_s,
                sent_seqs=self._shares.get(replica_id, _NOTHING).num_seqs,
                sent_tokens=self._shares.get(replica_id, _NOTHING).num_prefill_tokens,
            )
            for replica_id, known in self._known.items()
            if self._avoided_until_s.get(replica_id, now) <= now
        ]

    def load(self, now: float) -> PoolLoad:
        """Of all replicas together; what is held waits."""
        waiting_seqs, waiting_tokens, num_seqs = self.held.num_seqs, self.held.num_prefill_tokens, 0
        tokens = seconds = admitted_seqs_per_s = 0.0
        replicas = self.replicas(now)
        for replica in replicas:
            known = self._known[replica.replica_id]
            held = replica.num_seqs + replica.sent_seqs
            num_seqs += held
            waiting_tokens += replica.waiting_prefill_tokens + replica.sent_tokens
            # The engine may be unable to fill its batch for want of cache blocks.
            batch = known.report.limits.max_num_seqs
            over = 0 if batch is None else held - batch
            waiting_seqs += max(0, over, min(held, known.report.stats.num_requests_waiting))
            tokens += known.prefill_tokens
            seconds += known.prefill_s
            admitted_seqs_per_s += known.admitted_seqs_per_s
        return PoolLoad(
            num_replicas=len(replicas),
            running_seqs=num_seqs,
            waiting_seqs=waiting_seqs,
            prefill_tokens_per_s=tokens / seconds if seconds > 0.0 else None,
            waiting_prefill_tokens=waiting_tokens,
            admitted_seqs_per_s=admitted_seqs_per_s,
        )


_NOTHING = Share()
