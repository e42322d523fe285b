"""Multi-head latent attention over a paged cache of latents (DeepSeek-V2, section 2.1, arXiv 2405.04434).

    R = kv_lora_rank, dn / dr / dv = nope / rope / value dims, H heads
    cache[slot] = [ c: R | rotated key: dr ],  k_nope = W_kb c,  v = W_vb c

Absorbed: the query is mapped into latent space (W_kb^T q), attends to the cache itself, and W_vb maps the result back.
Expanded: keys and values of the whole context are computed once for a chunk of queries, which costs fewer FLOPs there.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

from app.model.config import ModelConfig
from app.model.inputs import ModelInput, SharedRows
from app.model.layers import Linear
from app.model.parallel import Ranks
from kernels.blocks import gather_blocks
from kernels.checks import Backend
from kernels.fp8_entry import Fp8Entry
from kernels.head_projection import HeadProjection
from kernels.mla_decode import mla_decode, plan_mla_decode
from kernels.mla_prefill import mla_prefill, plan_mla_prefill
from kernels.mla_rope_cache import mla_rope_cache
from kernels.rms_norm import rms_norm

MAX_KEYS = 2**17  # expanded at a time: some 10 KB each
LATENT_NORM_EPS = 1e-6  # of the two inner norms, whatever rms_norm_eps says


@dataclass(frozen=True, slots=True)
class MlaWeights:
    qkv_a: Linear  # D -> Rq + R + dr, Rq = q_lora_rank; without one q_proj comes first: D -> H (dn + dr) + R + dr
    q_norm: torch.Tensor | None  # [Rq]
    q_b: Linear | None  # Rq -> H (dn + dr)
    kv_norm: torch.Tensor  # [R]
    kv_b: torch.Tensor  # [H (dn + dv), R]: W_kb and W_vb of each head
    o: Linear  # H dv -> D


@dataclass(frozen=True, slots=True)
class AbsorbedRows:
    """The step's leading rows, which attend in latent space."""

    num_rows: int
    block_tables: torch.Tensor  # [B, max_blocks] int32
    context_lens: torch.Tensor  # [B] int32
    query_starts: torch.Tensor | None  # [B + 1] int32; None: one row per sequence
    plan: Any  # of plan_mla_decode: what the kernel derives from these once for all layers

    @classmethod
    def of(
        cls, inputs: ModelInput, num_rows: int, num_seqs: int, num_heads: int, backend: Backend | None
    ) -> AbsorbedRows:
        block_tables, context_lens = inputs.block_tables[:num_seqs], inputs.context_lens[:num_seqs]
        # As many rows as sequences say nothing in a graph: both are padded.
        are_decodes = num_rows == num_seqs <= inputs.num_decodes
        query_starts = None if are_decodes else inputs.query_starts[: num_seqs + 1]
        plan = plan_mla_decode(
            context_lens, num_queries=num_rows, num_heads=num_heads, query_starts=query_starts, backend=backend
        )
        return cls(num_rows, block_tables, context_lens, query_starts, plan)


