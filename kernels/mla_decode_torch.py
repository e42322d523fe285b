"""MLA decode on CPU, in torch: exact in fp32 and, row by row, independent of the batch.

In fp32 a row's bits depend on its own query and keys only. That rests on four properties of MKL and torch which the
tests hold: a product's row does not depend on the other rows if their number is a multiple of 8; a product over up to
128 terms adds them in order, so trailing zeros change nothing; a softmax does not see trailing -inf from 16 columns
on; and sums of partial products follow a tree fixed by the key's position.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_ROW_TILE = 8  # query rows are padded to a multiple of this
_QUERY_TILE = 32  # query tokens of one sequence attended together; bounds the score matrix
_MAX_GATHERED_BLOCKS = 16  # longer sequences are read in place, one by one


@dataclass(frozen=True, slots=True)
class _SequenceWork:
    """One sequence of the torch path: its query rows that see at least one key, and where its keys lie."""

    first_row: int
    num_queries: int
    context_len: int
    runs: tuple[tuple[int, int], ...]  # (first block, number of consecutive blocks)
    block_ids: torch.Tensor | None  # gather these instead, when the runs are too short to be worth a view each


@dataclass(frozen=True, slots=True)
class _GatheredWork:
    """Short sequences of one query each, attended together over a copy of their blocks."""

    rows: torch.Tensor  # [G] query row of each sequence
    block_ids: torch.Tensor  # [T] the blocks of all sequences, one after another
    block_rows: torch.Tensor  # [T] the query row each block belongs to
    positions: torch.Tensor | None  # [T] g * max_blocks + the block's index in sequence g; None: 0, 1, 2, ...
    unused_slots: torch.Tensor  # rows of the copy past the end of their sequence
    mask: torch.Tensor  # [G, 1, max_blocks * block_size] fp32: -inf past the end, else 0


@dataclass(frozen=True, slots=True)
class TorchDecodePlan:
    gathered: _GatheredWork | None
    sequences: tuple[_SequenceWork, ...]


def plan_torch(
    block_tables: torch.Tensor, context_lens: torch.Tensor, block_size: int, query_starts: torch.Tensor | None
) -> TorchDecodePlan:
    lens = context_lens.tolist()
    starts = list(range(len(lens) + 1)) if query_starts is None else query_starts.tolist()
    sequences = []
    short: list[tuple[int, int, torch.Tensor]] = []  # (row, context_len, blocks)
    for i, context_len in enumerate(lens):
        num_queries = min(starts[i + 1] - starts[i], context_len)
        if num_queries <= 0:
            continue
        first_row = starts[i + 1] - num_queries
        blocks = block_tables[i, : -(-context_len // block_size)]
        if num_queries == 1 and len(blocks) <= _MAX_GATHERED_BLOCKS:
            short.append((first_row, context_len, blocks))
            continue
        runs = _consecutive_runs(blocks.tolist())
        # A view costs a few operator calls, a copy costs memory traffic: long runs are read in place.
        gather = len(runs) > 1 and len(runs) * 4 > len(blocks)
        block_ids = blocks.long() if gather else None
        sequences.append(_SequenceWork(first_row, num_queries, context_len, runs, block_ids))
    return TorchDecodePlan(_plan_gathered(short, block_size) if short else None, tuple(sequences))


def _plan_gathered(short: list[tuple[int, int, torch.Tensor]], block_size: int) -> _GatheredWork:
    rows = torch.tensor([row for row, _, _ in short])
    lens = torch.tensor([context_len for _, context_len, _ in short])
    num_blocks = torch.tensor([len(blocks) for _, _, blocks in short])
    max_blocks = int(num_blocks.max())
    slots = torch.arange(max_blocks * block_size)
    positions = (slots[:max_blocks] < num_blocks.unsqueeze(1)).flatten().nonzero().squeeze(1)
    unused = slots >= lens.unsqueeze(1)
    copied = unused.view(-1, block_size).index_select(0, positions)
    is_dense = len(positions) == len(short) * max_blocks
    return _GatheredWork(
        rows=rows,
        block_ids=torch.cat([blocks for _, _, blocks in short]).long(),
        block_rows=rows.repeat_interleave(num_blocks),
        positions=None if is_dense else positions,
        unused_slots=copied.flatten().nonzero().squeeze(1),
        mask=torch.zeros(unused.shape).masked_fill_(unused, -torch.inf).unsqueeze(1),
    )


def _consecutive_runs(blocks: list[int]) -> tuple[tuple[int, int], ...]:
    """[7, 8, 9, 3, 4] -> ((7, 3), (3, 2))"""
    runs = []
    first = 0
    for i in range(1, len(blocks) + 1):
        if i == len(blocks) or blocks[i] != blocks[i - 1] + 1:
            runs.append((blocks[first], i - first))
            first = i
    return tuple(runs)


def decode_torch(
    q: torch.Tensor, cache: torch.Tensor, plan: TorchDecodePlan, scale: float, value_dim: int
) -> torch.Tensor:
    num_rows, num_heads, dim = q.shape
    # One query per sequence: pad the heads of all sequences at once instead of each sequence's rows.
    num_padded = num_heads if plan.sequences else num_heads + -num_heads % _ROW_TILE
    scaled = torch.zeros(num_rows, num_padded, dim)
    torch.mul(q.float(), scale, out=scaled[:, :num_heads])
    out = torch.zeros(num_rows, scaled.shape[1], value_dim)
    if plan.gathered is not None:
        _attend_gathered(scaled, cache, plan.gathered, out)
    for work in plan.sequences:
        if work.block_ids is None:
            runs = [cache[first : first + count].float() for first, count in work.runs]
        else:
            runs = [cache.index_select(0, work.block_ids).float()]
        for start in range(0, work.num_queries, _QUERY_TILE):
            end = min(start + _QUERY_TILE, work.num_queries)
            num_keys = work.context_len - (work.num_queries - end)
            first, last = work.first_row + start, work.first_row + end
            out[first:last] = _attend(scaled[first:last], runs, num_keys, value_dim)
    return out[:, :num_heads].to(q.dtype)


def _pad_rows(rows: torch.Tensor) -> torch.Tensor:
    """[..., M, D] with M padded to a multiple of the row tile."""
    missing = -rows.shape[-2] % _ROW_TILE
    return torch.nn.functional.pad(rows, (0, 0, 0, missing)) if missing else rows


def _attend_gathered(q: torch.Tensor, cache: torch.Tensor, work: _GatheredWork, out: torch.Tensor) -> None:
    """out[row] = attention of q[row] [H, D], scaled, for each of the work's rows."""
    num_heads, value_dim = q.shape[1], out.shape[2]
    num_sequences, block_size = len(work.rows), cache.shape[1]
    max_blocks = work.mask.shape[2] // block_size
    num_cells = num_sequences * max_blocks
    keys = cache.index_select(0, work.block_ids).float()
    keys.view(-1, keys.shape[2]).index_fill_(0, work.unused_slots, 0.0)
    rows = _pad_rows(q.index_select(0, work.block_rows))
    num_rows = rows.shape[1]
    cells = torch.bmm(rows, keys.transpose(1, 2))
    if work.positions is not None:
        cells = cells.new_full((num_cells, num_rows, block_size), -torch.inf).index_copy_(0, work.positions, cells)
    scores = cells.view(num_sequences, max_blocks, num_rows, block_size).transpose(1, 2).flatten(2)
    weights = torch.softmax(scores + work.mask, dim=-1)
    cells = weights.view(num_sequences, num_rows, max_blocks, block_size).transpose(1, 2).flatten(0, 1)
    if work.positions is not None:
        cells = cells.index_select(0, work.positions)
    partial = torch.bmm(cells, keys[:, :, :value_dim])
    if work.positions is not None:
        partial = partial.new_zeros(num_cells, num_rows, value_dim).index_copy_(0, work.positions, partial)
    summed = _sum_tree(partial.view(num_sequences, max_blocks, num_rows, value_dim).transpose(0, 1))
    out.index_copy_(0, work.rows, summed[:, :num_heads])


