"""Causal MLA prefill on Hopper, in Gluon: the matrix unit multiplies P V while the next scores' softmax runs.

Same operands and results as `_prefill_kernel` in mla_prefill.py, which serves every other case.
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

_QUERIES = 128
_KEYS = 128
_NOPE_DIM, _ROPE_DIM, _VALUE_DIM = 128, 64, 128
_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


def supports(q: torch.Tensor, k_nope: torch.Tensor, k_rope: torch.Tensor, v: torch.Tensor) -> bool:
    """The served shapes: nope 128, rope 64, value 128, 16 bits, rows aligned for bulk copies, compute capability 9."""
    return (
        q.is_cuda
        and torch.cuda.get_device_capability(q.device)[0] == 9
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
    max_query_len: int,
    out: torch.Tensor,
) -> None:
    """Fill the rows of `out` that belong to a sequence; scale: times log2(e)."""
    num_heads = q.shape[1]
    num_tiles = -(-max_query_len // _QUERIES)
    _prefill_kernel[(num_heads, num_tiles, query_starts.shape[0] - 1)](
        _per_head(q, _QUERIES, _NOPE_DIM),
        _per_head(q, _QUERIES, _ROPE_DIM),
        _per_head(k_nope, _KEYS, _NOPE_DIM),
        TensorDescriptor.from_tensor(k_rope, [_KEYS, _ROPE_DIM], _LAYOUT),
        _per_head(v, _KEYS, _VALUE_DIM),
        query_starts,
        key_starts,
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
        num_warps=8,
    )


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


@gluon.jit(do_not_specialize=["num_tiles"])
def _prefill_kernel(
    q_nope_rows,
    q_rope_rows,
    k_nope_rows,
    k_rope_rows,
    v_rows,
    query_starts,
    key_starts,
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
    """One tile of queries of one head of one sequence, over its key tiles from the diagonal backwards.

    scores(j+1) and P(j) V(j) are in flight together; the softmax of j+1 starts as soon as its scores are there.
    """
    dtype: gl.constexpr = q_nope_rows.dtype
    warps: gl.constexpr = gl.num_warps()
    smem: gl.constexpr = q_nope_rows.layout
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, KEYS, 16])
    value_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, VALUE_DIM, 16])
    weight_layout: gl.constexpr = gl.DotOperandLayout(0, value_layout, 2)

    head = gl.program_id(0)
    # Longest first: the last tiles see the most keys.
    first_query = (num_tiles - 1 - gl.program_id(1)) * QUERIES
    sequence = gl.program_id(2)
    query_start = gl.load(query_starts + sequence)
    num_queries = gl.load(query_starts + sequence + 1) - query_start
    key_start = gl.load(key_starts + sequence)
    num_keys = gl.load(key_starts + sequence + 1) - key_start
    first_end = num_keys - num_queries + first_query + 1  # keys that the tile's first query sees
    last_end = gl.minimum(num_keys, first_end + QUERIES - 1)
    num_steps = gl.where(first_query < num_queries, gl.maximum((last_end + KEYS - 1) // KEYS, 0), 0)

    if num_steps == 0:
        return
    q_nope = gl.allocate_shared_memory(dtype, [QUERIES, NOPE_DIM], smem)
    q_rope = gl.allocate_shared_memory(dtype, [QUERIES, ROPE_DIM], smem)
    k_nope = gl.allocate_shared_memory(dtype, [2, KEYS, NOPE_DIM], smem)
    k_rope = gl.allocate_shared_memory(dtype, [2, KEYS, ROPE_DIM], smem)
    v = gl.allocate_shared_memory(dtype, [2, KEYS, VALUE_DIM], smem)
    q_arrived = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_arrived = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    v_arrived = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_arrived, count=1)
    for i in gl.static_range(2):
        mbarrier.init(k_arrived.index(i), count=1)
        mbarrier.init(v_arrived.index(i), count=1)
    fence_async_shared()
    q_column = head * q_head_stride
    k_column = head * k_head_stride
    v_column = head * v_head_stride
    K_BYTES: gl.constexpr = KEYS * (NOPE_DIM + ROPE_DIM) * 2
    V_BYTES: gl.constexpr = KEYS * VALUE_DIM * 2
    mbarrier.expect(q_arrived, QUERIES * (NOPE_DIM + ROPE_DIM) * 2)
    tma.async_copy_global_to_shared(q_nope_rows, [query_start + first_query, q_column], q_arrived, q_nope)
    tma.async_copy_global_to_shared(q_rope_rows, [query_start + first_query, q_column + NOPE_DIM], q_arrived, q_rope)
    for i in gl.static_range(2):
        first = key_start + (num_steps - 1 - i) * KEYS
        if i < num_steps:
            mbarrier.expect(k_arrived.index(i), K_BYTES)
            tma.async_copy_global_to_shared(k_nope_rows, [first, k_column], k_arrived.index(i), k_nope.index(i))
            tma.async_copy_global_to_shared(k_rope_rows, [first, 0], k_arrived.index(i), k_rope.index(i))
            mbarrier.expect(v_arrived.index(i), V_BYTES)
            tma.async_copy_global_to_shared(v_rows, [first, v_column], v_arrived.index(i), v.index(i))

    row = gl.arange(0, QUERIES, gl.SliceLayout(1, score_layout))
    row_end = gl.minimum(first_end + row, num_keys)
    maximum = gl.full([QUERIES], float("-inf"), gl.float32, gl.SliceLayout(1, score_layout))
    denominator = gl.zeros([QUERIES], gl.float32, gl.SliceLayout(1, score_layout))
    numerator = gl.zeros([QUERIES, VALUE_DIM], gl.float32, value_layout)
    no_scores = gl.zeros([QUERIES, KEYS], gl.float32, score_layout)

    first_key = (num_steps - 1) * KEYS
    mbarrier.wait(q_arrived, 0)
    mbarrier.wait(k_arrived.index(0), 0)
    scores = warpgroup_mma(q_nope, k_nope.index(0).permute((1, 0)), no_scores, use_acc=False, is_async=True)
    scores = warpgroup_mma(q_rope, k_rope.index(0).permute((1, 0)), scores, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[scores])
    weights, maximum, denominator, decay = _softmax_step(
        scores, scale, maximum, denominator, row_end, first_key, True, dtype
    )
    if first_key + KEYS > num_keys:
        mbarrier.wait(v_arrived.index(0), 0)
        _zero_rows(v.index(0), num_keys - first_key)
        fence_async_shared()

    for step in range(1, num_steps):
        stage = step % 2
        phase = step // 2 % 2
        first_key = (num_steps - 1 - step) * KEYS
        if step + 1 < num_steps:
            # The other stage's keys have been used; its values follow below.
            next_key = key_start + first_key - KEYS
            mbarrier.expect(k_arrived.index(1 - stage), K_BYTES)
            tma.async_copy_global_to_shared(
                k_nope_rows, [next_key, k_column], k_arrived.index(1 - stage), k_nope.index(1 - stage)
            )
            tma.async_copy_global_to_shared(
                k_rope_rows, [next_key, 0], k_arrived.index(1 - stage), k_rope.index(1 - stage)
            )
        mbarrier.wait(k_arrived.index(stage), phase)
        scores = warpgroup_mma(q_nope, k_nope.index(stage).permute((1, 0)), no_scores, use_acc=False, is_async=True)
        scores = warpgroup_mma(q_rope, k_rope.index(stage).permute((1, 0)), scores, is_async=True)
        previous = (step - 1) % 2
        mbarrier.wait(v_arrived.index(previous), (step - 1) // 2 % 2)
        operand = gl.convert_layout(weights, weight_layout)
        numerator = warpgroup_mma(operand, v.index(previous), numerator, is_async=True)
        scores = warpgroup_mma_wait(1, deps=[scores])
        is_masked = first_key + KEYS > first_end
        weights, maximum, denominator, decay = _softmax_step(
            scores, scale, maximum, denominator, row_end, first_key, is_masked, dtype
        )
        numerator = warpgroup_mma_wait(0, deps=[numerator])
        if step + 1 < num_steps:
            next_value = key_start + first_key - KEYS
            mbarrier.expect(v_arrived.index(previous), V_BYTES)
            tma.async_copy_global_to_shared(
                v_rows, [next_value, v_column], v_arrived.index(previous), v.index(previous)
            )
        numerator = numerator * gl.convert_layout(decay, gl.SliceLayout(1, value_layout))[:, None]

    last = (num_steps - 1) % 2
    mbarrier.wait(v_arrived.index(last), (num_steps - 1) // 2 % 2)
    operand = gl.convert_layout(weights, weight_layout)
    numerator = warpgroup_mma(operand, v.index(last), numerator, is_async=True)
    numerator = warpgroup_mma_wait(0, deps=[numerator])

    inverse = gl.where(denominator > 0, 1.0 / denominator, 0.0)
    result = numerator * gl.convert_layout(inverse, gl.SliceLayout(1, value_layout))[:, None]
    query = first_query + gl.arange(0, QUERIES, gl.SliceLayout(1, value_layout))
    column = gl.arange(0, VALUE_DIM, gl.SliceLayout(0, value_layout))
    target = ((query_start + query).to(gl.int64) * NUM_HEADS + head) * VALUE_DIM
    gl.store(out + target[:, None] + column[None, :], result.to(dtype), mask=(query < num_queries)[:, None])
