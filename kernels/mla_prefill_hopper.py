"""Causal MLA prefill on Hopper, in Gluon: two consumer warp groups over the keys that a producer warp copies in.

Each consumer owns half of a tile's queries. Its matrix products are asynchronous: P V of one key tile and the scores
of the next run under a softmax, its own or the other consumer's. Same operands and results as `_prefill_kernel` in
mla_prefill.py, which serves every other case.
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

_QUERIES = 64  # of one consumer: the M of the matrix unit's instruction
_KEYS = 128
_NOPE_DIM, _ROPE_DIM, _VALUE_DIM = 128, 64, 128
_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
# Triton 3.6 has the older name only, 3.9 the newer.
_bulk_copy = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared


def is_device(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def supports(q: torch.Tensor, k_nope: torch.Tensor, k_rope: torch.Tensor, v: torch.Tensor) -> bool:
    """The served shapes: nope 128, rope 64, value 128, 16 bits, rows aligned for bulk copies, compute capability 9."""
    return (
        is_device(q.device)
        and q.element_size() == 2
        and (k_nope.shape[2], k_rope.shape[1], v.shape[2]) == (_NOPE_DIM, _ROPE_DIM, _VALUE_DIM)
        and min(q.shape[0], k_nope.shape[0]) > 0
        and all(t.data_ptr() % 16 == 0 and all(s % 8 == 0 for s in t.stride()[:-1]) for t in (q, k_nope, k_rope, v))
    )


def launch(
    q: torch.Tensor,
    k_nope: torch.Tensor,
    k_rope: torch.Tensor,
    v: torch.Tensor,
    query_starts: torch.Tensor,
    key_starts: torch.Tensor,
    scale: float,
    tiles: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Fill the rows of `out` that belong to a sequence; scale: times log2(e); tiles: of `plan_tiles`, if they exist."""
    if tiles is None:
        tiles = plan_tiles(query_starts, key_starts, q.shape[0])
    num_heads, num_tiles = q.shape[1], tiles.shape[0]
    num_multiprocessors = torch.cuda.get_device_properties(q.device).multi_processor_count
    _prefill_kernel[(min(num_multiprocessors, num_tiles * num_heads),)](
        _per_head(q, _QUERIES, _NOPE_DIM),
        _per_head(q, _QUERIES, _ROPE_DIM),
        _per_head(k_nope, _KEYS, _NOPE_DIM),
        TensorDescriptor.from_tensor(k_rope, [_KEYS, _ROPE_DIM], _LAYOUT),
        _per_head(v, _KEYS, _VALUE_DIM),
        query_starts,
        key_starts,
        tiles,
        out,
        scale,
        num_tiles,
        q.stride(1),
        k_nope.stride(1),
        v.stride(1),
        NUM_HEADS=num_heads,
        NOPE_DIM=_NOPE_DIM,
        ROPE_DIM=_ROPE_DIM,
        VALUE_DIM=_VALUE_DIM,
        QUERIES=_QUERIES,
        KEYS=_KEYS,
        num_warps=4,
    )


