"""rms_norm and add_rms_norm on three backends."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from kernels.rms_norm import add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_reference
from tests.kernels.cases import Target, assert_bitwise_equal, assert_close, generator

EPS = 1e-6
# One rounding to the output dtype; fp32 sums in another order.
RELATIVE_TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@dataclass(frozen=True)
class Case:
    name: str
    num_rows: int
    dim: int
    row_gap: int = 0  # columns between rows that belong to another tensor
    magnitude: float = 1.0


CASES = [
    Case("empty", 0, 64),
    Case("one row of one", 1, 1),
    Case("odd", 3, 37),
    Case("power of two", 16, 128),
    Case("tile + 1", 17, 129),
    Case("strided rows", 5, 96, row_gap=40),
    Case("tiny values, eps counts", 4, 64, magnitude=1e-4),
    Case("large values", 4, 64, magnitude=200.0),
]


def rows_of(case: Case, name: str, target: Target, dtype: torch.dtype) -> torch.Tensor:
    values = torch.randn(case.num_rows, case.dim + case.row_gap, generator=generator(case.name + name)) * case.magnitude
    return target.place(values, dtype)[:, : case.dim]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_matches_reference(case: Case, target: Target) -> None:
    for dtype in target.dtypes:
        x, residual = rows_of(case, "x", target, dtype), rows_of(case, "residual", target, dtype)
        weight = target.place(torch.randn(case.dim, generator=generator(case.name)), dtype)
        out = rms_norm(x, weight, EPS, backend=target.backend)
        assert out.dtype == dtype and out.is_contiguous()
        assert_close(out, rms_norm_reference(x, weight, EPS), RELATIVE_TOLERANCE[dtype])

        expected, total = add_rms_norm_reference(x, residual, weight, EPS)
        out = add_rms_norm(x, residual, weight, EPS, backend=target.backend)
        assert_close(out, expected, RELATIVE_TOLERANCE[dtype])
        assert_bitwise_equal(residual, total)  # an addition rounded once, wherever it runs


def test_strided_residual_keeps_its_neighbours(target: Target) -> None:
    memory = target.place(torch.ones(4, 100))
    add_rms_norm(
        target.place(torch.ones(4, 60)), memory[:, 20:80], target.place(torch.ones(60)), EPS, backend=target.backend
    )
    assert memory[:, 20:80].eq(2).all() and memory[:, :20].eq(1).all() and memory[:, 80:].eq(1).all()


def test_what_is_added_may_be_in_double_precision(target: Target) -> None:
    case = Case("double", 17, 129)
    for dtype in target.dtypes:
        x, residual = (rows_of(case, name, target, dtype) for name in ("x", "residual"))
        weight = target.place(torch.randn(case.dim, generator=generator(case.name)), dtype)
        sums = residual.clone(), residual.clone()
        outs = [
            add_rms_norm(added, total, weight, EPS, backend=target.backend)
            for added, total in zip((x, x.double()), sums, strict=True)
        ]
        assert outs[1].dtype == dtype
        assert_bitwise_equal(sums[1], sums[0])
        assert_bitwise_equal(outs[1], outs[0])


def test_row_does_not_depend_on_the_others(target: Target) -> None:
    x, weight = target.place(torch.randn(37, 130, generator=generator(1))), target.place(torch.ones(130))
    together = rms_norm(x, weight, EPS, backend=target.backend)
    poisoned = x.clone()
    poisoned[1:] = torch.nan
    assert_bitwise_equal(rms_norm(x[:1], weight, EPS, backend=target.backend), together[:1])
    assert_bitwise_equal(rms_norm(poisoned, weight, EPS, backend=target.backend)[:1], together[:1])


@pytest.mark.parametrize(
    ("x", "residual", "weight"),
    [
        (torch.ones(2, 3, 4), torch.ones(2, 4), torch.ones(4)),
        (torch.ones(2, 4), torch.ones(2, 4), torch.ones(5)),
        (torch.ones(4, 2).T, torch.ones(2, 4), torch.ones(4)),
        (torch.ones(2, 4), torch.ones(3, 4), torch.ones(4)),
        (torch.ones(2, 4), torch.ones(2, 4).half(), torch.ones(4)),
    ],
    ids=["rank", "weight length", "column stride", "residual rows", "residual dtype"],
)
def test_wrong_arguments_are_refused(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"expected|contiguous"):
        add_rms_norm(x, residual, weight, EPS)
