"""The `target` fixture (see cases.py) and poisoned allocations for every kernel test."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.kernels.cases import CUDA, INTERPRETED, TORCH, Target

# On a machine with a GPU kernels are compiled (tests/conftest.py), so nothing can be interpreted there.
TRITON_ON_CPU = [] if torch.cuda.is_available() else [pytest.param(INTERPRETED, id="interpreted")]


@pytest.fixture(
    params=[
        pytest.param(TORCH, id="torch"),
        *TRITON_ON_CPU,
        pytest.param(CUDA, id="cuda", marks=pytest.mark.gpu),
    ]
)
def target(request: pytest.FixtureRequest) -> Target:
    found: Target = request.param
    return found


def _poison(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_floating_point():
        return tensor.fill_(float("nan"))
    return tensor if tensor.dtype == torch.bool else tensor.fill_(torch.iinfo(tensor.dtype).max // 3)


@pytest.fixture(autouse=True)
def _poisoned_allocations(monkeypatch: pytest.MonkeyPatch) -> None:
    """`empty` allocations hold NaN or a large integer, so an element that a kernel leaves unwritten shows."""
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        original = getattr(owner, name)

        def poisoned(*args: Any, _original: Any = original, **kwargs: Any) -> torch.Tensor:
            return _poison(_original(*args, **kwargs))

        monkeypatch.setattr(owner, name, poisoned)
