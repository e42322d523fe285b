"""The configuration, validated once by the builders in main.py and never changed afterwards.

RouterConfig > VersionConfig, RouterSettings                            `args` of app.main:router
PoolsConfig > PoolConfig > EngineConfig, ParallelConfig, PoolSettings   `args` of app.main:pools
            > ScalingSettings > PoolScalingSettings
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from app.errors import ConfigError

EMBEDDED_MODEL = Path(__file__).parent / "assets" / "tiny"

PositiveInt = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class FrozenModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, protected_namespaces=())


class ModelSource(FrozenModel):
    """Where a checkpoint lies and under which name it is served."""

    path: str = "embedded"  # a folder in Hugging Face layout; "embedded" is app/assets/tiny
    name: str = "longspan-tiny"  # the `model` clients send
    digest: str | None = None  # sha256 over the checkpoint's manifest; a mismatch refuses to load
    weights: Literal["files", "random"] = "files"  # random: its shapes and its speed, for measuring without its files

    @property
    def folder(self) -> Path:
        return EMBEDDED_MODEL if self.path == "embedded" else Path(self.path)


class EngineConfig(FrozenModel):
    """Limits and numerics of one engine. None means: derived from the device, dtype or model."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # auto: float32 on CPU, bfloat16 on CUDA
    num_threads: PositiveInt | None = None  # torch intra-op threads on CPU
    # prompt + output tokens of one sequence; None: the model's context
    max_model_len: Annotated[int, Field(ge=2)] | None = None
    max_num_seqs: PositiveInt = 16  # sequences in one step
    max_batched_tokens: PositiveInt = 2048  # tokens in one step
    max_chunk_tokens: PositiveInt = 512  # prompt tokens one sequence computes in one step
    # prompts get as many tokens of a step as fit this time while others wait for it; None: 0.2 s on CPU, 0.11 on CUDA
    max_step_s: PositiveFloat | None = None
    max_passed_over_s: PositiveFloat = 30.0  # a request that waited so long goes first, whatever its priority
    cache_blocks: PositiveInt | None = None  # None: cache_memory_bytes decides
    cache_memory_bytes: PositiveInt | None = None  # None: 256 MiB on CPU, up to 90% of the free memory on CUDA
    cache_dtype: Literal["auto", "fp8"] = "auto"  # of the latents; auto: the model's. fp8: half the memory, inexact
    prefix_caching: bool = True
    batch_invariant: bool | None = None  # None: on for float32 on CPU, off elsewhere
    max_waiting_seqs: PositiveInt = 256
    kernel_backend: Literal["torch", "triton"] | None = None  # None: triton on CUDA tensors, torch on CPU tensors
    kernel_cache: str | None = None  # folder of compiled kernels, reused by the next start; None: ~/.triton/cache
    tuning_table: str | None = None  # of `python -m kernels.tune`; None: what is shipped for the card

    @model_validator(mode="after")
    def _chunk_fits_step(self) -> Self:
        if self.max_num_seqs > self.max_batched_tokens:
            raise ValueError("max_num_seqs: must not exceed max_batched_tokens: a sequence takes one token a step")
        return self


class ParallelConfig(FrozenModel):
    """How `tensor` x `expert` ranks share one replica's model. Rank e * tensor + t is number t of tensor group e."""

    tensor: PositiveInt = 1  # ranks that split heads, MLPs and vocabulary; always on one node
    expert: PositiveInt = 1  # groups of such ranks that split the routed experts
    # Where the bundles of a replica go. None: STRICT_PACK, one node, for one tensor group; PACK for several
    strategy: Literal["STRICT_PACK", "PACK", "SPREAD"] | None = None
    # Ray's node labels a bundle needs: one selector for all bundles, or one for each
    bundle_labels: tuple[dict[str, str], ...] = ()
    expert_placement: str | None = None  # a file of `longspan bench --expert-load`; None: experts spread evenly
    peer_memory: bool = True  # small collectives of GPUs of one host go through their memory, not by NCCL
    # a collective that takes longer counts as a dead rank, and so does a rank silent for as long, while loading too
    collective_timeout_s: PositiveFloat = 30.0

    @model_validator(mode="after")
    def _labels_match_bundles(self) -> Self:
        if len(self.bundle_labels) not in {0, 1, self.num_bundles}:
            raise ValueError(f"bundle_labels: one for all or one for each of {self.num_bundles} bundles")
        return self

    @property
    def num_ranks(self) -> int:
        return self.tensor * self.expert

    @property
    def placement_strategy(self) -> str:
        return self.strategy or ("STRICT_PACK" if self.expert == 1 else "PACK")

    @property
    def ranks_per_bundle(self) -> int:
        """A bundle lies on one node: where bundles may part, a tensor group is one bundle."""
        return 1 if self.placement_strategy == "STRICT_PACK" else self.tensor

    @property
    def num_bundles(self) -> int:
        return self.num_ranks // self.ranks_per_bundle


