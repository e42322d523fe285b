"""The last step of MLA decode: what several programs found for one row becomes its result."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.dependent_launch import dependent_launch, wait_for_previous
from kernels.mla_decode_plan import MIN_SEGMENT_TILES, PLAN_TILE, TritonDecodePlan, segment_of


def merge(plan: TritonDecodePlan, partial: torch.Tensor, partial_lse: torch.Tensor, out: torch.Tensor) -> None:
    """Fill the rows of out [N, H, V] that no program finished alone, and 0 for rows without keys.

    partial [entries, H, V] and partial_lse [entries, H], fp32: the result and the log-sum-exp of a row's part. In equal
    shares a program has two entries, for a row that began before its share and one that goes on after it; else one.
    """
    num_rows, num_heads, value_dim = out.shape
    # Few rows may have many splits each: then the splits are loaded together, else the row's columns.
    splits, columns = (64, 64) if num_rows * num_heads <= 128 else (4, 512)
    if plan.num_segments:
        splits, columns = plan.num_segments, 256
    _merge_kernel[(num_rows, num_heads, triton.cdiv(value_dim, columns))](
        partial,
        partial_lse,
        plan.tile_starts,
        plan.row_lens,
        out,
        num_rows,
        plan.num_programs,
        NUM_HEADS=num_heads,
        VALUE_DIM=value_dim,
        SPLITS=splits,
        COLUMNS=columns,
        SEGMENTS=plan.num_segments,
        PLAN_TILE=PLAN_TILE,
        MIN_TILES=MIN_SEGMENT_TILES,
        num_warps=4,
        **dependent_launch(out.device),
    )


@triton.jit(do_not_specialize=["num_rows", "num_programs"])
def _merge_kernel(
    partial,
    partial_lse,
    tile_starts,
    row_lens,
    out,
    num_rows,
    num_programs,
    NUM_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    PLAN_TILE: tl.constexpr,
    MIN_TILES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Rows that several programs attended: weigh their results by the log-sum-exp. Rows without keys: 0."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    in_row = column < VALUE_DIM
    target = out + (row.to(tl.int64) * NUM_HEADS + head) * VALUE_DIM + column
    wait_for_previous(PDL)
    if SEGMENTS == 0:
        row_start = tl.load(tile_starts + row)
        row_end = tl.load(tile_starts + row + 1)
    else:
        row_start = 0
        row_end = (tl.load(row_lens + row) + PLAN_TILE - 1) // PLAN_TILE
    if row_start == row_end:
        tl.store(target, tl.zeros([COLUMNS], out.dtype.element_ty), mask=in_row)
    else:
        if SEGMENTS == 0:
            share = (tl.load(tile_starts + num_rows) + num_programs - 1) // num_programs
            first = row_start // share
            last = (row_end - 1) // share
        else:
            _, share = segment_of(tl.load(row_lens + row), 0, SEGMENTS, PLAN_TILE, MIN_TILES)
            first = row * SEGMENTS
            last = first + (row_end - 1) // share
        if first < last:
            maximum = float("-inf")
            total = 0.0
            merged = tl.zeros([COLUMNS], tl.float32)
            for start in range(first, last + 1, SPLITS):
                program = start + tl.arange(0, SPLITS)
                is_split = program <= last
                entry = program if SEGMENTS > 0 else program * 2 + (program == first).to(tl.int32)
                entry = entry * NUM_HEADS + head
                lse = tl.load(partial_lse + entry, mask=is_split, other=float("-inf"))
                results = partial + entry[:, None].to(tl.int64) * VALUE_DIM + column[None, :]
                results = tl.load(results, mask=is_split[:, None] & in_row[None, :], other=0.0)
                new_maximum = tl.maximum(maximum, tl.max(lse, axis=0))
                weights = tl.exp2(lse - new_maximum)
                decay = tl.exp2(maximum - new_maximum)
                total = total * decay + tl.sum(weights, axis=0)
                merged = merged * decay + tl.sum(weights[:, None] * results, axis=0)
                maximum = new_maximum
            tl.store(target, (merged / total).to(out.dtype.element_ty), mask=in_row)
