"""The ranks of an engine that is spread over processes: rank 0 shares each step's plan, the others follow it."""

from __future__ import annotations

from app.config import EngineConfig, ModelSource
from app.engine.loading import build_runner, load_model
from app.model.parallel import RankPlace

__all__ = ["RankPlace", "run_rank"]


def run_rank(source: ModelSource, config: EngineConfig, place: RankPlace) -> None:
    """Load this rank's part of the model, then follow rank 0's plans until it stops. Blocks; for ranks 1 and up.

    Raises CheckpointError, ConfigError or PreflightError while loading, RankLostError on a failed or timed-out
    collective. The caller ends the process then: a GPU may still wait in a collective for a rank that is gone.
    """
    model = load_model(source, config, place)
    runner, _ = build_runner(model, config)
    runner.follow()
