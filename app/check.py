"""`longspan check`: everything about a Serve config file that can be known without starting anything."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import yaml
from pydantic import ValidationError

from app.cache.layout import CacheLayout
from app.config import (
    EngineConfig,
    FrozenModel,
    ModelSource,
    PoolConfig,
    PoolScalingSettings,
    PoolsConfig,
    PoolSettings,
    RouterConfig,
    RouterSettings,
    ScalingSettings,
    load_config,
)
from app.engine.loading import CPU_CACHE_BYTES, CUDA_CACHE_SHARE
from app.errors import ConfigError, PreflightError
from app.model.checkpoint import Checkpoint, checkpoint_digest
from app.model.config import ModelConfig
from app.model.sharding import Shard
from app.serving.limits import check_bucket, check_pools
from app.serving.placement import Demand, Node, demand, nodes_of, plain_demand, shortage
from app.tokenizer import Tokenizer
from kernels import tuning

ROUTER_PATH = "app.main:router"
POOLS_PATH = "app.main:pools"
# Which model validates the user_config of which deployment.
_USER_CONFIGS: dict[str, dict[str, type[FrozenModel]]] = {
    ROUTER_PATH: {"router": RouterSettings},
    POOLS_PATH: {"short": PoolSettings, "long": PoolSettings, "monitor": ScalingSettings},
}
POLICY_PATH = "app.serving.autoscaling:PoolsPolicy"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
Model = TypeVar("Model", bound=FrozenModel)


def check(path: Path, nodes: Sequence[Node] | None = None) -> str:
    """A summary of the file, a line or two per application. `nodes` are those of the cluster it is meant for.

    Raises ConfigError that names the file, the application and the field; CheckpointError on a model that is absent or
    broken; PreflightError on a cache that holds nothing, and on nodes without room for all replicas.
    """
    applications = [_Application(path, values) for values in _applications(path)]
    ours = [application for application in applications if application.import_path in _USER_CONFIGS]
    if not ours:
        raise ConfigError(f"{path}: no application has the import_path {ROUTER_PATH} or {POOLS_PATH}")
    by_name = {application.name: application for application in applications}
    lines: list[str] = []
    replicas: list[tuple[str, Demand]] = []
    for application in ours:
        application.user_configs()
        is_router = application.import_path == ROUTER_PATH
        lines += _router_lines(application, by_name) if is_router else _pools_lines(application)
        replicas += _router_replicas(application) if is_router else _pools_replicas(application)
    if nodes is not None:
        if line := shortage(replicas, nodes):
            raise PreflightError(f"{path}: {line}")
        lines.append(f"the cluster has room for all {len(replicas)} replicas")
    return "\n".join(lines)


def cluster_nodes(address: str) -> list[Node]:
    """The nodes of the running cluster at `address`, HOST:PORT or "auto". Raises PreflightError if there is none."""
    import ray

    try:
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise PreflightError(f"no Ray cluster at {address}: {error}") from None
    try:
        return nodes_of(ray.nodes())  # type: ignore[no-untyped-call]
    finally:
        ray.shutdown()


@dataclass(frozen=True, slots=True)
class _Application:
    path: Path
    values: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.values.get("name", "default"))

    @property
    def import_path(self) -> str:
        return str(self.values.get("import_path"))

    @property
    def args(self) -> Any:
        return self.values.get("args") or {}

    @property
    def where(self) -> str:
        return f"{self.path}: application {self.name}"

    def load(self, cls: type[Model], values: Any, field: str) -> Model:
        """Validate a part of the application; `field` is that part's dotted path."""
        if not isinstance(values, dict):
            raise self.error(f"{field}: expected a mapping", field)
        with self.named():
            return load_config(cls, values, where=field)

    @contextmanager
    def named(self) -> Iterator[None]:
        """Put the application's name before a ConfigError."""
        try:
            yield
        except ConfigError as error:
            raise self.error(error.message, error.field) from None

    def error(self, message: str, field: str | None) -> ConfigError:
        return ConfigError(f"{self.where}: {message}", field=field)

    def user_configs(self) -> dict[str, FrozenModel]:
        """Every deployment's user_config that is ours, by its dotted path. Raises ConfigError."""
        found = {}
        known = _USER_CONFIGS[self.import_path]
        for index, deployment in enumerate(self.values.get("deployments") or ()):
            if not isinstance(deployment, dict):
                raise self.error(f"deployments.{index}: expected a mapping", f"deployments.{index}")
            if deployment.get("name") not in known:
                field = f"deployments.{index}.name"
                raise self.error(f"{field}: must be one of {', '.join(known)}, got {deployment.get('name')!r}", field)
            if deployment.get("user_config") is not None:
                where = f"deployments.{index}.user_config"
                found[where] = self.load(known[deployment["name"]], deployment["user_config"], where)
        return found


