"""The deployment graphs. `import_path` in serve_configs/ names one of these two builders; `args` are its argument.

router   HTTP ingress; sends each request to a pool of one version by the pools application's name
pools    one version of one model: a short and a long pool of engine replicas, and their monitor
"""

from __future__ import annotations

from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from app.config import PoolConfig, PoolsConfig, RouterConfig, load_config
from app.serving.monitor import Monitor
from app.serving.placement import placement_options
from app.serving.replica import Replica
from app.serving.router import Router
from app.serving.routing import PoolName

# Far above RouterSettings.max_ongoing_requests: the router itself refuses, with an OpenAI body.
ROUTER_ONGOING_REQUESTS = 100_000
DRAIN_TIMEOUT_S = 600.0


def router(args: dict[str, Any]) -> Application:
    """Raises ConfigError that names the field."""
    config = load_config(RouterConfig, args)
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
    """Raises ConfigError that names the field."""
    config = load_config(PoolsConfig, args)
    monitor = serve.deployment(
        name="monitor",
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=1000,
        # It is called several times a second for as long as the application runs.
        logging_config={"enable_access_log": False},
    )
    return monitor(Monitor).bind(_pool("short", config, config.short), _pool("long", config, config.long))


def _pool(name: PoolName, config: PoolsConfig, pool: PoolConfig) -> Application:
    deployment = serve.deployment(
        name=name,
        num_replicas=pool.num_replicas,
        ray_actor_options={"num_cpus": pool.num_cpus, "num_gpus": pool.num_gpus},
        max_ongoing_requests=pool.max_ongoing_requests,
        graceful_shutdown_timeout_s=pool.graceful_shutdown_timeout_s,
        health_check_period_s=pool.health_check_period_s,
        health_check_timeout_s=pool.health_check_timeout_s,
        user_config=pool.settings.model_dump(),
        # By name: the controller imports it from the installed package.
        request_router_config=RequestRouterConfig(request_router_class="app.serving.request_router:NamedReplicaRouter"),
        **placement_options(pool),
    )
    return deployment(Replica).bind(name, config.model, pool)
