"""A matrix of its own for every head: how absorbed MLA maps queries into latent space and results out of it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels import invariance, native, native_products
from kernels.checks import Backend, check_dtype, check_last_dim_contiguous, check_shape, use_triton
from kernels.dependent_launch import dependent_launch, wait_for_previous

_BLOCK_N = 16
# Few rows are bound by how fast the weight streams in: many programs then, each of which asks for its part at once.
_FEW, _MANY = (16, 512), (64, 128)  # up to _BLOCK_N rows, and above: outputs of a program, inputs of a step
_MAX_PLAIN_ROWS, _MAX_PLAIN_WIDTH = 4, 1024  # up to here the matrix unit's set-up takes longer than plain sums


def project_heads_reference(x: torch.Tensor, weight: torch.Tensor, *, tail: int = 0) -> torch.Tensor:
    """The definition, in fp32; rounded once to x's dtype."""
    width = weight.shape[1]
    projected = torch.einsum("nhk,hkm->nhm", x[..., :width].float(), weight.float()).to(x.dtype)
    return torch.cat([projected, x[..., width : width + tail]], dim=-1)


@triton.jit(do_not_specialize=["num_rows"])
def _project_kernel(
    x_ptr, weight_ptr, out_ptr, num_rows,
    x_row_stride, x_head_stride, w_head_stride, w_in_stride, w_out_stride,
    H: tl.constexpr, K: tl.constexpr, M: tl.constexpr, TAIL: tl.constexpr, BLOCK_TAIL: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One tile [BLOCK_N rows, BLOCK_M outputs] of one head; the first column of tiles also copies the tail.

    The first weights are on their way before the rows are there.
    """
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    head = tl.program_id(1)
    column = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row, is_column = row < num_rows, column < M
    x_rows = x_ptr + row.to(tl.int64) * x_row_stride + head * x_head_stride
    out_rows = out_ptr + (row.to(tl.int64) * H + head) * (M + TAIL)
    weights = weight_ptr + head.to(tl.int64) * w_head_stride + column[None, :] * w_out_stride
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    k = tl.arange(0, BLOCK_K)
    w = tl.load(weights + k[:, None] * w_in_stride, mask=(k[:, None] < K) & is_column[None, :], other=0.0)
    wait_for_previous(PDL)
    for start in tl.static_range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        if start > 0:
            w = tl.load(weights + k[:, None] * w_in_stride, mask=(k[:, None] < K) & is_column[None, :], other=0.0)
        x = tl.load(x_rows[:, None] + k[None, :], mask=is_row[:, None] & (k[None, :] < K), other=0.0)
        total = tl.dot(x, w, total, input_precision=PRECISION)
    mask = is_row[:, None] & is_column[None, :]
    tl.store(out_rows[:, None] + column[None, :], total.to(out_ptr.dtype.element_ty), mask=mask)
    if TAIL > 0:
        place = tl.arange(0, BLOCK_TAIL)
        # Nothing is left of the tail for the tiles after the first.
        is_copied = is_row[:, None] & (tl.program_id(2) * TAIL + place[None, :] < TAIL)
        kept = tl.load(x_rows[:, None] + K + place[None, :], mask=is_copied, other=0.0)
        tl.store(out_rows[:, None] + M + place[None, :], kept, mask=is_copied)


@triton.jit(do_not_specialize=["num_rows"])
def _project_rows_kernel(
    x_ptr, weight_ptr, out_ptr, num_rows,
    x_row_stride, x_head_stride, w_head_stride, w_in_stride, w_out_stride,
    H: tl.constexpr, K: tl.constexpr, M: tl.constexpr, TAIL: tl.constexpr, BLOCK_TAIL: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK_M outputs of one head for very few rows, ROWS at most, without the matrix unit."""
    head = tl.program_id(0)
    column = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    weights = weight_ptr + head.to(tl.int64) * w_head_stride + k[:, None] * w_in_stride + column[None, :] * w_out_stride
    w = tl.load(weights, mask=(k[:, None] < K) & (column[None, :] < M), other=0.0)
    wait_for_previous(PDL)
    for n in tl.static_range(ROWS):
        x_row = x_ptr + n * x_row_stride + head * x_head_stride
        out_row = out_ptr + (n * H + head) * (M + TAIL)
        is_row = n < num_rows
        width = tl.where(is_row, K, 0)
        out_width = tl.where(is_row, M, 0)
        x = tl.load(x_row + k, mask=k < width, other=0.0)
        total = tl.sum(w.to(tl.float32) * x.to(tl.float32)[:, None], axis=0)
        tl.store(out_row + column, total.to(out_ptr.dtype.element_ty), mask=column < out_width)
        if TAIL > 0:
            place = tl.arange(0, BLOCK_TAIL)
            is_copied = tl.program_id(1) * TAIL + place < tl.where(is_row, TAIL, 0)
            kept = tl.load(x_row + K + place, mask=is_copied, other=0.0)
            tl.store(out_row + M + place, kept, mask=is_copied)


def project_heads(
    x: torch.Tensor, weight: torch.Tensor, *, tail: int = 0, backend: Backend | None = None
) -> torch.Tensor:
    """Multiply each head's vector by that head's matrix and append the vector's last values unchanged.

        out[n,h] = [ x[n,h,:K] @ weight[h] | x[n,h,K:K+tail] ]

    Args:
        x:      [N, H, K + tail] fp32, bf16 or fp16; rows and heads may be strided
        weight: [H, K, M] in x's dtype, any strides
    Returns: [N, H, M + tail] in x's dtype, contiguous, freshly allocated; fp32 accumulation
    Raises:  ValueError on shape, dtype or stride
    Source:  absorption of W_UK and W_UV, DeepSeek-V2 section 2.1.2, https://arxiv.org/abs/2405.04434
    """
    check_shape("weight", weight, (None, None, None))
    num_heads, width, out_width = weight.shape
    check_shape("x", x, (None, num_heads, width + tail))
    check_last_dim_contiguous("x", x)
    check_dtype("weight", weight, x.dtype)
    if not use_triton(x, backend):
        projected = torch.bmm(x[..., :width].transpose(0, 1), weight).transpose(0, 1)
        return torch.cat([projected, x[..., width:]], dim=-1) if tail else projected.contiguous()
    out = torch.empty(x.shape[0], num_heads, out_width + tail, dtype=x.dtype, device=x.device)
    if x.shape[0] == 0:
        return out
    shape: dict[str, int] = {
        "H": num_heads, "K": width, "M": out_width, "TAIL": tail, "BLOCK_TAIL": triton.next_power_of_2(max(tail, 1)),
    }  # fmt: skip
    is_plain = x.shape[0] <= _MAX_PLAIN_ROWS and width <= _MAX_PLAIN_WIDTH and x.element_size() == 2
    if is_plain and not invariance.is_required():
        _project_rows_kernel[(num_heads, triton.cdiv(out_width, _FEW[0]))](
            x, weight, out, x.shape[0], x.stride(0), x.stride(1), *weight.stride(), **shape,
            ROWS=triton.next_power_of_2(x.shape[0]), BLOCK_K=triton.next_power_of_2(width), BLOCK_M=_FEW[0],
            num_warps=4, **dependent_launch(x.device),
        )  # fmt: skip
        return out
    block_m, block_k = _FEW if x.shape[0] <= _BLOCK_N and not invariance.is_required() else _MANY
    grid = (triton.cdiv(x.shape[0], _BLOCK_N), num_heads, triton.cdiv(out_width, block_m))
    _project_kernel[grid](
        x, weight, out, x.shape[0], x.stride(0), x.stride(1), *weight.stride(), **shape,
        BLOCK_N=_BLOCK_N, BLOCK_K=min(max(triton.next_power_of_2(width), 16), block_k), BLOCK_M=block_m,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32", num_warps=4, **dependent_launch(x.device),
    )  # fmt: skip
    return out


class HeadProjection:
    """project_heads for a weight that stays, [H, K, M]. On CPU in fp32 a row's bits do not depend on the others."""

    def __init__(self, weight: torch.Tensor, backend: Backend | None = None) -> None:
        self._backend = backend
        self._num_outputs = weight.shape[2]
        is_packed = native.can_run(weight) and not use_triton(weight, backend)
        self._weight = native_products.pack(weight.mT) if is_packed else weight

    def forward(self, x: torch.Tensor, tail: int = 0) -> torch.Tensor:
        """[N, H, K + tail] -> [N, H, M + tail]."""
        if isinstance(self._weight, torch.Tensor):
            return project_heads(x, self._weight, tail=tail, backend=self._backend)
        return native_products.project_heads(x, self._weight, self._num_outputs, tail)