@dataclass(frozen=True, slots=True)
class ExpandedRows:
    """Prefill chunks, which attend to the expanded keys and values of their whole context: some of the step's."""

    rows: slice  # of the step
    block_tables: torch.Tensor  # [B, max_blocks] int32
    context_lens: torch.Tensor  # [B] int32
    query_starts: torch.Tensor  # [B + 1] int32, counted from the first of the rows
    key_starts: torch.Tensor  # [B + 1] int32: the contexts one after the other
    num_keys: int
    max_query_len: int
    max_key_len: int
    plan: Any  # of plan_mla_prefill

    @classmethod
    def parts_of(cls, inputs: ModelInput) -> tuple[ExpandedRows, ...]:
        """All chunks of the step, cut so that no part has more than MAX_KEYS keys or one sequence."""
        num_rows, first, end = inputs.token_ids.shape[0], inputs.num_decodes, inputs.context_lens.shape[0]
        starts, lens = inputs.host_query_starts, inputs.host_context_lens
        if starts is None or lens is None:
            rows = slice(first, num_rows)
            return (cls._of(inputs, first, end, rows, inputs.num_keys, num_rows - first, inputs.num_keys),)
        parts = []
        while first < end:
            after = first + 1
            while after < end and sum(lens[first : after + 1]) <= MAX_KEYS:
                after += 1
            rows = slice(starts[first], starts[after] if after < end else num_rows)  # the last part has the padding
            longest = max(end - start for start, end in pairwise(starts[first : after + 1]))
            parts.append(cls._of(inputs, first, after, rows, sum(lens[first:after]), longest, max(lens[first:after])))
            first = after
        return tuple(parts)

    @classmethod
    def _of(
        cls, inputs: ModelInput, first: int, end: int, rows: slice, num_keys: int, max_query_len: int, max_key_len: int
    ) -> ExpandedRows:
        context_lens = inputs.context_lens[first:end]
        query_starts = inputs.query_starts[first : end + 1] - rows.start
        key_starts = F.pad(context_lens.cumsum(0, dtype=torch.int32), (1, 0))
        return cls(
            rows=rows,
            block_tables=inputs.block_tables[first:end],
            context_lens=context_lens,
            query_starts=query_starts,
            key_starts=key_starts,
            num_keys=num_keys,
            max_query_len=max_query_len,
            max_key_len=max_key_len,
            plan=plan_mla_prefill(query_starts, key_starts, rows.stop - rows.start),
        )


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """What a step's layers share; every row is in exactly one part, padding in the last one.

    A step without any sequence, of a rank that has none of the rows, has no part.
    """

    inputs: ModelInput
    absorbed: AbsorbedRows | None
    expanded: tuple[ExpandedRows, ...]

    @classmethod
    def of(
        cls, inputs: ModelInput, *, absorbed_prefill: bool, num_heads: int, backend: Backend | None
    ) -> AttentionStep:
        num_rows, num_seqs = inputs.token_ids.shape[0], inputs.context_lens.shape[0]
        expanded: tuple[ExpandedRows, ...] = ()
        has_sizes = inputs.host_context_lens is not None or inputs.num_keys > 0
        if not absorbed_prefill and has_sizes and inputs.num_decodes < num_seqs:
            expanded = ExpandedRows.parts_of(inputs)
            num_rows = num_seqs = inputs.num_decodes
        absorbed = None
        if num_rows and num_seqs:
            absorbed = AbsorbedRows.of(inputs, num_rows, num_seqs, num_heads, backend)
        return cls(inputs, absorbed, expanded)


