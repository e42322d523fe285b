"""Machine code for CPU kernels in fp32, compiled by Numba: what a step needs when it has only a few rows.

A decode step of a small model is a thousand operators on a few rows each. Called one by one they cost more than the
arithmetic, and a general matrix product streams weights from memory at a third of what the memory gives. These loops
do several operators in one pass and read each weight once, in order.

Every output is one chain of fused multiply-adds in the order of the inner index. oneDNN's packed products add up in
the same order, so few rows here and many rows there give the same bits; the engine's self-test holds this.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numba import njit

Array = npt.NDArray[Any]

MAX_ROWS = 16  # of routed tokens or heads; beyond, a blocked matrix product does better
MAX_INNER = 512  # oneDNN splits longer sums, and the two ways would round differently
MKL_MAX_INNER = 192  # likewise for MKL
_f32, _i32 = np.float32, np.int32


def compiled(function: Callable[..., Any]) -> Any:
    """Machine code of `function`, made at its first call and kept on disk where a folder can be written.

    contract: a * b + c in one rounding, as oneDNN computes it; no other freedom, so that no bit depends on vector
    widths. All such functions stand in this file: what is kept is renewed only when its own file changes.
    """
    settings: dict[str, Any] = {"fastmath": {"contract"}, "nogil": True, "error_model": "numpy"}
    try:
        return njit(cache=True, **settings)(function)
    except RuntimeError:  # neither this folder nor the user's can be written
        return njit(**settings)(function)


@contextmanager
def compiling() -> Iterator[None]:
    """Let one process at a time make and keep machine code: two that start together would mix up their files."""
    with open(Path(tempfile.gettempdir(), f"longspan-compiling-{os.getuid()}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def can_run(tensor: torch.Tensor) -> bool:
    """Whether a tensor can be computed here and, with more rows, by oneDNN in the same bits."""
    is_fp32 = tensor.dtype == torch.float32 and tensor.device.type == "cpu"
    return is_fp32 and bool(torch.backends.mkldnn.is_available())


def aligned_memory(size: int) -> Array:
    """[size] fp32 on a cache line's start. NumPy asks for huge pages where it is large, which a stream of weights
    reads a fifth faster."""
    memory = np.empty(size + 16, _f32)
    first = -(memory.ctypes.data // 4) % 16
    return memory[first : first + size]


def pack(weight: torch.Tensor) -> torch.Tensor:
    """[M, K] in oneDNN's own layout, for `packed_product`."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
    return packed


