"""A linear layer whose rows keep their bits whatever other rows there are: one tile size for any number of rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.checks import check_contiguous, check_dtype, check_last_dim_contiguous, check_shape
from kernels.dependent_launch import dependent_launch, wait_for_previous

_ROWS, _OUTPUTS, _WIDE_OUTPUTS = 64, 128, 64
_GROUP = 8  # row tiles that walk the columns together, so that weights stay in L2


@triton.jit(do_not_specialize=["num_rows"])
def _tile_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, num_rows, x_stride,
    M: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr, HAS_BIAS: tl.constexpr, IS_WIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One tile [BLOCK_N rows, BLOCK_M outputs]; the sum over K runs in steps of BLOCK_K from the front."""
    SUM: tl.constexpr = tl.float64 if IS_WIDE else tl.float32
    NUM_COLUMNS: tl.constexpr = (M + BLOCK_M - 1) // BLOCK_M
    program = tl.program_id(0)
    num_blocks = (num_rows + BLOCK_N - 1) // BLOCK_N
    first = program // (GROUP * NUM_COLUMNS) * GROUP
    size = min(num_blocks - first, GROUP)
    inside = program % (GROUP * NUM_COLUMNS)
    row = (first + inside % size) * BLOCK_N + tl.arange(0, BLOCK_N)
    column = inside // size * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + row.to(tl.int64)[:, None] * x_stride + k[None, :]
    w_ptrs = weight_ptr + column.to(tl.int64)[None, :] * K + k[:, None]
    is_row, is_column = row < num_rows, column < M
    total = tl.zeros([BLOCK_N, BLOCK_M], SUM)
    wait_for_previous(PDL)
    for start in range(0, K, BLOCK_K):
        is_inner = k < K - start
        x = tl.load(x_ptrs + start, mask=is_row[:, None] & is_inner[None, :], other=0.0)
        w = tl.load(w_ptrs + start, mask=is_inner[:, None] & is_column[None, :], other=0.0)
        if IS_WIDE:  # products of fp32 numbers are exact then
            x, w = x.to(tl.float64), w.to(tl.float64)
        total = tl.dot(x, w, total, input_precision="ieee" if IS_WIDE else "tf32", out_dtype=SUM)
    if HAS_BIAS:
        total += tl.load(bias_ptr + column, mask=is_column, other=0.0).to(SUM)[None, :]
    out = out_ptr + row.to(tl.int64)[:, None] * M + column[None, :]
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


def linear_fixed(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """x W^T + b, for CUDA tensors, or any under Triton's interpreter.

    Args:
        x:         [N, K], rows may be strided
        weight:    [M, K] in x's dtype, contiguous
        bias:      [M], or None
        out_dtype: None: x's
    Returns: [N, M], contiguous, freshly allocated; fp32 accumulation, of fp32 rows fp64, and one rounding. A row's bits
        do not depend on N.
    Raises:  ValueError on shape, dtype or stride
    """
    check_shape("weight", weight, (None, None))
    num_outputs, width = weight.shape
    check_shape("x", x, (None, width))
    check_last_dim_contiguous("x", x)
    check_contiguous("weight", weight)
    check_dtype("weight", weight, x.dtype)
    out = torch.empty(x.shape[0], num_outputs, dtype=out_dtype or x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    is_wide = x.dtype == torch.float32
    columns = _WIDE_OUTPUTS if is_wide else _OUTPUTS
    _tile_kernel[(triton.cdiv(x.shape[0], _ROWS) * triton.cdiv(num_outputs, columns),)](
        x, weight, bias, out, x.shape[0], x.stride(0),
        M=num_outputs, K=width, BLOCK_N=_ROWS, BLOCK_M=columns, BLOCK_K=32 if is_wide else 64, GROUP=_GROUP,
        HAS_BIAS=bias is not None, IS_WIDE=is_wide, num_warps=4, num_stages=3 if is_wide else 4,
        **dependent_launch(x.device),
    )  # fmt: skip
    return out
