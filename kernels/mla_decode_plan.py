"""Which program of a decode kernel attends which keys: a plan built on the device, once per step for all layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels import invariance
from kernels.dependent_launch import dependent_launch, wait_for_previous

PLAN_TILE = 64  # keys: work is dealt out in tiles of this many
MIN_HEADS, MAX_HEADS = 16, 64  # that share a program's keys
MAX_SEGMENTS, MIN_SEGMENT_TILES = 8, 16  # of a row that is split by its own length alone


@dataclass(frozen=True, slots=True)
class TritonDecodePlan:
    """The split of all rows' keys over the programs, on the device. The tiles of all rows form one line:

    row          | 0        | 1  | 2               |
    tile_starts  0          6    8                 17
    program      | 0     | 1     | 2     | 3       |     equal shares; a share's ends may split a row
    """

    row_sequences: torch.Tensor  # [N] int32: whose keys
    row_lens: torch.Tensor  # [N] int32: how many of them the row sees
    tile_starts: torch.Tensor  # [N + 1] int32
    first_rows: torch.Tensor  # [num_programs] int32: the row of each program's first tile
    # Set where a row must be split by its own length alone: programs per row. Tiles form no line then.
    num_segments: int = 0

    @property
    def num_programs(self) -> int:
        """That share the keys, for each group of heads."""
        return len(self.row_lens) * self.num_segments if self.num_segments else len(self.first_rows)

    @property
    def work(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """In the order in which kernels take it."""
        return self.row_sequences, self.row_lens, self.tile_starts, self.first_rows


def heads_per_program(num_heads: int) -> int:
    return min(MAX_HEADS, max(MIN_HEADS, 1 << (num_heads - 1).bit_length()))


def _num_programs(device: torch.device, num_heads: int) -> int:
    """Programs that share the keys, for each group of heads: one per multiprocessor in all."""
    if device.type != "cuda":
        return 5  # interpreted: few, but enough to split sequences
    num_groups = -(-num_heads // heads_per_program(num_heads))
    num_multiprocessors: int = torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, num_multiprocessors // num_groups)


def plan_triton(
    context_lens: torch.Tensor, num_queries: int, num_heads: int, query_starts: torch.Tensor | None
) -> TritonDecodePlan:
    device = context_lens.device
    if invariance.is_required():
        return _plan_segments(context_lens, num_queries, query_starts)
    num_programs = _num_programs(device, num_heads)
    plan = TritonDecodePlan(
        row_sequences=torch.empty(num_queries, dtype=torch.int32, device=device),
        row_lens=torch.empty(num_queries, dtype=torch.int32, device=device),
        tile_starts=torch.empty(num_queries + 1, dtype=torch.int32, device=device),
        first_rows=torch.empty(num_programs, dtype=torch.int32, device=device),
    )
    _plan_kernel[(1,)](
        context_lens,
        context_lens if query_starts is None else query_starts,
        plan.row_sequences,
        plan.row_lens,
        plan.tile_starts,
        plan.first_rows,
        context_lens.shape[0],
        num_queries,
        num_programs,
        IS_RAGGED=query_starts is not None,
        TILE=PLAN_TILE,
        # Few sizes: each is compiled once, the eager ones when they are met first.
        BLOCK_ROWS=64 if num_queries <= 64 else max(1024, triton.next_power_of_2(num_queries)),
        BLOCK_PROGRAMS=triton.next_power_of_2(num_programs),
        **dependent_launch(device),
    )
    return plan


def _plan_segments(context_lens: torch.Tensor, num_queries: int, query_starts: torch.Tensor | None) -> TritonDecodePlan:
    rows = torch.arange(num_queries, dtype=torch.int32, device=context_lens.device)
    sequences, lens = rows, context_lens
    if query_starts is not None:
        sequences = torch.searchsorted(query_starts, rows, right=True, out_int32=True) - 1
        is_padding = sequences >= context_lens.shape[0]
        sequences = sequences.clamp(max=context_lens.shape[0] - 1)
        num_later = query_starts.index_select(0, sequences + 1) - 1 - rows
        lens = (context_lens.index_select(0, sequences) - num_later).clamp(min=0).masked_fill(is_padding, 0)
    return TritonDecodePlan(sequences, lens, lens, lens, MAX_SEGMENTS)


@triton.jit
def segment_of(length, segment, MAX_SEGMENTS: tl.constexpr, TILE: tl.constexpr, MIN_TILES: tl.constexpr):
    """The tiles [first, last) of a segment of a row of so many keys; the row's segments have equal shares."""
    num_tiles = (length + TILE - 1) // TILE
    num_segments = min(MAX_SEGMENTS, (num_tiles + MIN_TILES - 1) // MIN_TILES)
    share = (num_tiles + max(num_segments, 1) - 1) // max(num_segments, 1)
    first = min(segment * share, num_tiles)
    return first, min(first + share, num_tiles)


@triton.jit
def _last_at_or_before(starts, num_starts, position):
    """The last i < num_starts with starts[i] <= position, for each position; starts ascend from 0."""
    low = tl.zeros_like(position)
    high = tl.zeros_like(position) + num_starts - 1
    span = num_starts - 1
    while span > 0:
        middle = (low + high + 1) // 2
        is_in = tl.load(starts + middle) <= position
        low = tl.where(is_in, middle, low)
        high = tl.where(is_in, high, middle - 1)
        span = span // 2
    return low


@triton.jit(do_not_specialize=["num_sequences", "num_rows", "num_programs"])
def _plan_kernel(
    context_lens,
    query_starts,
    row_sequences,
    row_lens,
    tile_starts,
    first_rows,
    num_sequences,
    num_rows,
    num_programs,
    IS_RAGGED: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_PROGRAMS: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    row = tl.arange(0, BLOCK_ROWS)
    if IS_RAGGED:
        sequence = _last_at_or_before(query_starts, num_sequences + 1, row)
        has_keys = (row < num_rows) & (sequence < num_sequences)
        num_later = tl.load(query_starts + sequence + 1, mask=has_keys, other=0) - 1 - row
    else:
        sequence = row
        has_keys = row < num_rows
        num_later = tl.zeros_like(row)
    length = tl.load(context_lens + sequence, mask=has_keys, other=0)
    length = tl.where(has_keys, tl.maximum(length - num_later, 0), 0)
    ends = tl.cumsum((length + TILE - 1) // TILE, axis=0)
    tl.store(row_sequences + row, sequence, mask=row < num_rows)
    tl.store(row_lens + row, length, mask=row < num_rows)
    tl.store(tile_starts + row + 1, ends, mask=row < num_rows)
    tl.store(tile_starts, 0)
    num_tiles = tl.max(ends, axis=0)
    tl.debug_barrier()  # the search below reads tile_starts
    program = tl.arange(0, BLOCK_PROGRAMS)
    share = (num_tiles + num_programs - 1) // num_programs
    first = _last_at_or_before(tile_starts, num_rows + 1, program * share)
    tl.store(first_rows + program, first, mask=program < num_programs)
