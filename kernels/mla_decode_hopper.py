"""MLA decode on Hopper, in Gluon: cache tiles arrive by bulk copies while the matrix unit works on the tile before.

Same work split, operands and results as `_decode_kernel` in mla_decode.py, which serves every other case.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.fp8_entry import Fp8Entry
from kernels.mla_decode_plan import MIN_SEGMENT_TILES, TritonDecodePlan

TILE = 64  # keys: the M of the matrix unit's instruction
_ROPE_DIM = 64
# Columns widened before their products begin: on an H200 half of them is 10% faster than a quarter with 16 heads, 2%
# slower with 64.
_FP8_PART = {16: 256, 32: 256, 64: 128}
_CACHE_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
_FP8_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
# Triton 3.6 has the older name only, 3.9 the newer.
_bulk_copy = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared


def supports(q: torch.Tensor, cache: torch.Tensor, value_dim: int) -> bool:
    """The served shapes: R = 512, rope 64, 16 bits, whole tiles in a block, on compute capability 9. FP8 entries
    become bfloat16, so there q is that."""
    return (
        q.is_cuda
        and torch.cuda.get_device_capability(q.device)[0] == 9
        and q.element_size() == 2
        and (value_dim, q.shape[2] - value_dim) == (512, _ROPE_DIM)
        and (cache.dtype != torch.uint8 or q.dtype == torch.bfloat16)
        and cache.shape[1] % TILE == 0
        and cache.data_ptr() % 16 == 0
    )


def launch(
    q: torch.Tensor,
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    plan: TritonDecodePlan,
    results: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    scale: float,
    heads_per_program: int,
) -> None:
    """Fill the rows of `results` (out, partial, partial_lse) that the plan deals out; scale: times log2(e)."""
    num_rows, num_heads, dim = q.shape
    value_dim = dim - _ROPE_DIM
    num_groups = -(-num_heads // heads_per_program)
    if is_fp8 := cache.dtype == torch.uint8:
        values, ropes, scales = Fp8Entry(value_dim, _ROPE_DIM, q.dtype).views(cache.flatten(0, 1))
    else:
        values, ropes, scales = cache.flatten(0, 1), cache.flatten(0, 1)[:, value_dim:], cache
    _decode_kernel[(plan.num_programs * num_groups,)](
        q, _rows(values, value_dim, _FP8_LAYOUT if is_fp8 else _CACHE_LAYOUT), _rows(ropes, _ROPE_DIM, _CACHE_LAYOUT),
        scales, block_tables, *plan.work, *results, scale,
        num_rows, plan.num_programs, block_tables.stride(0), q.stride(0), q.stride(1),
        NUM_HEADS=num_heads, VALUE_DIM=value_dim, ROPE_DIM=_ROPE_DIM, BLOCK_SIZE=cache.shape[1],
        HEADS=heads_per_program, KEYS=TILE, KEY_AXIS=1 if heads_per_program == 64 else 0,
        IS_FP8=is_fp8, SCALE_STRIDE=scales.stride(0) if is_fp8 else 0, FP8_PART=_FP8_PART[heads_per_program],
        SEGMENTS=plan.num_segments, MIN_TILES=MIN_SEGMENT_TILES, launch_pdl=True,
        num_warps=8 if heads_per_program == 64 else 4,
    )  # fmt: skip


def _rows(part: torch.Tensor, width: int, layout: gl.NVMMASharedLayout) -> TensorDescriptor:
    """Tiles of rows out of a part of the cache's entries [slots, width]."""
    return TensorDescriptor(part, [part.shape[0], width], list(part.stride()), [TILE, width], layout)