class MlaAttention:
    """One layer's attention, of the heads that this rank has."""

    def __init__(
        self, config: ModelConfig, weights: MlaWeights, cos_sin: torch.Tensor, backend: Backend | None, ranks: Ranks
    ) -> None:
        self._cos_sin, self._backend, self._ranks = cos_sin, backend, ranks
        self._interleaved, self._scale = config.rope.interleaved, config.softmax_scale
        self._num_heads, self._rank = config.num_heads // ranks.tensor.size, config.kv_lora_rank
        self._nope_dim, self._rope_dim = config.qk_nope_head_dim, config.qk_rope_head_dim
        self._weights, self._value_dim = weights, config.v_head_dim
        per_head = weights.kv_b.view(self._num_heads, self._nope_dim + config.v_head_dim, self._rank)
        self._to_latent = HeadProjection(per_head[:, : self._nope_dim], backend)  # [H, dn, R]
        self._from_latent = HeadProjection(per_head[:, self._nope_dim :].mT, backend)  # [H, R, dv]

    def forward(self, x: torch.Tensor, step: AttentionStep, cache: torch.Tensor) -> torch.Tensor:
        """[N, D] -> [N, D], in fp64 if the output projection says so; writes the step's latents to `cache` first.

        cache: [num_blocks, block_size, R + dr], or FP8 entries of uint8
        """
        weights = self._weights
        qkv = weights.qkv_a.forward(x)
        kv_start = qkv.shape[1] - self._rank - self._rope_dim
        q, kv = qkv[:, :kv_start], qkv[:, kv_start:]
        # Every rank's cache is whole: latents are narrow, so the other ranks' rows of them cost little to fetch.
        all_kv = self._ranks.expert.start_all_gather(kv) if step.inputs.shared else None
        if weights.q_b is not None and weights.q_norm is not None:
            q = weights.q_b.forward(rms_norm(q, weights.q_norm, LATENT_NORM_EPS, backend=self._backend))
        q = q.unflatten(1, (self._num_heads, -1))
        mla_rope_cache(
            q, kv, weights.kv_norm, LATENT_NORM_EPS, self._cos_sin, step.inputs.positions, step.inputs.slots, cache,
            interleaved=self._interleaved, backend=self._backend,
        )  # fmt: skip
        if all_kv is not None and step.inputs.shared is not None:
            self._write_rows(all_kv.wait(), q, step.inputs.shared, cache)
        parts = []
        if step.absorbed is not None:
            parts.append(self._attend_absorbed(q[: step.absorbed.num_rows], step.absorbed, cache))
        parts += [self._attend_expanded(q[part.rows], part, cache) for part in step.expanded]
        if not parts:
            parts.append(q.new_zeros(q.shape[0], self._num_heads, self._value_dim))
        heads = parts[0] if len(parts) == 1 else torch.cat(parts)
        return self._ranks.tensor.all_reduce(weights.o.forward(heads.flatten(1)))

    def _write_rows(self, kv: torch.Tensor, q: torch.Tensor, rows: SharedRows, cache: torch.Tensor) -> None:
        """Write the latents of all ranks' rows; their queries are elsewhere."""
        no_heads = q.new_empty(kv.shape[0], 0, q.shape[2])
        mla_rope_cache(
            no_heads, kv, self._weights.kv_norm, LATENT_NORM_EPS, self._cos_sin, rows.positions, rows.slots, cache,
            interleaved=self._interleaved, backend=self._backend,
        )  # fmt: skip

    def _attend_absorbed(self, q: torch.Tensor, rows: AbsorbedRows, cache: torch.Tensor) -> torch.Tensor:
        """[N, H, dn + dr] -> [N, H, dv]; padding rows give 0."""
        latent_q = self._to_latent.forward(q, tail=self._rope_dim)
        latents = mla_decode(
            latent_q, cache, rows.block_tables, rows.context_lens, self._scale, self._rank,
            query_starts=rows.query_starts, plan=rows.plan, backend=self._backend,
        )  # fmt: skip
        return self._from_latent.forward(latents)

    def _attend_expanded(self, q: torch.Tensor, rows: ExpandedRows, cache: torch.Tensor) -> torch.Tensor:
        """[N, H, dn + dr] -> [N, H, dv]; padding rows give 0."""
        entry = Fp8Entry(self._rank, self._rope_dim, q.dtype) if cache.dtype == torch.uint8 else None
        keys = gather_blocks(
            cache, rows.block_tables, rows.context_lens, rows.key_starts, rows.num_keys,
            entry=entry, backend=self._backend,
        )  # fmt: skip
        expanded = F.linear(keys[:, : self._rank], self._weights.kv_b).unflatten(1, (self._num_heads, -1))
        return mla_prefill(
            q, expanded[..., : self._nope_dim], keys[:, self._rank :], expanded[..., self._nope_dim :],
            rows.query_starts, rows.key_starts, self._scale,
            max_query_len=rows.max_query_len, max_key_len=rows.max_key_len, plan=rows.plan, backend=self._backend,
        )  # fmt: skip