def plan_tiles(query_starts: torch.Tensor, key_starts: torch.Tensor, num_queries: int) -> torch.Tensor:
    """What the kernel works on, computed on the device: tiles of 2 * _QUERIES queries, those that see most keys first.

    num_queries: at least query_starts[-1]
    Returns: [num_tiles] int64, keys << 32 | sequence << 16 | tile of it; then zeros. Tiles without a key are left out.
    """
    size, num_sequences = 2 * _QUERIES, query_starts.shape[0] - 1
    num_new, num_keys = query_starts.diff().long(), key_starts.diff().long()
    counts = (num_new + size - 1) // size
    ends = counts.cumsum(0)
    index = torch.arange(num_queries // size + num_sequences, device=query_starts.device)
    sequence = torch.searchsorted(ends, index, right=True).clamp_max_(num_sequences - 1)
    tile = index - (ends - counts)[sequence]
    keys = (num_keys - num_new)[sequence] + (tile + 1) * size
    keys = keys.minimum(num_keys[sequence]).clamp_min_(0) * (index < ends[-1])
    packed = torch.where(keys > 0, keys << 32 | sequence << 16 | tile, 0)
    return packed.sort(descending=True).values


def _per_head(tensor: torch.Tensor, num_rows: int, width: int) -> TensorDescriptor:
    """[N, H, D] as a matrix of N rows; head h begins at column h * stride(1)."""
    columns = (tensor.shape[1] - 1) * tensor.stride(1) + tensor.shape[2]
    return TensorDescriptor(tensor, [tensor.shape[0], columns], [tensor.stride(0), 1], [num_rows, width], _LAYOUT)


@gluon.jit
def _zero_rows(buffer, first):
    """Zero the rows from `first` on: a value past the sequence may be NaN, which a weight of 0 does not silence."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    row = gl.arange(0, buffer.shape[0], gl.SliceLayout(1, layout))
    for column in gl.static_range(0, 128, 64):
        part = buffer.slice(column, 64, dim=1)
        kept = part.load(layout)
        part.store(gl.where((row < first)[:, None], kept, gl.zeros_like(kept)))


@gluon.jit
def _softmax_step(scores, scale, maximum, denominator, row_end, first_key, is_masked, DTYPE: gl.constexpr):
    """Online softmax: (weights in 16 bits, maximum, denominator, decay of what was summed before)."""
    layout: gl.constexpr = scores.type.layout
    if is_masked:
        key = first_key + gl.arange(0, scores.shape[1], gl.SliceLayout(0, layout))
        scores = gl.where(key[None, :] < row_end[:, None], scores, float("-inf"))
    new_maximum = gl.maximum(maximum, gl.max(scores, axis=1) * scale)
    # A row that has seen no key yet keeps -inf; 0 in its place avoids -inf - -inf.
    shift = gl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    weights = gl.exp2(scores * scale - shift[:, None])
    decay = gl.exp2(maximum - shift)
    denominator = denominator * decay + gl.sum(weights, axis=1)
    return weights.to(DTYPE), new_maximum, denominator, decay


@gluon.jit
def _locate(turn, batch, NUM_HEADS: gl.constexpr, TILE: gl.constexpr, KEYS: gl.constexpr):
    """The program's tile of queries in this turn; num_steps, its key tiles, is 0 if there is none.

    Tiles come in the order of their keys, the most first, and programs take them in alternating order (0 1 2, 2 1 0,
    0 1 2), so that all get about the same number of keys.
    """
    query_starts, key_starts, tiles, num_tiles = batch
    num_programs = gl.num_programs(0)
    program = gl.program_id(0)
    work = turn * num_programs + gl.where(turn % 2 == 0, program, num_programs - 1 - program)
    packed = gl.load(tiles + gl.minimum(work // NUM_HEADS, num_tiles - 1))
    is_work = (work < num_tiles * NUM_HEADS) & (packed > 0)
    head = work % NUM_HEADS
    sequence = (packed >> 16 & 0xFFFF).to(gl.int32)
    first_query = (packed & 0xFFFF).to(gl.int32) * TILE
    query_start = gl.load(query_starts + sequence)
    num_queries = gl.load(query_starts + sequence + 1) - query_start
    key_start = gl.load(key_starts + sequence)
    num_keys = gl.load(key_starts + sequence + 1) - key_start
    first_end = num_keys - num_queries + first_query + 1  # keys that the tile's first query sees
    last_end = gl.minimum(num_keys, first_end + TILE - 1)
    num_steps = gl.where(is_work, (last_end + KEYS - 1) // KEYS, 0)
    return head, query_start, first_query, num_queries, key_start, num_keys, first_end, num_steps


@gluon.jit
def _num_turns(batch, NUM_HEADS: gl.constexpr):
    _, _, _, num_tiles = batch
    return (num_tiles * NUM_HEADS + gl.num_programs(0) - 1) // gl.num_programs(0)


@gluon.jit
def _produce(sources, head_strides, batch, buffers, barriers, NUM_HEADS: gl.constexpr):
    """Copy each tile's queries, then its keys and values from the diagonal backwards, as their buffers become free."""
    q_nope_rows, q_rope_rows, k_nope_rows, k_rope_rows, v_rows = sources
    q_head_stride, k_head_stride, v_head_stride = head_strides
    q_nope, q_rope, k_nope, k_rope, v = buffers
    q_arrived, q_free, k_arrived, k_free, v_arrived, v_free = barriers
    QUERIES: gl.constexpr = q_nope.shape[1]
    KEYS: gl.constexpr = k_nope.shape[1]
    NOPE_DIM: gl.constexpr = q_nope.shape[2]
    ROPE_DIM: gl.constexpr = q_rope.shape[2]
    VALUE_DIM: gl.constexpr = v.shape[2]
    num_turns = _num_turns(batch, NUM_HEADS)
    num_done = 0  # tiles
    num_copied = 0  # key tiles
    for turn in range(num_turns):
        head, query_start, first_query, _num_queries, key_start, _num_keys, _first_end, num_steps = _locate(
            turn, batch, NUM_HEADS, 2 * QUERIES, KEYS
        )
        if num_steps > 0:
            mbarrier.wait(q_free, (num_done & 1) ^ 1)
            mbarrier.expect(q_arrived, 2 * QUERIES * (NOPE_DIM + ROPE_DIM) * 2)
            for i in gl.static_range(2):
                row = query_start + first_query + i * QUERIES
                column = head * q_head_stride
                _bulk_copy(q_nope_rows, [row, column], q_arrived, q_nope.index(i))
                _bulk_copy(q_rope_rows, [row, column + NOPE_DIM], q_arrived, q_rope.index(i))
            num_done += 1
            for step in range(num_steps):
                stage = num_copied % 2
                phase = (num_copied // 2 & 1) ^ 1
                first = key_start + (num_steps - 1 - step) * KEYS
                k_barrier = k_arrived.index(stage)
                mbarrier.wait(k_free.index(stage), phase)
                mbarrier.expect(k_barrier, KEYS * (NOPE_DIM + ROPE_DIM) * 2)
                _bulk_copy(k_nope_rows, [first, head * k_head_stride], k_barrier, k_nope.index(stage))
                _bulk_copy(k_rope_rows, [first, 0], k_barrier, k_rope.index(stage))
                v_barrier = v_arrived.index(stage)
                mbarrier.wait(v_free.index(stage), phase)
                mbarrier.expect(v_barrier, KEYS * VALUE_DIM * 2)
                _bulk_copy(v_rows, [first, head * v_head_stride], v_barrier, v.index(stage))
                num_copied += 1


@gluon.jit
def _consume(half: gl.constexpr, out, scale, batch, buffers, barriers, NUM_HEADS: gl.constexpr):
    """Attend the queries of one half of each tile.

    In flight together: the scores of a key tile and P V of the one before; then P V and the softmax of those scores.
    """
    q_nope, q_rope, k_nope, k_rope, v = buffers
    q_arrived, q_free, k_arrived, k_free, v_arrived, v_free = barriers
    QUERIES: gl.constexpr = q_nope.shape[1]
    KEYS: gl.constexpr = k_nope.shape[1]
    VALUE_DIM: gl.constexpr = v.shape[2]
    dtype: gl.constexpr = q_nope.dtype
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    value_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, VALUE_DIM, 16])
    weight_layout: gl.constexpr = gl.DotOperandLayout(0, value_layout, 2)
    no_scores = gl.zeros([QUERIES, KEYS], gl.float32, score_layout)
    own_nope = q_nope.index(half)
    own_rope = q_rope.index(half)
    num_turns = _num_turns(batch, NUM_HEADS)
    num_done = 0  # tiles
    num_used = 0  # key tiles
    for turn in range(num_turns):
        head, query_start, first_query, num_queries, _key_start, num_keys, first_end, num_steps = _locate(
            turn, batch, NUM_HEADS, 2 * QUERIES, KEYS
        )
        if num_steps > 0:
            first_query += half * QUERIES
            first_end += half * QUERIES
            row = gl.arange(0, QUERIES, gl.SliceLayout(1, score_layout))
            row_end = gl.minimum(first_end + row, num_keys)
            maximum = gl.full([QUERIES], float("-inf"), gl.float32, gl.SliceLayout(1, score_layout))
            denominator = gl.zeros([QUERIES], gl.float32, gl.SliceLayout(1, score_layout))
            numerator = gl.zeros([QUERIES, VALUE_DIM], gl.float32, value_layout)

            stage = num_used % 2
            phase = num_used // 2 & 1
            first_key = (num_steps - 1) * KEYS
            mbarrier.wait(q_arrived, num_done & 1)
            num_done += 1
            mbarrier.wait(k_arrived.index(stage), phase)
            scores = warpgroup_mma(
                own_nope, k_nope.index(stage).permute((1, 0)), no_scores, use_acc=False, is_async=True
            )
            scores = warpgroup_mma(own_rope, k_rope.index(stage).permute((1, 0)), scores, is_async=True)
            scores = warpgroup_mma_wait(0, deps=[scores])
            mbarrier.arrive(k_free.index(stage), count=1)
            weights, maximum, denominator, decay = _softmax_step(
                scores, scale, maximum, denominator, row_end, first_key, True, dtype
            )
            if first_key + KEYS > num_keys:
                # Both consumers may do it: they write the same bits.
                mbarrier.wait(v_arrived.index(stage), phase)
                _zero_rows(v.index(stage), num_keys - first_key)
                fence_async_shared()

            for _ in range(1, num_steps):
                previous = stage
                previous_phase = phase
                num_used += 1
                stage = num_used % 2
                phase = num_used // 2 & 1
                first_key -= KEYS
                mbarrier.wait(k_arrived.index(stage), phase)
                scores = warpgroup_mma(
                    own_nope, k_nope.index(stage).permute((1, 0)), no_scores, use_acc=False, is_async=True
                )
                scores = warpgroup_mma(own_rope, k_rope.index(stage).permute((1, 0)), scores, is_async=True)
                mbarrier.wait(v_arrived.index(previous), previous_phase)
                operand = gl.convert_layout(weights, weight_layout)
                numerator = warpgroup_mma(operand, v.index(previous), numerator, is_async=True)
                scores = warpgroup_mma_wait(1, deps=[scores])
                mbarrier.arrive(k_free.index(stage), count=1)
                weights, maximum, denominator, decay = _softmax_step(
                    scores, scale, maximum, denominator, row_end, first_key, first_key + KEYS > first_end, dtype
                )
                numerator = warpgroup_mma_wait(0, deps=[numerator])
                mbarrier.arrive(v_free.index(previous), count=1)
                numerator = numerator * gl.convert_layout(decay, gl.SliceLayout(1, value_layout))[:, None]

            mbarrier.arrive(q_free, count=1)
            mbarrier.wait(v_arrived.index(stage), phase)
            operand = gl.convert_layout(weights, weight_layout)
            numerator = warpgroup_mma(operand, v.index(stage), numerator, is_async=True)
            numerator = warpgroup_mma_wait(0, deps=[numerator])
            mbarrier.arrive(v_free.index(stage), count=1)
            num_used += 1

            inverse = gl.where(denominator > 0, 1.0 / denominator, 0.0)
            result = numerator * gl.convert_layout(inverse, gl.SliceLayout(1, value_layout))[:, None]
            query = first_query + gl.arange(0, QUERIES, gl.SliceLayout(1, value_layout))
            column = gl.arange(0, VALUE_DIM, gl.SliceLayout(0, value_layout))
            target = ((query_start + query).to(gl.int64) * NUM_HEADS + head) * VALUE_DIM
            gl.store(out + target[:, None] + column[None, :], result.to(dtype), mask=(query < num_queries)[:, None])


