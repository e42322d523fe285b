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