def _applications(path: Path) -> list[dict[str, Any]]:
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    # Imported here: it takes a second that a mistyped file name should not cost.
    from ray.serve.schema import ServeDeploySchema

    try:
        ServeDeploySchema.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{path}: {field or 'document'}: {first['msg']}", field=field or None) from None
    applications: list[dict[str, Any]] = document["applications"]
    return applications


def _router_lines(application: _Application, by_name: Mapping[str, _Application]) -> Iterator[str]:
    config = application.load(RouterConfig, application.args, "args")
    settings = {"args.settings": config.settings}
    settings |= {key: one for key, one in application.user_configs().items() if isinstance(one, RouterSettings)}
    for index, version in enumerate(config.versions):
        field, pools = f"args.versions.{index}.app", by_name.get(version.app)
        if pools is None:
            raise application.error(f"{field}: the file has no application {version.app!r}", field)
        if pools.import_path == ROUTER_PATH:
            raise application.error(f"{field}: {version.app!r} is a router", field)
        _check_model(application, f"args.versions.{index}.model", version.model, pools)
        for where, one in settings.items():
            if problem := config.problem_of(one):
                raise application.error(f"{where}.{problem}", f"{where}.weights")
            _check_bucket(application, where, one, version.model, pools)
    versions = ", ".join(version.app for version in config.versions)
    yield f"{application.name}: router to {versions}; {_resources(config.num_replicas, config.num_cpus, 0)}"


def _check_model(application: _Application, field: str, model: ModelSource, pools: _Application) -> None:
    """The router encodes for the pools' model. Raises ConfigError, or CheckpointError on an unusable tokenizer."""
    tokenizer = Tokenizer(model.folder)
    if pools.import_path != POOLS_PATH:
        return
    served = pools.load(PoolsConfig, pools.args, "args").model
    if served.folder != model.folder and Tokenizer(served.folder).digest != tokenizer.digest:
        raise application.error(f"{field}.path: has another tokenizer than the model of {pools.name}", f"{field}.path")


def _router_replicas(application: _Application) -> list[tuple[str, Demand]]:
    config = application.load(RouterConfig, application.args, "args")
    return [(application.name, plain_demand(config.num_cpus, 0.0))] * config.num_replicas


def _pools_replicas(application: _Application) -> list[tuple[str, Demand]]:
    config = application.load(PoolsConfig, application.args, "args")
    scaling = config.scaling
    return [
        (f"{application.name}/{name}", demand(pool))
        for name, pool, limits in (("short", config.short, scaling.short), ("long", config.long, scaling.long))
        # Of a pool that scales, as many as are always there; the first of a pool that may have none.
        for _ in range(pool.num_replicas if limits is None else max(1, limits.min_replicas))
    ]


def _check_bucket(
    application: _Application, where: str, settings: RouterSettings, model: ModelSource, pools: _Application
) -> None:
    """The short bucket must fit the short pool of the version and the model's context."""
    with application.named():
        check_bucket(settings, model, where)
    if pools.import_path != POOLS_PATH:
        return
    limit = pools.load(PoolsConfig, pools.args, "args").short.engine.max_model_len
    if limit is not None and settings.short_max_cost_tokens > limit:
        field = f"{where}.short_max_cost_tokens"
        message = f"{settings.short_max_cost_tokens} exceeds max_model_len {limit} of the short pool of {pools.name}"
        raise application.error(f"{field}: {message}", field)


def _pools_lines(application: _Application) -> Iterator[str]:
    config = application.load(PoolsConfig, application.args, "args")
    folder = config.model.folder
    model = ModelConfig.from_folder(folder)
    if config.model.weights == "files":
        Checkpoint(folder)  # opens every shard's header
    digest = checkpoint_digest(folder, expected=config.model.digest)
    yield (
        f"{application.name}: {config.model.name}, {model.model_type}, {model.num_layers} layers,"
        f" context {model.max_position_embeddings}, digest {digest[:12]}"
    )
    with application.named():
        check_pools(config, "args")
    scaling = config.scaling
    policy = application.values.get("autoscaling_policy") or {}
    if (scaling.short or scaling.long) and policy.get("policy_function") != POLICY_PATH:
        field = "autoscaling_policy.policy_function"
        raise application.error(f"{field}: must be {POLICY_PATH}, or the pools in args.scaling stay as they are", field)
    _check_fixed_pools(application, scaling)
    for name, pool, limits in (("short", config.short, scaling.short), ("long", config.long, scaling.long)):
        yield f"  {name}: {_pool_line(application, name, pool, limits, model)}"


