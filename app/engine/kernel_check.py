"""A kernel beside its definition, before it serves: the self-test could not tell wrong numbers from right ones."""

from __future__ import annotations

import torch

from app.cache.layout import LATENT_BLOCK_SIZE
from app.errors import PreflightError
from app.model.config import ModelConfig
from kernels.checks import Backend
from kernels.fp8_entry import Fp8Entry
from kernels.mla_decode import mla_decode, mla_decode_reference

CONTEXT_LENS = (2 * LATENT_BLOCK_SIZE + 2, 1, LATENT_BLOCK_SIZE)
MAX_RELATIVE_ERROR = 2e-2  # weights are rounded to 16 bits: some 3e-3


def check_fp8_attention(config: ModelConfig, device: torch.device, dtype: torch.dtype, backend: Backend | None) -> None:
    """Attend to a few random FP8 entries. Raises PreflightError if this device gives another result than torch."""
    entry = Fp8Entry(config.kv_lora_rank, config.qk_rope_head_dim, dtype)
    generator = torch.Generator().manual_seed(0)
    num_blocks = [-(-length // LATENT_BLOCK_SIZE) for length in CONTEXT_LENS]
    tables = torch.zeros(len(CONTEXT_LENS), max(num_blocks), dtype=torch.int32)
    for row, count in enumerate(num_blocks):
        tables[row, :count] = torch.arange(count) + sum(num_blocks[:row])
    latents = torch.randn(sum(num_blocks), LATENT_BLOCK_SIZE, config.cache_dim, generator=generator)
    queries = torch.randn(len(CONTEXT_LENS), config.num_heads, config.cache_dim, generator=generator)
    lens = torch.tensor(CONTEXT_LENS, dtype=torch.int32)
    q, cache, tables, lens = (part.to(device) for part in (queries.to(dtype), entry.pack(latents), tables, lens))
    arguments = (q, cache, tables, lens, config.cache_dim**-0.5, config.kv_lora_rank)
    expected = mla_decode_reference(*arguments)
    error = (mla_decode(*arguments, backend=backend).float() - expected).norm() / expected.norm()
    if not error.item() <= MAX_RELATIVE_ERROR:  # NaN as well
        raise PreflightError(
            f"engine.cache_dtype: attention over FP8 entries is wrong on {device} (relative error {error.item():.2g}); "
            "set cache_dtype: auto"
        )
