"""Where a replica's ranks go: placement group bundles, and why a cluster's nodes cannot hold them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from app.config import PoolConfig

RESOURCES = ("CPU", "GPU")
_EPSILON = 1e-6  # shares of a CPU add up with rounding errors
_SELECTOR = re.compile(r"(!?)(?:in\((.*)\)|(.*))", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Demand:
    """What one replica asks of the cluster at once."""

    bundles: tuple[Mapping[str, float], ...]
    strategy: str = "STRICT_PACK"
    labels: tuple[Mapping[str, str], ...] = ()  # selectors, one per bundle; empty: any node

    @property
    def size(self) -> tuple[float, ...]:
        """GPUs, then CPUs."""
        return tuple(sum(bundle.get(name, 0.0) for bundle in self.bundles) for name in reversed(RESOURCES))

    def __str__(self) -> str:
        count = len(self.bundles)
        what = _amounts(self.bundles[0]) if count == 1 else f"{count} bundles of {_amounts(self.bundles[0])}"
        where = {"STRICT_PACK": " on one node", "STRICT_SPREAD": ", each on another node"}.get(self.strategy, "")
        selectors = " / ".join(dict.fromkeys(_pairs(labels) for labels in self.labels if labels))
        return what + (where if count > 1 else "") + (f" with labels {selectors}" if selectors else "")


@dataclass(frozen=True, slots=True)
class Node:
    """What a node has left; at first, all it has."""

    name: str
    resources: Mapping[str, float]
    labels: Mapping[str, str]

    def __str__(self) -> str:
        labels = {key: value for key, value in self.labels.items() if not key.startswith("ray.io/node-")}
        return f"{self.name}: {_amounts(self.resources)}" + (f" ({_pairs(labels)})" if labels else "")

    def without(self, asked: Iterable[Mapping[str, float]]) -> Node:
        left = dict(self.resources)
        for bundle in asked:
            for name, amount in bundle.items():
                left[name] = left.get(name, 0.0) - amount
        return Node(self.name, left, self.labels)

    @property
    def is_overdrawn(self) -> bool:
        return any(amount < -_EPSILON for amount in self.resources.values())


def bundles(pool: PoolConfig) -> list[dict[str, float]]:
    """What each bundle of a replica asks of its node."""
    ranks = pool.parallel.ranks_per_bundle
    return [_asked(pool.num_cpus * ranks, pool.num_gpus * ranks) for _ in range(pool.parallel.num_bundles)]


def placement_options(pool: PoolConfig) -> dict[str, Any]:
    """Serve's options for a replica of several ranks or with labels; none for any other, which is a plain actor."""
    if pool.parallel.num_ranks == 1 and not pool.parallel.bundle_labels:
        return {}
    options: dict[str, Any] = {
        "placement_group_bundles": bundles(pool),
        "placement_group_strategy": pool.parallel.placement_strategy,
    }
    if pool.parallel.bundle_labels:
        options["placement_group_bundle_label_selector"] = [dict(labels) for labels in pool.parallel.bundle_labels]
    return options


def demand(pool: PoolConfig) -> Demand:
    parallel = pool.parallel
    if parallel.num_ranks == 1 and not parallel.bundle_labels:
        return plain_demand(pool.num_cpus, pool.num_gpus)
    labels = parallel.bundle_labels * (parallel.num_bundles if len(parallel.bundle_labels) == 1 else 1)
    return Demand(tuple(bundles(pool)), parallel.placement_strategy, labels)


def plain_demand(num_cpus: float, num_gpus: float) -> Demand:
    """Of an actor without a placement group."""
    return Demand((_asked(num_cpus, num_gpus),))