@gluon.jit(do_not_specialize=["num_tiles"])
def _prefill_kernel(
    q_nope_rows,
    q_rope_rows,
    k_nope_rows,
    k_rope_rows,
    v_rows,
    query_starts,
    key_starts,
    tiles,
    out,
    scale,
    num_tiles,
    q_head_stride,
    k_head_stride,
    v_head_stride,
    NUM_HEADS: gl.constexpr,
    NOPE_DIM: gl.constexpr,
    ROPE_DIM: gl.constexpr,
    VALUE_DIM: gl.constexpr,
    QUERIES: gl.constexpr,
    KEYS: gl.constexpr,
):
    """Persistent: every program takes tiles of 2 * QUERIES queries of one head of one sequence in turn."""
    dtype: gl.constexpr = q_nope_rows.dtype
    smem: gl.constexpr = q_nope_rows.layout
    q_nope = gl.allocate_shared_memory(dtype, [2, QUERIES, NOPE_DIM], smem)
    q_rope = gl.allocate_shared_memory(dtype, [2, QUERIES, ROPE_DIM], smem)
    k_nope = gl.allocate_shared_memory(dtype, [2, KEYS, NOPE_DIM], smem)
    k_rope = gl.allocate_shared_memory(dtype, [2, KEYS, ROPE_DIM], smem)
    v = gl.allocate_shared_memory(dtype, [2, KEYS, VALUE_DIM], smem)
    q_arrived = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_arrived = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    v_arrived = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_arrived, count=1)
    mbarrier.init(q_free, count=2)
    for i in gl.static_range(2):
        mbarrier.init(k_arrived.index(i), count=1)
        mbarrier.init(k_free.index(i), count=2)
        mbarrier.init(v_arrived.index(i), count=1)
        mbarrier.init(v_free.index(i), count=2)
    fence_async_shared()
    batch = (query_starts, key_starts, tiles, num_tiles)
    buffers = (q_nope, q_rope, k_nope, k_rope, v)
    barriers = (q_arrived, q_free, k_arrived, k_free, v_arrived, v_free)
    sources = (q_nope_rows, q_rope_rows, k_nope_rows, k_rope_rows, v_rows)
    head_strides = (q_head_stride, k_head_stride, v_head_stride)
    gl.warp_specialize(
        [
            (_consume, (0, out, scale, batch, buffers, barriers, NUM_HEADS)),
            (_consume, (1, out, scale, batch, buffers, barriers, NUM_HEADS)),
            (_produce, (sources, head_strides, batch, buffers, barriers, NUM_HEADS)),
        ],
        worker_num_warps=[4, 1],
        worker_num_regs=[240, 24],
    )
