"""Causal MLA attention over explicit keys and values, for prompts: ragged, bottom-right aligned."""

from __future__ import annotations

import torch

from kernels.checks import Backend, check_dtype, check_last_dim_contiguous, check_shape

_QUERY_TILE = 64  # CPU: queries attended together, a multiple of 8 so that MKL gives a row the same bits in any tile
_KEY_TILE = 64  # CPU: keys of one P @ V product, so that the order of additions does not depend on the length


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
    return _prefill_torch(q, k_nope, k_rope, v, query_starts, key_starts, scale)


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
