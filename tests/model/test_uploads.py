"""Threads that read tensors straight out of safetensors files."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from app.errors import CheckpointError
from app.model import uploads
from app.model.checkpoint import Checkpoint
from app.model.uploads import Uploader, data_offsets


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "matrix": torch.randn(37, 53, generator=generator),
        "halves": torch.randn(5, 3, 7, generator=generator).to(torch.bfloat16),
        "bytes": torch.randn(64, 96, generator=generator).to(torch.float8_e4m3fn),
        "empty": torch.empty(0, 4),
        "number": torch.tensor(3.5),
    }


@pytest.fixture
def path(tensors: dict[str, torch.Tensor], tmp_path: Path) -> Path:
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path / "model.safetensors"


@pytest.mark.parametrize("buffer_bytes", [7, 64, 2**20])
def test_every_tensor_is_read_whole_whatever_the_buffer(
    tensors: dict[str, torch.Tensor], path: Path, buffer_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "BUFFER_BYTES", buffer_bytes)
    offsets = data_offsets(path)
    assert offsets.keys() == tensors.keys()
    uploader = Uploader(3)
    targets = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    for name, target in targets.items():
        uploader.submit(lambda name=name, target=target: uploader.read(path, offsets[name], target))
    uploader.flush()
    uploader.close()
    for name, target in targets.items():
        assert torch.equal(target.view(-1).view(torch.uint8), tensors[name].view(-1).view(torch.uint8)), name


def test_a_file_that_ends_early(tensors: dict[str, torch.Tensor], path: Path) -> None:
    offsets = data_offsets(path)
    path.write_bytes(path.read_bytes()[:-10])
    uploader = Uploader(1)
    last = max(offsets, key=lambda name: offsets[name] if tensors[name].numel() else -1)
    uploader.submit(lambda: uploader.read(path, offsets[last], torch.zeros_like(tensors[last])))
    with pytest.raises(EOFError, match="ends 10 bytes early"):
        uploader.flush()
    uploader.close()


def test_reads_overlap_and_the_first_error_ends_the_wait() -> None:
    uploader = Uploader(2)
    both = threading.Barrier(2, timeout=60)
    uploader.submit(lambda: [both.wait(), None][1])
    uploader.submit(lambda: [both.wait(), None][1])
    uploader.flush()  # one thread alone would break the barrier

    def fail() -> None:
        raise OSError("gone")

    ran: list[int] = []
    released = threading.Event()
    uploader.submit(fail)
    for index in range(50):
        uploader.submit(lambda index=index: [released.wait(60), ran.append(index)][1])
    with pytest.raises(OSError, match="gone"):
        uploader.flush()
    released.set()
    uploader.close()
    assert len(ran) <= 2  # those the threads had begun
    uploader.flush()


@pytest.mark.gpu
def test_a_checkpoint_arrives_on_the_device(tensors: dict[str, torch.Tensor], path: Path) -> None:
    with Checkpoint(path.parent) as checkpoint:
        matrix = torch.zeros(37, 53, dtype=torch.bfloat16, device="cuda")  # another dtype
        halves = torch.zeros(2, 5, 3, 7, dtype=torch.bfloat16, device="cuda")
        columns = torch.zeros(64, 96 * 2, dtype=torch.float8_e4m3fn, device="cuda")[:, :96]  # strided
        checkpoint.fill("matrix", matrix)
        checkpoint.fill("halves", halves[1])
        checkpoint.fill("bytes", columns)
        checkpoint.close(lambda name: name in {"empty", "number"})
    assert torch.equal(matrix.cpu(), tensors["matrix"].bfloat16())
    assert torch.equal(halves[1].cpu(), tensors["halves"])
    assert torch.equal(columns.cpu().float(), tensors["bytes"].float())


@pytest.mark.gpu
def test_a_file_cut_after_it_was_opened_is_named(path: Path) -> None:
    with Checkpoint(path.parent) as checkpoint:
        target = torch.zeros(37, 53, device="cuda")
        data = path.read_bytes()
        path.unlink()
        path.write_bytes(data[: len(data) // 4])
        checkpoint.fill("matrix", target)
        with pytest.raises(CheckpointError, match="cannot be read") as error:
            checkpoint.flush()
    assert error.value.tensor == "matrix"
