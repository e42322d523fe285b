"""The machine-code loops against torch, and bit for bit against the packed products that take over for many rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kernels import native
from tests.kernels.cases import assert_bitwise_equal, assert_close, generator


@pytest.mark.parametrize("num_rows", [1, 2, 5, native.MAX_ROWS])
@pytest.mark.parametrize(("inner", "outer"), [(384, 256), (native.MAX_INNER, 70), (33, 17), (1, 1), (6, 8200)])
def test_few_rows_have_the_bits_of_many(inner: int, outer: int, num_rows: int) -> None:
    random = generator("product")
    x, weight = torch.randn(64, inner, generator=random), torch.randn(outer, inner, generator=random)
    out = torch.full((num_rows, outer), torch.nan)
    native.product(x[:num_rows].numpy(), weight.t().contiguous().numpy(), out.numpy())
    assert_bitwise_equal(out, native.packed_product(x, native.pack(weight))[:num_rows])


def test_the_fused_gate_is_silu() -> None:
    gate_up = torch.randn(7, 2 * 1000, generator=generator("silu")) * 8
    gate_up[0, :4] = torch.tensor([0.0, -0.0, 200.0, -200.0])
    out = torch.empty(7, 1000)
    native.silu_and_mul(gate_up.numpy(), out.numpy())
    gate, up = gate_up.double().chunk(2, dim=1)
    assert_close(out, torch.nn.functional.silu(gate) * up, 1e-6)
    assert torch.isfinite(out).all()


def test_a_rows_norm_does_not_depend_on_its_neighbours_or_place() -> None:
    memory = torch.randn(9, 400, generator=generator("norm"))
    weight = torch.randn(390, generator=generator("weight"))
    many, one = torch.empty(9, 390), torch.empty(1, 390)
    native.norm_rows(memory[:, 5:395].numpy(), weight.numpy(), 1e-6, many.numpy())
    native.norm_rows(memory[4:5, 5:395].clone().numpy(), weight.numpy(), 1e-6, one.numpy())
    assert_bitwise_equal(one, many[4:5])


def test_memory_starts_on_a_cache_line() -> None:
    assert all(native.aligned_memory(size).ctypes.data % 64 == 0 for size in (1, 15, 16, 17, 1000))


def test_it_runs_where_no_folder_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **settings: object) -> object:
        if settings.get("cache"):
            raise RuntimeError("cannot cache function: no locator available")
        return lambda function: function

    monkeypatch.setattr(native, "njit", refuse)
    assert native.compiled(abs)(-3) == 3


def test_all_machine_code_stands_in_one_file() -> None:
    """Numba renews kept code only when the file of its own function changes, not when a called one's does."""
    import kernels

    users = [path.name for path in Path(kernels.__file__).parent.glob("*.py") if "numba" in path.read_text()]
    assert users == ["native.py"]
