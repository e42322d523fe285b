"""How many replicas each pool gets: one pure function over all pools.

    figures of replicas and monitor -> PoolSignals -> assess each pool alone -> share the budget -> targets, reasons

Pressure (a queue longer than the TTFT target allows, or a full KV cache) says *that* a pool needs replicas; the load
that arrives says *how many*. So a backlog that grows while replicas start does not ask for ever more of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from app.serving.budget import Claim, Shares
from app.serving.load import (
    Demand,
    Load,
    PoolScaling,
    Queue,
    ReplicaSignals,
    is_pressed,
    known_of,
    measure,
    replicas_for,
    totals_of,
)

SMALL_LOAD = 0.05  # replicas' worth too small to compare
GROWTH = 1.5  # a queue this many times as long as when it crossed the target is not a passing clump
STRAIN_MARGIN = 0.75  # of the load that strained a number of replicas: below it they are tried again,
STRAIN_WINDOWS = 24.0  # or after this many down windows


@dataclass(frozen=True, slots=True)
class Report:
    """Signals and their stamp. Only a change of the stamp counts, so the sender's clock does not matter."""

    stamp: float
    signals: ReplicaSignals


@dataclass(frozen=True, slots=True)
class PoolSignals:
    """A pool as the cluster sees it. `demand` None: nobody could say, which is not zero."""

    target: int
    num_running: int
    reports: Mapping[str, Report] = field(default_factory=dict)  # by replica
    demand: Demand | None = None

    @property
    def num_draining(self) -> int:
        """Replicas that Serve is stopping. One that has only just come up may look like one for a moment."""
        return 0 if self.demand is None else max(0, int(self.demand.num_alive) - self.num_running)


@dataclass(frozen=True, slots=True)
class ScalingConfig:
    """All pools and what they share. Raises ValueError that starts with the field's name."""

    pools: Mapping[str, PoolScaling]
    budget: float = math.inf  # sum of replica_cost over all replicas
    stale_after_s: float = 10.0

    def __post_init__(self) -> None:
        reserved = sum(pool.min_replicas * pool.replica_cost for pool in self.pools.values())
        if not self.budget >= reserved:
            raise ValueError(f"budget: must be at least the pools' minimum of {reserved:g}, got {self.budget:g}")


class Strain(NamedTuple):
    """A load that came with pressure, and how many replicas ran then."""

    replicas: int
    prefill: float
    decode: float
    since_s: float


class Wish(NamedTuple):
    """A number of replicas that has been called for without a break."""

    since_s: float
    replicas: int


