"""The routed experts of a mixture-of-experts layer: SwiGLU feed-forward networks, each on its own tokens."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels import invariance
from kernels.checks import ROW_TILE, Backend, check_contiguous, check_dtype, check_shape, use_triton
from kernels.dependent_launch import wait_for_previous
from kernels.grouped_gemm import add_counts, check_pairs, choose_tiles, descriptor, sort_pairs, sum_parts, tile_of


def fused_experts_reference(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """The definition: fp32 throughout, rounded once to x's dtype."""
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in range(gate_up.shape[0]):
        token, choice = (ids == expert).nonzero(as_tuple=True)
        gate, up = (x[token].float() @ gate_up[expert].float().T).chunk(2, -1)
        hidden = torch.nn.functional.silu(gate) * up
        out.index_add_(0, token, hidden @ down[expert].float().T * weights[token, choice, None])
    return out.to(x.dtype)


def _torch_experts(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Two GEMMs per hit expert over its rows, which lie one expert after the other:

    buffer | expert 0's tokens, padding | expert 2's tokens, padding | ...  each part a multiple of ROW_TILE
    """
    num_tokens, top_k = ids.shape
    pairs_of: list[list[int]] = [[] for _ in range(gate_up.shape[0])]
    pair_ids = ids.flatten().tolist()
    for pair, expert in enumerate(pair_ids):
        if expert >= 0:
            pairs_of[expert].append(pair)
    hit = [expert for expert, pairs in enumerate(pairs_of) if pairs]
    source: list[int] = []  # buffer row -> token
    place = [-1] * len(pair_ids)  # pair -> buffer row; -1 is the row of zeros at the end
    sizes = []
    for pairs in (pairs_of[expert] for expert in hit):
        for pair in pairs:
            place[pair] = len(source)
            source.append(pair // top_k)
        padding = -len(pairs) % ROW_TILE
        source += source[-1:] * padding
        sizes.append(len(pairs) + padding)

    projected = x.new_empty(len(source), gate_up.shape[1])
    weights_of = gate_up.mT.unbind()
    for expert, rows, out in zip(hit, x[source].split(sizes), projected.split(sizes), strict=True):
        torch.mm(rows, weights_of[expert], out=out)
    gate, up = projected.chunk(2, -1)
    # SiLU in exactly rounded steps: torch's silu rounds differently in its vector loop and that loop's scalar tail.
    hidden = torch.exp(-gate).add_(1).reciprocal_().mul_(gate).mul_(up)
    results = x.new_empty(len(source) + 1, x.shape[1])
    results[-1] = 0.0
    weights_of = down.mT.unbind()
    for expert, rows, out in zip(hit, hidden.split(sizes), results[:-1].split(sizes), strict=True):
        torch.mm(rows, weights_of[expert], out=out)

    scaled = results[place].float().mul_(weights.view(-1, 1))
    return scaled.view(num_tokens, top_k, -1).sum(1).to(x.dtype)


@triton.jit(do_not_specialize=["num_pairs"])
def _gate_up_kernel(
    x_ptr, gate_up_desc, hidden_ptr, rows_ptr, block_experts_ptr, num_blocks_ptr, num_pairs,
    D: tl.constexpr, INTER: tl.constexpr, TOP_K: tl.constexpr, PRECISION: tl.constexpr, IS_WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """hidden[r] = silu(gate) * up of the token in sorted row r. Each program walks over tiles."""
    SUM: tl.constexpr = tl.float64 if IS_WIDE else tl.float32
    FACTOR: tl.constexpr = tl.float64 if IS_WIDE else x_ptr.dtype.element_ty
    columns: tl.constexpr = (INTER + BLOCK_N - 1) // BLOCK_N
    wait_for_previous(PDL)
    num_blocks = tl.load(num_blocks_ptr)
    k = tl.arange(0, BLOCK_K)
    for tile in tl.range(tl.program_id(0), num_blocks * columns, tl.num_programs(0)):
        block, column = tile_of(tile, num_blocks, columns, GROUP)
        expert = tl.load(block_experts_ptr + block)
        row = block * BLOCK_M + tl.arange(0, BLOCK_M)
        pair = tl.load(rows_ptr + row)
        is_pair = pair < num_pairs
        x_ptrs = x_ptr + (pair // TOP_K).to(tl.int64)[:, None] * D + k[None, :]
        gate_row = expert * (2 * INTER) + column * BLOCK_N
        gate = tl.zeros([BLOCK_M, BLOCK_N], SUM)
        up = tl.zeros([BLOCK_M, BLOCK_N], SUM)
        for start in range(0, D, BLOCK_K):
            if D % BLOCK_K == 0:
                x = tl.load(x_ptrs + start, mask=is_pair[:, None], other=0.0)
            else:
                x = tl.load(x_ptrs + start, mask=is_pair[:, None] & (k[None, :] < D - start), other=0.0)
            x = x.to(FACTOR)
            w = gate_up_desc.load([gate_row, start]).to(FACTOR)
            gate = tl.dot(x, w.T, gate, input_precision=PRECISION, out_dtype=SUM)
            w = gate_up_desc.load([gate_row + INTER, start]).to(FACTOR)
            up = tl.dot(x, w.T, up, input_precision=PRECISION, out_dtype=SUM)
        if IS_WIDE:  # as a linear layer gives them
            gate, up = gate.to(tl.float32).to(SUM), up.to(tl.float32).to(SUM)
        hidden = gate / (1.0 + tl.exp(-gate)) * up
        n = column * BLOCK_N + tl.arange(0, BLOCK_N)
        out_ptrs = hidden_ptr + row.to(tl.int64)[:, None] * INTER + n[None, :]
        tl.store(out_ptrs, hidden.to(hidden_ptr.dtype.element_ty), mask=n[None, :] < INTER)


@triton.jit(do_not_specialize=["num_pairs"])
def _down_kernel(
    hidden_desc, down_desc, weights_ptr, out_ptr, rows_ptr, block_experts_ptr, num_blocks_ptr, num_pairs,
    D: tl.constexpr, INTER: tl.constexpr, PRECISION: tl.constexpr, IS_WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[pair] = weights[pair] * down @ hidden of the pair's sorted row.

    `flatten` makes one loop of tiles and steps, so that a tile's first loads run during the last one's stores:
    4 to 20% here; the gate and up GEMM, which gathers rows through an index, loses by it.
    """
    SUM: tl.constexpr = tl.float64 if IS_WIDE else tl.float32
    FACTOR: tl.constexpr = tl.float64 if IS_WIDE else hidden_desc.dtype
    columns: tl.constexpr = (D + BLOCK_N - 1) // BLOCK_N
    wait_for_previous(PDL)
    num_blocks = tl.load(num_blocks_ptr)
    for tile in tl.range(tl.program_id(0), num_blocks * columns, tl.num_programs(0), flatten=True):
        block, column = tile_of(tile, num_blocks, columns, GROUP)
        down_row = tl.load(block_experts_ptr + block) * D + column * BLOCK_N
        out = tl.zeros([BLOCK_M, BLOCK_N], SUM)
        for start in range(0, INTER, BLOCK_K):
            hidden = hidden_desc.load([block * BLOCK_M, start]).to(FACTOR)
            w = down_desc.load([down_row, start]).to(FACTOR)
            out = tl.dot(hidden, w.T, out, input_precision=PRECISION, out_dtype=SUM)
        pair = tl.load(rows_ptr + block * BLOCK_M + tl.arange(0, BLOCK_M))
        is_pair = pair < num_pairs
        out *= tl.load(weights_ptr + pair, mask=is_pair, other=0.0).to(SUM)[:, None]
        n = column * BLOCK_N + tl.arange(0, BLOCK_N)
        out_ptrs = out_ptr + pair.to(tl.int64)[:, None] * D + n[None, :]
        tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=is_pair[:, None] & (n[None, :] < D))


