"""The scaling policy as a pure function: windows, steps, holds, wakes, replicas that never start."""

from __future__ import annotations

import dataclasses
import random

import pytest

from app.serving.load import Demand, PoolScaling, ReplicaSignals
from app.serving.scaling import Decision, PoolSignals, PoolState, Report, ScalingConfig, decide

POOL = PoolScaling(
    max_replicas=8,
    max_waiting_seqs=4,
    max_step=2,
    up_window_s=2,
    down_window_s=30,
    drain_window_s=20,
    start_timeout_s=60,
    retry_s=40,
)
IDLE = ReplicaSignals(max_running_seqs=10)
MEASURED = dataclasses.replace(IDLE, prefill_tokens_per_s=1000.0, decode_s=2.0)


class Pool:
    """One pool driven second by second; replicas report unless told otherwise."""

    def __init__(self, config: PoolScaling = POOL, target: int = 1, budget: float = 100) -> None:
        self.config = ScalingConfig({"short": config}, budget=budget)
        self.state: dict[str, PoolState] = {}
        self.now = 0.0
        self.target = self.running = target
        self.demand: Demand | None = Demand()
        self.is_reporting = True
        self.stamp = 0.0
        self.last: Decision | None = None

    def step(self, signals: ReplicaSignals = MEASURED, seconds: int = 1) -> int:
        for _ in range(seconds):
            self.now += 1.0
            self.stamp += self.is_reporting
            reports = {str(index): Report(self.stamp, signals) for index in range(self.running)}
            pool = PoolSignals(self.target, self.running, reports, self.demand)
            self.last = decide({"short": pool}, self.state, self.config, self.now)
            self.state, self.target = self.last.state, self.last.targets["short"]
            self.running = min(self.running, self.target)
        return self.target

    @property
    def why(self) -> str:
        assert self.last is not None
        return "; ".join(self.last.reasons["short"].reasons)


def queued(seqs: float, **values: float) -> ReplicaSignals:
    return dataclasses.replace(MEASURED, waiting_seqs=seqs, running_seqs=10, **values)


def test_pressure_must_last_a_window() -> None:
    pool = Pool()
    pool.step(queued(5, arrival_seqs_per_s=12))
    pool.step(MEASURED)
    assert pool.step(queued(5, arrival_seqs_per_s=12), 2) == 1
    assert pool.step(queued(5, arrival_seqs_per_s=12)) == 3


def test_the_load_says_how_many_and_the_step_limits_it() -> None:
    pool = Pool()
    overload = queued(50, arrival_seqs_per_s=25)  # 25 x 2 s = 50 places: 5 replicas' worth, 6 at 0.85
    assert pool.step(overload, 3) == 3
    assert pool.step(overload, 3) == 5
    assert pool.step(overload, 3) == 6
    assert pool.step(overload, 40) == 6


@pytest.mark.parametrize("count", [2, 3, 4])
def test_starting_replicas_count(count: int) -> None:
    pool = Pool()
    overload = queued(50, arrival_seqs_per_s=count * 4.2)  # `count` replicas at 0.84
    for second in range(60):
        # The queue grows all the while, as it does when replicas take long to start.
        pool.step(dataclasses.replace(overload, waiting_seqs=50.0 + 10 * second))
    assert pool.target == count
    assert "starting will do" in pool.why


def test_waiting_prompt_tokens_are_held_against_the_ttft_target() -> None:
    pool = Pool(dataclasses.replace(POOL, ttft_target_s=3.0))
    below = dataclasses.replace(MEASURED, waiting_seqs=1, waiting_prefill_tokens=2900, arrival_tokens_per_s=1500)
    assert pool.step(below, 10) == 1
    assert pool.step(dataclasses.replace(below, waiting_prefill_tokens=3100), 4) == 2


def test_a_full_cache_adds_replicas_without_a_queue() -> None:
    pool = Pool(target=2)
    assert pool.step(dataclasses.replace(MEASURED, running_seqs=4, kv_usage=0.84), 10) == 2
    assert pool.step(dataclasses.replace(MEASURED, running_seqs=4, kv_usage=0.95), 4) == 3


def test_a_short_queue_that_keeps_growing_needs_no_rates() -> None:
    pool = Pool()
    for waiting in (5, 8, 11, 14):
        pool.step(dataclasses.replace(IDLE, waiting_seqs=waiting, running_seqs=10))
    assert pool.target == 2
    assert pool.running == 1


