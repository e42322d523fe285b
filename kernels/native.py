"""Machine code for a CPU in fp32, compiled by Numba: the operators between the matrix products.

A decode step of a small model is a thousand operators on a few rows each. Called one by one they cost more than the
arithmetic; these loops do several of them in one pass. native_products.py holds the products.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

try:
    import numba
except ImportError:  # a machine that serves on its GPUs only, where nothing here is called
    HAS_NUMBA = False
else:
    HAS_NUMBA = True

Array = npt.NDArray[Any]

LOG2_E = np.float32(1.4426950408889634)
_f32, _i32 = np.float32, np.int32


def _digest_of_sources() -> str:
    paths = sorted(Path(__file__).parent.glob("native*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:16]


_SOURCES = _digest_of_sources()


def compiled(function: Callable[..., Any]) -> Any:
    """Machine code of `function`, made at its first call and kept on disk where a folder can be written.

    contract: a * b + c in one rounding; no other freedom, so that no bit depends on vector widths.
    """
    if not HAS_NUMBA:
        return function
    # Numba finds kept code by the function's name and looks at no file but the function's own.
    function.__qualname__ += f"_{_SOURCES}"
    settings: dict[str, Any] = {"fastmath": {"contract"}, "nogil": True, "error_model": "numpy"}
    try:
        return numba.njit(cache=True, **settings)(function)
    except RuntimeError:  # neither this folder nor the user's can be written
        return numba.njit(**settings)(function)


@contextmanager
def compiling() -> Iterator[None]:
    """Let one process at a time make and keep machine code: two that start together would mix up their files."""
    with open(Path(tempfile.gettempdir(), f"longspan-compiling-{os.getuid()}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def can_run(tensor: torch.Tensor) -> bool:
    return tensor.dtype == torch.float32 and tensor.device.type == "cpu"


@compiled
def exp2_parts(power: float) -> Any:
    """2^power as fraction * 2^n: (fraction, the bits of 2^n as fp32), for power in [-126, 126].

    fraction = p(power - n), power - n in [-1/2, 1/2], p of degree 6: relative error below 1e-6.
    """
    whole = np.floor(power + _f32(0.5))
    f = power - whole
    p = _f32(1.5403530e-4) * f + _f32(1.3333558e-3)
    p = p * f + _f32(9.6181291e-3)
    p = p * f + _f32(5.5504109e-2)
    p = p * f + _f32(2.4022651e-1)
    p = p * f + _f32(6.9314718e-1)
    return p * f + _f32(1.0), (_i32(whole) + _i32(127)) << _i32(23)


@compiled
def inverse_rms(row: Array, eps: float) -> Any:
    """1 / sqrt(mean(row^2) + eps), summed in 16 lanes."""
    size = row.shape[0]
    lanes = np.zeros(16, _f32)
    whole = size // 16 * 16
    for start in range(0, whole, 16):
        for lane in range(16):
            lanes[lane] += row[start + lane] * row[start + lane]
    total = _f32(0.0)
    for lane in range(16):
        total += lanes[lane]
    for i in range(whole, size):
        total += row[i] * row[i]
    return _f32(1.0) / np.sqrt(total / _f32(size) + _f32(eps))


@compiled
def norm_rows(x: Array, weight: Array, eps: float, out: Array) -> None:
    for r in range(x.shape[0]):
        scale = inverse_rms(x[r], eps)
        for i in range(weight.shape[0]):
            out[r, i] = x[r, i] * scale * weight[i]


@compiled
def add_and_norm_rows(x: Array, residual: Array, weight: Array, eps: float, out: Array) -> None:
    for r in range(x.shape[0]):
        for i in range(weight.shape[0]):
            residual[r, i] += x[r, i]
    norm_rows(residual, weight, eps, out)


@compiled
def rotate_pairs(row: Array, cos_sin: Array, interleaved: bool, out: Array) -> None:
    half = cos_sin.shape[0] // 2
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        first, second = row[a], row[b]
        out[a] = first * cos_sin[i] - second * cos_sin[half + i]
        out[b] = second * cos_sin[i] + first * cos_sin[half + i]


@compiled
def rope_and_cache(
    q: Array, kv: Array, norm_weight: Array, eps: float, cos_sin: Array, positions: Array, slots: Array, cache: Array,
    interleaved: bool,
) -> None:  # fmt: skip
    """mla_rope_cache: q [N, H, dn + dr] turned in place, cache [slots, R + dr] written where slot >= 0."""
    rank, rope_dim = norm_weight.shape[0], cos_sin.shape[1]
    for n in range(q.shape[0]):
        angles = cos_sin[positions[n]]
        for h in range(q.shape[1]):
            rope = q[n, h, q.shape[2] - rope_dim :]
            rotate_pairs(rope, angles, interleaved, rope)
        if slots[n] < 0:
            continue
        entry = cache[slots[n]]
        scale = inverse_rms(kv[n, :rank], eps)
        for i in range(rank):
            entry[i] = kv[n, i] * scale * norm_weight[i]
        rotate_pairs(kv[n, rank:], angles, interleaved, entry[rank:])


@compiled
def score_experts(logits: Array, softmax: bool, scores: Array) -> None:
    """One token's scores; exp in double precision, rounded once."""
    if softmax:
        largest, total = logits.max(), 0.0
        for e in range(logits.shape[0]):
            total += np.exp(np.float64(logits[e] - largest))
        for e in range(logits.shape[0]):
            scores[e] = np.exp(np.float64(logits[e] - largest)) / total
    else:
        for e in range(logits.shape[0]):
            scores[e] = 1.0 / (1.0 + np.exp(-np.float64(logits[e])))


