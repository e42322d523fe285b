"""The Serve policy: what it reads from Ray's contexts, and that nothing can make it raise."""

from __future__ import annotations

import json
import logging
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ray import cloudpickle
from ray.serve._private.common import DeploymentID, ReplicaID, TimeStampedValue
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

from app.serving.autoscaling import CLOSE_S, PoolsPolicy, monitor_stats, replica_stats
from app.serving.board import PoolDecision
from app.serving.load import Demand, PoolScaling, ReplicaSignals
from app.serving.scaling import ScalingConfig

CONFIG = ScalingConfig(
    {"short": PoolScaling(max_replicas=4, up_window_s=1.0), "long": PoolScaling(0, 4)}, budget=5, stale_after_s=5
)
IDLE = ReplicaSignals(max_running_seqs=16)
BUSY = ReplicaSignals(waiting_seqs=100, running_seqs=16, max_running_seqs=16, arrival_seqs_per_s=9, decode_s=5)


class Cluster:
    """Contexts as Serve's controller builds them; a report is kept until the replica sends another one."""

    def __init__(self, config: ScalingConfig = CONFIG) -> None:
        self.config = config
        self.now = 100.0
        self.posted: list[dict[str, PoolDecision]] = []
        self.policy = PoolsPolicy(clock=lambda: self.now, post=lambda _app, _stamp, new: self.posted.append(dict(new)))
        self.targets = {"short": 1, "long": 1, "monitor": 1}
        self.running = {"short": 1, "long": 1, "monitor": 1}
        self.bounds = {"short": (1, 4), "long": (0, 4), "monitor": (1, 1)}
        self.stats: dict[str, dict[ReplicaID, dict[str, list[TimeStampedValue]]]] = {}

    def report(self, name: str, stats: dict[str, float], stamp: float, replica: str = "a") -> None:
        key = ReplicaID(replica, DeploymentID(name, "pools"))
        self.stats.setdefault(name, {})[key] = {
            stat: [TimeStampedValue(stamp - 1, -1.0), TimeStampedValue(stamp, value)] for stat, value in stats.items()
        }

    def report_all(
        self,
        stamp: float,
        short: ReplicaSignals = IDLE,
        long: ReplicaSignals = IDLE,
        demand: float = 0,
        num_alive: float = 0,
    ) -> None:
        """demand, num_alive: of the long pool"""
        self.report("monitor", monitor_stats(self.config, {"long": Demand(demand, num_alive=num_alive)}), stamp)
        self.report("short", replica_stats(short), stamp)
        if self.running["long"]:
            self.report("long", replica_stats(long), stamp)

    def contexts(self) -> dict[DeploymentID, AutoscalingContext]:
        return {DeploymentID(name, "pools"): self._context(name) for name in self.targets}

    def _context(self, name: str) -> AutoscalingContext:
        raw: dict[str, dict[ReplicaID, list[TimeStampedValue]]] = {}
        for replica, stats in self.stats.get(name, {}).items():
            for stat, series in stats.items():
                raw.setdefault(stat, {})[replica] = series
        return AutoscalingContext(
            deployment_id=DeploymentID(name, "pools"),
            deployment_name=name,
            app_name="pools",
            current_num_replicas=self.running[name],
            target_num_replicas=self.targets[name],
            running_replicas=list(self.stats.get(name, {})),
            total_num_requests=0.0,
            total_queued_requests=0.0,
            aggregated_metrics={},
            raw_metrics=lambda: raw,
            capacity_adjusted_min_replicas=self.bounds[name][0],
            capacity_adjusted_max_replicas=self.bounds[name][1],
            policy_state={},
            last_scale_up_time=None,
            last_scale_down_time=None,
            current_time=0.0,
            config=None,
        )

    def decide(self, elapsed_s: float = 0.0) -> dict[str, int]:
        self.now += elapsed_s
        contexts = self.contexts()
        targets, states = self.policy(contexts)
        assert set(states) == set(contexts)
        assert len({id(state) for state in states.values()}) == len(states)
        self.targets |= {key.name: count for key, count in targets.items()}
        self.running = {name: min(count, self.targets[name]) for name, count in self.running.items()}
        return {key.name: count for key, count in targets.items()}


def test_overload_adds_a_replica_and_leaves_the_others_alone() -> None:
    cluster = Cluster()
    cluster.report_all(1.0, short=BUSY)
    assert cluster.decide() == {"short": 1, "long": 1, "monitor": 1}
    cluster.report_all(2.0, short=BUSY)
    assert cluster.decide(1.0)["short"] > 1
    assert cluster.targets["long"] == cluster.targets["monitor"] == 1


def test_no_settings_yet_holds() -> None:
    cluster = Cluster()
    cluster.report("short", replica_stats(BUSY), 1.0)
    for _ in range(5):
        assert cluster.decide(2.0) == {"short": 1, "long": 1, "monitor": 1}