def place(asked: Demand, nodes: Sequence[Node]) -> list[Node] | None:
    """What the nodes have left with this replica on them; None if they cannot hold it.

    Exact for equal bundles; Ray itself may choose other nodes, so a second replica may find less room than here.
    """
    labels = asked.labels or ({},) * len(asked.bundles)
    if asked.strategy == "STRICT_PACK":
        for index, node in enumerate(nodes):
            left = node.without(asked.bundles)
            if not left.is_overdrawn and all(matches(each, node.labels) for each in labels):
                return [*nodes[:index], left, *nodes[index + 1 :]]
        return None
    chosen: list[int | None] = [None] * len(asked.bundles)
    for bundle in range(len(asked.bundles)):
        if not _assign(bundle, chosen, asked, labels, nodes, set()):
            return None
    return [
        node.without(bundle for bundle, at in zip(asked.bundles, chosen, strict=True) if at == index)
        for index, node in enumerate(nodes)
    ]


def _assign(
    bundle: int,
    chosen: list[int | None],
    asked: Demand,
    labels: Sequence[Mapping[str, str]],
    nodes: Sequence[Node],
    tried: set[int],
) -> bool:
    """Find a node for the bundle, moving bundles that were placed before if need be."""
    for index, node in enumerate(nodes):
        if index in tried or not matches(labels[bundle], node.labels):
            continue
        tried.add(index)
        there = [other for other, at in enumerate(chosen) if at == index]
        if not node.without(asked.bundles[other] for other in (*there, bundle)).is_overdrawn:
            chosen[bundle] = index
            return True
        for other in there:
            if _assign(other, chosen, asked, labels, nodes, tried):
                chosen[bundle] = index
                return True
    return False


def matches(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    """Ray's label selectors: `value`, `!value`, `in(a, b)`, `!in(a, b)`."""
    for key, wanted in selector.items():
        negated, several, one = _SELECTOR.fullmatch(wanted).groups()  # type: ignore[union-attr]
        values = [one] if several is None else [value.strip() for value in several.split(",")]
        if (labels.get(key) in values) == bool(negated):
            return False
    return True


def shortage(replicas: Iterable[tuple[str, Demand]], nodes: Sequence[Node]) -> str | None:
    """Place the named replicas, the largest first; a line about the first that finds no room, None if all do."""
    left = list(nodes)
    for name, asked in sorted(replicas, key=lambda replica: replica[1].size, reverse=True):
        after = place(asked, left)
        if after is None:
            return explain(name, asked, nodes) + ("" if place(asked, nodes) is None else f", left {_joined(left)}")
        left = after
    return None


def explain(name: str, asked: Demand, nodes: Sequence[Node]) -> str:
    """One line: what a replica asks, and what the cluster has."""
    return f"{name} asks {asked}; the cluster has {_joined(nodes)}"


def nodes_of(entries: Iterable[Mapping[str, Any]]) -> list[Node]:
    """From `ray.nodes()`: the live ones, with all they have."""
    return [
        Node(
            f"node {entry['NodeName']} ({entry['NodeID'][:8]})",
            {name: entry["Resources"].get(name, 0.0) for name in RESOURCES},
            entry["Labels"],
        )
        for entry in entries
        if entry["Alive"]
    ]


def waiting_groups(table: Mapping[str, Mapping[str, Any]], nodes: Sequence[Node]) -> list[str]:
    """A line for each replica that waits for its placement group; `table` is Ray's placement_group_table()."""
    lines = []
    for entry in table.values():
        kind, _, replica = entry["name"].partition("::")
        if kind == "SERVE_REPLICA" and entry["state"] in {"PENDING", "RESCHEDULING"}:
            app, pool, _ = replica.split("#")
            asked = Demand(tuple(entry["bundles"].values()), entry["strategy"])
            line = explain(f"a replica of {app}/{pool} waits: it", asked, nodes)
            if place(asked, nodes) is not None:
                line += ", of which others hold a part, or whose labels do not match"
            lines.append(line)
    return lines


def _asked(num_cpus: float, num_gpus: float) -> dict[str, float]:
    return {name: amount for name, amount in zip(RESOURCES, (num_cpus, num_gpus), strict=True) if amount}


def _joined(nodes: Sequence[Node]) -> str:
    return "; ".join(map(str, nodes)) or "no nodes"


def _amounts(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:.4g} {name}" for name, amount in resources.items() if amount > _EPSILON) or "nothing"


def _pairs(labels: Mapping[str, str]) -> str:
    return ", ".join(f"{key}={value}" for key, value in labels.items())
