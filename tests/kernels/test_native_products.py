"""The packed products against torch in double precision, and a row's bits in any company."""

from __future__ import annotations

from itertools import pairwise, permutations

import numpy as np
import pytest
import torch

from kernels import native_products
from tests.kernels.cases import assert_bitwise_equal, assert_close, generator

RELATIVE_TOLERANCE = 2e-6  # fp32 sums in another order
SHAPES = [(384, 256), (1100, 70), (33, 17), (1, 1), (6, 1000), (20, 32)]  # inner, outer


def operands(inner: int, outer: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """40 rows and a weight [outer, inner] of numbers that `dtype` can hold."""
    random = generator("product")
    weight = torch.randn(outer, inner, generator=random).to(dtype).float()
    return torch.randn(40, inner, generator=random), weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inner", "outer"), SHAPES)
def test_matches_double_precision(inner: int, outer: int, dtype: torch.dtype) -> None:
    x, weight = operands(inner, outer, dtype)
    out = native_products.linear(x, native_products.pack(weight), outer)
    assert_close(out, x.double() @ weight.double().t(), RELATIVE_TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inner", "outer"), SHAPES)
def test_a_rows_bits_do_not_depend_on_the_others(inner: int, outer: int, dtype: torch.dtype) -> None:
    x, weight = operands(inner, outer, dtype)
    panels = native_products.pack(weight)
    many = native_products.linear(x, panels, outer)
    for count in range(1, 2 * native_products.ROW_TILE + 1):
        assert_bitwise_equal(native_products.linear(x[-count:], panels, outer), many[-count:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inner", "outer"), SHAPES)
def test_sums_of_pieces_are_the_same_wherever_they_are_added(inner: int, outer: int, dtype: torch.dtype) -> None:
    x, weight = operands(inner, outer, dtype)
    ends = sorted({inner // 3, inner // 2, inner} - {0})
    whole = native_products.linear(x, native_products.pack(weight), outer, np.array(ends))
    assert_close(whole, x.double() @ weight.double().t(), RELATIVE_TOLERANCE)
    parts = [
        native_products.linear(
            x[:, start:end], native_products.pack(weight[:, start:end]), outer, np.array([end - start])
        )
        for start, end in pairwise([0, *ends])
    ]
    for order in permutations(parts):
        assert_bitwise_equal(torch.stack(order).sum(0).float(), whole.float())
    alone = native_products.linear(x[-1:], native_products.pack(weight), outer, np.array(ends))
    assert_bitwise_equal(alone, whole[-1:])


def test_sixteen_bits_are_kept_where_they_lose_nothing() -> None:
    x, narrow = operands(64, 96, torch.bfloat16)
    wide = narrow.clone()
    wide[5, 7] += 2**-12  # one number that bf16 cannot hold
    packed, packed_wide = native_products.pack(narrow), native_products.pack(wide)
    assert packed.nbytes * 2 == packed_wide.nbytes == narrow.nbytes
    others = [row for row in range(96) if row != 5]
    out, out_wide = native_products.linear(x, packed, 96), native_products.linear(x, packed_wide, 96)
    assert_bitwise_equal(out[:, others], out_wide[:, others])
    assert not torch.equal(out[:, 5], out_wide[:, 5])


def test_strided_rows_and_neighbours_of_the_result() -> None:
    x, weight = operands(48, 40, torch.bfloat16)
    panels = native_products.pack(weight)
    out = torch.full((40, 50), torch.nan)
    native_products.product(torch.cat([x, x], dim=1)[:, 48:].numpy(), panels, out[:, :40].numpy(), 0, 2)
    assert_bitwise_equal(out[:, :40].contiguous(), native_products.linear(x, panels, 40))
    assert out[:, 40:].isnan().all()


def test_a_sum_is_one_chain_in_order() -> None:
    """Each step is rounded once, so a huge number that comes and goes takes the small ones before it along."""
    x = torch.tensor([[1.0, 2.0**30, -(2.0**30), 3.0]])
    out = native_products.linear(x, native_products.pack(torch.ones(1, 4)), 1)
    assert out.item() == 3.0


def test_no_rows_and_no_inner_index() -> None:
    panels = native_products.pack(torch.ones(5, 3))
    assert native_products.linear(torch.empty(0, 3), panels, 5).shape == (0, 5)
    empty = native_products.linear(torch.empty(2, 0), native_products.pack(torch.ones(5, 0)), 5)
    assert_bitwise_equal(empty, torch.zeros(2, 5))


def test_panels_start_on_a_cache_line() -> None:
    assert all(native_products.pack(torch.ones(1, size)).ctypes.data % 64 == 0 for size in (1, 15, 16, 17, 1000))


def test_the_fused_gate_is_silu() -> None:
    gate_up = torch.randn(7, 2 * 1000, generator=generator("silu")) * 8
    gate_up[0, :4] = torch.tensor([0.0, -0.0, 200.0, -200.0])
    out = torch.empty(7, 1000)
    native_products.silu_and_mul(gate_up.numpy(), out.numpy())
    gate, up = gate_up.double().chunk(2, dim=1)
    assert_close(out, torch.nn.functional.silu(gate) * up, 1e-6)
    assert torch.isfinite(out).all()


def test_parts_of_the_experts_cost_about_the_same() -> None:
    def ends(*costs: int, num_parts: int = 2) -> list[int]:
        return native_products.equal_shares(np.array(costs), num_parts).tolist()  # type: ignore[no-any-return]

    assert ends(1, 1, 1, 1) == [0, 2, 4]
    assert ends(9, 1, 1, 1) == [0, 1, 4]
    assert ends(1, 1, 1, 9) == [0, 3, 4]
    assert ends(0, 0, 0) == [0, 3, 3]
    assert ends(5, num_parts=3) == [0, 0, 1, 1]
    assert ends(*[1] * 9, num_parts=3) == [0, 3, 6, 9]
    starts = np.array([0, 3, 3, 4])
    assert native_products.costs_of_experts(starts, 4).tolist() == [7, 0, 5]
