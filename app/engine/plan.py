"""A step as plain arrays: all that a rank needs to build the model's input, and how it travels between ranks.

words  num_seqs | num_tokens | width | num_pending | num_new_tokens | context_lens | token_ids | block_tables
       1          1            1       1             num_seqs         num_seqs       num_tokens  num_seqs x width
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from app.engine.batch import Batch
from app.model.inputs import ModelInput, SharedRows
from app.model.parallel import Group
from kernels.checks import padded_rows

Words = npt.NDArray[np.int32]
NUM_HEADER_WORDS = 4
LONG_CHUNK = 1024  # at the end of the longest context: enough of it to fill a device


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Sequences with one new token come first, as in Batch.

    num_pending: of the first token ids, which are not on the host yet: rows of the step before that sample them
    """

    num_new_tokens: Words  # [num_seqs]
    context_lens: Words  # [num_seqs], this step's tokens included
    token_ids: Words  # [num_tokens]
    block_tables: Words  # [num_seqs, width]; entries past a sequence's blocks are 0
    num_pending: int = 0

    @classmethod
    def of(cls, batch: Batch) -> StepPlan:
        counts = np.array(batch.num_new_tokens, dtype=np.int32)
        num_pending = len(batch.previous_rows)
        first = [
            seq.num_tokens if row < num_pending else seq.num_computed_tokens for row, seq in enumerate(batch.sequences)
        ]
        width = max((len(ids) for ids in batch.block_ids), default=0)
        tables = np.zeros((len(counts), width), dtype=np.int32)
        for row, block_ids in enumerate(batch.block_ids):
            tables[row, : len(block_ids)] = block_ids
        token_ids = list(batch.previous_rows)
        for seq, start, count in list(zip(batch.sequences, first, batch.num_new_tokens, strict=True))[num_pending:]:
            token_ids += seq.token_ids[start : start + count]
        return cls(
            num_new_tokens=counts,
            context_lens=np.array(first, dtype=np.int32) + counts,
            token_ids=np.array(token_ids, dtype=np.int32),
            block_tables=tables,
            num_pending=num_pending,
        )

    @property
    def num_decodes(self) -> int:
        """Leading sequences with one new token."""
        return int(np.argmax(np.append(self.num_new_tokens, 0) != 1))

    def cut(self, first: int, end: int) -> StepPlan:
        """Rows [first, end) alone, as far as there are any: of the sequences at the borders a part each.

        rows | d0 d1 p0 p0 | p0 p1 p1 |      the first part ends p0 early, the second one continues it
        """
        ends = np.cumsum(self.num_new_tokens)
        starts = ends - self.num_new_tokens
        seqs = slice(int(np.searchsorted(ends, first, "right")), int(np.searchsorted(starts, end, "left")))
        missing = np.maximum(ends[seqs] - end, 0)
        counts = ends[seqs] - np.maximum(starts[seqs], first) - missing
        return StepPlan(
            num_new_tokens=counts.astype(np.int32),
            context_lens=(self.context_lens[seqs] - missing).astype(np.int32),
            token_ids=self.token_ids[first:end],
            block_tables=self.block_tables[seqs],
        )

    def rows(self, block_size: int) -> tuple[Words, npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Each sequence's first row, the total at the end [num_seqs + 1]; each row's position and cache slot."""
        starts = np.zeros(len(self.num_new_tokens) + 1, dtype=np.int32)
        np.cumsum(self.num_new_tokens, out=starts[1:])
        sequence = np.repeat(np.arange(len(self.num_new_tokens)), self.num_new_tokens)
        positions = np.arange(len(self.token_ids)) - starts[sequence + 1] + self.context_lens[sequence]
        blocks = self.block_tables[sequence, positions // block_size].astype(np.int64)
        return starts, positions, blocks * block_size + positions % block_size

    def pack(self) -> Words:
        header = [len(self.num_new_tokens), len(self.token_ids), self.block_tables.shape[1], self.num_pending]
        parts = (header, self.num_new_tokens, self.context_lens, self.token_ids, self.block_tables.ravel())
        return np.concatenate(parts, dtype=np.int32)

    @classmethod
    def unpack(cls, words: Words) -> StepPlan:
        num_seqs, num_tokens, width, num_pending = words[:NUM_HEADER_WORDS].tolist()
        sizes = (num_seqs, num_seqs, num_tokens, num_seqs * width)
        counts, context_lens, token_ids, tables, _ = np.split(words[NUM_HEADER_WORDS:], np.cumsum(sizes))
        return cls(counts, context_lens, token_ids, tables.reshape(num_seqs, width), num_pending)


def warm_up_plans(max_tokens: int, max_context: int, block_size: int, *, num_parts: int = 1) -> list[StepPlan]:
    """Decodes and prompts of every size that kernels tell apart, up to `max_tokens` together, the largest first, which
    also attends to `max_context` tokens, as the last one does in each of several parts; all in block 0, which nobody
    reads yet.
    """
    chunk = max(1, min(max_tokens - 1, LONG_CHUNK))
    counts = [1, chunk] + ([max_tokens - 1 - chunk] if max_tokens - 1 > chunk else [])
    plans = [_warm_up_plan(counts, [1, max(max_context, chunk), *counts[2:]], block_size)]
    num_decodes, num_tokens = 1, 8
    while num_tokens < max_tokens:
        counts = [1] * num_decodes + [num_tokens - num_decodes]
        plans.append(_warm_up_plan(counts, counts, block_size))
        num_decodes, num_tokens = 2 * num_decodes, 4 * num_tokens
    if num_parts > 1:
        counts = [num_parts * max(2, min(max_tokens // num_parts, LONG_CHUNK))]
        plans.append(_warm_up_plan(counts, [max(max_context, *counts)], block_size))
    return plans


def _warm_up_plan(num_new_tokens: list[int], context_lens: list[int], block_size: int) -> StepPlan:
    return StepPlan(
        num_new_tokens=np.array(num_new_tokens, dtype=np.int32),
        context_lens=np.array(context_lens, dtype=np.int32),
        token_ids=np.zeros(sum(num_new_tokens), dtype=np.int32),
        block_tables=np.zeros((len(context_lens), -(-max(context_lens) // block_size)), dtype=np.int32),
    )


def to_model_input(
    plan: StepPlan, block_size: int, device: torch.device, *, part: int = 0, num_parts: int = 1
) -> ModelInput:
    """Lay a plan out as the arrays of ModelInput. Token rows are padded to the row tile of the GEMMs.

    part: of `num_parts` equal ones that the rows are cut into, the one to compute; the last ones may be empty
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

    rows, shared = slice(part * size, (part + 1) * size), None
    logit_rows = logit_rows_of(starts, rows.start, rows.stop)
    on_device = put(token_ids), put(positions), put(slots)
    if num_parts > 1:
        shared = SharedRows(*on_device)
        on_device = shared.token_ids[rows], shared.positions[rows], torch.full_like(shared.slots[rows], -1)
        plan = plan.cut(rows.start, rows.stop)
        starts, _, _ = plan.rows(block_size)
    return ModelInput(
        token_ids=on_device[0],
        positions=on_device[1],
        slots=on_device[2],
        query_starts=put(starts),
        context_lens=put(plan.context_lens),
        block_tables=put(plan.block_tables),
        logit_rows=put(logit_rows),
        num_decodes=plan.num_decodes,
        host_query_starts=tuple(starts.tolist()),
        host_context_lens=tuple(plan.context_lens.tolist()),
        shared=shared,
    )


def put_sampled(token_ids: torch.Tensor, previous_token_ids: torch.Tensor | None, ranks: Group) -> None:
    """Replace rows of the step before, in place, by what rank 0 sampled there and alone has: `previous_token_ids`."""
    if previous_token_ids is not None:
        token_ids.copy_(previous_token_ids.index_select(0, token_ids))
    ranks.broadcast(token_ids)


def logit_rows_of(starts: Words, first: int, end: int) -> npt.NDArray[np.int64]:
    """The last row of each sequence, counted from `first`; -1 where it is not one of [first, end)."""
    rows = starts[1:].astype(np.int64) - 1
    return np.where((rows >= first) & (rows < end), rows - first, -1)
