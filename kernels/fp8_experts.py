"""The routed experts of an FP8 checkpoint, in its own weights: e4m3 with one scale per 128 x 128 block.

Activations are rounded to e4m3 as well, with one scale per token and 128 values, a power of two. Products of 128 terms
are summed by the matrix unit, their sums in fp32 with both scales applied.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.checks import Backend, check_contiguous, check_dtype, check_shape, use_triton
from kernels.dependent_launch import dependent_launch, wait_for_previous
from kernels.fp8_entry import power_of_two_scale, round_to_e4m3, scale_of
from kernels.grouped_gemm import add_counts, check_pairs, choose_tiles, descriptor, sort_pairs, sum_parts, tile_of

BLOCK = 128  # of rows and columns that share a weight's scale, and of values that share an activation's
_E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class Fp8Experts:
    """Weights of E experts of width I, both I and the model's D multiples of 128."""

    gate_up: torch.Tensor  # [E, 2I, D] e4m3: gate rows, then up rows
    gate_up_scales: torch.Tensor  # [E, 2I / 128, D / 128] fp32
    down: torch.Tensor  # [E, D, I] e4m3
    down_scales: torch.Tensor  # [E, D / 128, I / 128] fp32


def quantize_groups(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[N, D] -> e4m3 [N, D], fp32 scales [N, D / 128]: x ~ values * scale of its group of 128."""
    groups = x.float().unflatten(1, (-1, BLOCK))
    scales = power_of_two_scale(groups.abs().amax(-1))
    return (groups / scales.unsqueeze(-1)).to(_E4M3).flatten(1), scales


def dequantize(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """e4m3 [M, N] with scales [M / 128 or M, N / 128] -> fp32 [M, N]."""
    by_row = scales.repeat_interleave(values.shape[0] // max(scales.shape[0], 1), 0)
    return values.float() * by_row.repeat_interleave(BLOCK, 1)


def fp8_experts_reference(
    x: torch.Tensor, experts: Fp8Experts, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """The definition: fp32 throughout, but for the two roundings of activations; rounded once to x's dtype."""
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    rows = dequantize(*quantize_groups(x))
    for expert in range(experts.gate_up.shape[0]):
        token, choice = (ids == expert).nonzero(as_tuple=True)
        if token.numel():
            gate_up = dequantize(experts.gate_up[expert], experts.gate_up_scales[expert])
            gate, up = (rows[token] @ gate_up.T).chunk(2, -1)
            hidden = dequantize(*quantize_groups(torch.nn.functional.silu(gate) * up))
            down = dequantize(experts.down[expert], experts.down_scales[expert])
            out.index_add_(0, token, hidden @ down.T * weights[token, choice, None])
    return out.to(x.dtype)


@triton.jit
def _quantize_kernel(
    x_ptr, values_ptr, scales_ptr, D: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, PDL: tl.constexpr
):
    """GROUPS groups of one row: quantize_groups."""
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    is_group = group < D // GROUP
    at = row * D + group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = tl.load(x_ptr + at, mask=is_group[:, None], other=0.0).to(tl.float32)
    scale, inverse = scale_of(tl.max(tl.abs(x), axis=1))
    tl.store(values_ptr + at, round_to_e4m3(x * inverse[:, None], values_ptr.dtype.element_ty), mask=is_group[:, None])
    tl.store(scales_ptr + row * (D // GROUP) + group, scale, mask=is_group)


@triton.jit(do_not_specialize=["num_pairs"])
def _gate_up_kernel(
    x_ptr, x_scales_ptr, gate_up_desc, w_scales_ptr, hidden_ptr, hidden_scales_ptr,
    rows_ptr, block_experts_ptr, num_blocks_ptr, num_pairs,
    D: tl.constexpr, INTER: tl.constexpr, TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """hidden[r] = silu(gate) * up of the token in sorted row r, rounded to e4m3: a tile is one group wide."""
    columns: tl.constexpr = INTER // BLOCK
    depth: tl.constexpr = D // BLOCK
    wait_for_previous(PDL)
    num_blocks = tl.load(num_blocks_ptr)
    k = tl.arange(0, BLOCK)
    for tile in tl.range(tl.program_id(0), num_blocks * columns, tl.num_programs(0)):
        block, column = tile_of(tile, num_blocks, columns, GROUP)
        expert = tl.load(block_experts_ptr + block)
        row = block * BLOCK_M + tl.arange(0, BLOCK_M)
        pair = tl.load(rows_ptr + row)
        is_pair = pair < num_pairs
        token = (pair // TOP_K).to(tl.int64)
        x_ptrs = x_ptr + token[:, None] * D + k[None, :]
        gate_row = expert * (2 * INTER) + column * BLOCK
        gate_scales = w_scales_ptr + (expert.to(tl.int64) * 2 * columns + column) * depth
        gate = tl.zeros([BLOCK_M, BLOCK], tl.float32)
        up = tl.zeros([BLOCK_M, BLOCK], tl.float32)
        # A step's scales are loaded during the one before: they meet the matrix unit's results, which nothing hides.
        x_scales = x_scales_ptr + token * depth
        x_scale = tl.load(x_scales, mask=is_pair, other=0.0)
        gate_scale = tl.load(gate_scales)
        up_scale = tl.load(gate_scales + columns * depth)
        for step in range(depth):
            following = tl.minimum(step + 1, depth - 1)
            next_x_scale = tl.load(x_scales + following, mask=is_pair, other=0.0)
            next_gate_scale = tl.load(gate_scales + following)
            next_up_scale = tl.load(gate_scales + columns * depth + following)
            x = tl.load(x_ptrs + step * BLOCK, mask=is_pair[:, None], other=0.0)
            gate += tl.dot(x, gate_up_desc.load([gate_row, step * BLOCK]).T) * (x_scale * gate_scale)[:, None]
            up += tl.dot(x, gate_up_desc.load([gate_row + INTER, step * BLOCK]).T) * (x_scale * up_scale)[:, None]
            x_scale, gate_scale, up_scale = next_x_scale, next_gate_scale, next_up_scale
        hidden = gate / (1.0 + tl.exp(-gate)) * up
        scale, inverse = scale_of(tl.max(tl.abs(hidden), axis=1))
        out_ptrs = hidden_ptr + row.to(tl.int64)[:, None] * INTER + (column * BLOCK + k)[None, :]
        tl.store(out_ptrs, round_to_e4m3(hidden * inverse[:, None], hidden_ptr.dtype.element_ty))
        tl.store(hidden_scales_ptr + row.to(tl.int64) * columns + column, scale)


@triton.jit(do_not_specialize=["num_pairs"])
def _down_kernel(
    hidden_desc, hidden_scales_ptr, down_desc, w_scales_ptr, weights_ptr, out_ptr,
    rows_ptr, block_experts_ptr, num_blocks_ptr, num_pairs,
    D: tl.constexpr, INTER: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[pair] = weights[pair] * down @ hidden of the pair's sorted row."""
    columns: tl.constexpr = D // BLOCK_N
    depth: tl.constexpr = INTER // BLOCK
    wait_for_previous(PDL)
    num_blocks = tl.load(num_blocks_ptr)
    for tile in tl.range(tl.program_id(0), num_blocks * columns, tl.num_programs(0)):
        block, column = tile_of(tile, num_blocks, columns, GROUP)
        expert = tl.load(block_experts_ptr + block)
        row = block * BLOCK_M + tl.arange(0, BLOCK_M)
        down_row = expert * D + column * BLOCK_N
        scales = w_scales_ptr + (expert.to(tl.int64) * (D // BLOCK) + column * BLOCK_N // BLOCK) * depth
        out = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        hidden_scales = hidden_scales_ptr + row.to(tl.int64) * depth
        scale = tl.load(hidden_scales) * tl.load(scales)
        for step in range(depth):
            following = tl.minimum(step + 1, depth - 1)
            next_scale = tl.load(hidden_scales + following) * tl.load(scales + following)
            hidden = hidden_desc.load([block * BLOCK_M, step * BLOCK])
            out += tl.dot(hidden, down_desc.load([down_row, step * BLOCK]).T) * scale[:, None]
            scale = next_scale
        pair = tl.load(rows_ptr + row)
        is_pair = pair < num_pairs
        out *= tl.load(weights_ptr + pair, mask=is_pair, other=0.0)[:, None]
        out_ptrs = out_ptr + pair.to(tl.int64)[:, None] * D + (column * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
        tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=is_pair[:, None])


def _triton_experts(
    x: torch.Tensor, experts: Fp8Experts, ids: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor | None
) -> torch.Tensor:
    (num_tokens, dim), (num_experts, _, inter), num_pairs, device = x.shape, experts.down.shape, ids.numel(), x.device
    tiles = choose_tiles("fp8_experts", num_pairs, num_experts, device, dim=dim, inter=inter)
    pairs = sort_pairs(ids, num_experts, tiles.rows, counts)
    x8 = torch.empty(num_tokens, dim, dtype=_E4M3, device=device)
    x_scales = torch.empty(num_tokens, dim // BLOCK, dtype=torch.float32, device=device)
    _quantize_kernel[(num_tokens, triton.cdiv(dim // BLOCK, 8))](
        x, x8, x_scales, D=dim, GROUP=BLOCK, GROUPS=8, **dependent_launch(device)
    )
    hidden = torch.empty(len(pairs.rows), inter, dtype=_E4M3, device=device)
    hidden_scales = torch.empty(len(pairs.rows), inter // BLOCK, dtype=torch.float32, device=device)
    parts = torch.empty(num_pairs, dim, dtype=x.dtype, device=device)
    tile = tiles.gate_up
    _gate_up_kernel[tile.grid(pairs, inter)](
        x8, x_scales, descriptor(experts.gate_up.view(-1, dim), BLOCK, BLOCK), experts.gate_up_scales,
        hidden, hidden_scales, pairs.rows, pairs.block_experts, pairs.num_blocks, num_pairs,
        D=dim, INTER=inter, TOP_K=ids.shape[1], BLOCK_M=tiles.rows, BLOCK=BLOCK, **tile.options(device),
    )  # fmt: skip
    tile = tiles.down
    _down_kernel[tile.grid(pairs, dim)](
        descriptor(hidden, tiles.rows, BLOCK), hidden_scales,
        descriptor(experts.down.view(-1, inter), tile.columns, BLOCK), experts.down_scales,
        weights, parts, pairs.rows, pairs.block_experts, pairs.num_blocks, num_pairs,
        D=dim, INTER=inter, BLOCK_M=tiles.rows, BLOCK_N=tile.columns, BLOCK=BLOCK, **tile.options(device),
    )  # fmt: skip
    return sum_parts(parts, ids, num_experts)


def fp8_experts(
    x: torch.Tensor, experts: Fp8Experts, ids: torch.Tensor, weights: torch.Tensor,
    *, counts: torch.Tensor | None = None, backend: Backend | None = None,
) -> torch.Tensor:  # fmt: skip
    """Apply each token's chosen experts and sum them by weight, as fused_experts does, in FP8.

        out[n] = sum_j weights[n,j] * down[e] @ Q(silu(g) * u),  e = ids[n,j],  [g | u] = gate_up[e] @ Q(x[n])

    Q rounds groups of 128 values to e4m3 times a power of two.

    Args:
        x:       [N, D] contiguous
        experts: on x's device; on CPU the definition runs, for checks only
        ids:     [N, k] int32; -1 contributes nothing; an expert named twice counts twice
        weights: [N, k] fp32, finite
        counts:  [E] int64 or None; grows by how often each expert is named
    Returns: [N, D] in x's dtype, freshly allocated. The sum over j runs in the order of j.
    Raises:  ValueError on shape, dtype or stride
    Accuracy: relative error < 1e-2 against fp8_experts_reference in bf16: a hidden value beside a rounding of e4m3
        may fall on its other side
    Source:  DeepSeek-V3 section 3.3.2, https://arxiv.org/abs/2412.19437
    """
    check_shape("x", x, (None, None))
    dim = x.shape[1]
    check_shape("down", experts.down, (None, dim, None))
    num_experts, _, inter = experts.down.shape
    if dim % BLOCK or inter % BLOCK:
        raise ValueError(f"experts: widths must be multiples of {BLOCK}, got {dim} and {inter}")
    check_shape("gate_up", experts.gate_up, (num_experts, 2 * inter, dim))
    check_shape("gate_up_scales", experts.gate_up_scales, (num_experts, 2 * inter // BLOCK, dim // BLOCK))
    check_shape("down_scales", experts.down_scales, (num_experts, dim // BLOCK, inter // BLOCK))
    for name, tensor, dtype in (
        ("gate_up", experts.gate_up, _E4M3), ("gate_up_scales", experts.gate_up_scales, torch.float32),
        ("down", experts.down, _E4M3), ("down_scales", experts.down_scales, torch.float32),
    ):  # fmt: skip
        check_dtype(name, tensor, dtype)
        check_contiguous(name, tensor)
    check_pairs(x, ids, weights, counts, num_experts)
    if ids.numel() == 0:
        return torch.zeros_like(x)
    if not use_triton(x, backend):
        add_counts(counts, ids)
        return fp8_experts_reference(x, experts, ids, weights)
    return _triton_experts(x, experts, ids, weights, counts)