class PoolSettings(FrozenModel):
    """What may change while a pool runs (`user_config`)."""

    watchdog_timeout_s: PositiveFloat = 60.0  # an engine with work that makes no step for this long is replaced


class PoolConfig(FrozenModel):
    """A pool: identical engine replicas behind one Serve deployment."""

    engine: EngineConfig = EngineConfig()
    parallel: ParallelConfig = ParallelConfig()
    num_replicas: PositiveInt = 1  # fixed, unless `scaling` of PoolsConfig names the pool
    num_cpus: Annotated[float, Field(ge=0)] = 1.0  # Ray CPUs each rank of a replica holds
    num_gpus: Annotated[float, Field(ge=0)] = 0.0
    max_ongoing_requests: PositiveInt = 512
    graceful_shutdown_timeout_s: PositiveFloat = 600.0  # at least the longest stream
    health_check_period_s: PositiveFloat = 10.0
    health_check_timeout_s: PositiveFloat = 30.0
    settings: PoolSettings = PoolSettings()  # used until a `user_config` arrives

    @model_validator(mode="after")
    def _ranks_ask_for_something(self) -> Self:
        if self.parallel.num_ranks > 1 and not self.num_cpus and not self.num_gpus:
            raise ValueError("num_cpus: a replica of several ranks needs CPUs or GPUs to place them by")
        if self.parallel.num_ranks > 1 and 0 < self.num_gpus <= 0.5:
            raise ValueError("num_gpus: more than 0.5 for each of several ranks, or two could be given the same GPU")
        return self


class PoolScalingSettings(FrozenModel):
    """Between which numbers of replicas a pool moves, and what moves it."""

    min_replicas: NonNegativeInt = 1  # 0: the pool may stop altogether, and the first request waits for a start
    max_replicas: PositiveInt = 1
    replica_cost: PositiveFloat = 1.0  # of the budget
    ttft_target_s: PositiveFloat = 2.0  # waiting prompts that take a replica longer are pressure,
    max_waiting_seqs: PositiveFloat = 8.0  # and so are more waiting sequences per replica,
    max_kv_usage: Annotated[float, Field(gt=0, le=1)] = 0.85  # and a fuller KV cache
    max_step: PositiveInt = 2  # replicas started or stopped by one decision
    up_window_s: PositiveFloat = 1.0  # pressure must last this long,
    down_window_s: NonNegativeFloat = 300.0  # and a load that fewer replicas carry this long
    start_timeout_s: PositiveFloat = 600.0  # a replica not up by then gives its share of the budget back,
    retry_s: NonNegativeFloat = 300.0  # and is asked for again after this time

    @field_validator("max_replicas")
    @classmethod
    def _max_is_not_below_min(cls, value: int, info: ValidationInfo) -> int:
        least = info.data.get("min_replicas", 0)
        if value < least:
            raise ValueError(f"must be at least min_replicas, which is {least}, got {value}")
        return value


class ScalingSettings(FrozenModel):
    """What may change while pools scale (`user_config` of deployment `monitor`). A pool left out keeps its number."""

    short: PoolScalingSettings | None = None
    long: PoolScalingSettings | None = None
    budget: PositiveFloat | None = None  # for the replicas of both pools, in units of replica_cost

    @field_validator("budget")
    @classmethod
    def _budget_holds_the_minimums(cls, value: float | None, info: ValidationInfo) -> float | None:
        pools = [pool for name in ("short", "long") if (pool := info.data.get(name)) is not None]
        least = sum(pool.min_replicas * pool.replica_cost for pool in pools)
        if value is not None and value < least:
            raise ValueError(f"must be at least {least:g}, what the pools' min_replicas cost, got {value:g}")
        return value


class PoolsConfig(FrozenModel):
    """`args` of app.main:pools: one version of one model, as a short and a long pool."""

    model: ModelSource = ModelSource()
    short: PoolConfig = PoolConfig()
    long: PoolConfig = PoolConfig()
    scaling: ScalingSettings = ScalingSettings()  # used until a `user_config` of `monitor` arrives

    @model_validator(mode="after")
    def _number_is_fixed_or_scales(self) -> Self:
        for name, pool, scaling in (("short", self.short, self.scaling.short), ("long", self.long, self.scaling.long)):
            if scaling is not None and "num_replicas" in pool.model_fields_set:
                raise ValueError(f"{name}.num_replicas: must be left out where scaling.{name} is given")
        return self