def test_a_queue_grows_although_it_looked_longer_before_the_speed_was_known() -> None:
    """Prompts of two tokens let a replica look slow; 400 tokens wait 100 x too long at that speed, 0.5 x in truth."""
    slow, fast = (dataclasses.replace(IDLE, prefill_tokens_per_s=speed) for speed in (2.0, 400.0))
    pool = Pool()
    assert pool.step(dataclasses.replace(slow, waiting_prefill_tokens=400, arrival_tokens_per_s=1)) == 1
    assert pool.step(dataclasses.replace(fast, waiting_prefill_tokens=2000, arrival_tokens_per_s=100)) == 1
    assert pool.step(dataclasses.replace(fast, waiting_prefill_tokens=2400, arrival_tokens_per_s=120), 3) == 2
    assert "queue at 3.0 x the target" in pool.why


def test_a_queue_does_not_look_halved_because_the_speed_was_learned() -> None:
    slow, fast = (dataclasses.replace(IDLE, prefill_tokens_per_s=speed) for speed in (100.0, 400.0))
    pool = Pool(target=2)
    pool.step(dataclasses.replace(slow, waiting_prefill_tokens=3000, arrival_tokens_per_s=10))
    waiting = dataclasses.replace(fast, waiting_prefill_tokens=3000, arrival_tokens_per_s=10)
    assert pool.step(waiting, 19) == 2
    assert pool.step(waiting, 4) == 3


def test_a_queue_that_does_not_halve_gets_one_more_and_one_that_does_gets_none() -> None:
    stuck, draining = Pool(target=2), Pool(target=2)
    for second in range(30):
        stuck.step(queued(10, arrival_seqs_per_s=1))
        draining.step(queued(max(4.1, 10.0 - 0.3 * second), arrival_seqs_per_s=1))
    assert stuck.target == 3
    assert draining.target == 2


def test_down_only_after_the_window_and_only_if_the_rest_can_carry_it() -> None:
    pool = Pool(target=3)
    # Each of three holds 3.9 of 10 places: two would hold 5.85, below 0.6 of their places.
    light = dataclasses.replace(MEASURED, running_seqs=3.9, arrival_seqs_per_s=1.95)
    assert pool.step(light, 30) == 3
    assert pool.step(light) == 2
    assert "fitted 2" in pool.why
    heavy = dataclasses.replace(MEASURED, running_seqs=4.1, arrival_seqs_per_s=2.05)
    assert Pool(target=3).step(heavy, 100) == 3


def test_down_takes_steps_and_ends_at_the_minimum() -> None:
    pool = Pool(target=8)
    seen = {pool.step() for _ in range(300)}
    assert pool.target == 1
    assert seen == {8, 6, 4, 2, 1}


def test_zero_only_where_the_minimum_allows_it_and_one_at_a_time() -> None:
    pool = Pool(dataclasses.replace(POOL, min_replicas=0), target=2)
    seen = [pool.step() for _ in range(100)]
    assert sorted(set(seen), reverse=True) == [2, 1, 0]


def test_a_trickle_keeps_the_last_replica() -> None:
    pool = Pool(dataclasses.replace(POOL, min_replicas=0))
    assert pool.step(dataclasses.replace(MEASURED, arrival_seqs_per_s=0.01), 200) == 1


def test_replicas_added_for_a_queue_stay_while_the_load_is_the_same() -> None:
    steady = dataclasses.replace(MEASURED, arrival_seqs_per_s=2.0)  # 4 of 10 places
    pool = Pool()
    pool.step(dataclasses.replace(steady, waiting_seqs=5, running_seqs=8), 3)
    pool.step(dataclasses.replace(steady, waiting_seqs=9, running_seqs=8), 3)
    assert pool.target == 2  # a clump of requests, though one replica carries this load
    pool.running = 2
    half = dataclasses.replace(MEASURED, arrival_seqs_per_s=1.0)
    assert pool.step(half, 600) == 2
    assert pool.step(dataclasses.replace(half, arrival_seqs_per_s=0.5), 100) == 1


def test_a_metrics_outage_holds_and_zero_figures_do_not() -> None:
    silent, quiet = Pool(target=4), Pool(target=4)
    silent.step(queued(3, arrival_seqs_per_s=4), 5)
    silent.is_reporting = False
    assert silent.step(IDLE, 500) == 4
    assert "hold" in silent.why
    assert quiet.step(IDLE, 500) == 1


def test_one_silent_replica_forbids_scaling_down_but_not_up() -> None:
    pool = Pool(target=2)
    pool.running = 2
    for second in range(100):
        pool.now += 1
        pool.state, pool.target = _with_silent(pool, MEASURED, float(second))
    assert pool.target == 2
    for second in range(4):
        pool.now += 1
        pool.state, pool.target = _with_silent(pool, queued(30, arrival_seqs_per_s=12), 1000.0 + second)
    assert pool.target > 2


