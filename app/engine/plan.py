"""A step as plain arrays: all that a rank needs to build the model's input, and how it travels between ranks.

words  num_seqs | num_tokens | width | is_ahead | num_new_tokens | context_lens | token_ids | block_tables
       1          1            1       1          num_seqs         num_seqs       num_tokens  num_seqs x width
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from app.engine.batch import Batch
from app.model.inputs import ModelInput, SharedRows
from kernels.checks import padded_rows

Words = npt.NDArray[np.int32]
NUM_HEADER_WORDS = 4


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Sequences with one new token come first, as in Batch.

    is_ahead: in place of token ids, which are not on the host yet, stand the rows of the step before that sample them.
    """

    num_new_tokens: Words  # [num_seqs]
    context_lens: Words  # [num_seqs], this step's tokens included
    token_ids: Words  # [num_tokens]
    block_tables: Words  # [num_seqs, width]; entries past a sequence's blocks are 0
    is_ahead: bool

    @classmethod
    def of(cls, batch: Batch) -> StepPlan:
        counts = np.array(batch.num_new_tokens, dtype=np.int32)
        first = [seq.num_computed_tokens + batch.num_ahead for seq in batch.sequences]
        width = max((len(ids) for ids in batch.block_ids), default=0)
        tables = np.zeros((len(counts), width), dtype=np.int32)
        for row, block_ids in enumerate(batch.block_ids):
            tables[row, : len(block_ids)] = block_ids
        token_ids: list[int] = []
        if batch.previous_rows is not None:
            token_ids += batch.previous_rows
        else:
            for seq, start, count in zip(batch.sequences, first, batch.num_new_tokens, strict=True):
                token_ids += seq.token_ids[start : start + count]
        return cls(
            num_new_tokens=counts,
            context_lens=np.array(first, dtype=np.int32) + counts,
            token_ids=np.array(token_ids, dtype=np.int32),
            block_tables=tables,
            is_ahead=batch.previous_rows is not None,
        )

    @property
    def num_decodes(self) -> int:
        return int(np.count_nonzero(self.num_new_tokens == 1))

    def rows(self, block_size: int) -> tuple[Words, npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Each sequence's first row, the total at the end [num_seqs + 1]; each row's position and cache slot."""
        starts = np.zeros(len(self.num_new_tokens) + 1, dtype=np.int32)
        np.cumsum(self.num_new_tokens, out=starts[1:])
        sequence = np.repeat(np.arange(len(self.num_new_tokens)), self.num_new_tokens)
        positions = np.arange(len(self.token_ids)) - starts[sequence + 1] + self.context_lens[sequence]
        blocks = self.block_tables[sequence, positions // block_size].astype(np.int64)
        return starts, positions, blocks * block_size + positions % block_size

    def pack(self) -> Words:
        header = [len(self.num_new_tokens), len(self.token_ids), self.block_tables.shape[1], self.is_ahead]
        parts = (header, self.num_new_tokens, self.context_lens, self.token_ids, self.block_tables.ravel())
        return np.concatenate(parts, dtype=np.int32)

    @classmethod
    def unpack(cls, words: Words) -> StepPlan:
        num_seqs, num_tokens, width, is_ahead = words[:NUM_HEADER_WORDS].tolist()
        sizes = (num_seqs, num_seqs, num_tokens, num_seqs * width)
        counts, context_lens, token_ids, tables, _ = np.split(words[NUM_HEADER_WORDS:], np.cumsum(sizes))
        return cls(counts, context_lens, token_ids, tables.reshape(num_seqs, width), bool(is_ahead))


def to_model_input(
    plan: StepPlan, block_size: int, device: torch.device, *, part: int = 0, num_parts: int = 1
) -> ModelInput:
    """Lay a plan out as the arrays of ModelInput. Token rows are padded to the row tile of the GEMMs.

    part: of `num_parts` equal ones that the rows are cut into, the one to compute; a cut may go through a chunk:

        rows | d0 d1 p0 p0 | p0 p1 p1 pad |      part 0 ends p0 early, part 1 continues it
    """
    starts, own_positions, own_slots = plan.rows(block_size)
    num_tokens = len(plan.token_ids)
    size = padded_rows(-(-num_tokens // num_parts))
    token_ids = np.zeros(num_parts * size, dtype=np.int64)
    positions = np.zeros(num_parts * size, dtype=np.int64)
    slots = np.full(num_parts * size, -1, dtype=np.int64)
    token_ids[:num_tokens], positions[:num_tokens], slots[:num_tokens] = plan.token_ids, own_positions, own_slots

    def put(array: npt.NDArray[Any]) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)

    context_lens, tables, num_decodes = plan.context_lens, plan.block_tables, plan.num_decodes
    logit_rows = starts[1:].astype(np.int64) - 1
    shared = None
    if num_parts > 1:
        shared = SharedRows(put(positions), put(slots))
        first = part * size
        end = max(first, min(first + size, num_tokens))
        first_seq = int(np.searchsorted(starts[1:], first, "right"))
        end_seq = int(np.searchsorted(starts[:-1], end, "left"))
        context_lens = context_lens[first_seq:end_seq] - np.maximum(starts[first_seq + 1 : end_seq + 1] - end, 0)
        tables, num_decodes = tables[first_seq:end_seq], max(0, min(num_decodes, end_seq) - first_seq)
        logit_rows = np.where((logit_rows >= first) & (logit_rows < end), logit_rows - first, -1)
        starts = np.clip(starts[first_seq : end_seq + 1] - first, 0, end - first)
        token_ids, positions = token_ids[first : first + size], positions[first : first + size]
        slots = np.full(size, -1, dtype=np.int64)
    return ModelInput(
        token_ids=put(token_ids),
        positions=put(positions),
        slots=put(slots),
        query_starts=put(starts),
        context_lens=put(context_lens),
        block_tables=put(tables),
        logit_rows=put(logit_rows),
        num_decodes=num_decodes,
        host_query_starts=tuple(starts.tolist()),
        host_context_lens=tuple(context_lens.tolist()),
        shared=shared,
    )