@compiled
def drop_groups(choice: Array, num_groups: int, top_groups: int, sum_of_two: bool) -> None:
    """Set the experts outside the best groups to -inf; of equal groups the lower one is kept."""
    size = choice.shape[0] // num_groups
    best, kept = np.empty(num_groups, _f32), np.zeros(num_groups, np.bool_)
    for g in range(num_groups):
        first, second = _f32(-np.inf), _f32(-np.inf)
        for e in range(g * size, (g + 1) * size):
            if choice[e] > first:
                first, second = choice[e], first
            elif choice[e] > second:
                second = choice[e]
        best[g] = first + second if sum_of_two else first
    for _ in range(top_groups):
        at = -1
        for g in range(num_groups):
            if not kept[g] and (at < 0 or best[g] > best[at]):
                at = g
        kept[at] = True
    for e in range(choice.shape[0]):
        if not kept[e // size]:
            choice[e] = _f32(-np.inf)


@compiled
def route(
    logits: Array, bias: Array, slots: Array, softmax: bool, num_groups: int, top_groups: int, sum_of_two: bool,
    normalize: bool, scale: float, top_k: int, ids: Array, weights: Array,
) -> None:  # fmt: skip
    """route_experts; the columns of ids and weights after the first top_k are the shared experts'. slots [N] or [0]."""
    num_experts = logits.shape[1]
    scores, choice = np.empty(num_experts, _f32), np.empty(num_experts, _f32)
    for n in range(logits.shape[0]):
        score_experts(logits[n], softmax, scores)
        for e in range(num_experts):
            choice[e] = scores[e] + bias[e]
            if not choice[e] > -np.inf:
                choice[e] = _f32(-3.4e38)  # NaN too: whatever comes in, an id is in range
        if num_groups > 1:
            drop_groups(choice, num_groups, top_groups, sum_of_two)
        total = _f32(0.0)
        for j in range(top_k):
            at = 0
            for e in range(1, num_experts):
                if choice[e] > choice[at]:
                    at = e
            ids[n, j], weights[n, j] = at, scores[at]
            choice[at] = _f32(-np.inf)
            total += scores[at]
        for j in range(top_k):
            if normalize:
                weights[n, j] /= total + _f32(1e-20)
            weights[n, j] *= _f32(scale)
        for j in range(top_k, ids.shape[1]):
            ids[n, j], weights[n, j] = num_experts + j - top_k, _f32(1.0)
        if slots.shape[0] and slots[n] < 0:
            ids[n] = -1
