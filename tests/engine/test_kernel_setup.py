"""Where compiled kernels lie and which launch table is in force, by configuration."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import triton

from app.config import EngineConfig
from app.engine.loading import prepare_kernels
from app.errors import ConfigError
from kernels import tuning
from kernels.blocks import gather_blocks


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    with triton.knobs.cache.scope():
        yield
    tuning.use(None)


def test_a_folder_is_made_and_used(tmp_path: Path) -> None:
    folder = tmp_path / "made" / "here"
    prepare_kernels(EngineConfig(kernel_cache=str(folder)))
    assert folder.is_dir()
    assert triton.knobs.cache.dir == str(folder)


def test_without_a_folder_tritons_own_stays() -> None:
    before = triton.knobs.cache.dir
    prepare_kernels(EngineConfig())
    assert triton.knobs.cache.dir == before


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"engine\.kernel_cache: .*file/inside") as error:
        prepare_kernels(EngineConfig(kernel_cache=str(tmp_path / "file" / "inside")))
    assert error.value.field == "engine.kernel_cache"


def test_a_table_is_used_until_another_configuration(tmp_path: Path) -> None:
    use = {"tokens": 2, "num_warps": 1}
    path = tmp_path / "table.json"
    path.write_text(json.dumps({"card": "x", "kernels": {"gather_blocks": [{"up_to": {}, "use": use}]}}))
    prepare_kernels(EngineConfig(tuning_table=str(path)))
    assert tuning.find("gather_blocks", torch.device("cpu"), row_bytes=4) == use
    prepare_kernels(EngineConfig())
    assert tuning.find("gather_blocks", torch.device("cpu"), row_bytes=4) != use


@pytest.mark.parametrize(("text", "message"), [("{", "is no JSON"), (None, "No such file")])
def test_a_table_that_cannot_be_used_is_named(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "table.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=message) as error:
        prepare_kernels(EngineConfig(tuning_table=str(path)))
    assert error.value.field == "engine.tuning_table"


@pytest.mark.gpu
def test_compiled_kernels_land_in_the_folder(tmp_path: Path) -> None:
    prepare_kernels(EngineConfig(kernel_cache=str(tmp_path)))
    cache = torch.randn(3, 5, 11, device="cuda")  # a shape of its own: compiled here and now
    lens = torch.tensor([7], dtype=torch.int32, device="cuda")
    tables = torch.tensor([[2, 0]], dtype=torch.int32, device="cuda")
    out = gather_blocks(cache, tables, lens, torch.tensor([0, 7], dtype=torch.int32, device="cuda"), 7)
    assert torch.equal(out, cache[[2, 0]].view(-1, 11)[:7])
    assert list(tmp_path.rglob("*.cubin"))
