"""How many bytes a model caches per token, and in blocks of what size."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from app.model.config import ModelConfig

LATENT_BLOCK_SIZE = 64  # tokens; follows the attention kind, not a knob


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The latent group: one vector of `dim` values per token and layer, kept while its sequence lives."""

    num_layers: int
    dim: int
    dtype: torch.dtype
    block_size: int = LATENT_BLOCK_SIZE

    @classmethod
    def of(cls, model: ModelConfig, dtype: torch.dtype) -> CacheLayout:
        return cls(num_layers=model.num_layers, dim=model.cache_dim, dtype=dtype)

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
