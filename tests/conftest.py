"""Settings that must be there before any kernel or test is imported."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

# The same examples each time, however slow the machine: a red run is a defect, not bad luck.
settings.register_profile("longspan", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("longspan")

# Without a GPU, Triton kernels run in its interpreter. `@triton.jit` reads the variable when a kernel is defined. CPU
# tensors take the torch path unless a test forces the Triton backend, so it changes nothing for the other tests.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Engines take a lock to compile, tests of single kernels do not: two workers would mix up Numba's files.
if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    os.environ["NUMBA_CACHE_DIR"] = str(Path(__file__).parents[1] / ".numba_cache" / worker)


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    """Whatever ran before."""
    torch.manual_seed(0)


class _NumpyOfTheInterpreter:
    """NumPy whose products add each element's terms one after the other, as tiles on a GPU do in some fixed order.

    OpenBLAS on CPUs without AVX-512 gives a row other bits in another place of the matrix.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    @staticmethod
    def matmul(a: np.ndarray, b: np.ndarray, dtype: Any = None) -> np.ndarray:
        a, b = a.astype(dtype or a.dtype), b.astype(dtype or b.dtype)
        total = np.zeros_like(a[..., :, :1] * b[..., :1, :])
        for k in range(a.shape[-1]):
            total += a[..., :, k, None] * b[..., None, k, :]
        return total


@pytest.fixture
def invariant(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As an engine with `batch_invariant` on CUDA asks of the kernels."""
    from kernels import invariance  # not before the interpreter is chosen

    monkeypatch.setattr("triton.runtime.interpreter.np", _NumpyOfTheInterpreter())
    invariance.require(True)
    yield
    invariance.require(False)
