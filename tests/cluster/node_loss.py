"""Two replicas of two ranks on four nodes, two of which are lost: one of each replica. Both must come back.

A program, run by test_shards.py: Ray's simulated nodes leave sockets to the garbage collector, which pytest reports.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group_table

from app.main import pools

NODE_LABEL = {"role": "rank"}
TIMEOUT_S = 120.0
# So that the cluster notices a dead node within seconds: Ray's own defaults take half a minute.
_SETTINGS = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
}


@dataclass(frozen=True, slots=True)
class NodeLossRun:
    """Seconds."""

    one_s: float | None  # from the loss to one whole replica on the two nodes that are left; None: not in time
    explained_s: float | None  # from then to a line in the log about what the other replica lacks
    both_s: float | None  # from two new nodes to two whole replicas


def main() -> int:
    """Nodes are processes of this machine. Starts and stops a cluster of its own; this process joins it meanwhile."""
    os.environ.update(_SETTINGS)
    os.environ.pop("RAY_ADDRESS", None)
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        for _ in range(4):
            cluster.add_node(num_cpus=1, labels=NODE_LABEL)
        ray.init(cluster.address, namespace="serve", log_to_driver=False, logging_level=logging.ERROR)
        serve.start(proxy_location="Disabled")
        serve.run(pools(_args()), name="pools", route_prefix=None)
        run = _lose_opposite_bundles(cluster)
        serve.shutdown()
        return 0 if None not in (run.one_s, run.explained_s, run.both_s) else 1
    finally:
        ray.shutdown()
        cluster.shutdown()


def _args() -> dict[str, Any]:
    health = {"health_check_period_s": 1, "health_check_timeout_s": 3, "graceful_shutdown_timeout_s": 10}
    engine = {"device": "cpu", "num_threads": 1, "cache_blocks": 16}
    parallel = {"expert": 2, "strategy": "SPREAD", "collective_timeout_s": 5, "bundle_labels": [NODE_LABEL]}
    short = {"num_cpus": 1, "num_replicas": 2, "parallel": parallel, "engine": engine, **health}
    return {"short": short, "long": {"num_cpus": 0.1, "engine": engine}}


def _lose_opposite_bundles(cluster: Cluster) -> NodeLossRun:
    if _seconds_until_whole(2, set(), time.perf_counter()) is None:
        raise RuntimeError("the two replicas did not come up")
    old = _groups()
    first, second = (group["bundles_to_node_id"] for group in old.values())
    lost = {first[0], second[1]}  # rank 0 of one replica, rank 1 of the other
    print(f"two replicas run in {len(old)} placement groups; a node of each goes")
    lost_s = time.perf_counter()
    for node in [node for node in cluster.worker_nodes if node.node_id in lost]:
        cluster.remove_node(node, allow_graceful=False)
    one_s = _seconds_until_whole(1, old.keys(), lost_s)
    print("no whole replica" if one_s is None else f"one whole replica on the two nodes left after {one_s:.1f} s")
    explained_s = _seconds_until_explained(Path(cluster.head_node.get_logs_dir_path()), time.perf_counter())
    print("no explanation" if explained_s is None else f"what the other lacks was logged after {explained_s:.1f} s")
    for _ in lost:
        cluster.add_node(num_cpus=1, labels=NODE_LABEL)
    both_s = _seconds_until_whole(2, old.keys(), time.perf_counter())
    print("not two replicas" if both_s is None else f"two replicas {both_s:.1f} s after two new nodes")
    return NodeLossRun(one_s, explained_s, both_s)


def _seconds_until_whole(count: int, old: Any, since_s: float) -> float | None:
    """Until so many replicas run, each in a new placement group that holds all its bundles, and no old group is left.

    None after TIMEOUT_S.
    """
    while (elapsed_s := time.perf_counter() - since_s) < TIMEOUT_S:
        groups = _groups()
        num_whole = sum(group["state"] == "CREATED" for name, group in groups.items() if name not in old)
        states = serve.status().applications["pools"].deployments["short"].replica_states
        num_running = sum(number for state, number in states.items() if state == "RUNNING")
        if num_running == num_whole == count and not old & groups.keys():
            return elapsed_s
        time.sleep(0.2)
    return None


def _seconds_until_explained(logs: Path, since_s: float) -> float | None:
    wanted = "a replica of pools/short waits: it asks 2 bundles of 1 CPU; the cluster has"
    while (elapsed_s := time.perf_counter() - since_s) < TIMEOUT_S:
        if any(wanted in path.read_text(errors="replace") for path in logs.glob("serve/*monitor*.log")):
            return elapsed_s
        time.sleep(0.2)
    return None


def _groups() -> dict[str, dict[str, Any]]:
    return {group["name"]: group for group in placement_group_table().values() if group["state"] != "REMOVED"}


if __name__ == "__main__":
    sys.exit(main())
