"""How many bytes a model caches per token, and in blocks of what size."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from app.model.config import ModelConfig
from kernels.fp8_entry import Fp8Entry

LATENT_BLOCK_SIZE = 64  # tokens; follows the attention kind, not a knob


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The latent group: one entry of `dim` elements per token and layer, kept while its sequence lives.

    An entry is the latent and the rotated key in the model's dtype, or the bytes of an Fp8Entry: then dtype is uint8.
    """

    num_layers: int
    dim: int
    dtype: torch.dtype
    block_size: int = LATENT_BLOCK_SIZE

    @classmethod
    def of(cls, model: ModelConfig, dtype: torch.dtype, *, is_fp8: bool = False) -> CacheLayout:
        """dtype: of the model. Raises ValueError if the model's latent does not fit an FP8 entry."""
        if not is_fp8:
            return cls(num_layers=model.num_layers, dim=model.cache_dim, dtype=dtype)
        entry = Fp8Entry(model.kv_lora_rank, model.qk_rope_head_dim, dtype)
        return cls(num_layers=model.num_layers, dim=entry.num_bytes, dtype=torch.uint8)

    @property
    def bytes_per_token(self) -> int:
        return self.num_layers * self.dim * self.dtype.itemsize

    @property
    def bytes_per_block(self) -> int:
        return self.block_size * self.bytes_per_token

    def num_blocks_in(self, memory_bytes: int) -> int:
        return memory_bytes // self.bytes_per_block

    def num_blocks_of(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens of one sequence."""
        return -(-num_tokens // self.block_size)

    def allocate(self, num_blocks: int, device: torch.device) -> torch.Tensor:
        """[num_layers, num_blocks, block_size, dim], uninitialised: only written slots are ever read."""
        return torch.empty(self.num_layers, num_blocks, self.block_size, self.dim, dtype=self.dtype, device=device)
