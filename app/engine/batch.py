"""One step's work: which sequences, how many new tokens each, and its form as the model's input."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from app.engine.sequence import Sequence
from app.model.inputs import ModelInput
from kernels.checks import padded_rows


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences with one new token come first: they share the decode kernels.

    block_ids: each sequence's blocks as they were when the step was scheduled. A sequence that is aborted while the
        step is being prepared loses its blocks; the step must still write where it was told to.
    previous_rows: set if the step is launched before the one ahead of it is committed. Each sequence's input is then
    the token that the earlier step samples in that row, still on the device, and lies one position further on.
    """

    sequences: tuple[Sequence, ...]
    num_new_tokens: tuple[int, ...]
    block_ids: tuple[list[int], ...]
    previous_rows: tuple[int, ...] | None = None

    @classmethod
    def of(cls, scheduled: Seq[tuple[Sequence, int]]) -> Batch:
        ordered = sorted(scheduled, key=lambda pair: pair[1] > 1)
        return cls(
            tuple(seq for seq, _ in ordered),
            tuple(count for _, count in ordered),
            tuple(seq.block_ids for seq, _ in ordered),
        )

    @property
    def num_decodes(self) -> int:
        return self.num_new_tokens.count(1)

    def split(self) -> tuple[Batch, Batch]:
        """The decodes and the rest, as two batches."""
        at = self.num_decodes
        sequences, counts, block_ids = self.sequences, self.num_new_tokens, self.block_ids
        decodes = Batch(sequences[:at], counts[:at], block_ids[:at], self.previous_rows)
        return decodes, Batch(sequences[at:], counts[at:], block_ids[at:])

    @property
    def num_ahead(self) -> int:
        """Tokens of each sequence that are computed or sampled but not committed yet."""
        return 0 if self.previous_rows is None else 1

    @property
    def num_tokens(self) -> int:
        return sum(self.num_new_tokens)

    @property
    def samples(self) -> list[int]:
        """Rows whose sequence is fully computed after this step, so that it samples a token."""
        return [
            row
            for row, (seq, count) in enumerate(zip(self.sequences, self.num_new_tokens, strict=True))
            if count == seq.num_new_tokens
        ]


def to_model_input(batch: Batch, block_size: int, device: torch.device) -> ModelInput:
    """Lay the batch out as the arrays of ModelInput. Token rows are padded to the row tile of the GEMMs.

    In place of token ids that are not on the host yet stand the rows of the step before that sample them.
    """
    counts = np.array(batch.num_new_tokens, dtype=np.int64)
    starts = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=starts[1:])
    num_tokens = padded_rows(int(starts[-1]))
    token_ids = np.zeros(num_tokens, dtype=np.int64)
    positions = np.zeros(num_tokens, dtype=np.int64)
    slots = np.full(num_tokens, -1, dtype=np.int64)
    context_lens = np.empty(len(counts), dtype=np.int32)
    tables = np.zeros((len(counts), max(len(ids) for ids in batch.block_ids)), dtype=np.int32)
    for row, seq in enumerate(batch.sequences):
        first = seq.num_computed_tokens + batch.num_ahead
        end = first + batch.num_new_tokens[row]
        rows = slice(starts[row], starts[row + 1])
        block_ids = batch.block_ids[row]
        tables[row, : len(block_ids)] = block_ids
        context_lens[row] = end
        token_ids[rows] = seq.token_ids[first:end] if batch.previous_rows is None else batch.previous_rows[row]
        span = np.arange(first, end)
        positions[rows] = span
        slots[rows] = tables[row, span // block_size].astype(np.int64) * block_size + span % block_size

    def put(array: npt.NDArray[Any]) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)

    return ModelInput(
        token_ids=put(token_ids),
        positions=put(positions),
        slots=put(slots),
        query_starts=put(starts),
        context_lens=put(context_lens),
        block_tables=put(tables),
        logit_rows=put(starts[1:].astype(np.int64) - 1),
        num_decodes=batch.num_decodes,
        host_query_starts=tuple(starts.tolist()),
        host_context_lens=tuple(context_lens.tolist()),
    )
