"""The ranks of an engine that is spread over processes: rank 0 shares each step's plan, the others follow it."""

from __future__ import annotations

from app.config import EngineConfig, ModelSource
from app.errors import ConfigError
from app.model.parallel import RankPlace

__all__ = ["RankPlace", "run_rank"]


def run_rank(source: ModelSource, config: EngineConfig, place: RankPlace) -> None:
    """Load this rank's slices, then follow rank 0's plans until it stops. Blocks; for ranks 1 and up.

    Raises CheckpointError, ConfigError or PreflightError while loading, EngineError on a failed or timed-out
    collective. The caller ends the process then: a GPU may still wait in a collective for a rank that is gone.
    """
    raise ConfigError("parallel: not available")