@dataclass(frozen=True, slots=True)
class PoolState:
    """What the policy remembers of a pool."""

    seen: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # replica -> (stamp, when it changed)
    up: Wish | None = None  # the least wanted since then
    down: Wish | None = None  # the most needed since then
    spare: Wish | None = None  # the same, if another pool is short
    queue: Queue | None = None  # when it crossed its target,
    queue_since_s: float = -math.inf  # and when that was
    starting_since_s: float | None = None
    num_running: int = 0  # at the last call
    target: int = 0  # at the last call
    blocked_until_s: float = -math.inf
    average: Mapping[str, float] = field(default_factory=dict)  # load over the down window
    averaged_s: float = -math.inf
    lowered_s: float = -math.inf  # last time the target fell
    strain: Strain | None = None


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a pool got its target: the figures, what it wanted, what the budget granted, the reasons in words."""

    values: Mapping[str, float]
    wanted: int
    granted: int
    reasons: tuple[str, ...]


class Decision(NamedTuple):
    targets: dict[str, int]
    state: dict[str, PoolState]
    reasons: dict[str, Explanation]


class _Assessment(NamedTuple):
    """One pool alone, before the budget."""

    claim: Claim
    state: PoolState
    values: dict[str, float]
    reasons: tuple[str, ...]


def decide(
    signals: Mapping[str, PoolSignals], state: Mapping[str, PoolState], config: ScalingConfig, now: float
) -> Decision:
    """Targets for every pool in `signals`; `now` is this process's monotonic clock, in seconds.

    The targets' cost never exceeds the budget, unless the minimums alone do.
    """
    assessed = {
        name: _assess(pool, config.pools[name], state.get(name, PoolState()), config.stale_after_s, now)
        for name, pool in signals.items()
    }
    shares = Shares({name: one.claim for name, one in assessed.items()}, config.budget)
    shares.settle()
    states, reasons = {}, {}
    for name, one in assessed.items():
        granted = shares.granted[name]
        states[name] = _after(one.state, signals[name].target, granted, now)
        reasons[name] = Explanation(one.values, one.claim.wanted, granted, (*one.reasons, *shares.notes[name]))
    return Decision(shares.granted, states, reasons)


def _assess(pool: PoolSignals, config: PoolScaling, state: PoolState, stale_after_s: float, now: float) -> _Assessment:
    state = _track(state, pool, config, now)
    current = _clip(pool.target, config)
    fresh = [report.signals for key, report in pool.reports.items() if now - state.seen[key][1] < stale_after_s]
    values: dict[str, float] = {
        "target": pool.target, "running": pool.num_running, "draining": pool.num_draining, "reporting": len(fresh)
    }  # fmt: skip
    if pool.num_running == 0 or current == 0 or not fresh:
        state = replace(state, up=None, down=None, spare=None, queue=None)
        wanted, why = _without_figures(pool, current, values)
        wanted, why = _placeable(wanted, why, pool, state, config, now, values)
        return _Assessment(_claim(pool, config, state, now, wanted, wanted, wanted), state, values, why)

    load = measure(fresh, pool.demand or Demand(), config)
    state, slow_load = _slowly(state, load, config, now)
    # A queue that drains fills every place and the cache, whatever arrives: then only the arrivals count.
    need = replicas_for(load, config.max_utilisation, config, present=load.backlog < 1)
    spare = max(replicas_for(load, config.consolidation_utilisation, config, present=True), config.min_replicas)
    low = max(replicas_for(slow_load, config.consolidation_utilisation, config, present=True), spare)
    state = _strained(state, load, pool.num_running, config, now)
    low = max(low, _tried_in_vain(state.strain, slow_load))
    values |= {**totals_of(fresh), **known_of(load), "need": need, "need_to_consolidate": low}

    state, up, why = _upward(load, need, pool, state, config, now)
    # A queue that has only just formed counts from where it did: its growth already took a window to see.
    is_new = state.queue is not None and now - state.queue_since_s <= 2 * config.up_window_s
    since_s = state.queue_since_s if is_new else now
    is_calm = len(fresh) >= pool.num_running and load.backlog < 1 and pool.demand is not None
    state = replace(
        state,
        up=_sustained(state.up, up, since_s, min) if up > current else None,
        down=_sustained(state.down, low, now, max) if is_calm and low < current else None,
        spare=_sustained(state.spare, spare, now, max) if is_calm and spare < current else None,
    )
    if len(fresh) < pool.num_running:
        why += (f"no scaling down: {pool.num_running - len(fresh)} replicas have no fresh figures",)
    if pool.demand is None:
        why += ("no scaling down: no fresh figures of the demand",)

    wanted, settled = _settled(state, current, config, now)
    wanted, why = _placeable(wanted, why + settled, pool, state, config, now, values)
    can_spare = state.spare is not None and now - state.spare.since_s >= config.up_window_s
    spare_to = min(wanted, state.spare.replicas) if state.spare is not None and can_spare else wanted
    return _Assessment(_claim(pool, config, state, now, wanted, need, spare_to), state, values, why)


def _strained(state: PoolState, load: Load, num_running: int, config: PoolScaling, now: float) -> PoolState:
    """Remember what load so many replicas could not take without pressure."""
    last = state.strain
    if last is not None and now - last.since_s > STRAIN_WINDOWS * config.down_window_s:
        last = None
    if is_pressed(load, config) and math.isfinite(load.prefill):
        new = Strain(num_running, load.prefill, load.decode or 0.0, now)
        if last is not None and last.replicas == num_running:
            new = Strain(num_running, max(last.prefill, new.prefill), max(last.decode, new.decode), now)
        last = new
    return state if last is state.strain else replace(state, strain=last)


def _tried_in_vain(strain: Strain | None, load: Load) -> int:
    """One replica more than came under pressure with about this load: going back would only fetch it again."""
    if strain is None or not load.is_active:
        return 0
    pairs = ((load.prefill, strain.prefill), (load.decode or 0.0, strain.decode))
    is_alike = any(now > STRAIN_MARGIN * then and then > SMALL_LOAD for now, then in pairs)
    return strain.replicas + 1 if is_alike else 0


def _claim(
    pool: PoolSignals, config: PoolScaling, state: PoolState, now: float, wanted: int, need: int, spare_to: int
) -> Claim:
    return Claim(
        target=_clip(pool.target, config),
        num_running=pool.num_running,
        num_draining=pool.num_draining,
        min_replicas=config.min_replicas,
        cost=config.replica_cost,
        wanted=wanted,
        need=max(need, 1),
        spare_to=spare_to,
        is_settled=now - state.lowered_s >= config.down_window_s,
    )


def _track(state: PoolState, pool: PoolSignals, config: PoolScaling, now: float) -> PoolState:
    """Notice when reports change hands, and replicas that do not come up: a start or a higher target restarts that
    clock.
    """
    seen = {}
    for key, report in pool.reports.items():
        last = state.seen.get(key)
        seen[key] = last if last is not None and last[0] == report.stamp else (report.stamp, now)
    since = state.starting_since_s
    if pool.target <= pool.num_running:
        since = None
    elif since is None or pool.num_running > state.num_running or pool.target > state.target:
        since = now
    is_overdue = since is not None and now - since >= config.start_timeout_s
    return replace(
        state,
        seen=seen,
        starting_since_s=since,
        blocked_until_s=now + config.retry_s if is_overdue else state.blocked_until_s,
        num_running=pool.num_running,
        target=pool.target,
    )


def _without_figures(pool: PoolSignals, current: int, values: dict[str, float]) -> tuple[int, tuple[str, ...]]:
    """Hold, except that demand from outside wakes a pool at zero, whose last replica may still be on its way out."""
    if current > 0 and pool.num_running > 0:
        return current, ("hold: no fresh figures from any replica",)
    if pool.demand is None:
        return current, ("hold: no replica, and no fresh figures of the demand",)
    values["demand_seqs"] = pool.demand.waiting_seqs
    if current == 0 and pool.demand.waiting_seqs > 0:
        return 1, (f"wake: {pool.demand.waiting_seqs:g} requests need a first replica",)
    return current, ()


def _placeable(
    wanted: int,
    why: tuple[str, ...],
    pool: PoolSignals,
    state: PoolState,
    config: PoolScaling,
    now: float,
    values: dict[str, float],
) -> tuple[int, tuple[str, ...]]:
    if now >= state.blocked_until_s:
        return wanted, why
    values["next_try_s"] = wait_s = state.blocked_until_s - now
    reason = f"no node placed more than {pool.num_running} in {config.start_timeout_s:g} s; next try in {wait_s:.0f} s"
    return min(wanted, max(pool.num_running, config.min_replicas)), (*why, reason)


def _slowly(state: PoolState, load: Load, config: PoolScaling, now: float) -> tuple[PoolState, Load]:
    """The greater of the load and its average over the down window: chance lulls do not look like less traffic."""
    part = 1.0 - math.exp(-max(0.0, now - state.averaged_s) / max(config.down_window_s, 1.0))
    values = {"prefill": load.prefill, "decode": load.decode or 0.0}
    average = {
        name: value if math.isinf(value) or name not in state.average else
        state.average[name] + part * (value - state.average[name])
        for name, value in values.items()
    }  # fmt: skip
    higher = load._replace(
        prefill=max(load.prefill, average["prefill"]),
        decode=None if load.decode is None else max(load.decode, average["decode"]),
    )
    kept = {name: value for name, value in average.items() if math.isfinite(value)}
    return replace(state, average=kept, averaged_s=now), higher


def _upward(
    load: Load, need: int, pool: PoolSignals, state: PoolState, config: PoolScaling, now: float
) -> tuple[PoolState, int, tuple[str, ...]]:
    """How many replicas pressure asks for at this moment; the target if there is none, or if patience will do."""
    current = _clip(pool.target, config)
    calm = replace(state, queue=None)
    if not is_pressed(load, config):
        return calm, current, ()
    queue = state.queue
    if queue is None:
        queue, state = load.queue, replace(state, queue=load.queue, queue_since_s=now)
    pressure = f"queue at {load.backlog:.1f} x the target" if load.backlog >= 1 else "KV cache over its target"
    num_starting = max(0, current - pool.num_running)
    if math.isfinite(load.prefill) and need > current:
        return state, need, (f"{pressure}; the load needs {need}",)
    if num_starting:
        return calm, current, (f"{pressure}; {num_starting} starting will do",)
    if not math.isfinite(load.prefill):
        return state, current + 1, (f"{pressure}; speed not measured yet, one more",)
    # Both at the speed as it is known now: it may have been learned meanwhile.
    before = queue.backlog(load.num_replicas, load.speed, config)
    since_s = now - state.queue_since_s
    if load.backlog >= 1 and since_s >= config.up_window_s and load.backlog > GROWTH * before:
        return state, current + 1, (f"{pressure} and growing, one more",)
    if since_s < config.drain_window_s:
        return state, current, (f"{pressure}; draining",)
    if load.backlog >= 1 and load.backlog > before / 2:
        return state, current + 1, (f"{pressure}; not halved in {config.drain_window_s:g} s, one more",)
    return replace(state, queue=load.queue, queue_since_s=now), current, (f"{pressure}; draining",)


def _sustained(wish: Wish | None, count: int, since_s: float, pick: Callable[[int, int], int]) -> Wish:
    return Wish(since_s, count) if wish is None else Wish(wish.since_s, pick(wish.replicas, count))


def _settled(state: PoolState, current: int, config: PoolScaling, now: float) -> tuple[int, tuple[str, ...]]:
    """What has been wanted for a whole window, one step at most."""
    if state.up is not None and now - state.up.since_s >= config.up_window_s:
        return max(min(state.up.replicas, current + config.max_step, config.max_replicas), current), ()
    if state.down is not None and now - state.down.since_s >= config.down_window_s:
        # The last replica goes alone: Ray does not stop several at once down to zero.
        least = 1 if current > 1 else 0
        wanted = max(state.down.replicas, current - config.max_step, least)
        return min(wanted, current), (f"the load has fitted {state.down.replicas} for {config.down_window_s:g} s",)
    return current, ()


def _after(state: PoolState, target: int, granted: int, now: float) -> PoolState:
    if granted == target:
        return state
    lowered_s = now if granted < target else state.lowered_s
    return replace(state, up=None, down=None, spare=None, queue=None, lowered_s=lowered_s)


def _clip(count: int, config: PoolScaling) -> int:
    return max(config.min_replicas, min(count, config.max_replicas))
