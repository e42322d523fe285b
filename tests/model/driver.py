"""Runs a Transformer over token sequences in any batching and chunking, without an engine."""

from __future__ import annotations

import random

import torch

from app.cache.layout import CacheLayout
from app.model.inputs import ModelInput
from app.model.transformer import Transformer
from kernels.checks import padded_rows

BLOCK_SIZE = 64


class Driver:
    """Sequences in a shared paged cache whose blocks are handed out in a shuffled order.

    Unused cache entries hold NaN, so that a read past a sequence's end shows.
    """

    def __init__(self, model: Transformer, *, num_blocks: int = 48, seed: int = 0, is_fp8: bool = False) -> None:
        self._model = model
        config = model.config
        self.cache = CacheLayout.of(config, model.dtype, is_fp8=is_fp8).allocate(num_blocks, model.device)
        self.cache.fill_(0xFF if is_fp8 else torch.nan)  # of FP8 entries every byte 0xff is NaN in each part
        self._free = list(range(num_blocks))
        random.Random(seed).shuffle(self._free)
        self._tokens: list[list[int]] = []
        self._computed: list[int] = []
        self._blocks: list[list[int]] = []

    def add(self, token_ids: list[int]) -> int:
        """Returns the sequence's index."""
        self._tokens.append(list(token_ids))
        self._computed.append(0)
        self._blocks.append([])
        return len(self._tokens) - 1

    def append(self, sequence: int, token_id: int) -> None:
        self._tokens[sequence].append(token_id)

    def step(self, work: dict[int, int]) -> torch.Tensor:
        """Compute `work[sequence]` more tokens of each sequence: logits [len(work), vocab], in the order of `work`."""
        ordered = sorted(work, key=lambda sequence: work[sequence] > 1)
        logits = self._model.forward(self._inputs(ordered, work), self.cache)
        for sequence in ordered:
            self._computed[sequence] += work[sequence]
        return logits[[ordered.index(sequence) for sequence in work]]

    def run(self, sequence: int, chunk: int) -> torch.Tensor:
        """Compute the rest of one sequence, alone, `chunk` tokens a step: the logits after each step."""
        rows = []
        while left := len(self._tokens[sequence]) - self._computed[sequence]:
            rows.append(self.step({sequence: min(chunk, left)}))
        return torch.cat(rows)

    def _inputs(self, ordered: list[int], work: dict[int, int]) -> ModelInput:
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts, context_lens = [0], []
        for sequence in ordered:
            first, end = self._computed[sequence], self._computed[sequence] + work[sequence]
            while len(self._blocks[sequence]) * BLOCK_SIZE < end:
                self._blocks[sequence].append(self._free.pop())
            token_ids += self._tokens[sequence][first:end]
            positions += range(first, end)
            slots += [self._blocks[sequence][p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(first, end)]
            starts.append(starts[-1] + work[sequence])
            context_lens.append(end)
        padding = padded_rows(starts[-1]) - starts[-1]
        width = max(len(self._blocks[sequence]) for sequence in ordered)
        tables = [self._blocks[sequence] + [0] * (width - len(self._blocks[sequence])) for sequence in ordered]
        device = self._model.device
        return ModelInput(
            token_ids=torch.tensor(token_ids + [0] * padding, device=device),
            positions=torch.tensor(positions + [0] * padding, device=device),
            slots=torch.tensor(slots + [-1] * padding, device=device),
            query_starts=torch.tensor(starts, dtype=torch.int32, device=device),
            context_lens=torch.tensor(context_lens, dtype=torch.int32, device=device),
            block_tables=torch.tensor(tables, dtype=torch.int32, device=device),
            logit_rows=torch.tensor(starts[1:], device=device) - 1,
            num_decodes=sum(work[sequence] == 1 for sequence in ordered),
            host_query_starts=tuple(starts),
            host_context_lens=tuple(context_lens),
        )
