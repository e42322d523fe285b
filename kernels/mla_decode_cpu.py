"""MLA decode on a CPU, in machine code for fp32. A row's bits depend on its own query and keys only."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from kernels import native_attention, parallel
from kernels.fp8_entry import Fp8Entry


@dataclass(frozen=True, slots=True)
class CpuDecodePlan:
    query_starts: torch.Tensor  # [B + 1] int32
    num_scores: int  # at most: pairs of a row and a key


def plan_cpu(context_lens: torch.Tensor, query_starts: torch.Tensor | None) -> CpuDecodePlan:
    starts = torch.arange(context_lens.shape[0] + 1, dtype=torch.int32) if query_starts is None else query_starts
    return CpuDecodePlan(starts, int((context_lens * starts.diff()).sum()))


def decode_cpu(
    q: torch.Tensor,
    cache: torch.Tensor,
    entry: Fp8Entry | None,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    plan: CpuDecodePlan,
    scale: float,
    value_dim: int,
) -> torch.Tensor:
    """mla_decode; other dtypes than fp32 are widened first, of the cache the blocks that are read."""
    num_rows, num_heads, dim = q.shape
    block_size = cache.shape[1]
    if cache.dtype != torch.float32:
        used, block_tables = used_blocks(block_tables, context_lens, block_size)
        cache = cache.index_select(0, used)
        cache = (cache if entry is None else entry.unpack(cache)).float()
    out = torch.empty(num_rows, num_heads, value_dim)
    arrays = (
        q.float().numpy(), cache.view(-1, dim).numpy(), block_tables.numpy(), block_size, context_lens.numpy(),
        plan.query_starts.numpy(), scale, out.numpy(),
    )  # fmt: skip
    ranges = parallel.split(num_rows, plan.num_scores * num_heads * (dim + value_dim), 2)
    # The last rows of a prompt see the most keys: what comes first is best long.
    parallel.run([partial(native_attention.attend, *arrays, *rows) for rows in reversed(ranges)])
    return out.to(q.dtype)


def used_blocks(
    block_tables: torch.Tensor, context_lens: torch.Tensor, block_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The blocks that some sequence holds, each once [U], and block_tables [B, max_blocks] as they number them."""
    is_used = torch.arange(block_tables.shape[1]) < -(-context_lens // block_size).unsqueeze(1)
    used, numbers = block_tables[is_used].unique(return_inverse=True)
    return used, torch.zeros_like(block_tables).masked_scatter_(is_used, numbers.to(block_tables.dtype))