@gluon.jit
def _copy_tile(value_rows, rope_rows, table, token, values, ropes, arrived, BLOCK_SIZE: gl.constexpr):
    """Start the copy of the tile of tokens that begins at `token`; `arrived` completes with it. Returns its slot."""
    slot = gl.load(table + token // BLOCK_SIZE) * BLOCK_SIZE + token % BLOCK_SIZE
    VALUE_BYTES: gl.constexpr = values.shape[1] * values.dtype.primitive_bitwidth // 8
    mbarrier.expect(arrived, values.shape[0] * (VALUE_BYTES + ropes.shape[1] * 2))
    _bulk_copy(value_rows, [slot, 0], arrived, values)
    _bulk_copy(rope_rows, [slot, 0], arrived, ropes)
    return slot


@gluon.jit
def _zero_rows(buffer, first, WIDTH: gl.constexpr):
    """Zero the rows from `first` on: slots past a sequence's end may hold NaN, which a weight of 0 does not silence."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    row = gl.arange(0, buffer.shape[0], gl.SliceLayout(1, layout))
    NUM_COLUMNS: gl.constexpr = buffer.shape[1]
    for column in gl.static_range(0, NUM_COLUMNS, WIDTH):
        part = buffer.slice(column, WIDTH, dim=1)
        kept = part.load(layout)
        part.store(gl.where((row < first)[:, None], kept, gl.zeros_like(kept)))


@gluon.jit
def _widen(raw, wide):
    """wide (bf16) = raw (e4m3); scales are applied elsewhere.

    An e4m3 moved into bf16's bits, s0000eeee mmm0000, is its value times 2^(7 - 127), exactly; NaN becomes 480.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    values = gl.inline_asm_elementwise(
        """
        {
        .reg .b32 low, high, low_sign, high_sign, power;
        mov.b32 power, 0x7b807b80;
        prmt.b32 low_sign, $2, 0, 0x1404;
        prmt.b32 high_sign, $2, 0, 0x3424;
        shr.b32 low, low_sign, 4;
        shr.b32 high, high_sign, 4;
        and.b32 low, low, 0x07f007f0;
        and.b32 high, high, 0x07f007f0;
        lop3.b32 low, low_sign, 0x80008000, low, 0xea;
        lop3.b32 high, high_sign, 0x80008000, high, 0xea;
        mul.rn.bf16x2 $0, low, power;
        mul.rn.bf16x2 $1, high, power;
        }
        """,
        "=r,=r,r",
        [raw.load(layout).to(gl.uint8, bitcast=True)],
        dtype=gl.bfloat16,
        is_pure=True,
        pack=4,
    )
    wide.store(values)


@gluon.jit
def _value_scores(raw, wide, q_value, no_scores, KEY_AXIS: gl.constexpr, PART: gl.constexpr):
    """Scores of an FP8 tile's latents, still being computed, and the tile in bf16: widening runs beside the products.

    Whatever an unused slot holds becomes a finite number, which the mask and a weight of 0 silence.
    """
    scores = no_scores
    NUM_COLUMNS: gl.constexpr = raw.shape[1]
    for column in gl.static_range(0, NUM_COLUMNS, PART):
        part = wide.slice(column, PART, dim=1)
        q_part = q_value.slice(column, PART, dim=1)
        _widen(raw.slice(column, PART, dim=1), part)
        fence_async_shared()
        if KEY_AXIS == 0:
            scores = warpgroup_mma(part, q_part.permute((1, 0)), scores, use_acc=column > 0, is_async=True)
        else:
            scores = warpgroup_mma(q_part, part.permute((1, 0)), scores, use_acc=column > 0, is_async=True)
    return scores


