"""Draw each row's next token: temperature, top-k, top-p, min-p, and a counter-based random number."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.checks import Backend, check_contiguous, check_dtype, check_shape, use_triton

_MASK = 0xFFFFFFFF
_FINITE_MAX = torch.finfo(torch.float32).max
_MIN_TEMPERATURE = 1e-6  # below it every temperature draws the best token


def philox_4x32_10(counter: tuple[torch.Tensor, ...], key: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Ten rounds of Philox4x32 on four counter words and two key words, int64 tensors that hold 32-bit values.

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


def _multiply(value: torch.Tensor, factor: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Low and high words of a 32 x 32 bit product, in int64 without overflow: by 16-bit halves of `value`."""
    low = (value & 0xFFFF) * factor
    high = (value >> 16) * factor + (low >> 16)
    return (high & 0xFFFF) << 16 | (low & 0xFFFF), high >> 16


def uniforms(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """One fp32 number in [0, 1) per (seed, position): the top 24 bits of Philox's first word."""
    zero = torch.zeros_like(positions)
    counter = (positions & _MASK, positions >> 32 & _MASK, zero, zero)
    word = philox_4x32_10(counter, (seeds & _MASK, seeds >> 32 & _MASK))[0]
    return (word >> 8).float() * 2.0**-24


def _clean(logits: torch.Tensor) -> torch.Tensor:
    """NaN counts as -inf and +inf as the largest number, so that every row has a maximum."""
    return torch.where(logits.isnan(), -torch.inf, logits).clamp_(max=_FINITE_MAX)


def sample_reference(
    logits: torch.Tensor, temperatures: torch.Tensor, top_ks: torch.Tensor, top_ps: torch.Tensor,
    min_ps: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """The definition, by a full sort. Every step is row by row, so a row's token never depends on the batch."""
    logits, ids = torch.sort(_clean(logits), dim=-1, descending=True, stable=True)
    # Scaled around the maximum, so that no temperature overflows; a row of -inf alone has no weight anywhere.
    shifted = logits - logits[:, :1].clamp(min=-_FINITE_MAX)
    weights = torch.exp(shifted / temperatures.clamp(min=_MIN_TEMPERATURE)[:, None])
    rank = torch.arange(logits.shape[1], device=logits.device)
    limits = torch.where(top_ks > 0, top_ks, logits.shape[1])
    weights = weights.masked_fill(rank >= limits[:, None], 0.0)
    mass = weights.cumsum(-1)
    kept = (mass - weights < top_ps[:, None] * mass[:, -1:]) & (weights >= min_ps[:, None]) & (weights > 0)
    last = kept.sum(-1, keepdim=True).sub(1).clamp_(min=0)
    drawn = (mass <= uniforms(seeds, positions)[:, None] * mass.gather(1, last)).sum(-1, keepdim=True)
    drawn = torch.where(temperatures[:, None] > 0, torch.minimum(drawn, last), 0)
    return ids.gather(1, drawn).squeeze(1)


def _torch_sample(
    logits: torch.Tensor, temperatures: torch.Tensor, top_ks: torch.Tensor, top_ps: torch.Tensor,
    min_ps: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Greedy rows by argmax, the others by sorting them."""
    best, token_ids = logits.max(-1)
    if bool(best.isnan().any()):
        token_ids = _clean(logits).argmax(-1)
    rows = (temperatures > 0).nonzero().squeeze(1)
    if rows.numel():
        drawn = sample_reference(
            logits[rows], temperatures[rows], top_ks[rows], top_ps[rows], min_ps[rows], seeds[rows], positions[rows]
        )
        token_ids[rows] = drawn
    return token_ids


@triton.jit
def _key(logits):
    """fp32 -> int32 in the same order, with -0 equal to +0."""
    bits = (logits + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _weight(key, best, temperature):
    bits = key ^ ((key >> 31) & 0x7FFFFFFF)
    return tl.exp((bits.to(tl.float32, bitcast=True) - best) / temperature)


@triton.jit
def _load(row_ptr, start, V, BLOCK: tl.constexpr):
    """A chunk of cleaned logits and its token ids; past the end -inf, which weighs nothing."""
    ids = start + tl.arange(0, BLOCK)
    logits = tl.load(row_ptr + ids, mask=ids < V, other=-float("inf"))
    logits = tl.where(logits == logits, logits, -float("inf"))
    return tl.minimum(logits, 3.4028234663852886e38), ids


@triton.jit
def _around(row_ptr, V, best, temperature, key, BLOCK: tl.constexpr):
    """How many logits lie above `key`, what they weigh, and how many are equal to it."""
    above = tl.zeros([BLOCK], tl.int32)
    mass = tl.zeros([BLOCK], tl.float32)
    equal = tl.zeros([BLOCK], tl.int32)
    for start in range(0, V, BLOCK):
        logits, ids = _load(row_ptr, start, V, BLOCK)
        keys = _key(logits)
        above += (keys > key).to(tl.int32)
        mass += tl.where(keys > key, tl.exp((logits - best) / temperature), 0.0)
        equal += ((keys == key) & (ids < V)).to(tl.int32)
    return tl.sum(above, axis=0), tl.sum(mass, axis=0), tl.sum(equal, axis=0)


@triton.jit
def _crossing(
    row_ptr, V, best, temperature, lowest, target,
    BY_COUNT: tl.constexpr, STRICT: tl.constexpr, BLOCK: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """The largest key in the row such that the logits from it on number (BY_COUNT) or weigh at least `target`,
    or more than it if STRICT.

    It lies in [low, high): each pass over the row cuts the interval into T + 1 parts, until it holds one logit.
    """
    index = tl.arange(0, T)
    low = lowest.to(tl.int64)
    high = _key(best).to(tl.int64) + 1
    count_low = V
    count_high = 0
    while (high - low > 1) & (count_low - count_high > 1):
        thresholds = low + (high - low) * (index + 1) // (T + 1)
        counts = tl.zeros([BLOCK, T], tl.int32)
        masses = tl.zeros([BLOCK, T], tl.float32)
        for start in range(0, V, BLOCK):
            logits, ids = _load(row_ptr, start, V, BLOCK)
            reaches = (_key(logits)[:, None] >= thresholds.to(tl.int32)[None, :]) & (ids < V)[:, None]
            counts += reaches.to(tl.int32)
            if not BY_COUNT:
                masses += tl.where(reaches, tl.exp((logits - best) / temperature)[:, None], 0.0)
        count = tl.sum(counts, axis=0)
        if BY_COUNT:
            passes = count >= target
        elif STRICT:
            passes = tl.sum(masses, axis=0) > target
        else:
            passes = tl.sum(masses, axis=0) >= target
        low = tl.max(tl.where(passes, thresholds, low), axis=0)
        high = tl.min(tl.where(passes, high, thresholds), axis=0)
        count_low = tl.min(tl.where(passes, count, count_low), axis=0)
        count_high = tl.max(tl.where(passes, count_high, count), axis=0)
    return _smallest_key(row_ptr, V, low, BLOCK)


@triton.jit
def _smallest_key(row_ptr, V, bound, BLOCK: tl.constexpr):
    """The smallest key in the row that is at least `bound`; there is one."""
    smallest = tl.full([BLOCK], 0x7FFFFFFF, tl.int32)
    for start in range(0, V, BLOCK):
        logits, ids = _load(row_ptr, start, V, BLOCK)
        keys = _key(logits)
        smallest = tl.minimum(smallest, tl.where((keys >= bound) & (ids < V), keys, 0x7FFFFFFF))
    return tl.min(smallest, axis=0)


@triton.jit
def _ties(target, mass, weight, limit):
    """Which of `limit` equal logits of this weight, counted from 0, brings `mass` past `target`."""
    return tl.minimum(tl.maximum((target - mass) / tl.maximum(weight, 1e-38), 0.0), (limit - 1).to(tl.float32))


@triton.jit(do_not_specialize=["V"])
def _sample_kernel(
    logits_ptr, temperatures_ptr, top_ks_ptr, top_ps_ptr, min_ps_ptr, seeds_ptr, positions_ptr, out_ptr, V,
    MIN_TEMPERATURE: tl.constexpr, BLOCK: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """One row per program. Kept are all logits above `cut` and the first `ties` of those equal to it."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * V
    best = -float("inf")
    token = 0
    for start in range(0, V, BLOCK):
        logits, _ = _load(row_ptr, start, V, BLOCK)
        value, at = tl.max(logits, axis=0, return_indices=True, return_indices_tie_break_left=True)
        token = tl.where(value > best, start + at, token)
        best = tl.maximum(best, value)
    temperature = tl.load(temperatures_ptr + row)
    if (temperature > 0.0) & (best > -float("inf")):
        temperature = tl.maximum(temperature, MIN_TEMPERATURE)
        # Tokens below weigh under 1e-13 of the best one: no search by weight ends there.
        bottom = _key(best - 30.0 * temperature)
        top_k = tl.load(top_ks_ptr + row)
        cut = _key(best * 0.0 - float("inf"))
        if (top_k > 0) & (top_k < V):
            cut = _crossing(row_ptr, V, best, temperature, cut, top_k, True, False, BLOCK, T)
        above, mass, ties = _around(row_ptr, V, best, temperature, cut, BLOCK)
        if (top_k > 0) & (top_k < V):
            ties = top_k - above
        top_p = tl.load(top_ps_ptr + row)
        if top_p < 1.0:
            target = top_p * (mass + ties * _weight(cut, best, temperature))
            if target <= mass:
                lowest = tl.maximum(cut, bottom)
                cut = _crossing(row_ptr, V, best, temperature, lowest, target, False, False, BLOCK, T)
                above, mass, ties = _around(row_ptr, V, best, temperature, cut, BLOCK)
            ties = tl.maximum(tl.ceil(_ties(target, mass, _weight(cut, best, temperature), ties + 1)), 1.0).to(tl.int32)
        min_p = tl.load(min_ps_ptr + row)
        if _weight(cut, best, temperature) < min_p:
            bound = 0x7FFFFFFF
            for start in range(0, V, BLOCK):
                logits, _ = _load(row_ptr, start, V, BLOCK)
                heavy = tl.exp((logits - best) / temperature) >= min_p
                bound = tl.minimum(bound, tl.min(tl.where(heavy, _key(logits), 0x7FFFFFFF), axis=0))
            cut = tl.minimum(bound, _key(best))
            above, mass, ties = _around(row_ptr, V, best, temperature, cut, BLOCK)
        position = tl.load(positions_ptr + row)
        low_word = (position & 0xFFFFFFFF).to(tl.uint32)
        high_word = ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
        word, _, _, _ = tl.philox(tl.load(seeds_ptr + row), low_word, high_word, low_word * 0, low_word * 0)
        uniform = (word >> 8).to(tl.float32) * 5.9604644775390625e-08
        target = uniform * (mass + ties * _weight(cut, best, temperature))
        if target < mass:
            lowest = tl.maximum(cut, bottom)
            cut = _crossing(row_ptr, V, best, temperature, lowest, target, False, True, BLOCK, T)
            above, mass, ties = _around(row_ptr, V, best, temperature, cut, BLOCK)
        wanted = _ties(target, mass, _weight(cut, best, temperature), ties).to(tl.int32)
        seen = 0
        for start in range(0, V, BLOCK):
            logits, ids = _load(row_ptr, start, V, BLOCK)
            is_tie = (_key(logits) == cut) & (ids < V)
            rank = seen + tl.cumsum(is_tie.to(tl.int32), axis=0) - 1
            found = tl.max(tl.where(is_tie & (rank == wanted), ids, -1), axis=0)
            token = tl.where(found >= 0, found, token)
            seen += tl.sum(is_tie.to(tl.int32), axis=0)
    tl.store(out_ptr + row, token)


def sample(
    logits: torch.Tensor, temperatures: torch.Tensor, top_ks: torch.Tensor, top_ps: torch.Tensor,
    min_ps: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, *, backend: Backend | None = None,
) -> torch.Tensor:  # fmt: skip
    """Draw one token per row.

    With the tokens sorted by (logit descending, id ascending) and w = exp((logit - max) / temperature), a prefix is
    kept: at most top_k tokens; of these the shortest prefix with at least top_p of their weight; of these the ones
    with w >= min_p (the best token has w = 1). The best token is always kept. The row's token is the first one at
    which the kept weights, added up in that order, exceed u times their sum.

    Args:
        logits:       [B, V] fp32, contiguous. NaN counts as -inf, +inf as the largest finite number;
                      a row without any finite logit gives token 0
        temperatures: [B] fp32; 0 is greedy, the best token with the lowest id
        top_ks:       [B] int32; 0 is off
        top_ps:       [B] fp32; 1 is off
        min_ps:       [B] fp32; 0 is off
        seeds, positions: [B] int64; u = Philox4x32-10(key = seed, counter = position), its top 24 bits
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
        block = min(4096, triton.next_power_of_2(vocab))
        _sample_kernel[(num_rows,)](
            logits, temperatures, top_ks, top_ps, min_ps, seeds, positions, out, vocab,
            MIN_TEMPERATURE=_MIN_TEMPERATURE, BLOCK=block, T=4, num_warps=min(max(block // 128, 1), 16),
        )  # fmt: skip
    return out
