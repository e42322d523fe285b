"""What a pool's figures say about its load, and how many replicas carry it. A leaf of the scaling policy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

MIN_DECODE_SHARE = 0.05  # of the time, left to decoding however busy the prefill is
IDLE_ARRIVALS_PER_S = 1e-3  # a smoothed arrival rate below it counts as none


@dataclass(frozen=True, slots=True)
class ReplicaSignals:
    """What one replica reports (SignalMeter measures it). None: not known yet."""

    waiting_seqs: float = 0.0
    waiting_prefill_tokens: float = 0.0
    running_seqs: float = 0.0
    max_running_seqs: float = 1.0
    kv_usage: float = 0.0  # share of blocks held by live sequences
    arrival_seqs_per_s: float = 0.0
    arrival_tokens_per_s: float = 0.0  # prompt tokens that must be computed
    prefill_tokens_per_s: float | None = None  # how fast prompts are computed when there are enough of them
    decode_s: float | None = None  # first step to last token of a sequence, if no prefill ran beside it


@dataclass(frozen=True, slots=True)
class Demand:
    """What the monitor knows of a pool: requests that wait outside because it has no replica, or that were refused for
    want of room; and how many of its replicas live, with those that Serve is stopping and counts no more.
    """

    waiting_seqs: float = 0.0
    rejected_tokens_per_s: float = 0.0
    num_alive: float = 0.0


@dataclass(frozen=True, slots=True)
class PoolScaling:
    """How one pool scales. Raises ValueError that starts with the field's name."""

    min_replicas: int = 1
    max_replicas: int = 1
    replica_cost: float = 1.0  # of the budget
    ttft_target_s: float = 2.0
    max_waiting_seqs: float = 8.0  # per replica
    max_kv_usage: float = 0.85
    max_utilisation: float = 0.85  # load of a replica that scaling up aims at
    consolidation_utilisation: float = 0.6  # load of the remaining replicas that scaling down may cause
    max_step: int = 2
    up_window_s: float = 2.0
    down_window_s: float = 300.0
    drain_window_s: float = 60.0  # a backlog must halve in this time, or one more replica is asked for
    start_timeout_s: float = 600.0  # start-up longer than this: no node can place the replica
    retry_s: float = 300.0  # after which placing is tried again

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{item.name}: must be a finite number, at least 0, got {value}")
        if self.max_replicas < max(1, self.min_replicas):
            raise ValueError(f"max_replicas: must be at least max(1, min_replicas), got {self.max_replicas}")
        for name in ("replica_cost", "ttft_target_s", "max_waiting_seqs", "max_kv_usage", "max_step", "up_window_s"):
            if getattr(self, name) == 0:
                raise ValueError(f"{name}: must be greater than 0")
        if not 0 < self.consolidation_utilisation < self.max_utilisation <= 1:
            raise ValueError("consolidation_utilisation: must lie between 0 and max_utilisation, and that in (0, 1]")


class Queue(NamedTuple):
    """What waits."""

    seqs: float
    prefill_tokens: float
    is_refusing: bool  # what is refused would wait longer than is tolerated

    def backlog(self, num_replicas: int, prefill_tokens_per_s: float, config: PoolScaling) -> float:
        """As a multiple of what is tolerated. A speed of 0 is not known."""
        backlog = max(self.seqs / (num_replicas * config.max_waiting_seqs), 1.0 if self.is_refusing else 0.0)
        if prefill_tokens_per_s:
            served = num_replicas * prefill_tokens_per_s * config.ttft_target_s
            backlog = max(backlog, self.prefill_tokens / served)
        return backlog


class Load(NamedTuple):
    """Work of a pool in replicas' worth of each resource, as the replicas with fresh figures see it."""

    num_replicas: int
    prefill: float  # share of the time computing prompts; inf if the speed is not known
    decode: float | None  # share of the batch that arrivals will hold if no prefill ran; None: nothing ended yet
    seqs: float  # share of the batch held now
    kv: float  # cache held now
    queue: Queue
    backlog: float  # queue as a multiple of what is tolerated
    speed: float  # prompt tokens per second of one replica; 0 if not known
    is_active: bool


