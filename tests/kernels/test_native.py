"""The machine-code loops between the products."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kernels
from kernels import native
from tests.kernels.cases import assert_bitwise_equal, generator


def test_a_rows_norm_does_not_depend_on_its_neighbours_or_place() -> None:
    memory = torch.randn(9, 400, generator=generator("norm"))
    weight = torch.randn(390, generator=generator("weight"))
    many, one = torch.empty(9, 390), torch.empty(1, 390)
    native.norm_rows(memory[:, 5:395].numpy(), weight.numpy(), 1e-6, many.numpy())
    native.norm_rows(memory[4:5, 5:395].clone().numpy(), weight.numpy(), 1e-6, one.numpy())
    assert_bitwise_equal(one, many[4:5])


def test_it_runs_where_no_folder_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **settings: object) -> object:
        if settings.get("cache"):
            raise RuntimeError("cannot cache function: no locator available")
        return lambda function: function

    monkeypatch.setattr(native.numba, "njit", refuse)
    assert native.compiled(lambda number: -number)(-3) == 3


def test_kept_code_is_named_after_every_file_of_machine_code() -> None:
    """Numba renews kept code only when the file of its own function changes, not when a called one's does."""
    folder = Path(kernels.__file__).parent
    users = {path.name for path in folder.glob("*.py") if re.search("@compiled|numba", path.read_text())}
    named = {path.name for path in folder.glob("native*.py")}
    assert users == named
    digest = hashlib.sha256(b"".join((folder / name).read_bytes() for name in sorted(named))).hexdigest()[:16]
    assert native.norm_rows.py_func.__qualname__ == f"norm_rows_{digest}"


def test_the_package_imports_without_numba() -> None:
    """A machine that serves on its GPUs only may lack it."""
    code = "import sys; sys.modules.update(numba=None, llvmlite=None); import app.model.transformer"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200)