def _check_fixed_pools(application: _Application, scaling: ScalingSettings) -> None:
    """The monitor's settings can move only the pools that `args` lets scale."""
    for where, settings in application.user_configs().items():
        if not isinstance(settings, ScalingSettings):
            continue
        for name in ("short", "long"):
            if getattr(settings, name) is not None and getattr(scaling, name) is None:
                field = f"{where}.{name}"
                message = f"has no effect: the pool's number is fixed, as args.scaling.{name} is left out"
                raise application.error(f"{field}: {message}", field)
        if settings.budget is not None and not (scaling.short or scaling.long):
            field = f"{where}.budget"
            raise application.error(f"{field}: has no effect: no pool is in args.scaling", field)


def _pool_line(
    application: _Application, name: str, pool: PoolConfig, scaling: PoolScalingSettings | None, model: ModelConfig
) -> str:
    engine, parallel = pool.engine, pool.parallel
    try:
        Shard.of(model, 0, parallel.tensor, parallel.expert, parallel.expert_placement)
    except ConfigError as error:
        raise application.error(f"args.{name}.{error.message}", f"args.{name}.{error.field}") from None
    _check_device(application, f"args.{name}", pool)
    dtype = _dtype(engine, pool.num_gpus)
    layout = CacheLayout.of(model, dtype, is_fp8=engine.cache_dtype == "fp8")
    line = f"{str(dtype).removeprefix('torch.')}, {layout.bytes_per_token} bytes of cache per token, "
    blocks = _cache_blocks(engine, layout, on_gpu=_is_on_gpu(engine, pool.num_gpus))
    if blocks is None:
        line += f"{CUDA_CACHE_SHARE:.0%} of the free GPU memory"
    elif blocks < 1:
        raise PreflightError(
            f"{application.where}: args.{name}.engine.cache_memory_bytes:"
            f" holds no block of {layout.bytes_per_block} bytes"
        )
    else:
        capacity = blocks * layout.block_size
        line += f"{blocks} blocks = {capacity} tokens"
        if capacity < (engine.max_model_len or model.max_position_embeddings):
            line += " and no longer sequence"
    number = str(pool.num_replicas) if scaling is None else f"{scaling.min_replicas} to {scaling.max_replicas}"
    if parallel.num_ranks > 1:
        return f"{line} on each of {parallel.num_ranks} ranks; {number} x ({demand(pool)})"
    return f"{line}; {_resources(number, pool.num_cpus, pool.num_gpus)}"


def _check_device(application: _Application, where: str, pool: PoolConfig) -> None:
    engine = pool.engine
    if engine.device == "cuda" and not pool.num_gpus:
        raise application.error(f"{where}.num_gpus: engine.device cuda needs a GPU", f"{where}.num_gpus")
    is_on_gpu = _is_on_gpu(engine, pool.num_gpus)
    if engine.kernel_backend == ("torch" if is_on_gpu else "triton"):
        field, kind = f"{where}.engine.kernel_backend", "GPU" if is_on_gpu else "CPU"
        raise application.error(f"{field}: {engine.kernel_backend} does not run on a {kind}", field)
    if engine.tuning_table is not None:
        try:
            tuning.Table.read(Path(engine.tuning_table))
        except (OSError, ValueError) as error:
            field = f"{where}.engine.tuning_table"
            raise application.error(f"{field}: {error}", field) from None


def _is_on_gpu(engine: EngineConfig, num_gpus: float) -> bool:
    return engine.device == "cuda" or (engine.device == "auto" and num_gpus > 0)


def _dtype(engine: EngineConfig, num_gpus: float) -> torch.dtype:
    if engine.dtype != "auto":
        return _DTYPES[engine.dtype]
    return torch.bfloat16 if _is_on_gpu(engine, num_gpus) else torch.float32


def _cache_blocks(engine: EngineConfig, layout: CacheLayout, *, on_gpu: bool) -> int | None:
    """None if it depends on the GPU's free memory."""
    if engine.cache_blocks is not None:
        return engine.cache_blocks
    if engine.cache_memory_bytes is None and on_gpu:
        return None
    return layout.num_blocks_in(engine.cache_memory_bytes or CPU_CACHE_BYTES)


def _resources(num_replicas: int | str, num_cpus: float, num_gpus: float) -> str:
    gpus = f", {num_gpus:g} GPUs" if num_gpus else ""
    return f"{num_replicas} x ({num_cpus:g} CPUs{gpus})"
