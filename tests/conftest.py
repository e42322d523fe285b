"""Settings that must be there before any kernel or test is imported."""

from __future__ import annotations

import os
from collections.abc import Iterator

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


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    """Whatever ran before."""
    torch.manual_seed(0)


@pytest.fixture
def invariant() -> Iterator[None]:
    """As an engine with `batch_invariant` on CUDA asks of the kernels."""
    from kernels import invariance  # not before the interpreter is chosen

    invariance.require(True)
    yield
    invariance.require(False)
