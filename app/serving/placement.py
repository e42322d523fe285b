"""Where a replica's ranks go: placement group bundles, and why a cluster cannot hold them."""

from __future__ import annotations

from typing import Any

from app.config import PoolConfig


def bundles(pool: PoolConfig) -> list[dict[str, float]]:
    """What each bundle of a replica asks of its node."""
    ranks = pool.parallel.ranks_per_bundle
    bundle = {"CPU": pool.num_cpus * ranks, "GPU": pool.num_gpus * ranks}
    return [{name: amount for name, amount in bundle.items() if amount} for _ in range(pool.parallel.num_bundles)]


def placement_options(pool: PoolConfig) -> dict[str, Any]:
    """Serve's options for a replica of several ranks; none for a replica of one, which is a plain actor."""
    if pool.parallel.num_ranks == 1:
        return {}
    options: dict[str, Any] = {
        "placement_group_bundles": bundles(pool),
        "placement_group_strategy": pool.parallel.placement_strategy,
    }
    if pool.parallel.bundle_labels:
        options["placement_group_bundle_label_selector"] = [dict(labels) for labels in pool.parallel.bundle_labels]
    return options
