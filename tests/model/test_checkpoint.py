"""Manifests, digests, shards and FP8 blocks."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from app.config import EMBEDDED_MODEL
from app.errors import CheckpointError
from app.model.checkpoint import (
    INDEX_FILE,
    MANIFEST_FILE,
    Checkpoint,
    Span,
    checkpoint_digest,
    dequantize_blocks,
    verify_manifest,
)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """Two shards of one tensor each."""
    save_file({"a": torch.arange(6.0).view(2, 3)}, tmp_path / "one.safetensors")
    save_file({"b": torch.ones(4, dtype=torch.bfloat16)}, tmp_path / "two.safetensors")
    weight_map = {"a": "one.safetensors", "b": "two.safetensors"}
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    return tmp_path


def write_manifest(folder: Path) -> None:
    lines = [f"{hashlib.sha256(p.read_bytes()).hexdigest()}  {p.name}\n" for p in folder.iterdir()]
    (folder / MANIFEST_FILE).write_text("".join(lines))


def test_fill_converts_the_dtype(sharded: Path) -> None:
    checkpoint = Checkpoint(sharded)
    a, b = torch.empty(2, 3, dtype=torch.bfloat16), torch.empty(4)
    checkpoint.fill("a", a)
    checkpoint.fill("b", b)
    checkpoint.close(lambda name: False)
    assert a.tolist() == [[0, 1, 2], [3, 4, 5]] and b.tolist() == [1, 1, 1, 1]


def test_a_missing_shard_is_named(sharded: Path) -> None:
    (sharded / "two.safetensors").unlink()
    with pytest.raises(CheckpointError, match="is missing") as error:
        Checkpoint(sharded)
    assert error.value.file == str(sharded / "two.safetensors")


@pytest.mark.parametrize("keep", [0, 20, -1])
def test_a_truncated_shard_is_named(sharded: Path, keep: int) -> None:
    path = sharded / "two.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match="is corrupt") as error:
        Checkpoint(sharded)
    assert error.value.file == str(path)


def test_an_index_that_names_an_absent_tensor(sharded: Path) -> None:
    weight_map = {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"}
    (sharded / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError) as error:
        Checkpoint(sharded)
    assert (error.value.file, error.value.tensor) == (str(sharded / "two.safetensors"), "c")


@pytest.mark.parametrize("weight_map", [None, {}, {"a": 3}, {"a": "../one.safetensors"}])
def test_a_malformed_index_is_named(sharded: Path, weight_map: object) -> None:
    (sharded / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match="weight_map") as error:
        Checkpoint(sharded)
    assert error.value.file == str(sharded / INDEX_FILE)


def test_a_folder_without_tensors(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is missing") as error:
        Checkpoint(tmp_path)
    assert error.value.file == str(tmp_path / "model.safetensors")


def test_an_integer_weight_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.ones(3, dtype=torch.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="int8 is not supported"):
        Checkpoint(tmp_path).fill("a", torch.empty(3))


@pytest.mark.parametrize("shape", [(128, 128), (130, 300), (5, 7)])
def test_fp8_blocks_are_dequantised(tmp_path: Path, shape: tuple[int, int]) -> None:
    """Whole blocks, ragged edges, and a matrix smaller than a block."""
    rows, columns = shape
    blocks = (-(-rows // 128), -(-columns // 128))
    quantized = torch.randn(shape).clamp(-400, 400).to(torch.float8_e4m3fn)
    scales = torch.rand(blocks) + 0.5
    save_file({"w": quantized, "w_scale_inv": scales}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    actual = torch.empty(shape)
    checkpoint.fill("w", actual)
    checkpoint.close(lambda name: False)
    for row, column in ((0, 0), (rows - 1, columns - 1), (rows // 2, columns - 1)):
        expected = quantized[row, column].float() * scales[row // 128, column // 128]
        assert actual[row, column] == expected
    assert torch.equal(actual, dequantize_blocks(quantized, scales))


@pytest.mark.parametrize(("scales", "problem"), [(None, "is missing"), (torch.ones(1, 1), "expected shape")])
def test_fp8_needs_its_scales(tmp_path: Path, scales: torch.Tensor | None, problem: str) -> None:
    tensors = {"w": torch.zeros(128, 256).to(torch.float8_e4m3fn)}
    save_file(tensors if scales is None else {**tensors, "w_scale_inv": scales}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=problem) as error:
        Checkpoint(tmp_path).fill("w", torch.empty(128, 256))
    assert error.value.tensor == "w_scale_inv"


def test_the_embedded_model_matches_its_manifest() -> None:
    verify_manifest(EMBEDDED_MODEL)


def test_the_digest_is_the_manifests(sharded: Path) -> None:
    computed = checkpoint_digest(sharded)
    write_manifest(sharded)
    assert checkpoint_digest(sharded) == computed
    assert checkpoint_digest(sharded, expected=computed) == computed
    with pytest.raises(CheckpointError, match="digest") as error:
        checkpoint_digest(sharded, expected="0" * 64)
    assert error.value.file == str(sharded)


def test_the_digest_changes_with_a_file(sharded: Path) -> None:
    before = checkpoint_digest(sharded)
    (sharded / "config.json").write_text("{}")
    assert checkpoint_digest(sharded) != before


def test_a_changed_file_is_named(sharded: Path) -> None:
    write_manifest(sharded)
    verify_manifest(sharded)
    path = sharded / "one.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="sha256") as error:
        verify_manifest(sharded)
    assert error.value.file == str(path)


def test_a_listed_file_must_exist(sharded: Path) -> None:
    write_manifest(sharded)
    (sharded / "two.safetensors").unlink()
    with pytest.raises(CheckpointError, match="cannot be read") as error:
        verify_manifest(sharded)
    assert error.value.file == str(sharded / "two.safetensors")


def test_a_shard_must_be_listed(sharded: Path) -> None:
    write_manifest(sharded)
    save_file({"c": torch.ones(1)}, sharded / "three.safetensors")
    with pytest.raises(CheckpointError, match="not listed") as error:
        verify_manifest(sharded)
    assert error.value.file == str(sharded / "three.safetensors")


@pytest.mark.parametrize("line", ["one.safetensors", "0" * 64, "0" * 64 + "  ../one.safetensors", "xyz  one"])
def test_a_malformed_manifest_is_named(sharded: Path, line: str) -> None:
    (sharded / MANIFEST_FILE).write_text(line + "\n")
    with pytest.raises(CheckpointError, match="line 1") as error:
        checkpoint_digest(sharded)
    assert error.value.file == str(sharded / MANIFEST_FILE)


def test_a_part_of_a_tensor_is_what_slicing_gives(tmp_path: Path) -> None:
    whole = torch.arange(60.0).view(6, 10)
    save_file({"a": whole}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    part = torch.empty(2, 3)
    checkpoint.fill("a", part, (Span(6, 3, 2), Span(10, 4, 3)))
    assert torch.equal(part, whole[3:5, 4:7])
    assert checkpoint.bytes_read == part.nbytes
    with pytest.raises(CheckpointError, match=r"expected shape \[7, 10\], got \[6, 10\]"):
        checkpoint.fill("a", part, (Span(7, 3, 2), Span(10, 4, 3)))


@pytest.mark.parametrize(("rows", "columns"), [((0, 300), (0, 200)), ((100, 60), (127, 2)), ((256, 44), (130, 70))])
def test_a_part_of_an_fp8_tensor_takes_the_scales_of_its_place(
    tmp_path: Path, rows: tuple[int, int], columns: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    scales = torch.rand(3, 2)
    stored = {"a": torch.randn(300, 200).to(torch.float8_e4m3fn), "a_scale_inv": scales}
    save_file(stored, tmp_path / "model.safetensors")
    whole, part = torch.empty(300, 200), torch.empty(rows[1], columns[1])
    Checkpoint(tmp_path).fill("a", whole)
    Checkpoint(tmp_path).fill("a", part, (Span(300, *rows), Span(200, *columns)))
    assert torch.equal(part, whole[rows[0] : sum(rows), columns[0] : sum(columns)])
