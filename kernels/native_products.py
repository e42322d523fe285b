"""Matrix products on a CPU in fp32, compiled by Numba: linear layers, head projections and experts, for any rows.

Every output is one chain of fused multiply-adds in the order of the inner index, whatever rows are computed beside it
and on however many threads, so that a row's bits depend on nothing but the row. Weights lie in panels of 32 outputs
that are read from memory once, in order. Those that are bf16 numbers, as published ones are, take 16 bits there and
widen in registers without rounding: a step with few rows is bound by the bytes it reads.

    panels [M / 32, K, 16] uint32: word i of panel p at k holds outputs 32 p + i (low half) and 32 p + 16 + i
    panels [M / 32, K, 32] fp32:   other weights
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch

from kernels import parallel
from kernels.native import LOG2_E, Array, compiled, exp2_parts

try:
    from kernels.native_vectors import LANES, PANEL, ROW_TILE, multiply_tile
except ImportError:  # no Numba: a machine that serves on its GPUs only, where nothing here is called
    LANES, PANEL, ROW_TILE = 16, 32, 1

_f32, _i32, _i64 = np.float32, np.int32, np.int64


def pack(weight: torch.Tensor) -> Array:
    """[..., M, K] fp32 -> its panels [..., M / 32 rounded up, K, 16 uint32 or 32 fp32], on a cache line's start."""
    *batch, num_outputs, inner = weight.shape
    num_panels = -(-num_outputs // PANEL)
    if num_outputs % PANEL:
        weight = torch.nn.functional.pad(weight, (0, 0, 0, num_panels * PANEL - num_outputs))
    columns = weight.unflatten(-2, (num_panels, PANEL)).mT  # [..., panels, K, 32]
    # Part by part: copies of a whole matrix would be most of the memory that loading takes.
    if not all(torch.equal(part.bfloat16().float(), part) for part in columns):
        memory = _aligned_memory((*batch, num_panels, inner, PANEL), np.dtype(np.float32))
        memory[:] = columns.numpy()
        return memory
    memory = _aligned_memory((*batch, num_panels, inner, LANES), np.dtype(np.uint32))
    halves = memory.view(np.uint16).reshape(*memory.shape, 2)
    for place, part in zip(halves, columns, strict=True):
        place[:] = part.bfloat16().view(torch.uint16).unflatten(-1, (2, LANES)).mT.numpy()
    return memory


def put(stack: Array | None, count: int, index: int, panels: Array) -> Array:
    """Packed weights of one shape in one array of `count`; where some of them need fp32, all get it."""
    if stack is None:
        stack = _aligned_memory((count, *panels.shape), panels.dtype)
    if stack.dtype != panels.dtype:
        stack, panels = _widened(stack), _widened(panels)
    stack[index] = panels
    return stack


def _widened(panels: Array) -> Array:
    if panels.dtype == np.float32:
        return panels
    low, high = panels << np.uint32(16), panels & np.uint32(0xFFFF0000)
    return np.concatenate([low.view(np.float32), high.view(np.float32)], axis=-1)


def _aligned_memory(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """NumPy asks for huge pages where memory is large, which a stream of weights reads a fifth faster."""
    size = int(np.prod(shape))
    memory = np.empty(size + LANES, dtype)
    first = -(memory.ctypes.data // 4) % LANES
    return memory[first : first + size].reshape(shape)


def linear(x: torch.Tensor, panels: Array, num_outputs: int) -> torch.Tensor:
    """x [N, K] fp32, rows may be strided, times the packed weight -> [N, num_outputs]."""
    out = torch.empty(x.shape[0], num_outputs)
    arrays = x.numpy(), panels, out.numpy()
    ranges = parallel.split(panels.shape[0], (x.shape[0] + parallel.LOAD_COST) * x.shape[1] * num_outputs)
    parallel.run([partial(product, *arrays, *panel_range) for panel_range in ranges])
    return out


def project_heads(x: torch.Tensor, panels: Array, num_outputs: int, tail: int) -> torch.Tensor:
    """x [N, H, K + tail] -> [N, H, num_outputs + tail], with each head's packed weight, panels [H, M / 32, K, ...]."""
    num_rows, num_heads, width = x.shape
    out = torch.empty(num_rows, num_heads, num_outputs + tail)
    arrays = x.numpy(), panels, out.numpy()
    ranges = parallel.split(num_heads, (num_rows + parallel.LOAD_COST) * num_heads * (width - tail) * num_outputs)
    parallel.run([partial(project, *arrays, num_outputs, *heads) for heads in ranges])
    return out


def apply_experts(
    x: torch.Tensor, gate_up: Array, down: Array, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """fused_experts: gate_up [E, 2I / 32, D, ...] and down [E, D / 32, I, ...] in panels."""
    out = torch.zeros_like(x)
    arrays = x.numpy(), gate_up, down, ids.numpy(), weights.numpy()
    if torch.get_num_threads() == 1:
        experts(*arrays, out.numpy())
        return out
    source, place, starts = sort_by_expert(ids.numpy(), gate_up.shape[0])
    results = np.empty((ids.numel(), x.shape[1]), np.float32)
    num_hit = int(np.count_nonzero(np.diff(starts)))
    size = 3 * x.shape[1] * down.shape[2]
    ranges = parallel.split(gate_up.shape[0], (ids.numel() + num_hit * parallel.LOAD_COST) * size, 2)
    parallel.run([partial(expert_rows, *arrays[:3], source, starts, results, *expert_range) for expert_range in ranges])
    add_weighted(results, place, weights.numpy(), out.numpy())
    return out


@compiled
def product(x: Array, panels: Array, out: Array, first_panel: int, last_panel: int) -> None:
    """out [N, M] = x [N, K] @ the packed weight, the columns of some panels; both may have strided rows."""
    for panel in range(first_panel, last_panel):
        for first in range(0, x.shape[0], ROW_TILE):
            multiply_tile(x, first, panels, panel, out)


@compiled
def project(x: Array, panels: Array, out: Array, num_outputs: int, first_head: int, last_head: int) -> None:
    """project_heads for some heads: out[:, h] = [ x[:, h, :K] @ weight[h] | the rest of x ]."""
    width = panels.shape[2]
    for h in range(first_head, last_head):
        product(x[:, h, :width], panels[h], out[:, h, :num_outputs], 0, panels.shape[1])
        for n in range(x.shape[0]):
            for i in range(x.shape[2] - width):
                out[n, h, num_outputs + i] = x[n, h, width + i]


@compiled
def silu_and_mul(gate_up: Array, out: Array) -> None:
    """out [N, I] = silu of the first half of each row of gate_up [N, 2I] times its second half."""
    inter = out.shape[1]
    fraction, exponent = np.empty(inter, _f32), np.empty(inter, _i32)
    for r in range(out.shape[0]):
        gate, up = gate_up[r, :inter], gate_up[r, inter:]
        for i in range(inter):
            power = min(max(-gate[i] * LOG2_E, _f32(-126.0)), _f32(126.0))
            fraction[i], exponent[i] = exp2_parts(power)
        scale = exponent.view(_f32)
        for i in range(inter):
            out[r, i] = gate[i] / (_f32(1.0) + fraction[i] * scale[i]) * up[i]


@compiled
def sort_by_expert(ids: Array, num_experts: int) -> tuple[Array, Array, Array]:
    """Pairs in the order of their experts.

    Returns: source [pairs] the token of each; place [N, k] where a pair stands, -1 without an expert; starts [E + 1]
    where an expert's pairs begin
    """
    source, place = np.empty(ids.size, _i64), np.full(ids.shape, -1, _i64)
    starts = np.zeros(num_experts + 1, _i64)
    for n in range(ids.shape[0]):
        for j in range(ids.shape[1]):
            if 0 <= ids[n, j] < num_experts:
                starts[ids[n, j] + 1] += 1
    for expert in range(num_experts):
        starts[expert + 1] += starts[expert]
    following = starts[:num_experts].copy()
    for n in range(ids.shape[0]):
        for j in range(ids.shape[1]):
            expert = ids[n, j]
            if 0 <= expert < num_experts:
                place[n, j], source[following[expert]] = following[expert], n
                following[expert] += 1
    return source, place, starts


@compiled
def expert_rows(
    x: Array, gate_up: Array, down: Array, source: Array, starts: Array, results: Array, first: int, last: int
) -> None:
    """results [pairs, D] of the experts from `first` to `last`, in the order of sort_by_expert."""
    inter, largest = down.shape[2], 0
    for expert in range(first, last):
        largest = max(largest, starts[expert + 1] - starts[expert])
    rows, projected = np.empty((largest, x.shape[1]), _f32), np.empty((largest, 2 * inter), _f32)
    hidden = np.empty((largest, inter), _f32)
    for expert in range(first, last):
        start = starts[expert]
        count = starts[expert + 1] - start
        for i in range(count):
            rows[i] = x[source[start + i]]
        product(rows[:count], gate_up[expert], projected[:count], 0, gate_up.shape[1])
        silu_and_mul(projected[:count], hidden[:count])
        product(hidden[:count], down[expert], results[start : start + count], 0, down.shape[1])


@compiled
def add_weighted(results: Array, place: Array, weights: Array, out: Array) -> None:
    """out[n] += sum_j weights[n,j] * results[place[n,j]], in the order of j, without the places of -1."""
    for n in range(out.shape[0]):
        for j in range(place.shape[1]):
            if place[n, j] >= 0:
                weight, row = weights[n, j], results[place[n, j]]
                for d in range(out.shape[1]):
                    out[n, d] += weight * row[d]


@compiled
def experts(x: Array, gate_up: Array, down: Array, ids: Array, weights: Array, out: Array) -> None:
    """apply_experts in one call."""
    source, place, starts = sort_by_expert(ids, gate_up.shape[0])
    results = np.empty((ids.size, x.shape[1]), _f32)
    expert_rows(x, gate_up, down, source, starts, results, 0, gate_up.shape[0])
    add_weighted(results, place, weights, out)