def packed_product(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [N, K] @ weight^T + bias -> [N, M]."""
    y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return y


@compiled
def add_row_products(factors: Array, weight: Array, total: Array) -> None:
    """total [M] += factors [K] @ weight [K, M], four rows of `weight` at a time, in the order of k."""
    num_inner, size = weight.shape
    whole = num_inner // 4 * 4
    for k in range(0, whole, 4):
        f0, f1, f2, f3 = factors[k], factors[k + 1], factors[k + 2], factors[k + 3]
        row0, row1, row2, row3 = weight[k], weight[k + 1], weight[k + 2], weight[k + 3]
        for m in range(size):
            value = total[m]
            value += f0 * row0[m]
            value += f1 * row1[m]
            value += f2 * row2[m]
            value += f3 * row3[m]
            total[m] = value
    for k in range(whole, num_inner):
        factor, row = factors[k], weight[k]
        for m in range(size):
            total[m] += factor * row[m]


@compiled
def product(x: Array, weight: Array, out: Array) -> None:
    """out [N, M] = x [N, K] @ weight [K, M]; every weight is read from memory once, a panel of rows at a time."""
    panel = max(4, 8192 // weight.shape[1] // 4 * 4)  # 32 KiB: what the rows share stays in the first-level cache
    out[:] = _f32(0.0)
    for start in range(0, weight.shape[0], panel):
        end = min(start + panel, weight.shape[0])
        for r in range(x.shape[0]):
            add_row_products(x[r, start:end], weight[start:end], out[r])


@compiled
def silu_and_mul(gate_up: Array, out: Array) -> None:
    """out [N, I] = silu of the first half of each row of gate_up [N, 2I] times its second half.

    exp by 2^n * p(f), f in [-1/2, 1/2], p of degree 6: relative error below 1e-6.
    """
    inter = out.shape[1]
    fraction, exponent = np.empty(inter, _f32), np.empty(inter, _i32)
    for r in range(out.shape[0]):
        gate, up = gate_up[r, :inter], gate_up[r, inter:]
        for i in range(inter):
            power = min(max(-gate[i] * _f32(1.4426950408889634), _f32(-126.0)), _f32(126.0))
            whole = np.floor(power + _f32(0.5))
            f = power - whole
            p = _f32(1.5403530e-4) * f + _f32(1.3333558e-3)
            p = p * f + _f32(9.6181291e-3)
            p = p * f + _f32(5.5504109e-2)
            p = p * f + _f32(2.4022651e-1)
            p = p * f + _f32(6.9314718e-1)
            fraction[i] = p * f + _f32(1.0)
            exponent[i] = (_i32(whole) + _i32(127)) << _i32(23)
        scale = exponent.view(_f32)
        for i in range(inter):
            out[r, i] = gate[i] / (_f32(1.0) + fraction[i] * scale[i]) * up[i]


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
    logits: Array, bias: Array, softmax: bool, num_groups: int, top_groups: int, sum_of_two: bool,
    normalize: bool, scale: float, top_k: int, ids: Array, weights: Array,
) -> None:  # fmt: skip
    """route_experts, for the first top_k columns of ids and weights."""
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


@compiled
def project(x: Array, weight: Array, out: Array) -> None:
    """project_heads: out [N, H, M + tail] = [ x[..., :K] @ weight[h] | the rest of x ]."""
    width, out_width = weight.shape[1], weight.shape[2]
    for h in range(weight.shape[0]):
        for n in range(x.shape[0]):
            row = out[n, h]
            row[:out_width] = _f32(0.0)
            add_row_products(x[n, h, :width], weight[h], row[:out_width])
            row[out_width:] = x[n, h, width:]


@compiled
def add_weighted(results: Array, places: Array, weights: Array, out: Array) -> None:
    """out[n] += sum_j weights[n,j] * results[places[n,j]], in the order of j."""
    for n in range(out.shape[0]):
        for j in range(places.shape[1]):
            weight, row = weights[n, j], results[places[n, j]]
            for d in range(out.shape[1]):
                out[n, d] += weight * row[d]


@compiled
def few_experts(x: Array, gate_up: Array, down: Array, ids: Array, weights: Array, out: Array) -> None:
    """out += the experts' weighted results; each hit expert's weights are read once."""
    num_tokens, dim = x.shape
    num_experts, inter = down.shape[0], down.shape[1]
    top_k = ids.shape[1]
    results = np.zeros((num_tokens * top_k, dim), _f32)
    rows, hidden = np.empty((num_tokens * top_k, dim), _f32), np.empty((num_tokens * top_k, inter), _f32)
    projected, output = np.empty((num_tokens * top_k, 2 * inter), _f32), np.empty_like(rows)
    place = np.empty(num_tokens * top_k, np.int64)
    for expert in range(num_experts):
        count = 0
        for n in range(num_tokens):
            for j in range(top_k):
                if ids[n, j] == expert:
                    rows[count] = x[n]
                    place[count] = n * top_k + j
                    count += 1
        if count == 0:
            continue
        product(rows[:count], gate_up[expert], projected[:count])
        silu_and_mul(projected[:count], hidden[:count])
        product(hidden[:count], down[expert], output[:count])
        for i in range(count):
            results[place[i]] = output[i]
    add_weighted(results, np.arange(num_tokens * top_k).reshape(num_tokens, top_k), weights, out)