def test_a_report_ages_from_when_it_changed_whatever_its_own_clock_says() -> None:
    cluster = Cluster()
    for second in range(3):
        cluster.report_all(1e9 - second, short=BUSY)  # a clock far ahead, running backwards
        cluster.decide(1.0)
    assert cluster.targets["short"] > 1
    cluster.targets["short"] = 1
    cluster.decide(6.0)  # no stamp has changed for longer than stale_after_s
    for _ in range(10):
        assert cluster.decide(1.0)["short"] == 1


def test_serves_bounds_are_the_pools_bounds() -> None:
    cluster = Cluster()
    cluster.bounds["short"] = (1, 2)
    for second in range(20):
        cluster.report_all(float(second), short=BUSY)
        cluster.decide(1.0)
    assert cluster.targets["short"] == 2


def test_demand_wakes_a_pool_at_zero_within_the_budget() -> None:
    cluster = Cluster()
    cluster.targets["long"] = cluster.running["long"] = 0
    cluster.report_all(1.0)
    assert cluster.decide()["long"] == 0
    cluster.report_all(2.0, demand=3)
    assert cluster.decide(1.0)["long"] == 1


def test_settings_change_while_it_runs() -> None:
    cluster = Cluster()
    cluster.report_all(1.0, short=BUSY)
    cluster.decide()
    for second in range(2, 30):
        cluster.report_all(float(second), short=BUSY)
        lean = ScalingConfig(CONFIG.pools, budget=2)
        cluster.report("monitor", monitor_stats(lean, {}), float(second))
        cluster.decide(1.0)
    assert cluster.targets["short"] + cluster.targets["long"] == 2


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_figure_that_is_no_number_is_no_figure(broken: float) -> None:
    cluster = Cluster()
    for second in range(5):
        cluster.report_all(float(second))
        cluster.report("short", {**replica_stats(BUSY), "waiting_seqs": broken}, float(second))
        assert cluster.decide(1.0)["short"] == 1


def test_no_exception_leaves_it(caplog: pytest.LogCaptureFixture) -> None:
    cluster = Cluster()
    cluster.report("monitor", {"scaling/short/max_step": -1.0, "scaling//budget": 1.0}, 1.0)
    cluster.targets = {"short": 3, "long": 0, "monitor": 1}
    with caplog.at_level(logging.ERROR, "ray.serve.longspan.scaling"):
        for _ in range(3):
            assert cluster.decide(1.0) == {"short": 3, "long": 0, "monitor": 1}
    assert len(caplog.records) == 1
    assert "max_step" in str(caplog.records[0].exc_info)


def test_every_change_is_explained(caplog: pytest.LogCaptureFixture) -> None:
    cluster = Cluster()
    with caplog.at_level(logging.INFO, "ray.serve.longspan.scaling"):
        for second in range(3):
            cluster.report_all(float(second), short=BUSY)
            cluster.decide(1.0)
    assert all(record.levelno == logging.INFO for record in caplog.records)
    lines: list[dict[str, Any]] = [json.loads(record.getMessage()) for record in caplog.records]
    change = next(line for line in lines if line["pool"] == "short" and line["granted"] > 1)
    assert change["event"] == "scaling" and change["app"] == "pools"
    assert change["wanted"] == change["granted"]
    assert change["values"]["waiting_seqs"] == 100
    assert any("queue" in reason for reason in change["reasons"])


def test_decisions_are_posted_on_change_and_each_second() -> None:
    cluster = Cluster()
    for tick in range(30):
        cluster.report_all(float(tick), short=BUSY)
        cluster.decide(0.1)
    assert 3 <= len(cluster.posted) <= 7
    last = cluster.posted[-1]["short"]
    assert (last.target, last.granted) == (cluster.targets["short"], cluster.targets["short"])
    assert last.values["waiting_seqs"] == 100 and last.takes_requests


def test_a_decision_stands_even_if_it_cannot_be_posted() -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no control store")

    cluster = Cluster()
    cluster.policy = PoolsPolicy(clock=lambda: cluster.now, post=fail)
    for second in range(3):
        cluster.report_all(float(second), short=BUSY)
        cluster.decide(1.0)
    assert cluster.targets["short"] > 1


def idle_until_it_closes(cluster: Cluster) -> None:
    for second in range(400):
        cluster.report_all(float(second))
        cluster.decide(1.0)
        if not cluster.posted[-1]["long"].takes_requests:
            return
    pytest.fail("the idle pool did not close")


def test_a_pool_closes_before_its_last_replica_stops() -> None:
    cluster = Cluster()
    idle_until_it_closes(cluster)
    for tick in range(int(CLOSE_S) - 1):
        cluster.report_all(1000.0 + tick)
        assert cluster.decide(1.0)["long"] == 1
        assert not cluster.posted[-1]["long"].takes_requests
    cluster.report_all(2000.0)
    assert cluster.decide(2.0)["long"] == 0


def test_what_routers_hold_reopens_a_closing_pool() -> None:
    cluster = Cluster()
    idle_until_it_closes(cluster)
    cluster.report_all(1000.0, demand=1)
    assert cluster.decide(1.0)["long"] == 1
    assert cluster.posted[-1]["long"].takes_requests
    for tick in range(10):
        cluster.report_all(1001.0 + tick, long=ReplicaSignals(running_seqs=1, max_running_seqs=16))
        assert cluster.decide(1.0)["long"] == 1
        assert cluster.posted[-1]["long"].takes_requests


