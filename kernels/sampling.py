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
    raise NotImplementedError
