"""Which version and which pool a request goes to. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from app.config import RouterSettings
from app.errors import UnavailableError

PoolName = Literal["short", "long"]
POOLS: tuple[PoolName, ...] = ("short", "long")


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """What the engines of a pool accept."""

    max_model_len: int  # prompt + output tokens of one sequence
    vocab_size: int
    version: str  # digest of weights and config


def predicted_cost_tokens(num_prompt_tokens: int, max_tokens: int | None, expected_output_tokens: int) -> int:
    """Prompt plus the output to expect, which max_tokens caps."""
    return num_prompt_tokens + (
        expected_output_tokens if max_tokens is None else min(max_tokens, expected_output_tokens)
    )


def choose_pool(
    num_prompt_tokens: int, max_tokens: int | None, limits: Mapping[PoolName, PoolLimits], settings: RouterSettings
) -> PoolName:
    """The short pool for a request that is predicted short and fits it for certain, else the long pool.

    Without max_tokens the answer ends where the chosen pool's context does. Whether the request fits the long pool is
    not judged here. Raises UnavailableError if the pool has not come up yet.
    """
    cost = predicted_cost_tokens(num_prompt_tokens, max_tokens, settings.expected_output_tokens)
    pool: PoolName = "long"
    if cost <= settings.short_max_cost_tokens:
        short = limits.get("short")
        if short is None or num_prompt_tokens + (max_tokens or 1) <= short.max_model_len:
            pool = "short"
    if pool not in limits:
        raise UnavailableError(f"the {pool} pool is still starting", retry_after_s=2.0)
    return pool


def choose_version(apps: Sequence[str], weights: Mapping[str, float], chance: float) -> str:
    """One of `apps` by weight; `chance` is uniform in [0, 1). No weights at all: all equal; one not listed: 0.

    Raises UnavailableError if every weight is 0.
    """
    shares = [weights.get(app, 0.0) if weights else 1.0 for app in apps]
    target = chance * sum(shares)
    for app, share in zip(apps, shares, strict=True):
        target -= share
        if target < 0.0:
            return app
    raise UnavailableError("no version of this model takes traffic")
