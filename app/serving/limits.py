"""What lengths the buckets and pools of a configuration may have, which only the model's own context tells."""

from __future__ import annotations

from app.config import ModelSource, PoolsConfig, RouterConfig, RouterSettings
from app.errors import ConfigError
from app.model.config import ModelConfig


def check_pools(config: PoolsConfig, where: str = "") -> None:
    """short.max_model_len <= long.max_model_len <= the model's context.

    Raises ConfigError that names the field, CheckpointError for a model folder that cannot be used. A node that has no
    such folder cannot tell; the replicas will.
    """
    if not config.model.folder.is_dir():
        return
    context = ModelConfig.from_folder(config.model.folder).max_position_embeddings
    lengths = {"short": config.short.engine.max_model_len, "long": config.long.engine.max_model_len}
    for name, length in lengths.items():
        if length is not None and length > context:
            raise _error(where, f"{name}.engine.max_model_len", f"{length} exceeds the model's context of {context}")
    short, long = (length or context for length in lengths.values())
    if short > long:
        raise _error(where, "short.engine.max_model_len", f"{short} exceeds the long pool's {long}")


def check_router(config: RouterConfig, where: str = "") -> None:
    """Raises ConfigError if the short bucket is wider than a model's context; see check_pools."""
    for version in config.versions:
        check_bucket(config.settings, version.model, f"{where}.settings".lstrip("."))


def check_bucket(settings: RouterSettings, model: ModelSource, where: str = "") -> None:
    """Raises ConfigError if the settings' short bucket is wider than the model's context; see check_pools."""
    if not model.folder.is_dir():
        return
    context = ModelConfig.from_folder(model.folder).max_position_embeddings
    if settings.short_max_cost_tokens > context:
        message = f"{settings.short_max_cost_tokens} exceeds the context of {context} of {model.name}"
        raise _error(where, "short_max_cost_tokens", message)


def _error(where: str, field: str, message: str) -> ConfigError:
    path = f"{where}.{field}".lstrip(".")
    return ConfigError(f"{path}: {message}", field=path)
