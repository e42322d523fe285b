"""project_heads on three backends."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from kernels.head_projection import project_heads, project_heads_reference
from tests.kernels.cases import Target, assert_bitwise_equal, assert_close, generator

# fp32 sums in another order; one rounding to the output dtype.
RELATIVE_TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@dataclass(frozen=True)
class Case:
    name: str
    num_rows: int
    num_heads: int
    width: int
    out_width: int
    tail: int = 0


CASES = [
    Case("empty", 0, 2, 16, 16),
    Case("ones", 1, 1, 1, 1, tail=1),
    Case("odd", 3, 3, 21, 37, tail=5),
    Case("row tile + 1", 17, 2, 32, 64),
    Case("output tile + 1", 8, 2, 16, 65, tail=16),
    Case("several input tiles", 5, 2, 130, 20),
]


@pytest.mark.parametrize("transposed", [False, True], ids=["plain", "transposed"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_matches_reference(case: Case, transposed: bool, target: Target) -> None:
    for dtype in target.dtypes:
        random = generator(case.name)
        memory = torch.randn(case.num_rows, case.num_heads + 1, case.width + case.tail, generator=random)
        x = target.place(memory, dtype)[:, : case.num_heads]  # rows of something wider
        sides = (case.out_width, case.width) if transposed else (case.width, case.out_width)
        weight = target.place(torch.randn(case.num_heads, *sides, generator=random), dtype)
        weight = weight.mT if transposed else weight
        out = project_heads(x, weight, tail=case.tail, backend=target.backend)
        assert out.dtype == dtype and out.is_contiguous()
        assert_close(out, project_heads_reference(x, weight, tail=case.tail), RELATIVE_TOLERANCE[dtype])
        if case.tail:
            assert_bitwise_equal(out[..., case.out_width :], x[..., case.width :])


def test_a_row_keeps_its_bits_whatever_runs_beside_it() -> None:
    random = generator("rows")
    x, weight = torch.randn(64, 6, 96, generator=random), torch.randn(6, 64, 128, generator=random)
    many = project_heads(x, weight, tail=32)
    assert_bitwise_equal(project_heads(x[8:16], weight, tail=32), many[8:16])


@pytest.mark.parametrize(
    ("shape", "dtype"), [((2, 3, 16), torch.float32), ((2, 2, 17), torch.float32), ((2, 2, 16), torch.float16)]
)
def test_wrong_arguments_are_named(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=r"x|weight"):
        project_heads(torch.zeros(shape, dtype=dtype), torch.zeros(2, 16, 8))
