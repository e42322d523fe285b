"""What a simulation found: the pools over time, and what became of every request."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

from app.planning.replica import SimulatedRequest
from app.serving.scaling import Explanation


@dataclass(frozen=True, slots=True)
class PoolSample:
    """A pool at one moment."""

    target: int
    running: int
    draining: int  # finishing what they hold, no longer counted in the target
    waiting_seqs: int
    running_seqs: int
    kv_usage: float  # of the fullest replica


@dataclass(frozen=True, slots=True)
class Sample:
    time_s: float
    pools: Mapping[str, PoolSample]
    reasons: Mapping[str, Explanation]  # of the decision taken at this moment


@dataclass(frozen=True, slots=True)
class SimulationResult:
    timeline: tuple[Sample, ...]
    requests: tuple[SimulatedRequest, ...]  # accepted, in order of arrival
    num_refused: int  # fit no pool

    @property
    def num_unfinished(self) -> int:
        return sum(one.finished_s is None for one in self.requests)

    def ttft_s(self, bucket: str) -> list[float]:
        """Arrival at the router to the first token, ascending; infinite for a request that got none."""
        return sorted(
            (math.inf if one.first_token_s is None else one.first_token_s) - one.request.arrival_s
            for one in self.requests
            if one.bucket == bucket
        )

    def ttft_percentile_s(self, bucket: str, percent: float) -> float:
        """Nearest rank; NaN if the bucket saw no request."""
        values = self.ttft_s(bucket)
        return values[max(0, math.ceil(len(values) * percent / 100) - 1)] if values else math.nan

    def longest_wait_s(self, bucket: str) -> float:
        """Arrival at the router to the first step; infinite if it never came."""
        return max(
            (
                (math.inf if one.started_s is None else one.started_s) - one.request.arrival_s
                for one in self.requests
                if one.bucket == bucket
            ),
            default=0.0,
        )

    def targets(self, pool: str) -> list[int]:
        return [sample.pools[pool].target for sample in self.timeline]

    def changes(self, pool: str) -> Iterator[tuple[float, int]]:
        """(time, replicas more or fewer) of every change of the target."""
        for before, after in pairwise(self.timeline):
            if change := after.pools[pool].target - before.pools[pool].target:
                yield after.time_s, change

    def num_reversals(self, pool: str, within_s: float = math.inf) -> int:
        """How often the target turned round, counting turns no later than `within_s` after the change they undo."""
        return sum(
            (first > 0) != (second > 0) and now - before <= within_s
            for (before, first), (now, second) in pairwise(self.changes(pool))
        )

    def replica_hours(self, pool: str) -> float:
        """What the pool held, starting and draining replicas included."""
        held = sum(max(s.pools[pool].target, s.pools[pool].running) + s.pools[pool].draining for s in self.timeline)
        tick_s = self.timeline[1].time_s - self.timeline[0].time_s if len(self.timeline) > 1 else 0.0
        return held * tick_s / 3600.0
