from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from app.config import EMBEDDED_MODEL, EngineConfig, ModelSource
from app.engine.loading import load_engine
from app.errors import CheckpointError
from app.protocol import GenerateRequest, SamplingParams

CONFIG = EngineConfig(device="cpu", num_threads=1, cache_blocks=8, max_model_len=128)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A checkpoint's configuration without its tensors."""
    shutil.copy(EMBEDDED_MODEL / "config.json", tmp_path)
    return str(tmp_path)


def test_random_weights_serve_a_configuration_without_files(folder: str) -> None:
    engine = load_engine(ModelSource(path=folder, weights="random"), CONFIG)
    engine.add(GenerateRequest("one", (5, 6, 7), SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)))
    chunks = []
    while engine.has_work:
        chunks += engine.step()
    assert sum(len(chunk.token_ids) for chunk in chunks) == 4


def test_missing_files_are_an_error_unless_asked_for(folder: str) -> None:
    with pytest.raises(CheckpointError, match="safetensors"):
        load_engine(ModelSource(path=folder), CONFIG)
