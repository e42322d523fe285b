"""Memory in use on GPUs, as a program in place of the driver's says."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.bench.gpu_memory import gpu_memory_bytes, is_freed

GIBIBYTE = 2**30


def test_memory_is_what_the_driver_says_of_each_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_memory_bytes() == []
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 1024\necho 5\n")
    program.chmod(0o755)
    assert gpu_memory_bytes() == [GIBIBYTE, 5 * 2**20]
    program.write_text("#!/bin/sh\nexit 9\n")
    assert gpu_memory_bytes() == []


def test_memory_is_freed_where_no_gpu_has_more_in_use() -> None:
    assert is_freed([], [], 0)
    assert is_freed([5, 11], [6, 9], slack_bytes=2)
    assert not is_freed([5, 12], [6, 9], slack_bytes=2)
    assert not is_freed([], [6, 9], slack_bytes=2)  # the driver no longer answers