@pytest.mark.parametrize("budget", [5.0, 2.0])
def test_what_still_runs_keeps_the_last_replica(budget: float) -> None:
    """Routers send on for a moment: such a request may take longer than a replica is given to stop."""
    cluster = Cluster(ScalingConfig(CONFIG.pools, budget=budget, stale_after_s=CONFIG.stale_after_s))
    idle_until_it_closes(cluster)
    for tick in range(10):
        cluster.report_all(1000.0 + tick, long=ReplicaSignals(running_seqs=1, max_running_seqs=16))
        assert cluster.decide(1.0)["long"] == 1
        assert cluster.posted[-1]["long"].takes_requests


@pytest.mark.parametrize("is_closing", [False, True])
def test_no_pool_closes_while_nobody_could_tell_routers(is_closing: bool) -> None:
    cluster = Cluster()
    if is_closing:
        idle_until_it_closes(cluster)
    else:
        cluster.report_all(0.0)
        cluster.decide()
    cluster.now += CONFIG.stale_after_s
    for second in range(400):
        cluster.report("long", replica_stats(IDLE), 1000.0 + second)
        assert cluster.decide(1.0)["long"] == 1
        assert cluster.posted[-1]["long"].takes_requests
    assert "no fresh figures of the demand" in str(cluster.posted[-1]["long"].reasons)


def test_a_replica_that_drains_is_no_replica_of_the_budget_yet() -> None:
    """Serve counts it no more, but it holds its devices: another pool waits until its last stream has ended."""
    cluster = Cluster(ScalingConfig(CONFIG.pools, budget=2, stale_after_s=CONFIG.stale_after_s))
    cluster.targets["long"] = cluster.running["long"] = 0
    for second in range(10):
        cluster.report_all(float(second), short=BUSY, num_alive=1)
        assert cluster.decide(1.0)["short"] == 1
    assert "once another pool's replicas have stopped" in str(cluster.posted[-1]["short"].reasons)
    cluster.report_all(10.0, short=BUSY)
    assert cluster.decide(1.0)["short"] == 2


def test_serve_accepts_it() -> None:
    """Serve's own wrapper around application policies calls ours and keeps its decisions when delays are 0."""
    from ray.serve.autoscaling_policy import _apply_app_level_autoscaling_config

    cluster = Cluster()
    wrapped = _apply_app_level_autoscaling_config(cluster.policy)
    delays = AutoscalingConfig(min_replicas=0, max_replicas=4, upscale_delay_s=0, downscale_delay_s=0)
    for second in range(3):
        cluster.now += 1.0
        cluster.report_all(float(second), short=BUSY)
        contexts = cluster.contexts()
        for context in contexts.values():
            context.config = delays
        targets, _ = wrapped(contexts)
        cluster.targets |= {key.name: count for key, count in targets.items()}
    assert cluster.targets["short"] > 1
    assert cluster.targets["long"] == cluster.targets["monitor"] == 1


_WITHOUT_THE_PACKAGE = """
import pickle, sys
sys.path[:] = [entry for entry in sys.path if entry]
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("app", "torch"):
            raise ImportError(name)
sys.meta_path.insert(0, Refuse())
posted = []
policy = pickle.loads(open(sys.argv[1], "rb").read())(post=lambda app, stamp, pools: posted.append(pools["short"]))
class Context:
    deployment_name, app_name, target_num_replicas, current_num_replicas = "short", "pools", 3, 1
    capacity_adjusted_min_replicas, capacity_adjusted_max_replicas = 1, 4
    raw_metrics = pickle.loads(open(sys.argv[2], "rb").read())
import logging
failures = []
logging.getLogger("ray.serve.longspan.scaling").exception = lambda *args: failures.append(sys.exc_info())
assert policy({"id": Context()}) == ({"id": 3}, {"id": {}}), failures
assert policy._config is not None and not failures, failures
assert posted[0].granted == 3 and posted[0].takes_requests
"""


def test_it_travels_by_value(tmp_path: Path) -> None:
    """As Serve ships it to a controller that knows neither the package nor torch."""
    serialized = AutoscalingPolicy(policy_function="app.serving.autoscaling:PoolsPolicy").get_serialized_policy_def()
    assert serialized is not None
    (tmp_path / "policy").write_bytes(serialized)
    cluster = Cluster()
    cluster.report("short", {**monitor_stats(CONFIG, {}), **replica_stats(IDLE)}, 1.0)
    (tmp_path / "metrics").write_bytes(
        cloudpickle.dumps(cluster.contexts()[DeploymentID("short", "pools")].raw_metrics)
    )
    command = [sys.executable, "-c", _WITHOUT_THE_PACKAGE, str(tmp_path / "policy"), str(tmp_path / "metrics")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr


def test_the_policy_needs_neither_ray_nor_torch() -> None:
    code = "import sys, app.serving.scaling; assert not {'ray', 'torch', 'pydantic'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], timeout=200, check=True, capture_output=True)
