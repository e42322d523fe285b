"""Absorbed MLA attention over the paged latent cache: one or several query tokens per sequence."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels import invariance, mla_decode_hopper, tuning
from kernels.checks import Backend, check_contiguous, check_dtype, check_last_dim_contiguous, check_shape, use_triton
from kernels.dependent_launch import dependent_launch, wait_for_previous
from kernels.fp8_entry import Fp8Entry
from kernels.mla_decode_cpu import CpuDecodePlan, decode_cpu, plan_cpu
from kernels.mla_decode_merge import merge
from kernels.mla_decode_plan import (
    MIN_HEADS,
    MIN_SEGMENT_TILES,
    PLAN_TILE,
    TritonDecodePlan,
    heads_per_program,
    plan_triton,
    segment_of,
)

_LOG2_E = 1.4426950408889634


def mla_decode_reference(
    q: torch.Tensor,
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    value_dim: int,
    *,
    query_starts: torch.Tensor | None = None,
) -> torch.Tensor:
    """The definition (see mla_decode), one query at a time in fp32; returns fp32."""
    if cache.dtype == torch.uint8:
        cache = Fp8Entry(value_dim, q.shape[2] - value_dim, q.dtype).unpack(cache)
    block_size = cache.shape[1]
    out = torch.zeros(q.shape[0], q.shape[1], value_dim, device=q.device)
    starts = list(range(len(context_lens) + 1)) if query_starts is None else query_starts.tolist()
    for i, context_len in enumerate(context_lens.tolist()):
        blocks = block_tables[i, : -(-context_len // block_size)].long()
        keys = cache[blocks].flatten(0, 1)[:context_len].float()
        for row in range(starts[i], starts[i + 1]):
            num_visible = context_len - (starts[i + 1] - 1 - row)
            if num_visible > 0:
                scores = scale * (q[row].float() @ keys[:num_visible].T)
                out[row] = torch.softmax(scores, dim=-1) @ keys[:num_visible, :value_dim]
    return out


def plan_mla_decode(
    context_lens: torch.Tensor,
    *,
    num_queries: int,
    num_heads: int,
    query_starts: torch.Tensor | None = None,
    backend: Backend | None = None,
) -> CpuDecodePlan | TritonDecodePlan:
    """What mla_decode derives from a step's lengths: compute it once and pass it to every layer.

    Args as in mla_decode; num_queries: rows of q, padding included.
    """
    if use_triton(context_lens, backend):
        return plan_triton(context_lens, num_queries, num_heads, query_starts)
    return plan_cpu(context_lens, query_starts)


def mla_decode(
    q: torch.Tensor,
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    value_dim: int,
    *,
    query_starts: torch.Tensor | None = None,
    plan: CpuDecodePlan | TritonDecodePlan | None = None,
    backend: Backend | None = None,
) -> torch.Tensor:
    """Attend query tokens to their sequence's paged latent cache, in the absorbed form of MLA.

        out[r,h] = softmax(scale * q[r,h] . c[t]) @ c[t, :value_dim],  t < visible(r)

    Query j of the n of sequence i sees its first context_lens[i] - (n - 1 - j) keys; a row that sees none gives 0,
    and so does padding (rows from query_starts[-1] on).

    Args:
        q:            [N, H, R + P]: latent part, then rope part
        cache:        [num_blocks, block_size, R + P], contiguous, dtype of q; unused slots may hold anything.
                      Or FP8 entries (fp8_entry.py), uint8; on CPU they are unpacked first
        block_tables: [B, max_blocks] int32; entries past a sequence's blocks are never read
        context_lens: [B] int32, tokens, this step's included
        scale:        applied before the softmax, in fp32
        value_dim:    R, the leading part of a cache row that is also the value
        query_starts: [B + 1] int32; None: one query per sequence, N = B
        plan:         from plan_mla_decode over the same lengths and starts; None: computed here
    Returns: [N, H, value_dim] in q's dtype, freshly allocated; fp32 accumulation
    Raises:  ValueError on shape, dtype or stride
    Invariance: on CPU a row's bits depend on its own query and keys only, not on the batch, on where its blocks lie
        or on how a prompt is cut into chunks
    Source:  DeepSeek-V2, section 2.1, https://arxiv.org/abs/2405.04434
    """
    check_shape("q", q, (None, None, None))
    check_shape("cache", cache, (None, None, None))
    check_shape("context_lens", context_lens, (block_tables.shape[0],))
    check_dtype("block_tables", block_tables, torch.int32)
    check_dtype("context_lens", context_lens, torch.int32)
    check_last_dim_contiguous("q", q)
    check_contiguous("cache", cache)
    if not 0 < value_dim <= q.shape[2]:
        raise ValueError(f"value_dim: must be in [1, {q.shape[2]}], got {value_dim}")
    entry = None
    if cache.dtype == torch.uint8:
        entry = Fp8Entry(value_dim, q.shape[2] - value_dim, q.dtype)
        entry.check(cache)
    else:
        check_dtype("cache", cache, q.dtype)
        check_shape("q", q, (None, None, cache.shape[2]))
    if query_starts is not None:
        check_shape("query_starts", query_starts, (block_tables.shape[0] + 1,))
        check_dtype("query_starts", query_starts, torch.int32)
    elif q.shape[0] != block_tables.shape[0]:
        raise ValueError(f"q: expected one row per sequence ({block_tables.shape[0]}), got {q.shape[0]}")
    if plan is None:
        plan = plan_mla_decode(
            context_lens,
            num_queries=q.shape[0],
            num_heads=q.shape[1],
            query_starts=query_starts,
            backend="triton" if use_triton(q, backend) else "torch",
        )
    if isinstance(plan, TritonDecodePlan):
        return _decode_triton(q, cache, entry, block_tables, plan, scale, value_dim)
    return decode_cpu(q, cache, entry, block_tables, context_lens, plan, scale, value_dim)


def _decode_triton(
    q: torch.Tensor,
    cache: torch.Tensor,
    entry: Fp8Entry | None,
    block_tables: torch.Tensor,
    plan: TritonDecodePlan,
    scale: float,
    value_dim: int,
) -> torch.Tensor:
    num_rows, num_heads, dim = q.shape
    out = torch.empty(num_rows, num_heads, value_dim, dtype=q.dtype, device=q.device)
    if out.numel() == 0:
        return out
    # In equal shares a program has at most two ends of rows.
    num_entries = plan.num_programs if plan.num_segments else 2 * plan.num_programs
    partial = torch.empty(num_entries, num_heads, value_dim, dtype=torch.float32, device=q.device)
    partial_lse = torch.empty(num_entries, num_heads, dtype=torch.float32, device=q.device)
    # Under invariance fp32 heads are computed alike, however many of a layer's heads there are on this rank.
    tuned_heads = MIN_HEADS if invariance.is_wide(q.dtype) else num_heads
    heads = heads_per_program(tuned_heads)
    results = (out, partial, partial_lse)
    if mla_decode_hopper.supports(q, cache, value_dim):
        mla_decode_hopper.launch(q, cache, block_tables, plan, results, scale * _LOG2_E, heads)
    else:
        launch = tuning.find("mla_decode", q.device, bits=8 * q.element_size(), num_heads=tuned_heads)
        parts = (cache, cache[..., value_dim:], cache) if entry is None else entry.views(cache)
        _decode_kernel[(plan.num_programs * triton.cdiv(num_heads, heads),)](
            q, *parts, block_tables, *plan.work, *results, scale * _LOG2_E,
            num_rows, plan.num_programs, block_tables.stride(0), q.stride(0), q.stride(1),
            NUM_HEADS=num_heads, VALUE_DIM=value_dim, ROPE_DIM=dim - value_dim,
            VALUE_STRIDE=parts[0].stride(1), ROPE_STRIDE=parts[1].stride(1), SCALE_STRIDE=parts[2].stride(1),
            IS_FP8=entry is not None, BLOCK_SIZE=cache.shape[1], PLAN_TILE=PLAN_TILE, TILE=launch["tile"],
            BLOCK_HEADS=heads, BLOCK_VALUE=triton.next_power_of_2(value_dim),
            BLOCK_ROPE=max(16, triton.next_power_of_2(dim - value_dim)),
            SEGMENTS=plan.num_segments, MIN_TILES=MIN_SEGMENT_TILES,
            num_warps=launch["num_warps"], num_stages=launch["num_stages"], **dependent_launch(q.device),
        )  # fmt: skip
    merge(plan, partial, partial_lse, out)
    return out


@triton.jit
def _attend_tile(
    values, ropes, token_scales, q_value, q_rope, maximum, denominator, numerator, is_key, scale,
    MASKED: tl.constexpr, IS_FP8: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax, keys along the rows: scores [TILE, HEADS], numerator [VALUE, HEADS].

    With the heads as the narrow side of both products, 16 heads fill the matrix unit, and the tile is read from shared
    memory as keys (rows) and as values (columns). FP8 latents are exact in 16 bits; a token's scale is applied to its
    score and to its weight instead.
    """
    values = values.to(q_value.dtype)
    scores = tl.dot(values, q_value, input_precision="ieee")
    scores = tl.dot(ropes, q_rope, scores, input_precision="ieee") * scale
    if IS_FP8:
        scores *= token_scales[:, None]
    if MASKED:
        scores = tl.where(is_key[:, None], scores, float("-inf"))
    new_maximum = tl.maximum(maximum, tl.max(scores, axis=0))
    decay = tl.exp2(maximum - new_maximum)
    weights = tl.exp2(scores - new_maximum[None, :])
    # Summed over the keys at the end only: a sum over rows crosses warps.
    denominator = denominator * decay[None, :] + weights
    numerator = numerator * decay[None, :]
    if IS_FP8:
        weights *= token_scales[:, None]
    numerator = tl.dot(tl.trans(values), weights.to(values.dtype), numerator, input_precision="ieee")
    return new_maximum, denominator, numerator


