"""Whether a row's bits must not depend on what runs beside it: said once per process, as launch tables are.

Then kernels for CUDA cut every sum in one way, whatever the number of rows: matrix products have one tile size, and a
row's keys are split by its own length alone.
"""

from __future__ import annotations

_required = [False]


def require(is_required: bool) -> None:
    _required[0] = is_required


def is_required() -> bool:
    return _required[0]
