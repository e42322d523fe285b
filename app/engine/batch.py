"""One step's work: which sequences, and how many new tokens each."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from app.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences with one new token come first: they share the decode kernels.

    block_ids: each sequence's blocks as they were when the step was scheduled. A sequence that is aborted while the
        step is being prepared loses its blocks; the step must still write where it was told to.
    previous_rows: of a step that is launched before the one ahead of it is committed. So many sequences come first; the
        input of each is the token that the earlier step samples in that row, still on the device: it follows all tokens
        that the host knows.
    """

    sequences: tuple[Sequence, ...]
    num_new_tokens: tuple[int, ...]
    block_ids: tuple[list[int], ...]
    previous_rows: tuple[int, ...] = ()

    @classmethod
    def of(cls, scheduled: Seq[tuple[Sequence, int]]) -> Batch:
        ordered = sorted(scheduled, key=lambda pair: pair[1] > 1)
        return cls(
            tuple(seq for seq, _ in ordered),
            tuple(count for _, count in ordered),
            tuple(seq.block_ids for seq, _ in ordered),
        )

    def after(self, sequences: Seq[Sequence], previous_rows: Seq[int]) -> Batch:
        """This batch behind sequences whose new token the step before samples in these rows."""
        block_ids = tuple(seq.block_ids for seq in sequences)
        counts = (1,) * len(sequences) + self.num_new_tokens
        return Batch((*sequences, *self.sequences), counts, block_ids + self.block_ids, tuple(previous_rows))

    @property
    def num_decodes(self) -> int:
        return self.num_new_tokens.count(1)

    @property
    def num_tokens(self) -> int:
        return sum(self.num_new_tokens)

    @property
    def samples(self) -> list[int]:
        """Rows whose sequence is fully computed after this step, so that it samples a token."""
        return [
            row
            for row, (seq, count) in enumerate(zip(self.sequences, self.num_new_tokens, strict=True))
            if row < len(self.previous_rows) or count == seq.num_new_tokens
        ]
