"""The Triton kernel of sampling.py: no sort; top-k and top-p search for the logit at which the kept prefix ends."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

LANES = 4096  # part of the definition: the order in which a row's weights are added up
MIN_TEMPERATURE = 1e-6  # below it every temperature draws the best token


@triton.jit
def _key(logits):
    """fp32 -> int32 in the same order, with -0 equal to +0."""
    bits = (logits + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _weight(key, best, inverse_temperature):
    bits = key ^ ((key >> 31) & 0x7FFFFFFF)
    return tl.exp((bits.to(tl.float32, bitcast=True) - best) * inverse_temperature)


@triton.jit
def _load(row_ptr, start, V, BLOCK: tl.constexpr):
    """A chunk of cleaned logits and its token ids; past the end -inf, which weighs nothing."""
    ids = start + tl.arange(0, BLOCK)
    logits = tl.load(row_ptr + ids, mask=ids < V, other=-float("inf"))
    logits = tl.where(logits == logits, logits, -float("inf"))
    return tl.minimum(logits, 3.4028234663852886e38), ids


@triton.jit
def _kept_weights(logits, ids, best, inverse_temperature, cut, last_tie, min_p):
    keys = _key(logits)
    weights = tl.exp((logits - best) * inverse_temperature)
    is_kept = ((keys > cut) | ((keys == cut) & (ids <= last_tie))) & (weights >= min_p)
    return tl.where(is_kept, weights, 0.0)


@triton.jit
def _around(row_ptr, V, best, inverse_temperature, key, BLOCK: tl.constexpr):
    """How many logits lie above `key`, what they weigh, and how many are equal to it."""
    above = tl.zeros([BLOCK], tl.int32)
    mass = tl.zeros([BLOCK], tl.float32)
    equal = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(0, V, BLOCK, loop_unroll_factor=4):
        logits, ids = _load(row_ptr, start, V, BLOCK)
        keys = _key(logits)
        above += (keys > key).to(tl.int32)
        mass += tl.where(keys > key, tl.exp((logits - best) * inverse_temperature), 0.0)
        equal += ((keys == key) & (ids < V)).to(tl.int32)
    return tl.sum(above, axis=0), tl.sum(mass, axis=0), tl.sum(equal, axis=0)


@triton.jit
def _crossing(row_ptr, V, best, inverse_temperature, lowest, target, BY_COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """The largest key in the row such that the logits from it on number (BY_COUNT) or weigh at least `target`.

    It lies in [low, high): each pass over the row keeps a quarter of the interval, until that holds one logit.
    """
    low = lowest.to(tl.int64)
    high = _key(best).to(tl.int64) + 1
    count_low = V
    count_high = 0
    while (high - low > 1) & (count_low - count_high > 1):
        a = low + (high - low) // 4
        b = low + (high - low) // 2
        c = high - tl.maximum((high - low) // 4, 1)
        counts_a = tl.zeros([BLOCK], tl.int32)
        counts_b = tl.zeros([BLOCK], tl.int32)
        counts_c = tl.zeros([BLOCK], tl.int32)
        mass_a = tl.zeros([BLOCK], tl.float32)
        mass_b = tl.zeros([BLOCK], tl.float32)
        mass_c = tl.zeros([BLOCK], tl.float32)
        for start in tl.range(0, V, BLOCK, loop_unroll_factor=4):
            logits, _ = _load(row_ptr, start, V, BLOCK)  # past the end -inf, which reaches no threshold
            keys = _key(logits)
            reaches_a = keys >= a.to(tl.int32)
            reaches_b = keys >= b.to(tl.int32)
            reaches_c = keys >= c.to(tl.int32)
            counts_a += reaches_a.to(tl.int32)
            counts_b += reaches_b.to(tl.int32)
            counts_c += reaches_c.to(tl.int32)
            if not BY_COUNT:
                weights = tl.exp((logits - best) * inverse_temperature)
                mass_a += tl.where(reaches_a, weights, 0.0)
                mass_b += tl.where(reaches_b, weights, 0.0)
                mass_c += tl.where(reaches_c, weights, 0.0)
        count_a = tl.sum(counts_a, axis=0)
        count_b = tl.sum(counts_b, axis=0)
        count_c = tl.sum(counts_c, axis=0)
        passes_a = (count_a >= target) if BY_COUNT else (tl.sum(mass_a, axis=0) >= target)
        passes_b = (count_b >= target) if BY_COUNT else (tl.sum(mass_b, axis=0) >= target)
        passes_c = (count_c >= target) if BY_COUNT else (tl.sum(mass_c, axis=0) >= target)
        high = tl.where(passes_c, high, tl.where(passes_b, c, tl.where(passes_a, b, a)))
        count_high = tl.where(passes_c, count_high, tl.where(passes_b, count_c, tl.where(passes_a, count_b, count_a)))
        low = tl.where(passes_c, c, tl.where(passes_b, b, tl.where(passes_a, a, low)))
        count_low = tl.where(passes_c, count_c, tl.where(passes_b, count_b, tl.where(passes_a, count_a, count_low)))
    smallest = tl.full([BLOCK], 0x7FFFFFFF, tl.int32)
    for start in tl.range(0, V, BLOCK, loop_unroll_factor=4):
        logits, ids = _load(row_ptr, start, V, BLOCK)
        keys = _key(logits)
        smallest = tl.minimum(smallest, tl.where((keys >= low) & (ids < V), keys, 0x7FFFFFFF))
    return tl.min(smallest, axis=0)


@triton.jit
def _nth_equal(row_ptr, V, key, n, BLOCK: tl.constexpr):
    """The id of the n-th logit equal to `key`, counted from 1."""
    seen = 0
    last = -1
    for start in range(0, V, BLOCK):
        logits, ids = _load(row_ptr, start, V, BLOCK)
        is_equal = (_key(logits) == key) & (ids < V)
        rank = seen + tl.cumsum(is_equal.to(tl.int32), axis=0)
        last = tl.maximum(last, tl.max(tl.where(is_equal & (rank <= n), ids, -1), axis=0))
        seen += tl.sum(is_equal.to(tl.int32), axis=0)
    return last


@triton.jit
def _first_past(weights, target, WIDTH: tl.constexpr):
    """The first index at which the running sum of `weights` passes `target`, and the sum before it."""
    index = tl.arange(0, WIDTH)
    mass = tl.cumsum(weights, axis=0)
    # A parallel scan may step at a zero weight by rounding, or end below the target: stay on positive weights.
    first = tl.min(tl.where((mass > target) & (weights > 0.0), index, WIDTH), axis=0)
    last = tl.max(tl.where(weights > 0.0, index, 0), axis=0)
    found = tl.minimum(first, last)
    return found, tl.sum(tl.where(index == found, mass - weights, 0.0), axis=0)


# Parameters of B rows lie one after the other in one copy: where each begins depends on B.
@triton.jit(
    do_not_specialize_on_alignment=["temperatures_ptr", "top_ks_ptr", "top_ps_ptr", "min_ps_ptr", "seeds_ptr",
                                    "positions_ptr"]
)  # fmt: skip
def _sample_kernel(
    logits_ptr, temperatures_ptr, top_ks_ptr, top_ps_ptr, min_ps_ptr, seeds_ptr, positions_ptr, out_ptr, V,
    MIN_TEMPERATURE: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """One row per program. Kept are all logits above `cut` and the first `ties` of those equal to it."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * V
    lane_best = tl.full([BLOCK], -float("inf"), tl.float32)
    lane_id = tl.arange(0, BLOCK)
    for start in tl.range(0, V, BLOCK, loop_unroll_factor=4):
        logits, ids = _load(row_ptr, start, V, BLOCK)
        lane_id = tl.where(logits > lane_best, ids, lane_id)
        lane_best = tl.maximum(lane_best, logits)
    best = tl.max(lane_best, axis=0)
    token = tl.min(tl.where(lane_best == best, lane_id, V), axis=0)
    temperature = tl.load(temperatures_ptr + row)
    if (temperature > 0.0) & (best > -float("inf")):
        temperature = tl.maximum(temperature, MIN_TEMPERATURE)
        inverse_temperature = 1.0 / temperature
        top_k = tl.load(top_ks_ptr + row)
        top_p = tl.load(top_ps_ptr + row)
        cut = _key(best * 0.0 - float("inf"))  # keeps everything: -inf weighs nothing
        last_tie = V
        has_top_k = (top_k > 0) & (top_k < V)
        if has_top_k | (top_p < 1.0):
            if has_top_k:
                cut = _crossing(row_ptr, V, best, inverse_temperature, cut, top_k, True, BLOCK)
            above, mass, equal = _around(row_ptr, V, best, inverse_temperature, cut, BLOCK)
            ties = equal
            if has_top_k:
                ties = top_k - above
            if top_p < 1.0:
                target = top_p * (mass + ties * _weight(cut, best, inverse_temperature))
                if target <= mass:
                    # Tokens 30 temperatures below the best weigh under 1e-13 of it: no prefix of weight ends there.
                    lowest = tl.maximum(cut, _key(best - 30.0 * temperature))
                    cut = _crossing(row_ptr, V, best, inverse_temperature, lowest, target, False, BLOCK)
                    above, mass, equal = _around(row_ptr, V, best, inverse_temperature, cut, BLOCK)
                    ties = equal
                needed = tl.ceil((target - mass) / tl.maximum(_weight(cut, best, inverse_temperature), 1e-38))
                ties = tl.minimum(tl.maximum(needed, 1.0), ties.to(tl.float32)).to(tl.int32)
            if ties < equal:
                last_tie = _nth_equal(row_ptr, V, cut, ties, BLOCK)
        min_p = tl.load(min_ps_ptr + row)
        lanes = tl.zeros([BLOCK], tl.float32)
        for start in tl.range(0, V, BLOCK, loop_unroll_factor=4):
            logits, ids = _load(row_ptr, start, V, BLOCK)
            lanes += _kept_weights(logits, ids, best, inverse_temperature, cut, last_tie, min_p)
        position = tl.load(positions_ptr + row)
        low_word = (position & 0xFFFFFFFF).to(tl.uint32)
        high_word = ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
        word, _, _, _ = tl.philox(tl.load(seeds_ptr + row), low_word, high_word, low_word * 0, low_word * 0)
        target = (word >> 9).to(tl.float32) * 1.1920928955078125e-07 * tl.sum(lanes, axis=0)
        lane, before = _first_past(lanes, target, BLOCK)
        ids = lane + tl.arange(0, STEPS) * BLOCK
        logits = tl.load(row_ptr + ids, mask=ids < V, other=-float("inf"))
        logits = tl.minimum(tl.where(logits == logits, logits, -float("inf")), 3.4028234663852886e38)
        weights = _kept_weights(logits, ids, best, inverse_temperature, cut, last_tie, min_p)
        step, _ = _first_past(weights, target - before, STEPS)
        token = lane + step * BLOCK
    tl.store(out_ptr + row, token)


def launch_sample(
    logits: torch.Tensor, temperatures: torch.Tensor, top_ks: torch.Tensor, top_ps: torch.Tensor,
    min_ps: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """`sample` on checked arguments."""
    num_rows, vocab = logits.shape
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows:
        block = min(LANES, triton.next_power_of_2(vocab))
        _sample_kernel[(num_rows,)](
            logits, temperatures, top_ks, top_ps, min_ps, seeds, positions, out, vocab,
            MIN_TEMPERATURE=MIN_TEMPERATURE, BLOCK=block, STEPS=triton.next_power_of_2(triton.cdiv(vocab, block)),
            num_warps=min(max(block // 128, 1), 32),
        )  # fmt: skip
    return out
