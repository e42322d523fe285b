"""What the kinds of experts share: pairs sorted by expert, the tiles of two grouped GEMMs over them, shares summed.

A pair is a token and one of its choices: the j-th of token n's k choices is pair n * k + j.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels import invariance, tuning
from kernels.checks import check_contiguous, check_dtype, check_shape
from kernels.dependent_launch import dependent_launch, wait_for_previous

_INVARIANT_ROWS_PER_EXPERT = 64.0  # whose tiles serve any number of rows, where its bits must not depend on it


def check_pairs(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor | None, num_experts: int
) -> None:
    """Raise ValueError unless x [N, D], ids [N, k] int32, weights [N, k] fp32 are contiguous, counts [E] int64."""
    check_shape("ids", ids, (x.shape[0], None))
    check_shape("weights", weights, (x.shape[0], ids.shape[1]))
    check_dtype("ids", ids, torch.int32)
    check_dtype("weights", weights, torch.float32)
    for name, tensor in (("x", x), ("ids", ids), ("weights", weights)):
        check_contiguous(name, tensor)
    if counts is not None:
        check_shape("counts", counts, (num_experts,))
        check_dtype("counts", counts, torch.int64)


@dataclass(frozen=True, slots=True)
class SortedPairs:
    """Pairs, one expert after the other in blocks of rows (see _sort_kernel)."""

    rows: torch.Tensor  # [max_blocks * block] int32: the pair of each row; num_pairs in padding
    block_experts: torch.Tensor  # [max_blocks] int32
    num_blocks: torch.Tensor  # [1] int32: the blocks in use


@dataclass(frozen=True, slots=True)
class Tile:
    """How one grouped GEMM is cut."""

    columns: int
    depth: int  # of the reduction, per step
    num_warps: int
    num_stages: int
    programs: int  # at most, per multiprocessor: few that walk over tiles, or 16, in effect one per tile
    group: int  # row blocks that walk the columns together

    def grid(self, pairs: SortedPairs, num_columns: int) -> tuple[int]:
        """Programs for pairs.rows x num_columns: by shapes alone, so that the launch fits a CUDA graph."""
        num_tiles = len(pairs.block_experts) * triton.cdiv(num_columns, self.columns)
        return (min(num_tiles, self.programs * _num_multiprocessors(pairs.rows.device)),)

    def options(self, device: torch.device) -> dict[str, Any]:
        return {
            "GROUP": self.group, "num_warps": self.num_warps, "num_stages": self.num_stages, **dependent_launch(device)
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    """A configuration of the tuning table; both GEMMs share the row block."""

    rows: int
    gate_up: Tile
    down: Tile


def choose_tiles(kernel: str, num_pairs: int, num_experts: int, device: torch.device, **shape: int) -> ExpertTiles:
    """`shape`: what else the kernel's entries of the tuning table are told apart by."""
    rows_per_expert = _INVARIANT_ROWS_PER_EXPERT if invariance.is_required() else num_pairs / num_experts
    use = tuning.find(kernel, device, rows_per_expert=rows_per_expert, **shape)
    return ExpertTiles(use["rows"], Tile(**use["gate_up"]), Tile(**use["down"]))


@lru_cache
def _num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def descriptor(matrix: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(matrix, [rows, columns])


def sort_pairs(ids: torch.Tensor, num_experts: int, block: int, counts: torch.Tensor | None) -> SortedPairs:
    """ids [N, k] int32; counts: [num_experts] int64, to which each expert's pairs are added, or None"""
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
    """parts [N * k, D], one row for each of ids [N, k] -> [N, D]; in fp32, or in fp64 if the parts are."""
    (num_tokens, top_k), dim = ids.shape, parts.shape[1]
    out = torch.empty(num_tokens, dim, dtype=parts.dtype, device=parts.device)
    block = min(1024, triton.next_power_of_2(dim))
    _sum_kernel[(num_tokens, triton.cdiv(dim, block))](
        parts, ids, out, E=num_experts, D=dim, TOP_K=top_k, BLOCK_D=block, IS_WIDE=parts.dtype == torch.float64,
        **dependent_launch(parts.device),
    )  # fmt: skip
    return out


def add_counts(counts: torch.Tensor | None, ids: torch.Tensor) -> None:
    """counts [E] int64 += how often ids [N, k] name each expert: what sort_pairs does, without a kernel."""
    if counts is not None:
        counts += torch.bincount(ids[ids >= 0], minlength=len(counts))


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


@triton.jit
def _sum_kernel(
    parts_ptr, ids_ptr, out_ptr,
    E: tl.constexpr, D: tl.constexpr, TOP_K: tl.constexpr, BLOCK_D: tl.constexpr, IS_WIDE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out[n] = sum_j parts[n, j] in the order of j, leaving out pairs without an expert."""
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    SUM: tl.constexpr = tl.float64 if IS_WIDE else tl.float32
    total = tl.zeros([BLOCK_D], SUM)
    wait_for_previous(PDL)
    for j in tl.static_range(TOP_K):
        pair = token * TOP_K + j
        expert = tl.load(ids_ptr + pair)
        if expert >= 0 and expert < E:
            total += tl.load(parts_ptr + pair * D + n, mask=n < D, other=0.0).to(SUM)
    tl.store(out_ptr + token * D + n, total.to(out_ptr.dtype.element_ty), mask=n < D)
