"""What happens between MLA's projections and its attention: norm the latent, rotate q and k, write the cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels import invariance, native
from kernels.checks import (
    Backend,
    check_contiguous,
    check_dtype,
    check_last_dim_contiguous,
    check_shape,
    use_triton,
)
from kernels.dependent_launch import dependent_launch, wait_for_previous
from kernels.fp8_entry import Fp8Entry, round_to_e4m3, scale_of


def rotate_reference(x: torch.Tensor, cos_sin: torch.Tensor, *, interleaved: bool) -> torch.Tensor:
    """Rotate the last dimension of x [..., P] by the angles of cos_sin [..., P] (cosines | sines), in fp32."""
    cos, sin = cos_sin.chunk(2, -1)
    rows = x.float()
    first, second = (rows[..., ::2], rows[..., 1::2]) if interleaved else rows.chunk(2, -1)
    rotated = first * cos - second * sin, second * cos + first * sin
    return torch.stack(rotated, -1).flatten(-2) if interleaved else torch.cat(rotated, -1)


def mla_rope_cache_reference(
    q: torch.Tensor, kv: torch.Tensor, norm_weight: torch.Tensor, eps: float, cos_sin: torch.Tensor,
    positions: torch.Tensor, slots: torch.Tensor, cache: torch.Tensor, *, interleaved: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The definition, out of place: (rotated q, new cache)."""
    q, cache = q.clone(), cache.clone()
    rank, rope_dim = norm_weight.shape[0], cos_sin.shape[1]
    angles = cos_sin[positions]
    q[..., -rope_dim:] = rotate_reference(q[..., -rope_dim:], angles[:, None], interleaved=interleaved).to(q.dtype)
    latent = kv[:, :rank].float()
    latent = latent * torch.rsqrt(latent.square().mean(-1, keepdim=True) + eps) * norm_weight.float()
    entries = torch.cat([latent, rotate_reference(kv[:, rank:], angles, interleaved=interleaved)], -1)
    is_fp8 = cache.dtype == torch.uint8
    entries = Fp8Entry(rank, rope_dim, q.dtype).pack(entries) if is_fp8 else entries.to(cache.dtype)
    flat = cache.view(-1, cache.shape[-1])
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            flat[slot] = entries[row]
    return q, cache


def _cpu_rope_cache(
    q: torch.Tensor, kv: torch.Tensor, norm_weight: torch.Tensor, eps: float, cos_sin: torch.Tensor,
    positions: torch.Tensor, slots: torch.Tensor, cache: torch.Tensor, interleaved: bool,
) -> None:  # fmt: skip
    flat = cache.view(-1, cache.shape[-1])
    if cache.dtype == torch.uint8:
        rank, rope_dim = norm_weight.shape[0], cos_sin.shape[1]
        entries = torch.empty(1, q.shape[0], rank + rope_dim)
        rows = torch.arange(q.shape[0])
        _cpu_rope_cache(q, kv, norm_weight, eps, cos_sin, positions, rows, entries, interleaved)
        is_written = slots >= 0
        flat[slots[is_written]] = Fp8Entry(rank, rope_dim, q.dtype).pack(entries[0, is_written])
        return
    tensors = (q, kv, norm_weight, flat)
    wide = [tensor if tensor.dtype == torch.float32 else tensor.float() for tensor in tensors]
    native.rope_and_cache(
        wide[0].numpy(), wide[1].numpy(), wide[2].numpy(), eps, cos_sin.numpy(), positions.numpy(), slots.numpy(),
        wide[3].numpy(), interleaved,
    )  # fmt: skip
    if wide[0] is not q:
        q.copy_(wide[0])
    if wide[3] is not flat:
        written = slots[slots >= 0]
        flat[written] = wide[3][written].to(flat.dtype)


