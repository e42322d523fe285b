"""Random checkpoints of every family, written once, with their oracle beside them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from app.config import EMBEDDED_MODEL
from app.model.config import ModelConfig
from app.model.transformer import Transformer
from app.model.weights import load_weights
from kernels.checks import Backend
from tests.checkpoints import load_oracle, save_random_checkpoint

EMBEDDED = "embedded"


@dataclass(frozen=True, eq=False)
class Checkpoint:
    folder: Path
    config: ModelConfig
    oracle: PreTrainedModel

    @cache  # noqa: B019 - checkpoints live as long as the session
    def transformer(self, *, absorbed_prefill: bool, backend: Backend | None = None) -> Transformer:
        return load_transformer(self.folder, absorbed_prefill=absorbed_prefill, backend=backend)


def load_transformer(
    folder: Path,
    *,
    absorbed_prefill: bool = True,
    backend: Backend | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> Transformer:
    config = ModelConfig.from_folder(folder)
    weights = load_weights(folder, config, dtype=dtype, device=device, backend=backend)
    return Transformer(config, weights, device=device, dtype=dtype, absorbed_prefill=absorbed_prefill, backend=backend)


@pytest.fixture(scope="session")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    """Checkpoint of a family in tests.checkpoints.FAMILIES, or EMBEDDED."""
    transformers_logging.disable_progress_bar()

    @cache
    def of(family: str) -> Checkpoint:
        folder = EMBEDDED_MODEL
        if family != EMBEDDED:
            folder = save_random_checkpoint(tmp_path_factory.mktemp(family), family)
        return Checkpoint(folder, ModelConfig.from_folder(folder), load_oracle(folder))

    return of
