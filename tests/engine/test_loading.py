from __future__ import annotations

import logging
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from app.cache.layout import LATENT_BLOCK_SIZE
from app.config import EMBEDDED_MODEL, EngineConfig, ModelSource
from app.engine.loading import load_engine, load_model
from app.errors import CheckpointError, ConfigError
from app.model.config import ModelConfig
from app.model.parallel import RankPlace, Ranks
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


def test_no_sequence_may_be_longer_than_the_cache(caplog: pytest.LogCaptureFixture) -> None:
    """Else a chat without max_tokens, which asks for the rest of the context, would be refused each time."""
    with caplog.at_level(logging.WARNING):
        engine = load_engine(ModelSource(), CONFIG.model_copy(update={"cache_blocks": 1}))
    assert engine.limits.max_model_len == LATENT_BLOCK_SIZE < 128
    assert f"max_model_len 128 cut to {LATENT_BLOCK_SIZE}" in caplog.text
    assert load_engine(ModelSource(), CONFIG).limits.max_model_len == 128


def test_without_a_gpu_triton_needs_its_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triton.knobs.runtime.interpret", False)
    with pytest.raises(ConfigError, match=r"^engine\.kernel_backend: "):
        load_engine(ModelSource(), CONFIG.model_copy(update={"kernel_backend": "triton"}))


def test_missing_files_are_an_error_unless_asked_for(folder: str) -> None:
    with pytest.raises(CheckpointError, match="safetensors"):
        load_engine(ModelSource(path=folder), CONFIG)


class Joining(Exception):
    """Raised in place of meeting the other ranks."""


@pytest.mark.parametrize(
    ("tensor", "dtype", "is_fp8", "is_refused"),
    [
        (2, "bfloat16", False, False),
        (4, "bfloat16", False, True),
        (4, "float32", False, False),
        (4, "float32", True, True),
    ],
)
def test_batch_invariance_over_many_tensor_ranks_takes_sums_in_fp64(
    monkeypatch: pytest.MonkeyPatch, tensor: int, dtype: str, is_fp8: bool, is_refused: bool
) -> None:
    def join(*_: object) -> None:
        raise Joining

    model = replace(ModelConfig.from_folder(EMBEDDED_MODEL), num_heads=4, is_fp8=is_fp8)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(ModelConfig, "from_folder", lambda _: model)
    monkeypatch.setattr(Ranks, "join", join)
    config = EngineConfig(device="cuda", dtype=dtype, batch_invariant=True)  # type: ignore[arg-type]
    place = RankPlace(0, tensor, 1, "tcp://nobody:1")
    if not is_refused:
        with pytest.raises(Joining):
            load_model(ModelSource(), config, place)
        return
    with pytest.raises(ConfigError, match=r"engine\.batch_invariant: .*; parallel\.tensor: 2 at most"):
        load_model(ModelSource(), config, place)
