"""Causal MLA attention over explicit keys and values, for prompts: ragged, bottom-right aligned."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels import mla_prefill_hopper, tuning
from kernels.checks import Backend, check_dtype, check_last_dim_contiguous, check_shape, use_triton

_QUERY_TILE = 64  # CPU: queries attended together, a multiple of 8 so that MKL gives a row the same bits in any tile
_KEY_TILE = 64  # CPU: keys of one P @ V product, so that the order of additions does not depend on the length
_LOG2_E = 1.4426950408889634


def mla_prefill_reference(
    q: torch.Tensor,
    k_nope: torch.Tensor,
    k_rope: torch.Tensor,
    v: torch.Tensor,
    query_starts: torch.Tensor,
    key_starts: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """The definition (see mla_prefill), one query at a time in fp32; returns fp32."""
    out = torch.zeros(q.shape[0], q.shape[1], v.shape[2], device=q.device)
    k = torch.cat([k_nope, k_rope.unsqueeze(1).expand(-1, k_nope.shape[1], -1)], dim=-1).float()
    q_starts, k_starts = query_starts.tolist(), key_starts.tolist()
    for i in range(len(q_starts) - 1):
        for row in range(q_starts[i], q_starts[i + 1]):
            last = k_starts[i + 1] - (q_starts[i + 1] - 1 - row)
            if last > k_starts[i]:
                keys = slice(k_starts[i], last)
                weights = torch.softmax(scale * torch.einsum("hd,khd->hk", q[row].float(), k[keys]), dim=-1)
                out[row] = torch.einsum("hk,khd->hd", weights, v[keys].float())
    return out


def plan_mla_prefill(query_starts: torch.Tensor, key_starts: torch.Tensor, num_queries: int) -> torch.Tensor | None:
    """What mla_prefill derives from these alone: compute it once for all layers that share them.

    num_queries: of q, known to the host
    """
    if num_queries == 0 or query_starts.shape[0] < 2 or not mla_prefill_hopper.is_device(query_starts.device):
        return None
    return mla_prefill_hopper.plan_tiles(query_starts, key_starts, num_queries)


def mla_prefill(
    q: torch.Tensor,
    k_nope: torch.Tensor,
    k_rope: torch.Tensor,
    v: torch.Tensor,
    query_starts: torch.Tensor,
    key_starts: torch.Tensor,
    scale: float,
    *,
    max_query_len: int,
    max_key_len: int,
    plan: torch.Tensor | None = None,
    backend: Backend | None = None,
) -> torch.Tensor:
    """Attend each sequence's new tokens to all of its tokens, the rope part of the key shared by the heads.

        out[r,h] = softmax(scale * (q_nope[r,h] . k_nope[t,h] + q_rope[r,h] . k_rope[t])) @ v[t,h]

    Query j of n of a sequence with m keys sees its first m - (n - 1 - j) keys (bottom-right aligned: the n new tokens
    are the last n of the m); a row that sees none gives 0, and so does padding (rows from query_starts[-1] on).

    Args:
        q:             [Nq, H, dn + dr]
        k_nope, v:     [Nk, H, dn], [Nk, H, dv]; may be strided views of one tensor [Nk, H, dn + dv]
        k_rope:        [Nk, dr]
        query_starts, key_starts: [B + 1] int32
        scale:         applied before the softmax, in fp32
        max_query_len, max_key_len: the longest sequence's, known to the host: they size the launch
        plan:          of plan_mla_prefill; None: computed here
    Returns: [Nq, H, dv] in q's dtype, freshly allocated; fp32 accumulation
    Raises:  ValueError on shape, dtype or stride
    Invariance: on CPU in fp32 a row's bits do not depend on the other sequences or on how the prompt is cut
    Source:  DeepSeek-V2, section 2.1, https://arxiv.org/abs/2405.04434
    """
    num_keys, num_heads, nope_dim = k_nope.shape
    check_shape("k_rope", k_rope, (num_keys, None))
    check_shape("q", q, (None, num_heads, nope_dim + k_rope.shape[1]))
    check_shape("v", v, (num_keys, num_heads, None))
    check_shape("key_starts", key_starts, (query_starts.shape[0],))
    check_dtype("query_starts", query_starts, torch.int32)
    check_dtype("key_starts", key_starts, torch.int32)
    for name, tensor in (("q", q), ("k_nope", k_nope), ("k_rope", k_rope), ("v", v)):
        check_dtype(name, tensor, q.dtype)
        check_last_dim_contiguous(name, tensor)
    if not use_triton(q, backend):
        return _prefill_torch(q, k_nope, k_rope, v, query_starts, key_starts, scale)
    out = torch.zeros(q.shape[0], num_heads, v.shape[2], dtype=q.dtype, device=q.device)
    if min(out.numel(), num_keys, max_query_len, max_key_len) == 0:
        return out
    if mla_prefill_hopper.supports(q, k_nope, k_rope, v):
        mla_prefill_hopper.launch(q, k_nope, k_rope, v, query_starts, key_starts, scale * _LOG2_E, plan, out)
        return out
    launch = tuning.find("mla_prefill", q.device, bits=8 * q.element_size())
    grid = (triton.cdiv(max_query_len, launch["queries"]), num_heads, query_starts.shape[0] - 1)
    _prefill_kernel[grid](
        q,
        k_nope,
        k_rope,
        v,
        query_starts,
        key_starts,
        out,
        scale * _LOG2_E,
        *q.stride()[:2],
        *k_nope.stride()[:2],
        k_rope.stride(0),
        *v.stride()[:2],
        NUM_HEADS=num_heads,
        NOPE_DIM=nope_dim,
        ROPE_DIM=k_rope.shape[1],
        VALUE_DIM=v.shape[2],
        BLOCK_NOPE=max(16, triton.next_power_of_2(nope_dim)),
        BLOCK_ROPE=max(16, triton.next_power_of_2(k_rope.shape[1])),
        BLOCK_VALUE=max(16, triton.next_power_of_2(v.shape[2])),
        QUERIES=launch["queries"],
        KEYS=launch["keys"],
        num_warps=launch["num_warps"],
        num_stages=launch["num_stages"],
    )
    return out


def _prefill_torch(
    q: torch.Tensor,
    k_nope: torch.Tensor,
    k_rope: torch.Tensor,
    v: torch.Tensor,
    query_starts: torch.Tensor,
    key_starts: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    num_queries, num_heads, _ = q.shape
    out = torch.zeros(num_queries, num_heads, v.shape[2])
    q_starts, k_starts = query_starts.tolist(), key_starts.tolist()
    for i in range(len(q_starts) - 1):
        num_keys = k_starts[i + 1] - k_starts[i]
        first = max(q_starts[i], q_starts[i + 1] - num_keys)
        if first == q_starts[i + 1]:
            continue
        sequence = slice(k_starts[i], k_starts[i + 1])
        shared = k_rope[sequence].unsqueeze(1).expand(-1, num_heads, -1)
        keys = torch.cat([k_nope[sequence], shared], dim=-1).float().transpose(0, 1)
        values = v[sequence].float().transpose(0, 1)
        for start in range(first, q_starts[i + 1], _QUERY_TILE):
            end = min(start + _QUERY_TILE, q_starts[i + 1])
            num_visible = num_keys - (q_starts[i + 1] - end)
            queries = (q[start:end].float() * scale).transpose(0, 1)
            out[start:end] = _attend(queries, keys[:, :num_visible], values[:, :num_visible]).transpose(0, 1)
    return out.to(q.dtype)


def _attend(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """queries [H, T, D] scaled, the last one sees all keys [H, K, D]; values [H, K, V]; returns [H, T, V]."""
    num_tokens, num_keys = queries.shape[1], keys.shape[1]
    queries = torch.nn.functional.pad(queries, (0, 0, 0, -num_tokens % 8))
    keys = torch.nn.functional.pad(keys, (0, 0, 0, -num_keys % _KEY_TILE))
    scores = torch.bmm(queries, keys.transpose(1, 2))
    scores[:, :, num_keys:] = -torch.inf
    future = torch.ones(num_tokens, num_tokens, dtype=torch.bool).triu_(1)
    scores[:, :num_tokens, num_keys - num_tokens : num_keys].masked_fill_(future, -torch.inf)
    weights = torch.softmax(scores, dim=-1)
    out = torch.zeros(queries.shape[0], queries.shape[1], values.shape[2])
    for start in range(0, num_keys, _KEY_TILE):
        end = min(start + _KEY_TILE, num_keys)
        out += torch.bmm(weights[:, :, start:end], values[:, start:end])
    return out[:, :num_tokens]


@triton.jit
def _prefill_kernel(
    q,
    k_nope,
    k_rope,
    v,
    query_starts,
    key_starts,
    out,
    scale,
    q_row_stride,
    q_head_stride,
    k_row_stride,
    k_head_stride,
    rope_row_stride,
    v_row_stride,
    v_head_stride,
    NUM_HEADS: tl.constexpr,
    NOPE_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_NOPE: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):
    """One tile of queries of one head of one sequence. Any shape, dtype and card; the shapes served on Hopper run
    mla_prefill_hopper instead."""
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    query_start = tl.load(query_starts + sequence)
    num_queries = tl.load(query_starts + sequence + 1) - query_start
    key_start = tl.load(key_starts + sequence)
    num_keys = tl.load(key_starts + sequence + 1) - key_start
    query = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    is_query = query < num_queries
    row_end = tl.minimum(num_keys - num_queries + query + 1, num_keys)
    last_end = tl.where(is_query, row_end, 0)
    num_visible = tl.maximum(tl.max(last_end, axis=0), 0)

    nope = tl.arange(0, BLOCK_NOPE)
    rope = tl.arange(0, BLOCK_ROPE)
    column = tl.arange(0, BLOCK_VALUE)
    q_rows = q + (query_start + query).to(tl.int64)[:, None] * q_row_stride + head * q_head_stride
    q_nope = tl.load(q_rows + nope[None, :], mask=is_query[:, None] & (nope < NOPE_DIM)[None, :], other=0.0)
    q_rope = tl.load(q_rows + NOPE_DIM + rope[None, :], mask=is_query[:, None] & (rope < ROPE_DIM)[None, :], other=0.0)
    maximum = tl.full([QUERIES], float("-inf"), tl.float32)
    denominator = tl.zeros([QUERIES], tl.float32)
    numerator = tl.zeros([QUERIES, BLOCK_VALUE], tl.float32)
    for first in range(0, num_visible, KEYS):
        key = first + tl.arange(0, KEYS)
        is_key = key < num_keys
        key_row = (key_start + key).to(tl.int64)
        k_rows = k_nope + key_row[None, :] * k_row_stride + head * k_head_stride
        k = tl.load(k_rows + nope[:, None], mask=is_key[None, :] & (nope < NOPE_DIM)[:, None], other=0.0)
        rope_rows = k_rope + key_row[None, :] * rope_row_stride
        r = tl.load(rope_rows + rope[:, None], mask=is_key[None, :] & (rope < ROPE_DIM)[:, None], other=0.0)
        scores = tl.dot(q_nope, k, input_precision="ieee")
        scores = tl.dot(q_rope, r, scores, input_precision="ieee") * scale
        scores = tl.where(key[None, :] < row_end[:, None], scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
        # A row that has seen no key yet keeps -inf; 0 in its place avoids -inf - -inf.
        shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weights = tl.exp2(scores - shift[:, None])
        decay = tl.exp2(maximum - shift)
        denominator = denominator * decay + tl.sum(weights, axis=1)
        v_rows = v + key_row[:, None] * v_row_stride + head * v_head_stride
        value = tl.load(v_rows + column[None, :], mask=is_key[:, None] & (column < VALUE_DIM)[None, :], other=0.0)
        numerator = tl.dot(weights.to(value.dtype), value, numerator * decay[:, None], input_precision="ieee")
        maximum = new_maximum
    result = numerator / tl.where(denominator == 0.0, 1.0, denominator)[:, None]
    target = ((query_start + query).to(tl.int64) * NUM_HEADS + head)[:, None] * VALUE_DIM + column[None, :]
    tl.store(out + target, result.to(out.dtype.element_ty), mask=is_query[:, None] & (column < VALUE_DIM)[None, :])