def _with_silent(pool: Pool, signals: ReplicaSignals, stamp: float) -> tuple[dict[str, PoolState], int]:
    reports = {"alive": Report(stamp, signals)}
    done = decide({"short": PoolSignals(pool.target, 2, reports, Demand())}, pool.state, pool.config, pool.now)
    return done.state, done.targets["short"]


def test_demand_wakes_a_pool_at_zero_at_once_and_unknown_demand_does_not() -> None:
    pool = Pool(dataclasses.replace(POOL, min_replicas=0), target=0)
    assert pool.step(seconds=10) == 0
    pool.demand = None
    assert pool.step(seconds=10) == 0
    pool.demand = Demand(waiting_seqs=7)
    assert pool.step() == 1
    assert "wake" in pool.why


def test_a_replica_that_no_node_places_gives_its_share_back_and_is_tried_again() -> None:
    pool = Pool()
    overload = queued(50, arrival_seqs_per_s=8)
    pool.step(overload, 3)
    assert pool.target == 2
    pool.step(overload, 59)
    assert pool.target == 2
    assert pool.step(overload, 3) == 1
    assert "no node placed" in pool.why
    assert pool.step(overload, 30) == 1
    assert pool.step(overload, 15) == 2


def test_a_slow_start_that_makes_progress_is_not_given_up() -> None:
    pool = Pool(target=3)
    pool.running = 1
    pool.step(queued(50, arrival_seqs_per_s=12), 50)
    pool.running = 2
    pool.step(queued(50, arrival_seqs_per_s=6), 50)
    assert pool.target == 3


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"max_replicas": 1, "min_replicas": 2}, "max_replicas"),
        ({"max_step": 0}, "max_step"),
        ({"ttft_target_s": -1.0}, "ttft_target_s"),
        ({"down_window_s": float("nan")}, "down_window_s"),
        ({"consolidation_utilisation": 0.9}, "consolidation_utilisation"),
    ],
)
def test_bad_settings_name_their_field(values: dict[str, float], field: str) -> None:
    with pytest.raises(ValueError, match=f"^{field}:"):
        PoolScaling(**values)  # type: ignore[arg-type]


def test_a_budget_below_the_minimums_is_refused() -> None:
    pools = {"short": PoolScaling(2, 4), "long": PoolScaling(1, 4, replica_cost=8)}
    ScalingConfig(pools, budget=10)
    with pytest.raises(ValueError, match=r"^budget: .* 10"):
        ScalingConfig(pools, budget=9)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_the_figures_targets_stay_in_bounds(seed: int) -> None:
    draw = random.Random(seed)
    config = ScalingConfig(
        {
            "short": PoolScaling(draw.randint(0, 2), 6, down_window_s=5),
            "long": PoolScaling(0, 3, 2.0, start_timeout_s=9),
        },
        budget=8,
    )
    state: dict[str, PoolState] = {}
    targets = {"short": 2, "long": 0}
    running = dict(targets)
    for second in range(300):
        signals = {}
        for name in targets:
            running[name] = max(0, min(targets[name], running[name] + draw.choice((-1, 0, 0, 1, 1))))
            reports = {
                str(index): Report(float(draw.randint(0, second)), _random_signals(draw))
                for index in range(running[name])
            }
            demand = draw.choice((None, Demand(), Demand(draw.random() * 9, draw.random() * 900)))
            signals[name] = PoolSignals(targets[name], running[name], reports, demand)
        done = decide(signals, state, config, float(second))
        assert sum(count * config.pools[name].replica_cost for name, count in done.targets.items()) <= 8
        for name, pool in config.pools.items():
            assert pool.min_replicas <= done.targets[name] <= pool.max_replicas
            assert abs(done.targets[name] - targets[name]) <= 4
        state, targets = done.state, done.targets


def _random_signals(draw: random.Random) -> ReplicaSignals:
    return ReplicaSignals(
        waiting_seqs=draw.choice((0, 0, draw.random() * 50)),
        waiting_prefill_tokens=draw.choice((0, draw.random() * 1e5)),
        running_seqs=draw.randint(0, 16),
        max_running_seqs=16,
        kv_usage=draw.random(),
        arrival_seqs_per_s=draw.choice((0, draw.random() * 20)),
        arrival_tokens_per_s=draw.choice((0, draw.random() * 1e4)),
        prefill_tokens_per_s=draw.choice((None, draw.random() * 1e4)),
        decode_s=draw.choice((None, draw.random() * 100)),
    )
