"""Serve's application-level autoscaling policy: reads what replicas and monitor recorded, asks scaling.decide.

A leaf with its four neighbours (stdlib and ray only). Serve pickles a policy's own module by value and its controller
never sees the application's environment, so the neighbours are told to travel by value too: a controller older than
the deployed code then still runs the policy that was deployed.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields, replace
from typing import TYPE_CHECKING, Any

from ray import cloudpickle

from app.serving import board, budget, load, scaling
from app.serving.board import PoolDecision
from app.serving.load import Demand, PoolScaling, ReplicaSignals
from app.serving.scaling import Decision, PoolSignals, PoolState, Report, ScalingConfig, decide

if TYPE_CHECKING:
    from ray.serve._private.common import DeploymentID
    from ray.serve.config import AutoscalingContext

for _neighbour in (scaling, load, budget, board):
    cloudpickle.register_pickle_by_value(_neighbour)  # type: ignore[no-untyped-call]  # Ray ships no types for it

logger = logging.getLogger("ray.serve.longspan.scaling")

LOG_INTERVAL_S = 60.0  # an unchanged decision is logged this often,
EXPLAIN_INTERVAL_S = 5.0  # or this often while there is something to explain
POST_INTERVAL_S = 1.0  # of unchanged decisions
CLOSE_S = 3.0  # routers know of a pool's end by then: they ask the monitor each second, and it reads twice a second

Post = Callable[[str, float, Mapping[str, PoolDecision]], None]

# Serve carries flat numbers only, so settings and demand travel as `scaling/POOL/FIELD`.
_SCALING, _DEMAND = "scaling", "demand"


def replica_stats(signals: ReplicaSignals) -> dict[str, float]:
    """What a replica's `record_autoscaling_stats` returns."""
    values = {item.name: getattr(signals, item.name) for item in fields(signals)}
    return {name: float(value) for name, value in values.items() if value is not None}


def monitor_stats(config: ScalingConfig, demand: Mapping[str, Demand]) -> dict[str, float]:
    """What the monitor's `record_autoscaling_stats` returns: settings, so that they may change while replicas run,
    and the demand of every pool that the routers can see.
    """
    stats = {f"{_SCALING}//budget": config.budget, f"{_SCALING}//stale_after_s": config.stale_after_s}
    for kind, pools in ((_SCALING, config.pools), (_DEMAND, demand)):
        for name, values in pools.items():
            stats |= {f"{kind}/{name}/{item.name}": float(getattr(values, item.name)) for item in fields(values)}
    return stats