def measure(fresh: Sequence[ReplicaSignals], demand: Demand, config: PoolScaling) -> Load:
    """The load as the replicas in `fresh` (at least one) see it."""
    speeds = [one.prefill_tokens_per_s for one in fresh if one.prefill_tokens_per_s]
    speed = sum(speeds) / len(speeds) if speeds else 0.0
    decodes = [one.decode_s for one in fresh if one.decode_s is not None]
    num_seqs = sum(one.max_running_seqs for one in fresh) / len(fresh)
    totals = totals_of(fresh)
    tokens_per_s = totals["arrival_tokens_per_s"] + demand.rejected_tokens_per_s
    queue = Queue(
        totals["waiting_seqs"] + demand.waiting_seqs, totals["waiting_prefill_tokens"], demand.rejected_tokens_per_s > 0
    )
    is_busy = queue.seqs + queue.prefill_tokens + totals["running_seqs"] > 0
    # Little's law: arrivals x time in the batch is how many places they will hold, however many hold one now.
    places = totals["arrival_seqs_per_s"] * sum(decodes) / len(decodes) if decodes else None
    return Load(
        num_replicas=len(fresh),
        prefill=tokens_per_s / speed if speed else math.inf if tokens_per_s > 0 else 0.0,
        decode=None if places is None else places / num_seqs,
        seqs=totals["running_seqs"] / num_seqs,
        kv=sum(one.kv_usage for one in fresh),
        queue=queue,
        backlog=queue.backlog(len(fresh), speed, config),
        speed=speed,
        is_active=is_busy or totals["arrival_seqs_per_s"] > IDLE_ARRIVALS_PER_S,
    )


def replicas_for(load: Load, utilisation: float, config: PoolScaling, *, present: bool) -> int:
    """The fewest replicas that carry the load with none used beyond `utilisation`; the maximum if none do.

    Decoding gets the time that prefill leaves, so where prefill takes a larger share, sequences stay longer and hold
    more places and cache. `present`: what is held now must fit as well, not only what the arrivals will hold.
    """
    if not load.is_active:
        return 0
    kv_utilisation = config.max_kv_usage * utilisation / config.max_utilisation
    kv_per_place = load.kv / load.seqs if load.seqs else 0.0
    for count in range(1, config.max_replicas):
        prefill = load.prefill / count
        seqs, kv = load.seqs, load.kv
        if load.decode is not None:
            held = load.decode / max(1.0 - prefill, MIN_DECODE_SHARE)
            seqs = max(held, load.seqs if present else 0.0)
            kv = max(held * kv_per_place, load.kv if present else 0.0)
        if prefill <= utilisation and seqs <= count * utilisation and kv <= count * kv_utilisation:
            return count
    return config.max_replicas


def is_pressed(load: Load, config: PoolScaling) -> bool:
    """A queue longer than is tolerated, or a cache fuller."""
    return load.backlog >= 1 or load.kv > load.num_replicas * config.max_kv_usage


def totals_of(fresh: Sequence[ReplicaSignals]) -> dict[str, float]:
    """Sums over the replicas, for measuring and for the log; KV usage as a mean."""
    summed = ("waiting_seqs", "waiting_prefill_tokens", "running_seqs", "arrival_tokens_per_s", "arrival_seqs_per_s")
    totals = {name: sum(getattr(one, name) for one in fresh) for name in summed}
    return {**totals, "kv_usage": sum(one.kv_usage for one in fresh) / len(fresh)}


def known_of(load: Load) -> dict[str, float]:
    """The load's finite figures, for the log."""
    figures = {name: value for name, value in load._asdict().items() if isinstance(value, int | float)}
    return {name: float(value) for name, value in figures.items() if math.isfinite(value)}
