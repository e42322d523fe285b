"""Root-mean-square normalisation of rows, alone or fused with the residual addition before it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels import invariance, native
from kernels.checks import Backend, check_contiguous, check_dtype, check_last_dim_contiguous, check_shape, use_triton
from kernels.dependent_launch import dependent_launch, wait_for_previous


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The definition: fp32 arithmetic, rounded once to x's dtype."""
    rows = x.float()
    scale = torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps)
    return (rows * scale * weight.float()).to(x.dtype)


def add_rms_norm_reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition, out of place: (normed, new residual). The norm sees the residual as it is stored."""
    total = (x.float() + residual.float()).to(residual.dtype)
    return rms_norm_reference(total, weight, eps), total


@triton.jit
def _rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr,
    x_stride, residual_stride, out_stride, eps,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ADD: tl.constexpr, IS_WIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    SUM: tl.constexpr = tl.float64 if IS_WIDE else tl.float32
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK_D)
    mask = columns < D
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(SUM)
    wait_for_previous(PDL)
    x = tl.load(x_ptr + row * x_stride + columns, mask=mask, other=0.0).to(SUM)
    if ADD:
        residual_ptrs = residual_ptr + row * residual_stride + columns
        x += tl.load(residual_ptrs, mask=mask, other=0.0).to(SUM)
        stored = x.to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptrs, stored, mask=mask)
        x = stored.to(SUM)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / D + eps)
    tl.store(out_ptr + row * out_stride + columns, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=mask)


def _launch(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    target = x if residual is None else residual
    out = torch.empty(x.shape, dtype=target.dtype, device=x.device)
    num_rows, dim = x.shape
    if num_rows == 0:
        return out
    block = triton.next_power_of_2(dim)
    _rms_norm_kernel[(num_rows,)](
        x, target, weight, out, x.stride(0), target.stride(0), out.stride(0), eps,
        D=dim, BLOCK_D=block, ADD=residual is not None, IS_WIDE=invariance.is_wide(target.dtype),
        num_warps=min(max(block // 512, 1), 8), **dependent_launch(x.device),
    )  # fmt: skip
    return out


def _check(x: torch.Tensor, weight: torch.Tensor) -> None:
    check_shape("x", x, (None, None))
    check_last_dim_contiguous("x", x)
    check_shape("weight", weight, (x.shape[1],))
    check_contiguous("weight", weight)


def _cpu_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    if x.dtype == torch.float32 and weight.dtype == torch.float32:
        out = torch.empty(x.shape)
        native.norm_rows(x.numpy(), weight.numpy(), eps, out.numpy())
        return out
    return torch.nn.functional.rms_norm(x.float(), (x.shape[1],), weight.float(), eps).to(x.dtype)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, backend: Backend | None = None) -> torch.Tensor:
    """Normalise each row by its root mean square.

        out[n] = x[n] / sqrt(mean_d(x[n,d]^2) + eps) * weight

    Args:
        x:      [N, D] fp32, bf16 or fp16; rows may be strided, the last dimension is contiguous
        weight: [D]
        eps:    added to the mean square
    Returns: [N, D] in x's dtype, contiguous, freshly allocated; fp32 arithmetic, or fp64 of fp32 rows under
        `invariance`. A row does not depend on the others.
    Raises:  ValueError on shape or stride
    Accuracy: one rounding to the output dtype against rms_norm_reference
    Source:  Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467
    """
    _check(x, weight)
    if use_triton(x, backend):
        return _launch(x, None, weight, eps)
    return _cpu_rms_norm(x, weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, backend: Backend | None = None
) -> torch.Tensor:
    """Add x to the residual stream in place, then normalise the sum.

        residual[n] += x[n];  out[n] = rms_norm(residual[n]) * weight

    Args:
        x:        [N, D] in residual's dtype, or in fp64; rows may be strided
        residual: [N, D], overwritten; rows may be strided
        weight, eps: as in `rms_norm`
    Returns: [N, D] normed, contiguous, freshly allocated. The norm is taken of the residual as rounded for storage.
    Raises:  ValueError on shape, dtype or stride
    """
    _check(x, weight)
    check_shape("residual", residual, (x.shape[0], x.shape[1]))
    check_last_dim_contiguous("residual", residual)
    is_native = not use_triton(x, backend) and native.can_run(residual) and native.can_run(weight)
    takes_double = is_native or (use_triton(x, backend) and invariance.is_wide(residual.dtype))
    if x.dtype == torch.float64 and not takes_double:
        x = x.to(residual.dtype)
    if x.dtype != torch.float64:
        check_dtype("residual", residual, x.dtype)
    if use_triton(x, backend):
        return _launch(x, residual, weight, eps)
    if is_native:
        out = torch.empty(x.shape)
        native.add_and_norm_rows(x.numpy(), residual.numpy(), weight.numpy(), eps, out.numpy())
        return out
    residual.add_(x)
    return _cpu_rms_norm(residual, weight, eps)
