"""A linear layer over very few rows, bound by how fast its weight streams in."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from kernels import invariance
from kernels.checks import Backend, check_dtype, check_last_dim_contiguous, check_shape, use_triton
from kernels.dependent_launch import dependent_launch, wait_for_previous
from kernels.fixed_linear import linear_fixed

MAX_ROWS = 4  # with more, tiles of the matrix unit are faster
_OUTPUTS, _MAX_INNER = 8, 2048  # of a program, and of one step of its sum


def linear_rows_reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """The definition, in fp32; rounded once."""
    out = x.float() @ weight.float().T
    return (out if bias is None else out + bias.float()).to(out_dtype or x.dtype)


@triton.jit(do_not_specialize=["num_rows"])
def _rows_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, num_rows, x_stride,
    M: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK_M outputs of all rows, ROWS at most. The first weights are on their way before the input is there."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    row = tl.arange(0, ROWS)
    weights = weight_ptr + m.to(tl.int64)[:, None] * K
    k = tl.arange(0, BLOCK_K)
    w = tl.load(weights + k[None, :], mask=(m[:, None] < M) & (k[None, :] < K), other=0.0)
    wait_for_previous(PDL)
    total = tl.zeros([ROWS, BLOCK_M], tl.float32)
    for start in tl.static_range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        if start > 0:
            w = tl.load(weights + k[None, :], mask=(m[:, None] < M) & (k[None, :] < K), other=0.0)
        for n in tl.static_range(ROWS):
            x = tl.load(x_ptr + n * x_stride + k, mask=k < tl.where(n < num_rows, K, 0), other=0.0).to(tl.float32)
            part = tl.sum(w.to(tl.float32) * x[None, :], axis=1)
            total += tl.where(row[:, None] == n, part[None, :], 0.0)
    if HAS_BIAS:
        total += tl.load(bias_ptr + m, mask=m < M, other=0.0).to(tl.float32)[None, :]
    out = out_ptr + row[:, None] * M + m[None, :]
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=(row[:, None] < num_rows) & (m[None, :] < M))


def linear_rows(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *,
    out_dtype: torch.dtype | None = None, backend: Backend | None = None,
) -> torch.Tensor:  # fmt: skip
    """x W^T + b.

    Args:
        x:         [N, K], rows may be strided
        weight:    [M, K] in x's dtype, contiguous
        bias:      [M], or None
        out_dtype: None: x's; else float32, and no bias, or what linear_fixed takes
    Returns: [N, M], contiguous, freshly allocated; fp32 accumulation, one rounding. Up to MAX_ROWS rows of 16 bits have
        a kernel of their own, the others are torch's; under `invariance` all are linear_fixed's.
    Raises:  ValueError on shape, dtype or stride
    """
    check_shape("weight", weight, (None, None))
    num_outputs, width = weight.shape
    check_shape("x", x, (None, width))
    check_last_dim_contiguous("x", x)
    check_dtype("weight", weight, x.dtype)
    if use_triton(x, backend) and invariance.is_required():
        return linear_fixed(x, weight, bias, out_dtype=out_dtype)
    if not use_triton(x, backend) or not 0 < x.shape[0] <= MAX_ROWS or x.element_size() != 2:
        if out_dtype in (None, x.dtype):
            return F.linear(x, weight, bias)
        return torch.mm(x, weight.t(), out_dtype=out_dtype) if x.is_cuda else x.to(out_dtype) @ weight.t().to(out_dtype)
    out = torch.empty(x.shape[0], num_outputs, dtype=out_dtype or x.dtype, device=x.device)
    _rows_kernel[(triton.cdiv(num_outputs, _OUTPUTS),)](
        x, weight, bias, out, x.shape[0], x.stride(0),
        M=num_outputs, K=width, ROWS=triton.next_power_of_2(x.shape[0]), BLOCK_M=_OUTPUTS,
        BLOCK_K=min(triton.next_power_of_2(width), _MAX_INNER), HAS_BIAS=bias is not None, num_warps=8,
        **dependent_launch(x.device),
    )  # fmt: skip
    return out