def hold(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """The policy of a deployment whose application has no PoolsPolicy: nothing moves."""
    return context.target_num_replicas, {}


class PoolsPolicy:
    """Serve's application-level policy (`autoscaling_policy: {policy_function: app.serving.autoscaling:PoolsPolicy}`).

    Serve builds it once per deployment of the application and calls it every 0.1 s in its controller. An exception
    here would stop the scaling of every application on the cluster, so none leaves it. The deployments' own
    `upscale_delay_s` and `downscale_delay_s` must be 0: the windows are ours. A deployment that reports no settings
    and is no pool is left alone.

    Serve overrules the policy for a pool at zero whose handle holds requests, whatever the budget. So routers keep
    requests to themselves while a pool has no replica, and report them to the monitor; and a pool closes before its
    last replica stops: for CLOSE_S routers hold back, and what they hold reopens it, as does what they still sent.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, post: Post = board.post) -> None:
        self._clock = clock
        self._post = post
        self._config: ScalingConfig | None = None
        self._state: dict[str, PoolState] = {}
        self._settings: tuple[tuple[str, float], ...] = ()
        self._monitor_seen: tuple[float, float] = (-math.inf, -math.inf)  # stamp, when it changed
        self._closing_since_s: dict[str, float] = {}
        self._shown: Mapping[str, tuple[int, ...]] = {}
        self._shown_s = -math.inf
        self._logged_s: dict[str, float] = {}

    def __call__(
        self, contexts: Mapping[DeploymentID, AutoscalingContext]
    ) -> tuple[dict[DeploymentID, int], dict[DeploymentID, dict[str, Any]]]:
        targets = {key: context.target_num_replicas for key, context in contexts.items()}
        try:
            now = self._clock()
            demand = self._read_monitor(contexts, now)
            if self._config is not None:
                pools = {one.deployment_name: key for key, one in contexts.items()}
                pools = {name: key for name, key in pools.items() if name in self._config.pools}
                signals = {
                    name: _signals(contexts[key], demand, name, is_closing=name in self._closing_since_s)
                    for name, key in pools.items()
                }
                bounded = {name: _bounded(self._config.pools[name], contexts[key]) for name, key in pools.items()}
                decision = decide(signals, self._state, replace(self._config, pools=bounded), now)
                self._state = decision.state
                targets |= {key: self._close(name, decision, contexts[key], now) for name, key in pools.items()}
                self._explain(decision, signals, next(iter(contexts.values())).app_name or "", now)
        except Exception:
            if self._is_due("", LOG_INTERVAL_S):
                logger.exception("scaling failed; targets not decided yet stay as they are")
        return targets, {key: {} for key in contexts}

    def _read_monitor(
        self, contexts: Mapping[DeploymentID, AutoscalingContext], now: float
    ) -> dict[str, Demand] | None:
        """Take over changed settings; the demand by pool, None if no monitor has spoken of late."""
        for context in contexts.values():
            for stamp, values in _latest(context).values():
                if not any(key.startswith(f"{_SCALING}/") for key in values):
                    continue
                settings = tuple(sorted((key, value) for key, value in values.items() if key.startswith(_SCALING)))
                if settings != self._settings:
                    self._config, self._settings = _config_of(dict(settings)), settings
                if stamp != self._monitor_seen[0]:
                    self._monitor_seen = stamp, now
                if self._config is not None and now - self._monitor_seen[1] < self._config.stale_after_s:
                    return {name: Demand(**figures) for name, figures in _by_pool(values, _DEMAND).items()}
        return None

    def _close(self, name: str, decision: Decision, context: AutoscalingContext, now: float) -> int:
        """The target for Serve: a last replica runs on until routers know that it stops."""
        granted = decision.targets[name]
        if granted > 0 or context.target_num_replicas == 0:
            self._closing_since_s.pop(name, None)
            return granted
        since_s = self._closing_since_s.setdefault(name, now)
        return 0 if now - since_s >= CLOSE_S else context.target_num_replicas

    def _explain(self, decision: Decision, signals: Mapping[str, PoolSignals], app: str, now: float) -> None:
        for name, why in decision.reasons.items():
            has_changed = why.granted != signals[name].target
            if self._is_due(name, 0.0 if has_changed else EXPLAIN_INTERVAL_S if why.reasons else LOG_INTERVAL_S):
                logger.info(json.dumps({"event": "scaling", "app": app, "pool": name, **asdict(why)}))
        self._show(decision, signals, app, now)

    def _show(self, decision: Decision, signals: Mapping[str, PoolSignals], app: str, now: float) -> None:
        decisions = {
            name: PoolDecision(signals[name].num_running, signals[name].target, **asdict(why))
            for name, why in decision.reasons.items()
        }
        numbers = {name: (one.running, one.target, one.wanted, one.granted) for name, one in decisions.items()}
        if numbers != self._shown or now - self._shown_s >= POST_INTERVAL_S:
            self._shown, self._shown_s = numbers, now
            self._post(app, now, decisions)

    def _is_due(self, name: str, interval_s: float) -> bool:
        now = self._clock()
        if now - self._logged_s.get(name, -math.inf) < interval_s:
            return False
        self._logged_s[name] = now
        return True


def _latest(context: AutoscalingContext) -> dict[str, tuple[float, dict[str, float]]]:
    """Each replica's newest stamp and finite values."""
    found: dict[str, tuple[float, dict[str, float]]] = {}
    for name, by_replica in (context.raw_metrics or {}).items():
        for replica, series in by_replica.items():
            if series and math.isfinite(series[-1].value):
                stamp, values = found.get(replica.unique_id, (-math.inf, {}))
                found[replica.unique_id] = max(stamp, series[-1].timestamp), {**values, name: series[-1].value}
    return found


def _signals(
    context: AutoscalingContext, demand: Mapping[str, Demand] | None, name: str, *, is_closing: bool
) -> PoolSignals:
    reports = _reports(context)
    of_pool = None if demand is None else demand.get(name, Demand())
    is_closing = is_closing and of_pool is not None  # else nobody could tell routers
    if is_closing and of_pool is not None:
        num_seqs = sum(one.signals.running_seqs + one.signals.waiting_seqs for one in reports.values())
        of_pool = replace(of_pool, waiting_seqs=of_pool.waiting_seqs + num_seqs)
    return PoolSignals(
        target=0 if is_closing else context.target_num_replicas,
        num_running=context.current_num_replicas,
        reports=reports,
        demand=of_pool,
    )


def _reports(context: AutoscalingContext) -> dict[str, Report]:
    reports = {}
    names = [item.name for item in fields(ReplicaSignals)]
    for replica, (stamp, values) in _latest(context).items():
        known = {name: values[name] for name in names if name in values}
        if set(_REQUIRED) <= set(known):
            reports[replica] = Report(stamp, ReplicaSignals(**known))
    return reports


_REQUIRED = [item.name for item in fields(ReplicaSignals) if item.default is not None]


def _by_pool(values: Mapping[str, float], kind: str) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        first, *rest = key.split("/")
        if first == kind and len(rest) == 2:
            found.setdefault(rest[0], {})[rest[1]] = value
    return found


def _config_of(settings: Mapping[str, float]) -> ScalingConfig:
    pools = _by_pool(settings, _SCALING)
    shared = pools.pop("", {})
    whole = {item.name for item in fields(PoolScaling) if item.type == "int"}
    return ScalingConfig(
        {
            name: PoolScaling(**{key: int(value) if key in whole else value for key, value in values.items()})
            for name, values in pools.items()
        },
        **shared,
    )


def _bounded(pool: PoolScaling, context: AutoscalingContext) -> PoolScaling:
    """Within Serve's bounds as well, which are wide unless somebody narrowed them."""
    most = max(1, min(pool.max_replicas, context.capacity_adjusted_max_replicas))
    least = max(pool.min_replicas, context.capacity_adjusted_min_replicas)
    return replace(pool, min_replicas=min(least, most), max_replicas=most)