@triton.jit(do_not_specialize=["num_rows", "num_programs", "table_stride"])
def _decode_kernel(
    q,
    value_cache,
    rope_cache,
    scale_cache,
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
    NUM_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    VALUE_STRIDE: tl.constexpr,
    ROPE_STRIDE: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    IS_FP8: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PLAN_TILE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    SEGMENTS: tl.constexpr,
    MIN_TILES: tl.constexpr,
    PDL: tl.constexpr,
):
    """One share of the tiles (TritonDecodePlan) for one group of heads; programs of a share are neighbours in L2.

    Any shape, dtype and card; the shapes served on Hopper run mla_decode_hopper instead.
    """
    NUM_GROUPS: tl.constexpr = (NUM_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    wait_for_previous(PDL)
    program = tl.program_id(0) // NUM_GROUPS
    head = tl.program_id(0) % NUM_GROUPS * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    column = tl.arange(0, BLOCK_VALUE)
    rope_column = tl.arange(0, BLOCK_ROPE)
    in_tile = tl.arange(0, TILE)
    if SEGMENTS == 0:
        num_tiles = tl.load(tile_starts + num_rows)
        share = (num_tiles + num_programs - 1) // num_programs
        tile = program * share
        last_tile = tl.minimum(tile + share, num_tiles)
        row = tl.load(first_rows + program)
    else:
        row = program // SEGMENTS
        tile, last_tile = segment_of(
            tl.load(row_lens + row), program % SEGMENTS, SEGMENTS, PLAN_TILE, MIN_TILES
        )  # fmt: skip
    while tile < last_tile:
        if SEGMENTS == 0:
            row_start = tl.load(tile_starts + row)
            row_end = tl.load(tile_starts + row + 1)
        else:
            row_start = 0
            row_end = (tl.load(row_lens + row) + PLAN_TILE - 1) // PLAN_TILE
        segment_end = tl.minimum(row_end, last_tile)
        if tile < segment_end:
            length = tl.load(row_lens + row)
            table = block_tables + tl.load(row_sequences + row).to(tl.int64) * table_stride
            q_rows = q + row.to(tl.int64) * q_row_stride + head[:, None] * q_head_stride
            is_head = head[:, None] < NUM_HEADS
            q_value = tl.load(q_rows + column[None, :], mask=is_head & (column[None, :] < VALUE_DIM), other=0.0)
            q_ropes = q_rows + VALUE_DIM + rope_column[None, :]
            q_rope = tl.load(q_ropes, mask=is_head & (rope_column[None, :] < ROPE_DIM), other=0.0)
            q_value = tl.trans(q_value)
            q_rope = tl.trans(q_rope)
            maximum = tl.full([BLOCK_HEADS], float("-inf"), tl.float32)
            denominator = tl.zeros([TILE, BLOCK_HEADS], tl.float32)
            numerator = tl.zeros([BLOCK_VALUE, BLOCK_HEADS], tl.float32)
            begin = (tile - row_start) * PLAN_TILE
            end = tl.minimum((segment_end - row_start) * PLAN_TILE, length)
            full_end = begin + (end - begin) // TILE * TILE
            for start in tl.range(begin, full_end, TILE):
                token = start + in_tile
                slots = tl.load(table + token // BLOCK_SIZE).to(tl.int64) * BLOCK_SIZE + token % BLOCK_SIZE
                value_at = value_cache + slots[:, None] * VALUE_STRIDE + column[None, :]
                rope_at = rope_cache + slots[:, None] * ROPE_STRIDE + rope_column[None, :]
                values = tl.load(value_at, mask=column[None, :] < VALUE_DIM, other=0.0)
                ropes = tl.load(rope_at, mask=rope_column[None, :] < ROPE_DIM, other=0.0)
                token_scales = tl.load(scale_cache + slots * SCALE_STRIDE) if IS_FP8 else 0.0
                maximum, denominator, numerator = _attend_tile(
                    values, ropes, token_scales, q_value, q_rope, maximum, denominator, numerator, in_tile >= 0, scale,
                    False, IS_FP8,
                )  # fmt: skip
            if full_end < end:
                token = full_end + in_tile
                is_key = token < end
                blocks = tl.load(table + token // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
                slots = blocks * BLOCK_SIZE + token % BLOCK_SIZE
                value_at = value_cache + slots[:, None] * VALUE_STRIDE + column[None, :]
                rope_at = rope_cache + slots[:, None] * ROPE_STRIDE + rope_column[None, :]
                values = tl.load(value_at, mask=is_key[:, None] & (column[None, :] < VALUE_DIM), other=0.0)
                ropes = tl.load(rope_at, mask=is_key[:, None] & (rope_column[None, :] < ROPE_DIM), other=0.0)
                token_scales = tl.load(scale_cache + slots * SCALE_STRIDE, mask=is_key, other=0.0) if IS_FP8 else 0.0
                maximum, denominator, numerator = _attend_tile(
                    values, ropes, token_scales, q_value, q_rope, maximum, denominator, numerator, is_key, scale,
                    True, IS_FP8,
                )  # fmt: skip
            total = tl.sum(denominator, axis=0)
            result = tl.trans(numerator / total[None, :])
            in_out = is_head & (column[None, :] < VALUE_DIM)
            if (tile == row_start) & (segment_end == row_end):
                target = out + (row.to(tl.int64) * NUM_HEADS + head[:, None]) * VALUE_DIM + column[None, :]
                tl.store(target, result.to(out.dtype.element_ty), mask=in_out)
            else:
                # A program has at most two such ends: one that began before its share, one that goes on after it.
                entry = program if SEGMENTS > 0 else program * 2 + (tile == row_start).to(tl.int32)
                entry = entry * NUM_HEADS + head
                tl.store(partial + entry[:, None].to(tl.int64) * VALUE_DIM + column[None, :], result, mask=in_out)
                tl.store(partial_lse + entry, maximum + tl.log2(total), mask=head < NUM_HEADS)
            tile = segment_end
        row += 1
