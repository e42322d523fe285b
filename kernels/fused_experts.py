"""The routed experts of a mixture-of-experts layer: SwiGLU feed-forward networks, each on its own tokens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels import invariance, tuning
from kernels.checks import Backend, check_contiguous, check_dtype, check_shape, use_triton
from kernels.dependent_launch import dependent_launch, wait_for_previous

INVARIANT_ROWS_PER_EXPERT = 64.0  # whose tiles serve any number of rows, where its bits must not depend on it
# On CPU an expert's rows are padded to a multiple of this, the smallest row count at which MKL's bits settle.
_CPU_ROWS = 4


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

    buffer | expert 0's tokens, padding | expert 2's tokens, padding | ...  each part a multiple of _CPU_ROWS
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
        padding = -len(pairs) % _CPU_ROWS
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
def _sort_kernel(
    ids_ptr, rows_ptr, block_experts_ptr, num_blocks_ptr, counts_ptr, num_pairs,
    E: tl.constexpr, BINS: tl.constexpr, BLOCK_M: tl.constexpr, CHUNK: tl.constexpr, HAS_COUNTS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Counting sort of pairs by expert, padded to BLOCK_M rows each. Program e places expert e's pairs, in order:

    rows          | pairs of expert 0, padding | pairs of expert 2, padding | ...   padding holds num_pairs
    block_experts | 0 | 0 | 2 | ...                                                 one per BLOCK_M rows

    Every program counts all pairs, which costs less than a second launch.
    """
    expert = tl.program_id(0)
    bins = tl.arange(0, BINS)
    wait_for_previous(PDL)
    counts = tl.zeros([BINS], tl.int32)
    for start in range(0, num_pairs, CHUNK):
        pair = start + tl.arange(0, CHUNK)
        ids = tl.load(ids_ptr + pair, mask=pair < num_pairs, other=-1)
        counts += tl.histogram(tl.where((ids >= 0) & (ids < E), ids, BINS - 1), BINS)
    blocks = tl.where(bins < E, (counts + BLOCK_M - 1) // BLOCK_M, 0)
    first_block = tl.sum(tl.where(bins < expert, blocks, 0), axis=0)
    num_blocks = tl.sum(tl.where(bins == expert, blocks, 0), axis=0)
    if expert == 0:
        tl.store(num_blocks_ptr, tl.sum(blocks, axis=0))
    for block in range(num_blocks):
        tl.store(block_experts_ptr + first_block + block, expert)
    place = first_block * BLOCK_M
    for start in range(0, num_pairs, CHUNK):
        pair = start + tl.arange(0, CHUNK)
        is_mine = tl.load(ids_ptr + pair, mask=pair < num_pairs, other=-1) == expert
        rank = tl.cumsum(is_mine.to(tl.int32), axis=0) - 1
        tl.store(rows_ptr + place + rank, pair, mask=is_mine)
        place += tl.sum(is_mine.to(tl.int32), axis=0)
    padding = place + tl.arange(0, BLOCK_M)
    tl.store(rows_ptr + padding, num_pairs, mask=padding < (first_block + num_blocks) * BLOCK_M)
    if HAS_COUNTS:
        tl.atomic_add(counts_ptr + expert, (place - first_block * BLOCK_M).to(tl.int64), sem="relaxed")


@triton.jit
def tile_of(pid, num_blocks, num_columns: tl.constexpr, GROUP: tl.constexpr):
    """Program -> (row block, column block): GROUP row blocks walk the columns together, so weights stay in L2."""
    first = pid // (GROUP * num_columns) * GROUP
    size = min(num_blocks - first, GROUP)
    inside = pid % (GROUP * num_columns)
    return first + inside % size, inside // size


@triton.jit(do_not_specialize=["num_pairs"])
def _gate_up_kernel(
    x_ptr, gate_up_desc, hidden_ptr, rows_ptr, block_experts_ptr, num_blocks_ptr, num_pairs,
    D: tl.constexpr, INTER: tl.constexpr, TOP_K: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """hidden[r] = silu(gate) * up of the token in sorted row r. Each program walks over tiles."""
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
        gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, D, BLOCK_K):
            if D % BLOCK_K == 0:
                x = tl.load(x_ptrs + start, mask=is_pair[:, None], other=0.0)
            else:
                x = tl.load(x_ptrs + start, mask=is_pair[:, None] & (k[None, :] < D - start), other=0.0)
            gate = tl.dot(x, gate_up_desc.load([gate_row, start]).T, gate, input_precision=PRECISION)
            up = tl.dot(x, gate_up_desc.load([gate_row + INTER, start]).T, up, input_precision=PRECISION)
        hidden = gate / (1.0 + tl.exp(-gate)) * up
        n = column * BLOCK_N + tl.arange(0, BLOCK_N)
        out_ptrs = hidden_ptr + row.to(tl.int64)[:, None] * INTER + n[None, :]
        tl.store(out_ptrs, hidden.to(hidden_ptr.dtype.element_ty), mask=n[None, :] < INTER)


@triton.jit(do_not_specialize=["num_pairs"])
def _down_kernel(
    hidden_desc, down_desc, weights_ptr, out_ptr, rows_ptr, block_experts_ptr, num_blocks_ptr, num_pairs,
    D: tl.constexpr, INTER: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[pair] = weights[pair] * down @ hidden of the pair's sorted row.

    `flatten` makes one loop of tiles and steps, so that a tile's first loads run during the last one's stores:
    4 to 20% here; the gate and up GEMM, which gathers rows through an index, loses by it.
    """
    columns: tl.constexpr = (D + BLOCK_N - 1) // BLOCK_N
    wait_for_previous(PDL)
    num_blocks = tl.load(num_blocks_ptr)
    for tile in tl.range(tl.program_id(0), num_blocks * columns, tl.num_programs(0), flatten=True):
        block, column = tile_of(tile, num_blocks, columns, GROUP)
        down_row = tl.load(block_experts_ptr + block) * D + column * BLOCK_N
        out = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, INTER, BLOCK_K):
            hidden = hidden_desc.load([block * BLOCK_M, start])
            out = tl.dot(hidden, down_desc.load([down_row, start]).T, out, input_precision=PRECISION)
        pair = tl.load(rows_ptr + block * BLOCK_M + tl.arange(0, BLOCK_M))
        is_pair = pair < num_pairs
        out *= tl.load(weights_ptr + pair, mask=is_pair, other=0.0)[:, None]
        n = column * BLOCK_N + tl.arange(0, BLOCK_N)
        out_ptrs = out_ptr + pair.to(tl.int64)[:, None] * D + n[None, :]
        tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=is_pair[:, None] & (n[None, :] < D))


@triton.jit
def _sum_kernel(
    parts_ptr, ids_ptr, out_ptr,
    E: tl.constexpr, D: tl.constexpr, TOP_K: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[n] = sum_j parts[n, j] in the order of j, leaving out pairs without an expert."""
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    total = tl.zeros([BLOCK_D], tl.float32)
    wait_for_previous(PDL)
    for j in tl.static_range(TOP_K):
        pair = token * TOP_K + j
        expert = tl.load(ids_ptr + pair)
        if expert >= 0 and expert < E:
            total += tl.load(parts_ptr + pair * D + n, mask=n < D, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * D + n, total.to(out_ptr.dtype.element_ty), mask=n < D)


@dataclass(frozen=True, slots=True)
class Tile:
    """How one grouped GEMM is cut."""

    columns: int
    depth: int  # of the reduction, per step
    num_warps: int
    num_stages: int
    programs: int  # at most, per multiprocessor: few that walk over tiles, or 16, in effect one per tile
    group: int  # row blocks that walk the columns together


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    """A configuration of the tuning table; both GEMMs share the row block."""

    rows: int
    gate_up: Tile
    down: Tile


def choose_tiles(
    num_pairs: int, num_experts: int, dim: int, inter: int, dtype: torch.dtype, device: torch.device
) -> ExpertTiles:
    rows_per_expert = INVARIANT_ROWS_PER_EXPERT if invariance.is_required() else num_pairs / num_experts
    use = tuning.find(
        "fused_experts", device, bits=8 * dtype.itemsize, rows_per_expert=rows_per_expert, dim=dim, inter=inter
    )
    return ExpertTiles(use["rows"], Tile(**use["gate_up"]), Tile(**use["down"]))


def _triton_experts(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor,
    counts: torch.Tensor | None, tiles: ExpertTiles,
) -> torch.Tensor:  # fmt: skip
    """Sort, two grouped GEMMs, sum: four launches whose grids depend on shapes alone, so they fit a CUDA graph."""
    (num_tokens, dim), top_k, (num_experts, _, inter) = x.shape, ids.shape[1], down.shape
    num_pairs, device = num_tokens * top_k, x.device
    pairs = sort_pairs(ids, num_experts, tiles.rows, counts)
    hidden = torch.empty(len(pairs.rows), inter, dtype=x.dtype, device=device)
    parts = torch.empty(num_pairs, dim, dtype=x.dtype, device=device)
    precision = "ieee" if x.dtype == torch.float32 else "tf32"
    processors = num_multiprocessors(device)
    tile = tiles.gate_up
    _gate_up_kernel[(min(len(pairs.block_experts) * triton.cdiv(inter, tile.columns), tile.programs * processors),)](
        x, descriptor(gate_up.view(-1, dim), tile.columns, tile.depth), hidden,
        pairs.rows, pairs.block_experts, pairs.num_blocks, num_pairs,
        D=dim, INTER=inter, TOP_K=top_k, PRECISION=precision,
        BLOCK_M=tiles.rows, BLOCK_N=tile.columns, BLOCK_K=tile.depth, GROUP=tile.group,
        num_warps=tile.num_warps, num_stages=tile.num_stages, **dependent_launch(device),
    )  # fmt: skip
    tile = tiles.down
    _down_kernel[(min(len(pairs.block_experts) * triton.cdiv(dim, tile.columns), tile.programs * processors),)](
        descriptor(hidden, tiles.rows, tile.depth), descriptor(down.view(-1, inter), tile.columns, tile.depth),
        weights, parts, pairs.rows, pairs.block_experts, pairs.num_blocks, num_pairs,
        D=dim, INTER=inter, PRECISION=precision,
        BLOCK_M=tiles.rows, BLOCK_N=tile.columns, BLOCK_K=tile.depth, GROUP=tile.group,
        num_warps=tile.num_warps, num_stages=tile.num_stages, **dependent_launch(device),
    )  # fmt: skip
    return sum_parts(parts, ids, num_experts)


@dataclass(frozen=True, slots=True)
class SortedPairs:
    """Pairs of token and choice, one expert after the other in blocks of rows (see _sort_kernel)."""

    rows: torch.Tensor  # [max_blocks * block] int32: the pair of each row; num_pairs in padding
    block_experts: torch.Tensor  # [max_blocks] int32
    num_blocks: torch.Tensor  # [1] int32: the blocks in use


def sort_pairs(ids: torch.Tensor, num_experts: int, block: int, counts: torch.Tensor | None) -> SortedPairs:
    """counts: [num_experts] int64, to which each expert's pairs are added; as of fused_experts"""
    num_pairs, device = ids.numel(), ids.device
    max_blocks = num_pairs // block + min(num_experts, num_pairs)  # each hit expert fills up one block at most
    pairs = SortedPairs(
        rows=torch.empty(max_blocks * block, dtype=torch.int32, device=device),
        block_experts=torch.empty(max_blocks, dtype=torch.int32, device=device),
        num_blocks=torch.empty(1, dtype=torch.int32, device=device),
    )
    _sort_kernel[(num_experts,)](
        ids, pairs.rows, pairs.block_experts, pairs.num_blocks, counts, num_pairs,
        E=num_experts, BINS=triton.next_power_of_2(num_experts + 1), BLOCK_M=block,
        CHUNK=min(8192, max(256, triton.next_power_of_2(num_pairs // 4))), HAS_COUNTS=counts is not None,
        num_warps=8, **dependent_launch(device),
    )  # fmt: skip
    return pairs


def sum_parts(parts: torch.Tensor, ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """parts [N * k, D], one row for each of ids [N, k] -> [N, D]."""
    (num_tokens, top_k), dim = ids.shape, parts.shape[1]
    out = torch.empty(num_tokens, dim, dtype=parts.dtype, device=parts.device)
    block = min(1024, triton.next_power_of_2(dim))
    _sum_kernel[(num_tokens, triton.cdiv(dim, block))](
        parts, ids, out, E=num_experts, D=dim, TOP_K=top_k, BLOCK_D=block, **dependent_launch(parts.device)
    )
    return out


@lru_cache
def num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def descriptor(matrix: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(matrix, [rows, columns])


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
        On CPU in fp32 a token's bits do not depend on the other tokens.
    Raises:  ValueError on shape, dtype or stride
    Accuracy: relative error < 1e-5 in fp32, 1e-2 in bf16 against fused_experts_reference
    Source:  DeepSeek-V2 section 2.1.2, https://arxiv.org/abs/2405.04434
    """
    check_shape("x", x, (None, None))
    num_tokens, dim = x.shape
    check_shape("down", down, (None, dim, None))
    num_experts, _, inter = down.shape
    check_shape("gate_up", gate_up, (num_experts, 2 * inter, dim))
    check_shape("ids", ids, (num_tokens, None))
    check_shape("weights", weights, (num_tokens, ids.shape[1]))
    check_dtype("ids", ids, torch.int32)
    check_dtype("weights", weights, torch.float32)
    for name, tensor in (("x", x), ("ids", ids), ("weights", weights)):
        check_contiguous(name, tensor)
    check_dtype("gate_up", gate_up, x.dtype)
    check_dtype("down", down, x.dtype)
    check_contiguous("gate_up", gate_up)
    check_contiguous("down", down)
    if counts is not None:
        check_shape("counts", counts, (num_experts,))
        check_dtype("counts", counts, torch.int64)
    if ids.numel() == 0:
        return torch.zeros_like(x)
    if not use_triton(x, backend):
        if counts is not None:
            counts += torch.bincount(ids[ids >= 0], minlength=num_experts)
        return _torch_experts(x, gate_up, down, ids, weights)
    if dim * x.element_size() % 16 or inter * x.element_size() % 16:
        raise ValueError(f"x: rows of {dim} and {inter} values must be multiples of 16 bytes for the Triton kernel")
    tiles = choose_tiles(ids.numel(), num_experts, dim, inter, x.dtype, x.device)
    return _triton_experts(x, gate_up, down, ids, weights, counts, tiles)
