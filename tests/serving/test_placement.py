"""Bundles of a replica's ranks, and the words for a cluster that cannot hold them."""

from __future__ import annotations

from typing import Any

import pytest

from app.config import ParallelConfig, PoolConfig
from app.serving.placement import (
    Demand,
    Node,
    demand,
    matches,
    nodes_of,
    place,
    placement_options,
    plain_demand,
    shortage,
    waiting_groups,
)

ONE = {"CPU": 1.0}


def pool(parallel: dict[str, Any], **values: Any) -> PoolConfig:
    return PoolConfig(parallel=ParallelConfig(**parallel), **values)


def node(name: str, cpus: float, gpus: float = 0.0, **labels: str) -> Node:
    return Node(name, {"CPU": cpus, "GPU": gpus}, labels)


def left(nodes: list[Node] | None) -> list[float]:
    assert nodes is not None
    return [each.resources["CPU"] for each in nodes]


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (pool({}, num_cpus=1.0), {}),
        (
            pool({"bundle_labels": ({"zone": "x"},)}, num_cpus=1.0),
            {
                "placement_group_bundles": [{"CPU": 1.0}],
                "placement_group_strategy": "STRICT_PACK",
                "placement_group_bundle_label_selector": [{"zone": "x"}],
            },
        ),
        (
            pool({"tensor": 2}, num_cpus=0.5, num_gpus=1.0),
            {"placement_group_bundles": [{"CPU": 0.5, "GPU": 1.0}] * 2, "placement_group_strategy": "STRICT_PACK"},
        ),
        (
            pool({"expert": 3}, num_cpus=2.0),
            {"placement_group_bundles": [{"CPU": 2.0}] * 3, "placement_group_strategy": "PACK"},
        ),
        (
            pool(
                {
                    "tensor": 4,
                    "expert": 2,
                    "strategy": "SPREAD",
                    "bundle_labels": ({"ray.io/accelerator-type": "H200"},),
                },
                num_cpus=0.0,
                num_gpus=1.0,
            ),
            {
                "placement_group_bundles": [{"GPU": 4.0}] * 2,
                "placement_group_strategy": "SPREAD",
                "placement_group_bundle_label_selector": [{"ray.io/accelerator-type": "H200"}],
            },
        ),
    ],
    ids=["one", "labelled", "tensor", "expert", "both"],
)
def test_options_of_serve(config: PoolConfig, options: dict[str, Any]) -> None:
    assert placement_options(config) == options


def test_strict_packing_needs_one_node_and_packing_does_not() -> None:
    asked = (ONE,) * 3
    assert left(place(Demand(asked), [node("a", 2), node("b", 3)])) == [2, 0]
    assert place(Demand(asked), [node("a", 2), node("b", 2)]) is None
    assert left(place(Demand(asked, "PACK"), [node("a", 2), node("b", 2)])) == [0, 1]
    assert place(Demand(asked, "SPREAD"), [node("a", 1), node("b", 1)]) is None


def test_a_bundle_moves_for_one_with_a_label() -> None:
    nodes = [node("a", 1, zone="x"), node("b", 1, zone="y")]
    any_then_x = Demand((ONE, ONE), "PACK", ({}, {"zone": "x"}))
    assert left(place(any_then_x, nodes)) == [0, 0]
    assert place(Demand((ONE, ONE), "PACK", ({"zone": "x"},) * 2), nodes) is None


@pytest.mark.parametrize(
    ("selector", "is_match"),
    [("x", True), ("y", False), ("!x", False), ("!y", True), ("in(y, x)", True), ("!in(y,x)", False), ("in(y)", False)],
)
def test_selectors_as_ray_reads_them(selector: str, is_match: bool) -> None:
    assert matches({"zone": selector}, {"zone": "x", "other": "z"}) is is_match


def test_a_shortage_names_what_is_asked_and_what_is_there() -> None:
    sharded = demand(pool({"tensor": 4, "bundle_labels": ({"zone": "in(a, b)"},)}, num_cpus=1.0, num_gpus=1.0))
    line = shortage([("short", sharded)], [node("n1", 8, 2, zone="a"), node("n2", 8)])
    assert line == (
        "short asks 4 bundles of 1 CPU, 1 GPU on one node with labels zone=in(a, b);"
        " the cluster has n1: 8 CPU, 2 GPU (zone=a); n2: 8 CPU"
    )


def test_a_shortage_counts_what_others_took() -> None:
    replicas = [("router", plain_demand(0.5, 0)), ("short", plain_demand(1, 0)), ("long", plain_demand(1, 0))]
    assert shortage(replicas[:2], [node("n1", 2)]) is None
    assert shortage(replicas, [node("n1", 2)]) == "router asks 0.5 CPU; the cluster has n1: 2 CPU, left n1: nothing"
    assert shortage(replicas, []) == "short asks 1 CPU; the cluster has no nodes"


def test_small_replicas_do_not_take_the_room_of_large_ones() -> None:
    sharded = demand(pool({"tensor": 2}, num_cpus=1.0))
    assert shortage([("router", plain_demand(0.2, 0)), ("short", sharded)], [node("n1", 2), node("n2", 1)]) is None


def test_ten_tenths_of_a_cpu_fit_one() -> None:
    assert shortage([("r", plain_demand(0.1, 0))] * 10, [node("n1", 1)]) is None


def test_replicas_that_wait_for_their_group_are_explained() -> None:
    def group(name: str, state: str, cpus: float) -> dict[str, Any]:
        return {"name": name, "state": state, "bundles": {0: {"CPU": cpus}, 1: {"CPU": cpus}}, "strategy": "PACK"}

    nodes = nodes_of(
        [
            {"NodeName": "10.0.0.1", "NodeID": "0123456789", "Alive": True, "Resources": {"CPU": 4.0}, "Labels": {}},
            {"NodeName": "10.0.0.2", "NodeID": "ab", "Alive": False, "Resources": {"CPU": 64.0}, "Labels": {}},
        ]
    )
    table = {
        "1": group("SERVE_REPLICA::pools#short#abc", "PENDING", 3.0),
        "2": group("SERVE_REPLICA::pools#long#def", "PENDING", 2.0),
        "3": group("SERVE_REPLICA::pools#long#ghi", "CREATED", 2.0),
        "4": group("someone else's", "PENDING", 2.0),
    }
    has = "the cluster has node 10.0.0.1 (01234567): 4 CPU"
    assert waiting_groups(table, nodes) == [
        f"a replica of pools/short waits: it asks 2 bundles of 3 CPU; {has}",
        f"a replica of pools/long waits: it asks 2 bundles of 2 CPU; {has},"
        " of which others hold a part, or whose labels do not match",
    ]
