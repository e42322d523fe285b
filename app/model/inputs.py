"""What one step feeds the model: the engine fills it, model and kernels only read it."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class SharedRows:
    """All rows of a step whose rows the expert ranks split evenly, in the ranks' order; padding has slot -1."""

    token_ids: torch.Tensor  # [expert ranks x num_tokens] int64; the rank's own ones are a view of these
    positions: torch.Tensor  # [expert ranks x num_tokens] int64
    slots: torch.Tensor  # [expert ranks x num_tokens] int64


@dataclass(frozen=True, slots=True)
class ModelInput:
    """A ragged batch of `num_seqs` sequences, decodes (one new token) first, then prefill chunks.

        token_ids  | d0 | d1 | p0 p0 p0 | p1 p1 | pad pad |
        query_starts 0    1    2          5       7           (num_seqs + 1)

    Sequence i computes tokens [context_lens[i] - num_new, context_lens[i]); its cache holds the earlier ones.
    Rows past query_starts[-1] are padding: slot -1, position 0, no sequence.
    """

    token_ids: torch.Tensor  # [num_tokens] int64, padding included
    positions: torch.Tensor  # [num_tokens] int64
    slots: torch.Tensor  # [num_tokens] int64: block_id * block_size + offset; -1 is not written
    query_starts: torch.Tensor  # [num_seqs + 1] int32
    context_lens: torch.Tensor  # [num_seqs] int32, this step's tokens included
    block_tables: torch.Tensor  # [num_seqs, max_blocks] int32; entries past a sequence's blocks are never read
    logit_rows: torch.Tensor  # [num_seqs] int64: the row of each sequence's last token
    num_decodes: int  # sequences [0, num_decodes) have one query token each
    # The same numbers on the host, so that no kernel launch needs a device sync. None: the device alone will know them,
    # when a graph of the step is replayed; launches depend on shapes and on num_keys then.
    host_query_starts: tuple[int, ...] | None
    host_context_lens: tuple[int, ...] | None
    # Set if expert ranks split the step. The other fields then hold this rank's rows, and of sequences what these rows
    # are part of; slots are -1, and logit_rows are [all sequences], -1 where another rank holds the row.
    shared: SharedRows | None = None
    num_keys: int = 0  # room for the contexts of all prefill chunks; 0: only the host's lengths tell