def _attend(q: torch.Tensor, runs: list[torch.Tensor], num_keys: int, value_dim: int) -> torch.Tensor:
    """q [T, H, D] scaled; its last token sees num_keys keys, which lie one after another in runs of blocks.

    runs [blocks, block_size, D]:  | 64 64 64 | 64 64 |    consecutive blocks, read in place
    num_keys:                      ---------------->|..|   unused slots: masked in the scores, never read as values
    """
    num_tokens, num_heads, dim = q.shape
    num_rows = num_tokens * num_heads
    rows = _pad_rows(q.reshape(num_rows, dim))
    scores = _scores(rows, runs, num_keys)
    num_slots = scores.shape[1]
    scores[:, num_keys:] = -torch.inf
    if num_tokens > 1:
        future = torch.ones(num_tokens, num_tokens, dtype=torch.bool).triu_(1).unsqueeze(1)
        own = scores[:num_rows].view(num_tokens, num_heads, num_slots)[:, :, num_keys - num_tokens : num_keys]
        own.masked_fill_(future, -torch.inf)
    values = _weighted_sum(torch.softmax(scores, dim=-1), runs, num_keys, value_dim)
    return values[:num_rows].view(num_tokens, num_heads, value_dim)


def _scores(rows: torch.Tensor, runs: list[torch.Tensor], num_keys: int) -> torch.Tensor:
    """[rows, slots], over whole blocks: the width of the product is then the same for every length."""
    num_blocks = -(-num_keys // runs[0].shape[1])
    parts = []
    for run in runs:
        if num_blocks <= 0:
            break
        blocks = run[:num_blocks]
        parts.append(torch.bmm(rows.expand(blocks.shape[0], -1, -1), blocks.transpose(1, 2)))
        num_blocks -= blocks.shape[0]
    products = parts[0] if len(parts) == 1 else torch.cat(parts)
    return products.transpose(0, 1).flatten(1)


def _weighted_sum(weights: torch.Tensor, runs: list[torch.Tensor], num_keys: int, value_dim: int) -> torch.Tensor:
    """weights [rows, slots] times the values of the first num_keys slots: [rows, value_dim]."""
    num_rows, block_size = weights.shape[0], runs[0].shape[1]
    tiles = weights.view(num_rows, -1, block_size).transpose(0, 1)
    partial = weights.new_empty(tiles.shape[0], num_rows, value_dim)
    num_full = num_keys // block_size
    num_tail = num_keys - num_full * block_size
    first = 0
    for run in runs:
        last = min(first + run.shape[0], num_full)
        if first < last:
            torch.bmm(tiles[first:last], run[: last - first, :, :value_dim], out=partial[first:last])
        if num_tail and first <= num_full < first + run.shape[0]:
            torch.mm(tiles[num_full, :, :num_tail], run[num_full - first, :num_tail, :value_dim], out=partial[num_full])
        first += run.shape[0]
    return _sum_tree(partial)


def _sum_tree(partial: torch.Tensor) -> torch.Tensor:
    """The sum over dim 0, in pairs 0+1, 2+3, ... and so on; overwrites `partial`.

    The tree is fixed by the index, so zeros at the end change no bit of the sum.
    """
    while partial.shape[0] > 1:
        num_pairs = partial.shape[0] // 2
        partial[0 : 2 * num_pairs : 2].add_(partial[1::2])
        partial = partial[::2]
    return partial[0]
