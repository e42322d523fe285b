"""The deployment graphs. `import_path` in serve_configs/ names one of these two builders; `args` are its argument.

router   HTTP ingress; sends each request to a pool of one version by the pools application's name
pools    one version of one model: a short and a long pool of engine replicas, and their monitor
"""

from __future__ import annotations

import warnings
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, RequestRouterConfig

from app.config import PoolConfig, PoolScalingSettings, PoolsConfig, RouterConfig, load_config
from app.serving.limits import check_pools, check_router
from app.serving.monitor import Monitor
from app.serving.placement import placement_options
from app.serving.replica import Replica
from app.serving.router import Router
from app.serving.routing import PoolName

# Far above RouterSettings.max_ongoing_requests: the router itself refuses, with an OpenAI body.
ROUTER_ONGOING_REQUESTS = 100_000
DRAIN_TIMEOUT_S = 600.0
REQUEST_ROUTER = "app.serving.request_router:NamedReplicaRouter"  # Serve's annotation forgets that it takes a path
MAX_REPLICAS = 1000  # Serve's own bound; ours may change while it runs
# How often replicas and monitor push their figures to Serve's controller, and how often they are asked for them.
METRICS_INTERVAL_S, LOOK_BACK_S = 0.25, 0.5


def router(args: dict[str, Any]) -> Application:
    """Raises ConfigError that names the field."""
    config = load_config(RouterConfig, args)
    check_router(config)
    deployment = serve.deployment(
        name="router",
        num_replicas=config.num_replicas,
        ray_actor_options={"num_cpus": config.num_cpus},
        max_ongoing_requests=ROUTER_ONGOING_REQUESTS,
        graceful_shutdown_timeout_s=DRAIN_TIMEOUT_S,
        user_config=config.settings.model_dump(),
    )
    return deployment(serve.ingress()(Router)).bind(config)


def pools(args: dict[str, Any]) -> Application:
    """Raises ConfigError that names the field.

    Pools scale only under the application's `autoscaling_policy`, which a builder cannot set.
    """
    config = load_config(PoolsConfig, args)
    check_pools(config)
    scaling = config.scaling
    # Serve takes figures for a policy only from deployments that scale.
    number: dict[str, Any] = {"autoscaling_config": _autoscaling(1, 1)} if scaling.short or scaling.long else {}
    monitor = serve.deployment(
        name="monitor",
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=1000,
        user_config=scaling.model_dump(),
        **number,
        # It is called several times a second for as long as the application runs.
        logging_config={"enable_access_log": False},
    )
    short = _pool("short", config, config.short, scaling.short)
    return monitor(Monitor).bind(short, _pool("long", config, config.long, scaling.long))


def _pool(name: PoolName, config: PoolsConfig, pool: PoolConfig, scaling: PoolScalingSettings | None) -> Application:
    number: dict[str, Any] = {"num_replicas": pool.num_replicas}
    if scaling is not None:
        number = {"autoscaling_config": _autoscaling(scaling.min_replicas, MAX_REPLICAS)}
    deployment = serve.deployment(
        name=name,
        **number,
        ray_actor_options={"num_cpus": pool.num_cpus, "num_gpus": pool.num_gpus},
        max_ongoing_requests=pool.max_ongoing_requests,
        graceful_shutdown_timeout_s=pool.graceful_shutdown_timeout_s,
        health_check_period_s=pool.health_check_period_s,
        health_check_timeout_s=pool.health_check_timeout_s,
        user_config=pool.settings.model_dump(),
        # By name: the controller imports it from the installed package.
        request_router_config=RequestRouterConfig(request_router_class=REQUEST_ROUTER),  # type: ignore[arg-type]
        **placement_options(pool),
    )
    return deployment(Replica).bind(name, config.model, pool)


def _autoscaling(least: int, most: int) -> AutoscalingConfig:
    with warnings.catch_warnings():
        # Serve calls `metrics_interval_s` deprecated, and has nothing yet that takes its place.
        warnings.simplefilter("ignore", DeprecationWarning)
        return AutoscalingConfig(
            min_replicas=least,
            max_replicas=most,
            metrics_interval_s=METRICS_INTERVAL_S,
            look_back_period_s=LOOK_BACK_S,
            # The policy has windows of its own.
            upscale_delay_s=0.0,
            downscale_delay_s=0.0,
            # Without the application's policy nothing may move: Serve's own would count requests.
            policy={"policy_function": "app.serving.autoscaling:hold"},  # type: ignore[arg-type]  # pydantic converts it
        )
