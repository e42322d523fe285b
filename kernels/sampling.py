"""Draw each row's next token: temperature, top-k, top-p, min-p, and a counter-based random number."""

from __future__ import annotations

from typing import TypeVar

import torch
import triton
import triton.language as tl

from kernels.checks import Backend, check_contiguous, check_dtype, check_shape, use_triton

_MASK = 0xFFFFFFFF
_FINITE_MAX = torch.finfo(torch.float32).max
_LANES = 4096  # part of the definition: the order in which a row's weights are added up
_CANDIDATES = 256  # on CPU: where top-k and top-p usually end
_MIN_TEMPERATURE = 1e-6  # below it every temperature draws the best token


Word = TypeVar("Word", int, torch.Tensor)  # 32 bits, held by a Python int or by each number of an int64 tensor


def philox_4x32_10(counter: tuple[Word, Word, Word, Word], key: tuple[Word, Word]) -> tuple[Word, Word, Word, Word]:
    """Ten rounds of Philox4x32 on four counter words and two key words.

    Source: Salmon et al. 2011, https://doi.org/10.1145/2063384.2063405
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        low0, high0 = _multiply(c0, 0xD2511F53)
        low1, high1 = _multiply(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return c0, c1, c2, c3


def _multiply(value: Word, factor: int) -> tuple[Word, Word]:
    """Low and high words of a 32 x 32 bit product, in int64 without overflow: by 16-bit halves of `value`."""
    low = (value & 0xFFFF) * factor
    high = (value >> 16) * factor + (low >> 16)
    return (high & 0xFFFF) << 16 | (low & 0xFFFF), high >> 16


def uniforms(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """One fp32 number in [0, 1) per (seed, position): the top 23 bits of Philox's first word.

    With 24 bits the product u * sum could round up to the sum itself, past the last token.
    """
    zero = torch.zeros_like(positions)
    counter = (positions & _MASK, positions >> 32 & _MASK, zero, zero)
    word = philox_4x32_10(counter, (seeds & _MASK, seeds >> 32 & _MASK))[0]
    return (word >> 9).float() * 2.0**-23


def _uniforms_on_host(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """`uniforms`, faster for the few rows of a CPU step: hundreds of operations on Python's ints, not on tensors."""
    words = [
        philox_4x32_10((position & _MASK, position >> 32 & _MASK, 0, 0), (seed & _MASK, seed >> 32 & _MASK))[0]
        for seed, position in zip(seeds.tolist(), positions.tolist(), strict=True)
    ]
    return torch.tensor([(word >> 9) * 2.0**-23 for word in words], dtype=torch.float32)


def _clean(logits: torch.Tensor) -> torch.Tensor:
    """NaN counts as -inf and +inf as the largest number, so that every row has a maximum."""
    return torch.where(logits.isnan(), -torch.inf, logits).clamp_(max=_FINITE_MAX)


