"""A day of traffic in seconds: the product's routing and scaling functions over simulated replicas, in virtual time.

    trace -> choose_pool -> choose_replica -> SimulatedReplica -> SignalMeter -> decide -> replicas started and stopped

Nothing here decides: what the simulation shows is what serving/routing.py and serving/scaling.py do.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from app.config import RouterSettings
from app.planning.cost_model import ReplicaCost
from app.planning.replica import SimulatedReplica, SimulatedRequest
from app.planning.results import PoolSample, Sample, SimulationResult
from app.planning.trace import TraceRequest
from app.protocol import EngineStats
from app.serving.load import Demand
from app.serving.routing import (
    POOLS,
    OutputEstimate,
    PoolLimits,
    PoolLoad,
    PoolName,
    ReplicaLoad,
    bucket_of,
    choose_pool,
    choose_replica,
)
from app.serving.scaling import PoolSignals, PoolState, Report, ScalingConfig, decide
from app.serving.signals import SignalMeter


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """One pool of the simulated deployment."""

    cost: ReplicaCost
    max_model_len: int
    initial_replicas: int = 1


@dataclass(frozen=True, slots=True)
class Scenario:
    """A deployment, and what befalls it. Raises ValueError if a pool is missing."""

    pools: Mapping[PoolName, PoolPlan]
    scaling: ScalingConfig
    settings: RouterSettings = field(default_factory=RouterSettings)
    nodes_hold: float = math.inf  # replica_cost that the cluster's nodes have room for, draining replicas included
    outages: tuple[tuple[float, float], ...] = ()  # [from, to) in which no figure reaches policy or router
    tick_s: float = 1.0  # period of reports and decisions
    extra_s: float = 600.0  # simulated beyond the trace's last arrival
    seed: int = 0

    def __post_init__(self) -> None:
        if set(self.pools) != set(POOLS) or not set(POOLS) <= set(self.scaling.pools):
            raise ValueError(f"pools: exactly {' and '.join(POOLS)} are needed, with their scaling")


@dataclass(slots=True)
class _Member:
    """A replica in its pool, and what the router knows of it."""

    name: str
    replica: SimulatedReplica | None = None  # None until a node has room and the start-up is over
    ready_s: float | None = None  # None until a node has room
    meter: SignalMeter | None = None
    report: Report | None = None
    stats: EngineStats = field(default_factory=EngineStats)  # as last reported
    stats_s: float = 0.0
    sent_seqs: int = 0  # since then
    sent_tokens: int = 0


@dataclass(slots=True)
class _Pool:
    name: PoolName
    plan: PoolPlan
    target: int
    members: list[_Member] = field(default_factory=list)  # oldest first
    draining: list[_Member] = field(default_factory=list)
    held: list[SimulatedRequest] = field(default_factory=list)  # at the router, no replica yet
    num_started: int = 0

    @property
    def running(self) -> list[_Member]:
        return [one for one in self.members if one.replica is not None]


def simulate(trace: Sequence[TraceRequest], scenario: Scenario) -> SimulationResult:
    """Run the trace (in order of arrival) through the scenario; the same arguments give the same result."""
    return _Simulation(scenario).run(trace)


class _Simulation:
    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._draw = random.Random(scenario.seed)
        self._now = 0.0
        self._state: dict[str, PoolState] = {}
        self._pools = {name: _Pool(name, plan, plan.initial_replicas) for name, plan in scenario.pools.items()}
        self._limits = {name: PoolLimits(plan.max_model_len, 1, "simulated") for name, plan in scenario.pools.items()}
        expected = float(scenario.settings.expected_output_tokens)
        self._estimates = dict.fromkeys(POOLS, OutputEstimate(expected))
        self._sessions: dict[str, tuple[str, ...]] = {}
        self._requests: list[SimulatedRequest] = []
        self._samples: list[Sample] = []
        for pool in self._pools.values():
            self._grow(pool, pool.target)
            for one in pool.members:
                self._start(one, pool)

    def run(self, trace: Sequence[TraceRequest]) -> SimulationResult:
        end_s = (trace[-1].arrival_s if trace else 0.0) + self._scenario.extra_s
        index = num_refused = 0
        while self._now < end_s:
            tick_end = self._now + self._scenario.tick_s
            while index < len(trace) and trace[index].arrival_s < tick_end:
                num_refused += not self._accept(trace[index])
                index += 1
            self._advance(tick_end)
            self._now = tick_end
            self._report()
            self._scale()
        return SimulationResult(tuple(self._samples), tuple(self._requests), num_refused)

    def _accept(self, request: TraceRequest) -> bool:
        """Route a request; False if it fits no pool."""
        settings, prompt = self._scenario.settings, request.num_prompt_tokens
        bucket = bucket_of(prompt, settings)
        name = choose_pool(
            prompt,
            request.max_tokens,
            self._limits,
            settings,
            expected_output_tokens=self._estimates[bucket].mean_tokens,
            loads={name: _pool_load(pool) for name, pool in self._pools.items()},
        )
        plan = self._pools[name].plan
        if prompt + request.num_output_tokens > min(plan.max_model_len, plan.cost.kv_capacity_tokens):
            return False
        one = SimulatedRequest(request, bucket, name, order=len(self._requests))
        self._requests.append(one)
        self._send(one, self._pools[name], request.arrival_s)
        return True

    def _send(self, one: SimulatedRequest, pool: _Pool, now: float) -> None:
        running = {member.name: member for member in pool.running}
        if not running:
            pool.held.append(one)
            return
        loads = [_replica_load(member, now) for member in running.values()]
        session = one.request.session
        preferred = self._sessions.get(session, ()) if session else ()
        name = choose_replica(loads, self._draw.random(), preferred, other_chance=self._draw.random())
        if session:
            self._sessions[session] = (name,)
        member = running[name]
        member.sent_seqs += 1
        member.sent_tokens += one.request.num_prompt_tokens
        if member.replica is not None:
            member.replica.add(one, now)

    def _advance(self, until: float) -> None:
        for pool in self._pools.values():
            for member in (*pool.running, *pool.draining):
                if member.replica is not None:
                    member.replica.advance(until)
                    for one in member.replica.finished:
                        estimate = self._estimates[one.bucket].observe(one.request.num_output_tokens)
                        self._estimates[one.bucket] = estimate
                    member.replica.finished.clear()
            pool.draining = [one for one in pool.draining if one.replica is not None and not one.replica.is_empty]
        self._place(until)
        for pool in self._pools.values():
            for member in pool.members:
                if member.replica is None and member.ready_s is not None and member.ready_s <= until:
                    self._start(member, pool, until)
            if pool.running:
                held, pool.held = pool.held, []
                for one in held:
                    self._send(one, pool, until)

    def _place(self, now: float) -> None:
        """Put waiting replicas on nodes, in the order they were asked for, while there is room."""
        costs = {name: self._scenario.scaling.pools[name].replica_cost for name in self._pools}
        placed = [(name, one) for name, pool in self._pools.items() for one in (*pool.members, *pool.draining)]
        free = self._scenario.nodes_hold - sum(costs[name] for name, one in placed if one.ready_s is not None)
        for name, one in placed:
            if one.ready_s is None and costs[name] <= free:
                one.ready_s = now + self._pools[name].plan.cost.start_delay_s
                free -= costs[name]

    def _start(self, member: _Member, pool: _Pool, now: float = 0.0) -> None:
        member.ready_s = now
        member.replica = SimulatedReplica(pool.plan.cost, now)
        member.meter = SignalMeter(pool.plan.cost.max_running_seqs)

    def _report(self) -> None:
        if any(start <= self._now < end for start, end in self._scenario.outages):
            return
        for pool in self._pools.values():
            for member in pool.running:
                if member.replica is not None and member.meter is not None:
                    member.stats, member.stats_s = member.replica.stats(), self._now
                    member.sent_seqs = member.sent_tokens = 0
                    member.report = Report(self._now, member.meter.update(member.stats, self._now))

    def _scale(self) -> None:
        is_out = any(start <= self._now < end for start, end in self._scenario.outages)
        signals: dict[str, PoolSignals] = {
            name: PoolSignals(
                target=pool.target,
                num_running=len(pool.running),
                reports={one.name: one.report for one in pool.running if one.report is not None},
                demand=None if is_out else Demand(waiting_seqs=len(pool.held)),
            )
            for name, pool in self._pools.items()
        }
        decision = decide(signals, self._state, self._scenario.scaling, self._now)
        self._state = decision.state
        for name, pool in self._pools.items():
            pool.target = decision.targets[name]
            self._shrink(pool, pool.target)
            self._grow(pool, pool.target)
        self._samples.append(
            Sample(self._now, {name: self._sample(pool) for name, pool in self._pools.items()}, decision.reasons)
        )

    def _grow(self, pool: _Pool, count: int) -> None:
        while len(pool.members) < count:
            pool.num_started += 1
            pool.members.append(_Member(f"{pool.name}-{pool.num_started}"))

    def _shrink(self, pool: _Pool, count: int) -> None:
        """Stop the youngest, which are those still starting if there are any; the others finish what they hold."""
        pool.members.sort(key=lambda one: one.replica is None)
        while len(pool.members) > count:
            member = pool.members.pop()
            if member.replica is not None:
                pool.draining.append(member)

    def _sample(self, pool: _Pool) -> PoolSample:
        replicas = [one.replica for one in (*pool.members, *pool.draining) if one.replica is not None]
        stats = [one.stats() for one in replicas]
        return PoolSample(
            target=pool.target,
            running=len(pool.running),
            draining=len(pool.draining),
            waiting_seqs=sum(one.num_requests_waiting for one in stats) + len(pool.held),
            running_seqs=sum(one.num_requests_running for one in stats),
            kv_usage=max((one.kv_cache_usage_perc for one in stats), default=0.0),
        )


def _replica_load(member: _Member, now: float) -> ReplicaLoad:
    stats = member.stats
    return ReplicaLoad(
        member.name,
        num_seqs=stats.num_requests_running + stats.num_requests_waiting,
        waiting_prefill_tokens=stats.num_waiting_prefill_tokens,
        kv_usage=stats.kv_cache_usage_perc,
        age_s=now - member.stats_s,
        sent_seqs=member.sent_seqs,
        sent_tokens=member.sent_tokens,
    )


def _pool_load(pool: _Pool) -> PoolLoad:
    running = pool.running
    speeds = [one.report.signals.prefill_tokens_per_s for one in running if one.report is not None]
    known = [speed for speed in speeds if speed is not None]
    return PoolLoad(
        num_replicas=len(running),
        running_seqs=sum(one.stats.num_requests_running + one.sent_seqs for one in running),
        waiting_seqs=sum(one.stats.num_requests_waiting for one in running) + len(pool.held),
        prefill_tokens_per_s=min(known, default=None),
    )
