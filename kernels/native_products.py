"""Matrix products on a CPU in fp32, compiled by Numba: linear layers, head projections and experts, for any rows.

Every output is one chain of fused multiply-adds in the order of the inner index, whatever rows are computed beside it
and on however many threads, so that a row's bits depend on nothing but the row. Weights lie in panels of 32 outputs
that are read from memory once, in order. Those that are bf16 numbers, as published ones are, take 16 bits there and
widen in registers without rounding: a step with few rows is bound by the bytes it reads.

Where several processes may share the inner index, it is cut into pieces. Each piece is such a chain; their sums are
added in fp64, which holds sums of fp32 numbers without rounding unless they differ some 2^25-fold, and then rounds far
below what fp32 shows. So it makes no difference which process adds what, in which order.

    panels [M / 32, K, 16] uint32: word i of panel p at k holds outputs 32 p + i (low half) and 32 p + 16 + i
    panels [M / 32, K, 32] fp32:   other weights
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from kernels import parallel
from kernels.native import LOG2_E, Array, compiled, exp2_parts

try:
    from kernels.native_vectors import LANES, PANEL, ROW_TILE, add_tile, multiply_tile
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


def linear(x: torch.Tensor, panels: Array, num_outputs: int, piece_ends: Array | None = None) -> torch.Tensor:
    """x [N, K] fp32, rows may be strided, times the packed weight -> [N, num_outputs], in fp64 if cut into pieces."""
    ranges = parallel.split(panels.shape[0], (x.shape[0] + parallel.LOAD_COST) * x.shape[1] * num_outputs)
    if piece_ends is None:
        out = torch.empty(x.shape[0], num_outputs)
        parts = [partial(product, x.numpy(), panels, out.numpy(), *panel_range) for panel_range in ranges]
    else:
        out = torch.empty(x.shape[0], num_outputs, dtype=torch.float64)
        arrays = x.numpy(), panels, piece_ends, out.numpy()
        parts = [partial(piece_product, *arrays, *panel_range) for panel_range in ranges]
    parallel.run(parts)
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
    x: torch.Tensor, gate_up: Array, down: Array, piece_ends: Array, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """fused_experts in fp64: gate_up [E, 2I / 32, D, ...] and down [E, D / 32, I, ...] in panels, I cut into pieces."""
    if torch.get_num_threads() == 1:
        out = torch.empty(x.shape, dtype=torch.float64)
        experts(x.numpy(), gate_up, down, piece_ends, ids.numpy(), weights.numpy(), out.numpy())
        return out
    pairs, starts = sort_by_expert(ids.numpy(), gate_up.shape[0])
    costs = costs_of_experts(starts, parallel.LOAD_COST)
    num_parts = len(parallel.split(gate_up.shape[0], int(costs.sum()) * 3 * x.shape[1] * down.shape[2]))
    # As many sums as threads, and no more: each is as large as the result.
    outs = np.zeros((num_parts, *x.shape))
    arrays = x.numpy(), gate_up, down, piece_ends, weights.numpy(), pairs, starts
    ranges = pairwise(equal_shares(costs, num_parts))
    parallel.run([partial(add_experts, *arrays, out, *part) for out, part in zip(outs, ranges, strict=True)])
    total = outs[0]
    for other in outs[1:]:
        total += other
    return torch.from_numpy(total)


@compiled
def product(x: Array, panels: Array, out: Array, first_panel: int, last_panel: int) -> None:
    """out [N, M] = x [N, K] @ the packed weight, the columns of some panels; both may have strided rows."""
    for panel in range(first_panel, last_panel):
        for first in range(0, x.shape[0], ROW_TILE):
            multiply_tile(x, first, panels, panel, out)


@compiled
def add_product(
    x: Array, panels: Array, piece_ends: Array, rows: Array, out: Array, first_panel: int, last_panel: int
) -> None:
    """out[rows[n]] += x[n] @ the packed weight, the columns of some panels, in one sum for each piece of K.

    piece_ends: ascending, the last one K
    """
    for panel in range(first_panel, last_panel):
        for first in range(0, x.shape[0], ROW_TILE):
            start = 0
            for end in piece_ends:
                add_tile(x, first, start, end, panels, panel, rows, out)
                start = end


@compiled
def piece_product(x: Array, panels: Array, piece_ends: Array, out: Array, first_panel: int, last_panel: int) -> None:
    """product in fp64, see add_product."""
    out[:, first_panel * PANEL : last_panel * PANEL] = 0.0
    add_product(x, panels, piece_ends, np.arange(x.shape[0]), out, first_panel, last_panel)


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
def sort_by_expert(ids: Array, num_experts: int) -> tuple[Array, Array]:
    """Pairs n * k + j in the order of their experts, without those of none; [E + 1] where an expert's pairs begin."""
    pairs, starts = np.empty(ids.size, _i64), np.zeros(num_experts + 1, _i64)
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
                pairs[following[expert]] = n * ids.shape[1] + j
                following[expert] += 1
    return pairs, starts


@compiled
def costs_of_experts(starts: Array, load_cost: int) -> Array:
    """[E], in rows: how many pairs an expert has, and what reading its weights takes if there are any."""
    costs = np.zeros(starts.shape[0] - 1, _i64)
    for expert in range(costs.shape[0]):
        count = starts[expert + 1] - starts[expert]
        costs[expert] = count + load_cost if count > 0 else 0
    return costs


@compiled
def equal_shares(costs: Array, num_parts: int) -> Array:
    """[num_parts + 1] ascending from 0 to E: where parts of about equal cost end."""
    ends = np.full(num_parts + 1, costs.shape[0], _i64)
    ends[0] = 0
    total, done, part = costs.sum(), 0, 1
    for expert in range(costs.shape[0]):
        # An expert belongs to the part in which the middle of its cost lies.
        while part < num_parts and (2 * done + costs[expert]) * num_parts > 2 * total * part:
            ends[part] = expert
            part += 1
        done += costs[expert]
    return ends


@compiled
def add_experts(
    x: Array, gate_up: Array, down: Array, piece_ends: Array, weights: Array, pairs: Array, starts: Array, out: Array,
    first: int, last: int,
) -> None:  # fmt: skip
    """Add the results of some experts to the rows of the tokens that chose them."""
    top_k, inter, largest = weights.shape[1], down.shape[2], 0
    for expert in range(first, last):
        largest = max(largest, starts[expert + 1] - starts[expert])
    tokens, rows = np.empty(largest, _i64), np.empty((largest, x.shape[1]), _f32)
    projected, hidden = np.empty((largest, 2 * inter), _f32), np.empty((largest, inter), _f32)
    for expert in range(first, last):
        start = starts[expert]
        count = starts[expert + 1] - start
        for i in range(count):
            tokens[i] = pairs[start + i] // top_k
            rows[i] = x[tokens[i]]
        product(rows[:count], gate_up[expert], projected[:count], 0, gate_up.shape[1])
        silu_and_mul(projected[:count], hidden[:count])
        for i in range(count):
            hidden[i] *= weights[tokens[i], pairs[start + i] % top_k]
        add_product(hidden[:count], down[expert], piece_ends, tokens[:count], out, 0, down.shape[1])


@compiled
def experts(
    x: Array, gate_up: Array, down: Array, piece_ends: Array, ids: Array, weights: Array, out: Array
) -> None:  # fmt: skip
    """apply_experts in one call."""
    out[:] = 0.0
    pairs, starts = sort_by_expert(ids, gate_up.shape[0])
    add_experts(x, gate_up, down, piece_ends, weights, pairs, starts, out, 0, gate_up.shape[0])
