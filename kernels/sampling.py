"""Draw each row's next token: temperature, top-k, top-p, min-p, and a counter-based random number."""

from __future__ import annotations

from typing import TypeVar

import torch

from kernels.checks import Backend, check_contiguous, check_dtype, check_shape, use_triton
from kernels.sampling_kernel import LANES, MIN_TEMPERATURE, launch_sample

_MASK = 0xFFFFFFFF
_FINITE_MAX = torch.finfo(torch.float32).max
_CANDIDATES = 256  # on CPU: where top-k and top-p usually end


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
    inverse = temperatures.clamp(min=MIN_TEMPERATURE).reciprocal()
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
    """The token at which the weights, added up in the order (id mod LANES, id), exceed number * sum."""
    vocab = weights.shape[1]
    weights = weights.masked_fill(weights < min_ps[:, None], 0.0)
    width = min(LANES, vocab)
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
    return launch_sample(logits, temperatures, top_ks, top_ps, min_ps, seeds, positions)
