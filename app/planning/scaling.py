"""A Serve config's pools under a recorded trace: what routing and scaling would make of it, in virtual time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import yaml

from app.cache.layout import LATENT_BLOCK_SIZE
from app.config import PoolConfig, PoolsConfig, RouterConfig, load_config
from app.errors import ConfigError
from app.planning.cost_model import ReplicaCost
from app.planning.results import SimulationResult
from app.planning.simulator import PoolPlan, Scenario
from app.serving.load import PoolScaling
from app.serving.routing import POOLS, PoolName
from app.serving.scaling import ScalingConfig

POOLS_PATH, ROUTER_PATH = "app.main:pools", "app.main:router"
Costs = Mapping[PoolName, Mapping[str, float]]


def read_scenario(path: Path, app: str | None, costs: Costs, *, nodes_hold: float = math.inf) -> Scenario:
    """What a Serve config file deploys as `app`, its first application of pools if None.

    `costs` are fields of ReplicaCost; batch, budget and cache are the engine's own where its config sets them.
    Raises ConfigError that names file and field.
    """
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
        applications = [{"name": "", **application} for application in document["applications"]]
    except (OSError, UnicodeDecodeError, yaml.YAMLError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: is not a Serve config ({error})") from None
    args = _args(applications, POOLS_PATH, app)
    if args is None:
        raise ConfigError(f"{path}: has no application {app or ''} of {POOLS_PATH}", field="applications")
    pools = load_config(PoolsConfig, args, where=f"{path}: args")
    router = load_config(RouterConfig, _args(applications, ROUTER_PATH, None) or {}, where=f"{path}: args")
    scaling: dict[str, PoolScaling] = {}
    plans: dict[PoolName, PoolPlan] = {}
    for name in POOLS:
        pool, settings = getattr(pools, name), getattr(pools.scaling, name)
        number = pool.num_replicas
        scaling[name] = (
            PoolScaling(min_replicas=number, max_replicas=number)
            if settings is None
            else PoolScaling(**settings.model_dump())
        )
        plans[name] = PoolPlan(
            _replica_cost(pool, costs.get(name, {}), f"--{name}"),
            pool.engine.max_model_len or 2**31,
            scaling[name].min_replicas,
        )
    budget = math.inf if pools.scaling.budget is None else pools.scaling.budget
    return Scenario(plans, ScalingConfig(scaling, budget), router.settings, nodes_hold=nodes_hold)


def _args(applications: list[dict[str, Any]], import_path: str, name: str | None) -> dict[str, Any] | None:
    for application in applications:
        if application.get("import_path") == import_path and name in (None, application["name"]):
            return application.get("args") or {}
    return None


def _replica_cost(pool: PoolConfig, given: Mapping[str, float], option: str) -> ReplicaCost:
    engine = pool.engine
    values: dict[str, float] = {
        "max_running_seqs": engine.max_num_seqs,
        "max_batched_tokens": engine.max_batched_tokens,
        "max_chunk_tokens": engine.max_chunk_tokens,
    }
    if engine.cache_blocks is not None:
        values["kv_capacity_tokens"] = engine.cache_blocks * LATENT_BLOCK_SIZE
    kinds = {item.name: int if item.type == "int" else float for item in fields(ReplicaCost)}
    for name, value in given.items():
        if name not in kinds:
            raise ConfigError(f"{option}: {name}: is none of {', '.join(kinds)}", field=option)
        if kinds[name] is int and value != int(value):
            raise ConfigError(f"{option}: {name}: must be a whole number, got {value:g}", field=option)
        values[name] = kinds[name](value)
    try:
        return replace(ReplicaCost(), **values)  # type: ignore[arg-type]  # each of its field's type
    except ValueError as error:
        raise ConfigError(f"{option}: {error}", field=option) from None


def report_lines(result: SimulationResult) -> Iterator[str]:
    """Every change of a target and why, then a line for each pool and each kind of request."""
    yield f"{'time s':>8}  pool   replicas  why"
    before = dict.fromkeys(POOLS, -1)
    for sample in result.timeline:
        for name in POOLS:
            target = sample.pools[name].target
            if before[name] not in (-1, target):
                why = "; ".join(sample.reasons[name].reasons) if name in sample.reasons else ""
                yield f"{sample.time_s:8.0f}  {name:5}  {before[name]:2} to {target:2}  {why}"
            before[name] = target
    yield "\npool   replicas  most running  replica hours  turns within 10 min  fullest cache"
    for name in POOLS:
        targets, samples = result.targets(name), [sample.pools[name] for sample in result.timeline]
        yield (
            f"{name:5}  {min(targets):2} to {max(targets):2}  {max(one.running for one in samples):12}"
            f"  {result.replica_hours(name):13.2f}  {result.num_reversals(name, 600.0):19}"
            f"  {max(one.kv_usage for one in samples):13.2f}"
        )
    yield "\nkind   requests  TTFT p50 s   p95 s   p99 s  longest wait s"
    for name in POOLS:
        percentiles = "  ".join(f"{result.ttft_percentile_s(name, percent):6.2f}" for percent in (95, 99))
        yield (
            f"{name:5}  {len(result.ttft_s(name)):8}  {result.ttft_percentile_s(name, 50):10.2f}  {percentiles}"
            f"  {result.longest_wait_s(name):14.2f}"
        )
    yield f"\n{result.num_refused} requests fit no pool, {result.num_unfinished} had not ended when the simulation did"


def report_json(result: SimulationResult) -> dict[str, Any]:
    """The timeline and the requests, for other tools."""
    return {
        "timeline": [
            {"time_s": one.time_s, **{name: asdict(one.pools[name]) for name in POOLS}} for one in result.timeline
        ],
        "requests": [
            {
                "at_s": one.request.arrival_s,
                "pool": one.pool,
                "started_s": one.started_s,
                "first_token_s": one.first_token_s,
                "finished_s": one.finished_s,
            }
            for one in result.requests
        ],
        "num_refused": result.num_refused,
    }
