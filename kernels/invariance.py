"""Whether a row's bits must not depend on what runs beside it: said once per process, as launch tables are.

Then kernels for CUDA cut every sum in one way, whatever the number of rows: matrix products have one tile size, and a
row's keys are split by its own length alone. Sums of fp32 values are kept in fp64 besides and rounded once, so that
they hardly ever depend on how ranks split them either: a value in 10^8 or so lies close enough to the middle between
two fp32 numbers.
"""

from __future__ import annotations

import torch

_required = [False]


def require(is_required: bool) -> None:
    _required[0] = is_required


def is_required() -> bool:
    return _required[0]


def is_wide(dtype: torch.dtype) -> bool:
    """Whether sums of such values are kept in fp64. Results that ranks add up stay fp64 until they have been."""
    return _required[0] and dtype == torch.float32
