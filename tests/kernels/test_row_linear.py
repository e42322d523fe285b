"""linear_rows on three backends."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from kernels.row_linear import MAX_ROWS, linear_rows, linear_rows_reference
from tests.kernels.cases import Target, assert_close, generator

# fp32 sums in another order; one rounding to the output dtype.
RELATIVE_TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
FP32_OUT_TOLERANCE = 1e-6  # products of 16-bit numbers are exact


@dataclass(frozen=True)
class Case:
    name: str
    num_rows: int
    width: int
    num_outputs: int
    has_bias: bool = False


CASES = [
    Case("empty", 0, 16, 8),
    Case("ones", 1, 1, 1),
    Case("one row", 1, 64, 24),
    Case("odd with bias", 3, 37, 21, has_bias=True),
    Case("two steps and a rest", 2, 4100, 9),
    Case("most rows", MAX_ROWS, 130, 17),
    Case("too many rows", MAX_ROWS + 1, 16, 8, has_bias=True),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_matches_reference(case: Case, target: Target) -> None:
    for dtype in target.dtypes:
        random = generator(case.name)
        x = target.place(torch.randn(case.num_rows, case.width + 3, generator=random), dtype)[:, : case.width]
        weight = target.place(torch.randn(case.num_outputs, case.width, generator=random), dtype)
        bias = target.place(torch.randn(case.num_outputs, generator=random), dtype) if case.has_bias else None
        out = linear_rows(x, weight, bias, backend=target.backend)
        assert out.dtype == dtype and out.is_contiguous()
        assert_close(out, linear_rows_reference(x, weight, bias), RELATIVE_TOLERANCE[dtype])
        if not case.has_bias:
            wide = linear_rows(x, weight, out_dtype=torch.float32, backend=target.backend)
            assert wide.dtype == torch.float32
            assert_close(wide, linear_rows_reference(x, weight, out_dtype=torch.float32), FP32_OUT_TOLERANCE)


def test_wrong_arguments_are_refused(target: Target) -> None:
    x, weight = target.place(torch.zeros(2, 8)), target.place(torch.zeros(4, 8))
    with pytest.raises(ValueError, match="x: expected shape"):
        linear_rows(x[:, :7], weight, backend=target.backend)
    with pytest.raises(ValueError, match="weight"):
        linear_rows(x, weight.half(), backend=target.backend)