@gluon.jit
def _load_query(q_row, head, column_start, target, head_stride, NUM_HEADS: gl.constexpr):
    """target [HEADS, WIDTH] = q[row, head, column_start:]; heads past the last are 0."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    heads = head + gl.arange(0, target.shape[0], gl.SliceLayout(1, layout))
    column = column_start + gl.arange(0, target.shape[1], gl.SliceLayout(0, layout))
    pointers = q_row + heads[:, None] * head_stride + column[None, :]
    target.store(gl.load(pointers, mask=(heads < NUM_HEADS)[:, None], other=0.0))


@gluon.jit
def _segment_of(length, segment, MAX_SEGMENTS: gl.constexpr, KEYS: gl.constexpr, MIN_TILES: gl.constexpr):
    """As segment_of in mla_decode_plan.py."""
    num_tiles = (length + KEYS - 1) // KEYS
    num_segments = gl.maximum(gl.minimum(MAX_SEGMENTS, (num_tiles + MIN_TILES - 1) // MIN_TILES), 1)
    share = (num_tiles + num_segments - 1) // num_segments
    first = gl.minimum(segment * share, num_tiles)
    return first, gl.minimum(first + share, num_tiles)


@gluon.jit(do_not_specialize=["num_rows", "num_programs", "table_stride"])
def _decode_kernel(
    q,
    value_rows,
    rope_rows,
    scale_rows,
    block_tables,
    row_sequences,
    row_lens,
    tile_starts,
    first_rows,
    out,
    partial,
    partial_lse,
    scale,
    num_rows,
    num_programs,
    table_stride,
    q_row_stride,
    q_head_stride,
    NUM_HEADS: gl.constexpr,
    VALUE_DIM: gl.constexpr,
    ROPE_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    HEADS: gl.constexpr,
    KEYS: gl.constexpr,
    KEY_AXIS: gl.constexpr,
    IS_FP8: gl.constexpr,
    SCALE_STRIDE: gl.constexpr,
    FP8_PART: gl.constexpr,
    SEGMENTS: gl.constexpr,
    MIN_TILES: gl.constexpr,
):
    """One share of the tiles for one group of heads. Of two tiles of shared memory one is filled while the other is
    worked on; each is read in place as keys (rows) and as values (columns).

    KEY_AXIS 0: scores are [KEYS, HEADS], the numerator is [VALUE_DIM, HEADS]. The matrix unit's 64 rows are then keys
    and values, so that 16 heads waste nothing.
    KEY_AXIS 1: scores are [HEADS, KEYS], the numerator is [HEADS, VALUE_DIM]. 64 heads fill the rows themselves; a
    head's softmax stays within a warp's rows, and P V reads less shared memory per operation.
    IS_FP8: an arrived tile is first widened to bf16, exactly; a token's scale is applied to its score and its weight.
    """
    dtype: gl.constexpr = q.dtype.element_ty
    warps: gl.constexpr = gl.num_warps()
    HEAD_AXIS: gl.constexpr = 1 - KEY_AXIS
    groups: gl.constexpr = warps // 4
    width: gl.constexpr = HEADS if KEY_AXIS == 0 else KEYS
    score_shape: gl.constexpr = [KEYS, HEADS] if KEY_AXIS == 0 else [HEADS, KEYS]
    value_shape: gl.constexpr = [VALUE_DIM, HEADS] if KEY_AXIS == 0 else [HEADS, VALUE_DIM]
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, groups], [16, width // groups, 16])
    value_layout: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0],
        [warps, 1] if KEY_AXIS == 0 else [4, groups],
        [16, HEADS, 16] if KEY_AXIS == 0 else [16, VALUE_DIM // groups, 16],
    )
    cache_layout: gl.constexpr = rope_rows.layout
    weight_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(score_shape, dtype)

    values = gl.allocate_shared_memory(value_rows.dtype, [2, KEYS, VALUE_DIM], value_rows.layout)
    if IS_FP8:
        wide_values = gl.allocate_shared_memory(dtype, [KEYS, VALUE_DIM], cache_layout)
    ropes = gl.allocate_shared_memory(dtype, [2, KEYS, ROPE_DIM], cache_layout)
    q_value = gl.allocate_shared_memory(dtype, [HEADS, VALUE_DIM], cache_layout)
    q_rope = gl.allocate_shared_memory(dtype, [HEADS, ROPE_DIM], cache_layout)
    weight_tile = gl.allocate_shared_memory(dtype, score_shape, weight_layout)
    arrived = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(arrived.index(0), count=1)
    mbarrier.init(arrived.index(1), count=1)
    fence_async_shared()
    gdc_launch_dependents()  # a dependent launch, see dependent_launch.py
    gdc_wait()

    NUM_GROUPS: gl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    program = gl.program_id(0) // NUM_GROUPS
    first_head = gl.program_id(0) % NUM_GROUPS * HEADS
    if SEGMENTS == 0:
        num_tiles = gl.load(tile_starts + num_rows)
        share = (num_tiles + num_programs - 1) // num_programs
        first_tile = program * share
        last_tile = gl.minimum(first_tile + share, num_tiles)
        row = gl.load(first_rows + program)
    else:
        row = program // SEGMENTS
        first_tile, last_tile = _segment_of(gl.load(row_lens + row), program % SEGMENTS, SEGMENTS, KEYS, MIN_TILES)

    key = gl.arange(0, KEYS, gl.SliceLayout(HEAD_AXIS, score_layout))
    maximum = gl.full([HEADS], float("-inf"), gl.float32, gl.SliceLayout(KEY_AXIS, score_layout))
    denominator = gl.zeros(score_shape, gl.float32, score_layout)
    numerator = gl.zeros(value_shape, gl.float32, value_layout)
    no_scores = gl.zeros(score_shape, gl.float32, score_layout)

    token = 0
    length = 0
    slot = 0
    table = block_tables
    if first_tile < last_tile:
        token = first_tile * KEYS
        if SEGMENTS == 0:
            token -= gl.load(tile_starts + row) * KEYS
        length = gl.load(row_lens + row)
        table = block_tables + gl.load(row_sequences + row).to(gl.int64) * table_stride
        slot = _copy_tile(
            value_rows, rope_rows, table, token, values.index(0), ropes.index(0), arrived.index(0), BLOCK_SIZE
        )
        q_row = q + row.to(gl.int64) * q_row_stride
        _load_query(q_row, first_head, 0, q_value, q_head_stride, NUM_HEADS)
        _load_query(q_row, first_head, VALUE_DIM, q_rope, q_head_stride, NUM_HEADS)
        fence_async_shared()
    began_here = token == 0

    for tile in range(first_tile, last_tile):
        stage = (tile - first_tile) % 2
        phase = (tile - first_tile) // 2 % 2
        ends_row = token + KEYS >= length
        next_row = row
        next_token = token + KEYS
        next_length = length
        next_table = table
        next_slot = slot
        if IS_FP8:
            token_scales = gl.load(scale_rows + (slot + key).to(gl.int64) * SCALE_STRIDE)
        if tile + 1 < last_tile:
            if ends_row:
                next_token = 0
                next_row = row + 1
                next_length = gl.load(row_lens + next_row)
                while next_length == 0:
                    next_row += 1
                    next_length = gl.load(row_lens + next_row)
                next_table = block_tables + gl.load(row_sequences + next_row).to(gl.int64) * table_stride
            next_slot = _copy_tile(
                value_rows,
                rope_rows,
                next_table,
                next_token,
                values.index(1 - stage),
                ropes.index(1 - stage),
                arrived.index(1 - stage),
                BLOCK_SIZE,
            )
        tile_ropes = ropes.index(stage)
        mbarrier.wait(arrived.index(stage), phase)
        num_keys = length - token
        if num_keys < KEYS:
            _zero_rows(tile_ropes, num_keys, ROPE_DIM)
        if IS_FP8:
            tile_values = wide_values
            token_scales = gl.where(key < num_keys, token_scales, 0.0)
            scores = _value_scores(values.index(stage), tile_values, q_value, no_scores, KEY_AXIS, FP8_PART)
        else:
            tile_values = values.index(stage)
            if num_keys < KEYS:
                _zero_rows(tile_values, num_keys, 64)
                fence_async_shared()
            if KEY_AXIS == 0:
                scores = warpgroup_mma(tile_values, q_value.permute((1, 0)), no_scores, use_acc=False, is_async=True)
            else:
                scores = warpgroup_mma(q_value, tile_values.permute((1, 0)), no_scores, use_acc=False, is_async=True)
        if KEY_AXIS == 0:
            scores = warpgroup_mma(tile_ropes, q_rope.permute((1, 0)), scores, is_async=True)
        else:
            scores = warpgroup_mma(q_rope, tile_ropes.permute((1, 0)), scores, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[scores]) * scale
        if IS_FP8:
            scores = scores * gl.expand_dims(token_scales, HEAD_AXIS)
        scores = gl.where(gl.expand_dims(key < num_keys, HEAD_AXIS), scores, float("-inf"))
        new_maximum = gl.maximum(maximum, gl.max(scores, axis=KEY_AXIS))
        decay = gl.exp2(maximum - new_maximum)
        weights = gl.exp2(scores - gl.expand_dims(new_maximum, KEY_AXIS))
        maximum = new_maximum
        # Summed over the keys at the row's end only: such a sum crosses warps.
        denominator = denominator * gl.expand_dims(decay, KEY_AXIS) + weights
        if IS_FP8:
            weights = weights * gl.expand_dims(token_scales, HEAD_AXIS)
        weight_tile.store(weights.to(dtype))
        fence_async_shared()
        numerator_decay = gl.convert_layout(decay, gl.SliceLayout(KEY_AXIS, value_layout))
        numerator = numerator * gl.expand_dims(numerator_decay, KEY_AXIS)
        if KEY_AXIS == 0:
            numerator = warpgroup_mma(tile_values.permute((1, 0)), weight_tile, numerator, is_async=True)
        else:
            numerator = warpgroup_mma(weight_tile, tile_values, numerator, is_async=True)
        numerator = warpgroup_mma_wait(0, deps=[numerator])

        if ends_row or tile + 1 == last_tile:
            total = gl.sum(denominator, axis=KEY_AXIS)
            divisor = gl.convert_layout(total, gl.SliceLayout(KEY_AXIS, value_layout))
            result = numerator / gl.expand_dims(divisor, KEY_AXIS)
            head = first_head + gl.arange(0, HEADS, gl.SliceLayout(KEY_AXIS, value_layout))
            column = gl.expand_dims(gl.arange(0, VALUE_DIM, gl.SliceLayout(HEAD_AXIS, value_layout)), HEAD_AXIS)
            is_head = gl.expand_dims(head < NUM_HEADS, KEY_AXIS)
            if ends_row and began_here:
                target = gl.expand_dims(row.to(gl.int64) * NUM_HEADS + head, KEY_AXIS) * VALUE_DIM + column
                gl.store(out + target, result.to(dtype), mask=is_head)
            else:
                # A program has at most two such ends: one that began before its share, one that goes on after it.
                entry = (program if SEGMENTS > 0 else program * 2 + gl.where(began_here, 1, 0)) * NUM_HEADS
                target = gl.expand_dims((entry + head).to(gl.int64), KEY_AXIS) * VALUE_DIM + column
                gl.store(partial + target, result, mask=is_head)
                lse_head = first_head + gl.arange(0, HEADS, gl.SliceLayout(KEY_AXIS, score_layout))
                gl.store(partial_lse + entry + lse_head, maximum + gl.log2(total), mask=lse_head < NUM_HEADS)
            began_here = next_token == 0
            if tile + 1 < last_tile:
                q_row = q + next_row.to(gl.int64) * q_row_stride
                _load_query(q_row, first_head, 0, q_value, q_head_stride, NUM_HEADS)
                _load_query(q_row, first_head, VALUE_DIM, q_rope, q_head_stride, NUM_HEADS)
                fence_async_shared()
            maximum = gl.full([HEADS], float("-inf"), gl.float32, gl.SliceLayout(KEY_AXIS, score_layout))
            denominator = gl.zeros(score_shape, gl.float32, score_layout)
            numerator = gl.zeros(value_shape, gl.float32, value_layout)
        row = next_row
        token = next_token
        length = next_length
        table = next_table
        slot = next_slot