@triton.jit
def _rotate_rows(
    in_rows, out_rows, is_row, cos_ptr, sin_ptr, factor,
    HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, INTERLEAVED: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """out = the rotated rows times `factor`, a power of two; in_rows and out_rows: a pointer per row."""
    pair = tl.arange(0, BLOCK_HALF)
    cos = tl.load(cos_ptr + pair, mask=pair < HALF, other=0.0)[None, :]
    sin = tl.load(sin_ptr + pair, mask=pair < HALF, other=0.0)[None, :]
    first_at = (pair * 2 if INTERLEAVED else pair)[None, :]
    second_at = (pair * 2 + 1 if INTERLEAVED else pair + HALF)[None, :]
    mask = is_row[:, None] & (pair < HALF)[None, :]
    first = tl.load(in_rows[:, None] + first_at, mask=mask, other=0.0).to(SUM)
    second = tl.load(in_rows[:, None] + second_at, mask=mask, other=0.0).to(SUM)
    first, second = (first * cos - second * sin) * factor, (second * cos + first * sin) * factor
    tl.store(out_rows[:, None] + first_at, first.to(out_rows.dtype.element_ty), mask=mask)
    tl.store(out_rows[:, None] + second_at, second.to(out_rows.dtype.element_ty), mask=mask)


@triton.jit
def _mla_rope_cache_kernel(
    q_ptr, kv_ptr, weight_ptr, cos_sin_ptr, positions_ptr, slots_ptr, latent_ptr, rope_ptr, scale_ptr,
    q_token_stride, q_head_stride, kv_stride, latent_stride, rope_stride, scale_stride, eps,
    H: tl.constexpr, NOPE: tl.constexpr, R: tl.constexpr, P: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_HALF: tl.constexpr, HEADS_PER_PROGRAM: tl.constexpr, INTERLEAVED: tl.constexpr,
    FP8: tl.constexpr, IS_WIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs (n, 0) write token n's cache entry; programs (n, g) rotate group g - 1 of its query heads."""
    SUM: tl.constexpr = tl.float64 if IS_WIDE else tl.float32
    n = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    columns = tl.arange(0, BLOCK_R)
    mask = columns < R
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(SUM)
    wait_for_previous(PDL)
    position = tl.load(positions_ptr + n)
    cos_ptr = cos_sin_ptr + position * P
    sin_ptr = cos_ptr + P // 2
    if group == 0:
        slot = tl.load(slots_ptr + n)
        if slot >= 0:
            kv_row = kv_ptr + n * kv_stride
            latent = tl.load(kv_row + columns, mask=mask, other=0.0).to(SUM)
            scale = 1.0 / tl.sqrt(tl.sum(latent * latent, axis=0) / R + eps)
            latent = (latent * scale * weight).to(tl.float32)
            inverse = 1.0
            if FP8:
                entry_scale, inverse = scale_of(tl.max(tl.abs(latent), axis=0), -6)
                tl.store(scale_ptr + slot * scale_stride, entry_scale)
                latent = round_to_e4m3(latent * inverse, latent_ptr.dtype.element_ty)
            entry = latent_ptr + slot * latent_stride
            tl.store(entry + columns, latent.to(latent_ptr.dtype.element_ty), mask=mask)
            one = tl.arange(0, 1)
            rope = rope_ptr + slot * rope_stride + one
            _rotate_rows(
                kv_row + R + one, rope, one == 0, cos_ptr, sin_ptr, inverse, P // 2, BLOCK_HALF, INTERLEAVED, SUM
            )  # fmt: skip
    else:
        head = (group - 1) * HEADS_PER_PROGRAM + tl.arange(0, HEADS_PER_PROGRAM)
        rows = q_ptr + n * q_token_stride + head * q_head_stride + NOPE
        _rotate_rows(rows, rows, head < H, cos_ptr, sin_ptr, 1.0, P // 2, BLOCK_HALF, INTERLEAVED, SUM)


def _check(
    q: torch.Tensor, kv: torch.Tensor, norm_weight: torch.Tensor, cos_sin: torch.Tensor,
    positions: torch.Tensor, slots: torch.Tensor, cache: torch.Tensor,
) -> None:  # fmt: skip
    check_shape("q", q, (None, None, None))
    check_last_dim_contiguous("q", q)
    check_shape("norm_weight", norm_weight, (None,))
    check_shape("cos_sin", cos_sin, (None, None))
    check_dtype("cos_sin", cos_sin, torch.float32)
    check_contiguous("cos_sin", cos_sin)
    num_tokens, rope_dim, width = q.shape[0], cos_sin.shape[1], norm_weight.shape[0] + cos_sin.shape[1]
    if rope_dim % 2 or rope_dim > q.shape[2]:
        raise ValueError(f"cos_sin: the rope dimension must be even and at most q's {q.shape[2]}, got {rope_dim}")
    check_shape("kv", kv, (num_tokens, width))
    check_last_dim_contiguous("kv", kv)
    if cache.dtype == torch.uint8:
        Fp8Entry(norm_weight.shape[0], rope_dim, q.dtype).check(cache)
    else:
        check_shape("cache", cache, (None, None, width))
    check_contiguous("cache", cache)
    for name, tensor in (("positions", positions), ("slots", slots)):
        check_shape(name, tensor, (num_tokens,))
        check_dtype(name, tensor, torch.int64)
        check_contiguous(name, tensor)


def mla_rope_cache(
    q: torch.Tensor, kv: torch.Tensor, norm_weight: torch.Tensor, eps: float, cos_sin: torch.Tensor,
    positions: torch.Tensor, slots: torch.Tensor, cache: torch.Tensor, *,
    interleaved: bool, backend: Backend | None = None,
) -> None:  # fmt: skip
    """Rotate q's rope part in place and write one cache entry per token.

        q[n,h,dn:] = rope(q[n,h,dn:], positions[n])
        cache[slots[n]] = [rms_norm(kv[n,:R]) * norm_weight | rope(kv[n,R:], positions[n])]

    rope turns pairs of values by the position's angles, where the pairs are (2i, 2i+1) if `interleaved`,
    else (i, i + P/2); each value stays in its place.

    Args:
        q:           [N, H, dn + P], changed in place; strided in N and H at will
        kv:          [N, R + P], rows may be strided
        norm_weight: [R]
        eps:         of the latent's norm
        cos_sin:     [max_positions, P] fp32: cosines in the first half, sines in the second
        positions:   [N] int64, below max_positions
        slots:       [N] int64 = block_id * block_size + offset; -1 is not written. Distinct, apart from -1
        cache:       [num_blocks, block_size, R + P], changed in place; or FP8 entries (fp8_entry.py), uint8
    Raises:  ValueError on shape, dtype or stride
    Accuracy: fp32 arithmetic, or fp64 of fp32 rows under `invariance`, one rounding to the output dtype; an FP8
        latent's relative error is below 2^-4
    Source:  DeepSeek-V2, section 2.1, https://arxiv.org/abs/2405.04434
    """
    _check(q, kv, norm_weight, cos_sin, positions, slots, cache)
    if not use_triton(q, backend):
        _cpu_rope_cache(q, kv, norm_weight, eps, cos_sin, positions, slots, cache, interleaved)
        return
    num_tokens, num_heads, head_dim = q.shape
    rank, rope_dim = norm_weight.shape[0], cos_sin.shape[1]
    if num_tokens == 0:
        return
    latents, ropes, scales = cache[..., :rank], cache[..., rank:], cache
    if is_fp8 := cache.dtype == torch.uint8:
        latents, ropes, scales = Fp8Entry(rank, rope_dim, q.dtype).views(cache)
    heads_per_program = 8
    _mla_rope_cache_kernel[(num_tokens, 1 + triton.cdiv(num_heads, heads_per_program))](
        q, kv, norm_weight, cos_sin, positions, slots, latents, ropes, scales,
        q.stride(0), q.stride(1), kv.stride(0), latents.stride(1), ropes.stride(1), scales.stride(1), eps,
        H=num_heads, NOPE=head_dim - rope_dim, R=rank, P=rope_dim,
        BLOCK_R=triton.next_power_of_2(rank), BLOCK_HALF=triton.next_power_of_2(rope_dim // 2),
        HEADS_PER_PROGRAM=heads_per_program, INTERLEAVED=interleaved, FP8=is_fp8,
        IS_WIDE=invariance.is_wide(q.dtype), num_warps=1, **dependent_launch(q.device),
    )  # fmt: skip
