"""Latent attention on a CPU in fp32, compiled by Numba: any number of query tokens over a paged cache."""

from __future__ import annotations

import numpy as np

from kernels.native import LOG2_E, Array, compiled, exp2_parts

try:
    from kernels.native_vectors import HEAD_TILE, KEY_TILE, LANES, VALUE_TILE, score_tile, value_tile
except ImportError:  # no Numba: a machine that serves on its GPUs only, where nothing here is called
    HEAD_TILE, KEY_TILE, LANES, VALUE_TILE = 2, 8, 16, 128

TILE = 64  # keys of a step of the running softmax: tiles begin at multiples of it, whatever a sequence's length
_f32, _i32, _i64 = np.float32, np.int32, np.int64


@compiled
def find_slots(table: Array, block_size: int, first: int, count: int, slots: Array) -> None:
    """The cache slots of `count` positions from `first` on; the last of them fills up the rest of the tile."""
    block, offset = first // block_size, first % block_size
    for j in range(count):
        slots[j] = _i64(table[block]) * block_size + offset
        offset += 1
        if offset == block_size:
            block, offset = block + 1, 0
    for j in range(count, TILE):
        slots[j] = slots[count - 1]


@compiled
def soften(scores: Array, count: int, scale: float, largest: Array, total: Array, decay: Array) -> None:
    """A step of the running softmax of each head: scores [H, TILE] become weights, 0 from `count` on.

    largest, total: of the scores and the weights so far, brought up to date; decay: what earlier weights shrink by.
    """
    fraction, exponent = np.empty(TILE, _f32), np.empty(TILE, _i32)
    lanes = np.empty(LANES, _f32)
    for h in range(scores.shape[0]):
        row = scores[h]
        maximum = largest[h]
        for j in range(count):
            row[j] *= _f32(scale)
            maximum = max(maximum, row[j])
        decay[h] = np.exp(largest[h] - maximum)
        largest[h] = maximum
        for j in range(TILE):
            power = max((row[j] - maximum) * LOG2_E, _f32(-126.0))
            fraction[j], exponent[j] = exp2_parts(power)
        factors = exponent.view(_f32)
        for j in range(TILE):
            row[j] = fraction[j] * factors[j] if j < count else _f32(0.0)
        lanes[:] = _f32(0.0)
        for start in range(0, TILE, LANES):
            for lane in range(LANES):
                lanes[lane] += row[start + lane]
        added = _f32(0.0)
        for lane in range(LANES):
            added += lanes[lane]
        total[h] = total[h] * decay[h] + added


@compiled
def attend_tile(
    q: Array, keys: Array, slots: Array, count: int, scale: float, largest: Array, total: Array, scores: Array,
    decay: Array, out: Array,
) -> None:  # fmt: skip
    """One query token [H, R + P] over the first `count` keys of a tile; out [H, R] not yet divided by `total`."""
    num_heads, value_dim = out.shape
    for head in range(0, num_heads, HEAD_TILE):
        for key in range(0, count, KEY_TILE):
            score_tile(q, head, keys, slots, key, scores)
    soften(scores, count, scale, largest, total, decay)
    for head in range(0, num_heads, HEAD_TILE):
        column = 0
        while column < value_dim:
            value_tile(scores, head, count, keys, slots, column, decay, out)
            column += VALUE_TILE if value_dim - column >= VALUE_TILE else LANES


@compiled
def attend(
    q: Array, keys: Array, block_tables: Array, block_size: int, context_lens: Array, query_starts: Array,
    scale: float, out: Array, first_row: int, last_row: int,
) -> None:  # fmt: skip
    """mla_decode for some rows: q [N, H, R + P], keys [slots, R + P], query_starts [B + 1], out [N, H, R].

    A tile's keys stay in the cache while all rows of their sequence pass over them.
    """
    num_rows, num_heads = last_row - first_row, out.shape[1]
    largest, total = np.full((num_rows, num_heads), -np.inf, _f32), np.zeros((num_rows, num_heads), _f32)
    scores, decay, slots = np.zeros((num_heads, TILE), _f32), np.empty(num_heads, _f32), np.empty(TILE, _i64)
    out[first_row:last_row] = _f32(0.0)
    for s in range(context_lens.shape[0]):
        begin, end, context_len = max(query_starts[s], first_row), query_starts[s + 1], context_lens[s]
        for first in range(0, context_len, TILE):
            find_slots(block_tables[s], block_size, first, min(TILE, context_len - first), slots)
            for row in range(max(begin, end - context_len + first), min(end, last_row)):
                count, r = min(TILE, context_len - (end - 1 - row) - first), row - first_row
                attend_tile(q[row], keys, slots, count, scale, largest[r], total[r], scores, decay, out[row])
        for row in range(max(begin, end - context_len), min(end, last_row)):
            for h in range(num_heads):
                for i in range(out.shape[2]):
                    out[row, h, i] /= total[row - first_row, h]