def sample_reference(
    logits: torch.Tensor, temperatures: torch.Tensor, top_ks: torch.Tensor, top_ps: torch.Tensor,
    min_ps: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """The definition, by a full sort. Every step is row by row, so a row's token never depends on the batch."""
    logits = _clean(logits)
    weights = _weights(logits, temperatures)
    drawn = _draw(weights * _kept(logits, weights, top_ks, top_ps), min_ps, uniforms(seeds, positions))
    return torch.where((temperatures > 0) & (weights.sum(-1) > 0), drawn, logits.argmax(-1))


def _weights(logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """Scaled around the maximum, so that no temperature overflows; a row of -inf alone has no weight anywhere."""
    best = logits.amax(-1, keepdim=True).clamp(min=-_FINITE_MAX)
    inverse = temperatures.clamp(min=_MIN_TEMPERATURE).reciprocal()
    return torch.exp((logits - best) * inverse[:, None])


def _kept(logits: torch.Tensor, weights: torch.Tensor, top_ks: torch.Tensor, top_ps: torch.Tensor) -> torch.Tensor:
    """The tokens [B, V] that top-k and top-p keep: a prefix of the order (logit descending, id ascending)."""
    order = torch.sort(logits, dim=-1, descending=True, stable=True).indices
    rank = torch.arange(logits.shape[1], device=logits.device)
    limits = torch.where(top_ks > 0, top_ks, logits.shape[1])[:, None]
    ordered = weights.gather(1, order).masked_fill(rank >= limits, 0.0)
    mass = ordered.cumsum(-1)
    is_kept = (rank < limits) & ((mass - ordered < top_ps[:, None] * mass[:, -1:]) | (top_ps[:, None] >= 1.0))
    is_kept[:, 0] = True
    return torch.zeros_like(is_kept).scatter_(1, order, is_kept)


def _draw(weights: torch.Tensor, min_ps: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """The token at which the weights, added up in the order (id mod _LANES, id), exceed number * sum."""
    vocab = weights.shape[1]
    weights = weights.masked_fill(weights < min_ps[:, None], 0.0)
    width = min(_LANES, vocab)
    lanes = torch.nn.functional.pad(weights, (0, -vocab % width)).unflatten(1, (-1, width))
    mass = lanes.transpose(1, 2).flatten(1).cumsum(-1)
    place = (mass <= numbers[:, None] * mass[:, -1:]).sum(-1).clamp_(max=mass.shape[1] - 1)
    lanes_before, step = place // lanes.shape[1], place % lanes.shape[1]
    token_ids: torch.Tensor = step * width + lanes_before
    return token_ids


def _kept_on_host(
    logits: torch.Tensor, weights: torch.Tensor, top_ks: torch.Tensor, top_ps: torch.Tensor
) -> torch.Tensor:
    """`_kept`, sorting only rows whose prefix does not end among their _CANDIDATES best logits."""
    vocab = logits.shape[1]
    best, ids = logits.topk(min(_CANDIDATES, vocab))
    limits = torch.where(top_ks > 0, top_ks, vocab)[:, None]
    rank = torch.arange(best.shape[1])
    ordered = weights.gather(1, ids).masked_fill(rank >= limits, 0.0)
    mass = ordered.cumsum(-1)
    total = torch.where(limits <= len(rank), mass[:, -1:], weights.sum(-1, keepdim=True))
    is_kept = (rank < limits) & ((mass - ordered < top_ps[:, None] * total) | (top_ps[:, None] >= 1.0))
    num_kept = is_kept.sum(-1, keepdim=True).clamp_(min=1)
    cut = best.gather(1, num_kept - 1)
    ties = num_kept - (best > cut).sum(-1, keepdim=True)
    is_tie = logits == cut
    kept = (logits > cut) | (is_tie & (is_tie.cumsum(-1) <= ties))
    is_open = (limits > len(rank)) & ((limits < vocab) | (num_kept == len(rank)))
    rows = is_open.squeeze(1).nonzero().squeeze(1)
    if rows.numel():
        kept[rows] = _kept(logits[rows], weights[rows], top_ks[rows], top_ps[rows])
    return kept


def _torch_sample(
    logits: torch.Tensor, temperatures: torch.Tensor, top_ks: torch.Tensor, top_ps: torch.Tensor,
    min_ps: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Greedy rows by argmax; only top-k and top-p need an order."""
    best, token_ids = logits.max(-1)
    if not bool(best.isfinite().all()):
        return sample_reference(logits, temperatures, top_ks, top_ps, min_ps, seeds, positions)
    rows = (temperatures > 0).nonzero().squeeze(1)
    if rows.numel() == 0:
        return token_ids
    logits, top_ks, top_ps = logits[rows], top_ks[rows], top_ps[rows]
    weights = _weights(logits, temperatures[rows])
    cut = ((top_ks > 0) | (top_ps < 1.0)).nonzero().squeeze(1)
    if cut.numel():
        weights[cut] *= _kept_on_host(logits[cut], weights[cut], top_ks[cut], top_ps[cut])
    token_ids[rows] = _draw(weights, min_ps[rows], _uniforms_on_host(seeds[rows], positions[rows]))
    return token_ids


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


@triton.jit
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


@triton.jit
def _kept_weights(logits, ids, best, inverse_temperature, cut, last_tie, min_p):
    keys = _key(logits)
    weights = tl.exp((logits - best) * inverse_temperature)
    is_kept = ((keys > cut) | ((keys == cut) & (ids <= last_tie))) & (weights >= min_p)
    return tl.where(is_kept, weights, 0.0)


def sample(
    logits: torch.Tensor, temperatures: torch.Tensor, top_ks: torch.Tensor, top_ps: torch.Tensor,
    min_ps: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, *, backend: Backend | None = None,
) -> torch.Tensor:  # fmt: skip
    """Draw one token per row.

    With the tokens sorted by (logit descending, id ascending) and w = exp((logit - max) / temperature), a prefix is
    kept: at most top_k tokens; of these the shortest prefix with at least top_p of their weight; of these the ones
    with w >= min_p (the best token has w = 1). The best token is always kept. The row's token is the one at which
    the kept weights, added up in the order (id mod 4096, id), exceed u times their sum: a fixed order that needs no
    sort and lets 4096 sums run side by side.

    Args:
        logits:       [B, V] fp32, contiguous. NaN counts as -inf, +inf as the largest finite number;
                      a row without any finite logit gives token 0
        temperatures: [B] fp32; 0 is greedy, the best token with the lowest id
        top_ks:       [B] int32; 0 is off
        top_ps:       [B] fp32; 1 is off
        min_ps:       [B] fp32; 0 is off
        seeds, positions: [B] int64; u = Philox4x32-10(key = seed, counter = position), its top 23 bits
    Returns: [B] int64, freshly allocated. A row's token does not depend on the other rows.
    Raises:  ValueError on shape, dtype or stride
    Accuracy: fp32 sums: a draw within 1e-5 of a boundary between two tokens may give either
    Source:  Holtzman et al. 2020 (top-p), https://arxiv.org/abs/1904.09751; Salmon et al. 2011 (Philox)
    """
    check_shape("logits", logits, (None, None))
    check_dtype("logits", logits, torch.float32)
    check_contiguous("logits", logits)
    if logits.shape[1] == 0:
        raise ValueError("logits: the vocabulary is empty")
    for name, tensor, dtype in (
        ("temperatures", temperatures, torch.float32),
        ("top_ks", top_ks, torch.int32),
        ("top_ps", top_ps, torch.float32),
        ("min_ps", min_ps, torch.float32),
        ("seeds", seeds, torch.int64),
        ("positions", positions, torch.int64),
    ):
        check_shape(name, tensor, (logits.shape[0],))
        check_dtype(name, tensor, dtype)
        check_contiguous(name, tensor)
    if not use_triton(logits, backend):
        return _torch_sample(logits, temperatures, top_ks, top_ps, min_ps, seeds, positions)
    num_rows, vocab = logits.shape
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows:
        block = min(_LANES, triton.next_power_of_2(vocab))
        _sample_kernel[(num_rows,)](
            logits, temperatures, top_ks, top_ps, min_ps, seeds, positions, out, vocab,
            MIN_TEMPERATURE=_MIN_TEMPERATURE, BLOCK=block, STEPS=triton.next_power_of_2(triton.cdiv(vocab, block)),
            num_warps=min(max(block // 128, 1), 32),
        )  # fmt: skip
    return out