def _triton_experts(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor,
    counts: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """Sort, two grouped GEMMs, sum: four launches whose grids depend on shapes alone, so they fit a CUDA graph."""
    dim, (num_experts, _, inter), num_pairs, device = x.shape[1], down.shape, ids.numel(), x.device
    bits = 8 * x.element_size()
    tiles = choose_tiles("fused_experts", num_pairs, num_experts, device, bits=bits, dim=dim, inter=inter)
    pairs = sort_pairs(ids, num_experts, tiles.rows, counts)
    hidden = torch.empty(len(pairs.rows), inter, dtype=x.dtype, device=device)
    parts = torch.empty(num_pairs, dim, dtype=_out_dtype(x), device=device)
    precision, is_wide = "ieee" if x.dtype == torch.float32 else "tf32", invariance.is_wide(x.dtype)
    tile = tiles.gate_up
    _gate_up_kernel[tile.grid(pairs, inter)](
        x, descriptor(gate_up.view(-1, dim), tile.columns, tile.depth), hidden,
        pairs.rows, pairs.block_experts, pairs.num_blocks, num_pairs,
        D=dim, INTER=inter, TOP_K=ids.shape[1], PRECISION=precision, IS_WIDE=is_wide,
        BLOCK_M=tiles.rows, BLOCK_N=tile.columns, BLOCK_K=tile.depth, **tile.options(device),
    )  # fmt: skip
    tile = tiles.down
    _down_kernel[tile.grid(pairs, dim)](
        descriptor(hidden, tiles.rows, tile.depth), descriptor(down.view(-1, inter), tile.columns, tile.depth),
        weights, parts, pairs.rows, pairs.block_experts, pairs.num_blocks, num_pairs,
        D=dim, INTER=inter, PRECISION=precision, IS_WIDE=is_wide,
        BLOCK_M=tiles.rows, BLOCK_N=tile.columns, BLOCK_K=tile.depth, **tile.options(device),
    )  # fmt: skip
    return sum_parts(parts, ids, num_experts)


def _out_dtype(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if invariance.is_wide(x.dtype) else x.dtype


def fused_experts(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor,
    *, counts: torch.Tensor | None = None, backend: Backend | None = None,
) -> torch.Tensor:  # fmt: skip
    """Apply each token's chosen experts and sum them by weight.

        out[n] = sum_j weights[n,j] * down[e] @ (silu(g) * u),  e = ids[n,j],  [g | u] = gate_up[e] @ x[n]

    Args:
        x:       [N, D] contiguous
        gate_up: [E, 2I, D], the gate's I rows above the up projection's
        down:    [E, D, I]; both contiguous
        ids:     [N, k] int32; -1 contributes nothing; an expert named twice counts twice
        weights: [N, k] fp32, finite
        counts:  [E] int64 or None; grows by how often each expert is named
    Returns: [N, D] in x's dtype, freshly allocated. The sum over j runs in the order of j.
        On CPU in fp32 a token's bits do not depend on the other tokens. Of fp32 tokens under `invariance` all sums and
        the result are fp64, g, u and their product are rounded to fp32.
    Raises:  ValueError on shape, dtype or stride
    Accuracy: relative error < 1e-5 in fp32, 1e-2 in bf16 against fused_experts_reference
    Source:  DeepSeek-V2 section 2.1.2, https://arxiv.org/abs/2405.04434
    """
    check_shape("x", x, (None, None))
    dim = x.shape[1]
    check_shape("down", down, (None, dim, None))
    num_experts, _, inter = down.shape
    check_shape("gate_up", gate_up, (num_experts, 2 * inter, dim))
    for name, tensor in (("gate_up", gate_up), ("down", down)):
        check_dtype(name, tensor, x.dtype)
        check_contiguous(name, tensor)
    check_pairs(x, ids, weights, counts, num_experts)
    if ids.numel() == 0:
        return torch.zeros_like(x, dtype=_out_dtype(x) if use_triton(x, backend) else x.dtype)
    if not use_triton(x, backend):
        add_counts(counts, ids)
        return _torch_experts(x, gate_up, down, ids, weights)
    if dim * x.element_size() % 16 or inter * x.element_size() % 16:
        raise ValueError(f"x: rows of {dim} and {inter} values must be multiples of 16 bytes for the Triton kernel")
    return _triton_experts(x, gate_up, down, ids, weights, counts)