class QueueBounds(FrozenModel):
    """How much may wait for one pool. Past it: 429, with the time after which there is room again."""

    max_waiting_seqs: PositiveInt = 128  # sequences per replica beyond those in its batch
    max_ttft_s: PositiveFloat = 30.0  # prompts that the replicas would take longer to compute do not wait


class RouterSettings(FrozenModel):
    """What may change while the router runs (`user_config`)."""

    # share of traffic by application; empty: all equal
    weights: dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]] = {}
    short_max_cost_tokens: PositiveInt = 2048  # prompt + expected output up to here goes to the short pool
    expected_output_tokens: PositiveInt = 256  # until a bucket has its own running estimate
    default_timeout_s: PositiveFloat | None = None
    max_ongoing_requests: PositiveInt = 1024  # past it: 429
    short: QueueBounds = QueueBounds()
    long: QueueBounds = QueueBounds()
    spills: bool = True  # a short request may go to an idle long pool while its own has a queue,
    # and a long one to a short pool where nobody waits, if its prompt takes no longer than this there
    spill_bound_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.5
    max_retries: Annotated[int, Field(ge=0, le=10)] = 2  # after the loss of a replica, before the client has a token
    max_hold_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 60.0  # while a pool has no replica; then 503


class VersionConfig(FrozenModel):
    """One application of pools the router may send to."""

    app: str  # the Serve application's name
    model: ModelSource = ModelSource()


class RouterConfig(FrozenModel):
    """`args` of app.main:router: the versions of models that it may send to, and itself."""

    versions: tuple[VersionConfig, ...] = (VersionConfig(app="pools"),)
    num_replicas: PositiveInt = 1
    num_cpus: Annotated[float, Field(ge=0)] = 0.5
    max_body_bytes: PositiveInt = 4 * 1024 * 1024
    settings: RouterSettings = RouterSettings()  # used until a `user_config` arrives

    @model_validator(mode="after")
    def _versions_are_distinct(self) -> Self:
        apps = [version.app for version in self.versions]
        if not apps:
            raise ValueError("versions: at least one is needed")
        if len(set(apps)) != len(apps):
            raise ValueError(f"versions: each application once, got {apps}")
        if problem := self.problem_of(self.settings):
            raise ValueError(f"settings.{problem}")
        return self

    def problem_of(self, settings: RouterSettings) -> str | None:
        """What is wrong with settings that alone are valid, as FIELD: PROBLEM."""
        apps = [version.app for version in self.versions]
        if unknown := sorted(set(settings.weights) - set(apps)):
            return f"weights: {unknown[0]!r} is no application of `versions`, which are {', '.join(apps)}"
        if settings.weights and not any(settings.weights.values()):
            return "weights: at least one must be above 0"
        return None


Model = TypeVar("Model", bound=FrozenModel)
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_FIELD_AT_FAULT = re.compile(r"(\w+(?:\.\w+)*): ")


def load_config(cls: type[Model], values: dict[str, Any], *, where: str = "") -> Model:
    """Expand ${VAR} in every string, then validate.

    Raises ConfigError that names the dotted path of the first wrong field, under the prefix `where`.
    """
    try:
        return cls.model_validate(_expand(values, where))
    except ValidationError as error:
        first = error.errors()[0]
        message = first["msg"].removeprefix("Value error, ")
        # A model's own validator sees several fields, and names the one at fault.
        field = _FIELD_AT_FAULT.match(message) if first["type"] == "value_error" else None
        if field is not None:
            message = message[field.end() :]
        path = ".".join(str(part) for part in (where, *first["loc"], field[1] if field else "") if part != "")
        raise ConfigError(f"{path}: {message}" if path else message, field=path or None) from None


def _expand(value: Any, path: str) -> Any:
    if isinstance(value, dict):
        return {key: _expand(item, f"{path}.{key}".lstrip(".")) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_expand(item, f"{path}.{index}".lstrip(".")) for index, item in enumerate(value)]
    if not isinstance(value, str):
        return value

    def replace(match: re.Match[str]) -> str:
        name = match.group(1)
        if name not in os.environ:
            raise ConfigError(f"{path}: the environment variable {name} is not set", field=path)
        return os.environ[name]

    return _VARIABLE.sub(replace, value)
