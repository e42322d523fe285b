"""Vector instructions that Numba's own loops do not become, put down as LLVM code.

A vector is 16 fp32 numbers: one register where the processor has AVX-512, several elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16
PANEL = 2 * LANES  # outputs of a product that are computed together
# Rows that share a pass over a panel: as many as have their sums in registers.
ROW_TILE = 8 if binding.get_host_cpu_features().get("avx512f") else 3
HEAD_TILE, KEY_TILE = 2, 8  # dot products of attention that are computed together: one per lane of their vector
VALUE_TILE = 128  # columns of attention's values
_Float, _Word, _Index = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_Floats, _Words = ir.VectorType(_Float, LANES), ir.VectorType(_Word, LANES)
_Doubles = ir.VectorType(ir.DoubleType(), LANES)
_Mask = ir.VectorType(ir.IntType(1), LANES)
_ZEROS = ir.Constant(_Floats, [0.0] * LANES)
_declare: Any = cgutils.get_or_insert_function
_unpack: Any = cgutils.unpack_tuple


class _Array:
    """An array argument of an intrinsic, as addresses."""

    def __init__(self, context: Any, builder: Any, kind: Any, value: Any) -> None:
        array = context.make_array(kind)(context, builder, value)
        self._builder, self.dtype = builder, kind.dtype
        self.shape, self.strides = _unpack(builder, array.shape), _unpack(builder, array.strides)  # strides in bytes
        self._start = builder.ptrtoint(array.data, _Index)

    def at(self, *indices: Any, kind: Any = _Floats) -> Any:
        """The address of an element, as a pointer to `kind`."""
        address = self._start
        for index, stride in zip(indices, self.strides, strict=False):
            address = self._builder.add(address, self._builder.mul(index, stride))
        return self._builder.inttoptr(address, kind.as_pointer())


def _index(value: int) -> Any:
    return ir.Constant(_Index, value)


def _splat(builder: Any, value: Any, vector: Any = _Floats) -> Any:
    undefined = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(undefined, value, ir.Constant(_Word, 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(_Words, [0] * LANES))


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    name = f"llvm.fma.v{LANES}f32"
    return builder.call(_declare(builder.module, ir.FunctionType(_Floats, [_Floats] * 3), name), [a, b, c])


def _first_lanes(builder: Any, count: Any) -> Any:
    """A mask of the lanes below `count`, an index."""
    lanes = ir.Constant(_Words, list(range(LANES)))
    return builder.icmp_signed("<", lanes, _splat(builder, builder.trunc(count, _Word), _Words))


def _masked_store(builder: Any, values: Any, place: Any, mask: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [values.type, values.type.as_pointer(), _Word, _Mask])
    bits = 32 if values.type == _Floats else 64
    store = _declare(builder.module, kind, f"llvm.masked.store.v{LANES}f{bits}.p0")
    builder.call(store, [values, place, ir.Constant(_Word, bits // 8), mask])


def _masked_load(builder: Any, place: Any, mask: Any, vector: Any = _Floats) -> Any:
    """0 in the other lanes."""
    kind = ir.FunctionType(vector, [vector.as_pointer(), _Word, _Mask, vector])
    bits = 32 if vector == _Floats else 64
    load = _declare(builder.module, kind, f"llvm.masked.load.v{LANES}f{bits}.p0")
    return builder.call(load, [place, ir.Constant(_Word, bits // 8), mask, ir.Constant(vector, [0.0] * LANES)])


def _sum_loop(builder: Any, count: Any, sums: list[Any], body: Callable[[Any, list[Any]], list[Any]]) -> list[Any]:
    """sums = body(i, sums) for i < count, in registers."""
    before, loop = builder.block, builder.append_basic_block("loop")
    after = builder.append_basic_block("after")
    builder.cbranch(builder.icmp_signed(">", count, _index(0)), loop, after)
    builder.position_at_end(loop)
    i = builder.phi(_Index)
    running = [builder.phi(_Floats) for _ in sums]
    grown = body(i, running)
    following = builder.add(i, _index(1))
    i.add_incoming(_index(0), before)
    i.add_incoming(following, loop)
    for phi, start, value in zip(running, sums, grown, strict=True):
        phi.add_incoming(start, before)
        phi.add_incoming(value, loop)
    builder.cbranch(builder.icmp_signed("<", following, count), loop, after)
    builder.position_at_end(after)
    results = [builder.phi(_Floats) for _ in sums]
    for phi, start, value in zip(results, sums, grown, strict=True):
        phi.add_incoming(start, before)
        phi.add_incoming(value, loop)
    return results


def _panel_row(builder: Any, panels: _Array, panel: Any, k: Any) -> tuple[Any, Any]:
    """The 32 weights of one inner index, as two vectors."""
    if panels.dtype == types.float32:
        low, high = (builder.load(panels.at(panel, k, _index(half * LANES)), align=64) for half in (0, 1))
        return low, high
    words = builder.load(panels.at(panel, k, kind=_Words), align=64)
    low = builder.shl(words, ir.Constant(_Words, [16] * LANES))
    high = builder.and_(words, ir.Constant(_Words, [0xFFFF0000] * LANES))
    return builder.bitcast(low, _Floats), builder.bitcast(high, _Floats)


def _row_sums(
    builder: Any, x: _Array, rows: list[Any], panels: _Array, panel: Any, start: Any, end: Any
) -> list[tuple[Any, Any]]:
    """x[row, start:end] @ panel[start:end] of each row, as two vectors.

    Numba's own loops keep no sums in registers here.
    """

    def step(i: Any, sums: list[Any]) -> list[Any]:
        k = builder.add(start, i)
        weights = _panel_row(builder, panels, panel, k)
        factors = [_splat(builder, builder.load(x.at(row, k, kind=_Float))) for row in rows]
        halves = [(factor, weight) for factor in factors for weight in weights]
        return [_fma(builder, *pair, total) for pair, total in zip(halves, sums, strict=True)]

    sums = _sum_loop(builder, builder.sub(end, start), [_ZEROS] * (2 * len(rows)), step)
    return list(zip(sums[::2], sums[1::2], strict=True))


def _for_row_tile(builder: Any, num_rows: Any, first: Any, body: Callable[[list[Any]], None]) -> None:
    """body(rows first : first + ROW_TILE), of fewer at the end."""
    done = builder.append_basic_block("done")
    choice = builder.switch(builder.sub(num_rows, first), builder.append_basic_block("whole"))
    for count in range(ROW_TILE, 0, -1):
        block = choice.default if count == ROW_TILE else builder.append_basic_block(f"rows{count}")
        if count < ROW_TILE:
            choice.add_case(_index(count), block)
        builder.position_at_end(block)
        body([builder.add(first, _index(row)) for row in range(count)])
        builder.branch(done)
    builder.position_at_end(done)


def _panel_places(builder: Any, panel: Any, num_columns: Any) -> list[tuple[Any, Any]]:
    """The first column of each half of a panel, and the mask of those that exist."""
    starts = [builder.add(builder.mul(panel, _index(PANEL)), _index(half * LANES)) for half in (0, 1)]
    return [(start, _first_lanes(builder, builder.sub(num_columns, start))) for start in starts]


def _multiply_tile(typing: Any, x: Any, first: Any, panels: Any, panel: Any, out: Any) -> Any:
    """out[first : first + ROW_TILE, the panel's columns] = x[the same rows] @ the panel; fewer rows at x's end."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x_array, panels_array, out_array = (
            _Array(context, builder, signature.args[place], args[place]) for place in (0, 2, 4)
        )
        places = _panel_places(builder, args[3], out_array.shape[1])

        def multiply(rows: list[Any]) -> None:
            sums = _row_sums(builder, x_array, rows, panels_array, args[3], _index(0), x_array.shape[1])
            for half, (start, mask) in enumerate(places):
                for row, values in zip(rows, sums, strict=True):
                    _masked_store(builder, values[half], out_array.at(row, start), mask)

        _for_row_tile(builder, x_array.shape[0], args[1], multiply)
        return context.get_dummy_value()

    return types.void(x, types.int64, panels, types.int64, out), emit


def _add_tile(
    typing: Any, x: Any, first: Any, start: Any, end: Any, panels: Any, panel: Any, rows: Any, out: Any
) -> Any:
    """out[rows[n], the panel's columns] += x[n, start:end] @ panel[start:end], n as of multiply_tile, `out` in fp64."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x_array, panels_array, rows_array, out_array = (
            _Array(context, builder, signature.args[place], args[place]) for place in (0, 4, 6, 7)
        )
        places = _panel_places(builder, args[5], out_array.shape[1])

        def multiply(rows: list[Any]) -> None:
            sums = _row_sums(builder, x_array, rows, panels_array, args[5], args[2], args[3])
            for row, values in zip(rows, sums, strict=True):
                out_row = builder.load(rows_array.at(row, kind=_Index))
                for (column, mask), part in zip(places, values, strict=True):
                    place = out_array.at(out_row, column, kind=_Doubles)
                    total = builder.fadd(_masked_load(builder, place, mask, _Doubles), builder.fpext(part, _Doubles))
                    _masked_store(builder, total, place, mask)

        _for_row_tile(builder, x_array.shape[0], args[1], multiply)
        return context.get_dummy_value()

    return types.void(x, types.int64, types.int64, types.int64, panels, types.int64, rows, out), emit


def _sums_of(builder: Any, vectors: list[Any]) -> Any:
    """The sum of each of 16 vectors' lanes, as one vector; neighbours first."""
    even, odd = (ir.Constant(_Words, list(range(first, 2 * LANES, 2))) for first in (0, 1))
    while len(vectors) > 1:
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [
            builder.fadd(builder.shuffle_vector(a, b, even), builder.shuffle_vector(a, b, odd)) for a, b in pairs
        ]
    return vectors[0]


def _rows_from(builder: Any, first: Any, count: Any) -> list[Any]:
    """HEAD_TILE rows; where there are fewer, the last one again."""
    rows = [builder.add(first, _index(row)) for row in range(HEAD_TILE)]
    last = builder.sub(count, _index(1))
    return [builder.select(builder.icmp_signed("<", row, last), row, last) for row in rows]


def _score_tile(typing: Any, q: Any, head: Any, keys: Any, slots: Any, key: Any, scores: Any) -> Any:
    """scores[head + a, key + b] = q[head + a] . keys[slots[key + b]], a < HEAD_TILE, b < KEY_TILE."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        q_array, keys_array, slots_array, scores_array = (
            _Array(context, builder, signature.args[place], args[place]) for place in (0, 2, 3, 5)
        )
        heads = _rows_from(builder, args[1], q_array.shape[0])
        columns = [builder.add(args[4], _index(b)) for b in range(KEY_TILE)]
        slots = [builder.load(slots_array.at(column, kind=_Index)) for column in columns]

        def products(load: Callable[[Any], Any], at: Any, sums: list[Any]) -> list[Any]:
            queries = [load(q_array.at(row, at)) for row in heads]
            vectors = [load(keys_array.at(slot, at)) for slot in slots]
            pairs = [(query, vector) for query in queries for vector in vectors]
            return [_fma(builder, *pair, total) for pair, total in zip(pairs, sums, strict=True)]

        def step(i: Any, sums: list[Any]) -> list[Any]:
            return products(lambda place: builder.load(place, align=4), builder.mul(i, _index(LANES)), sums)

        width = q_array.shape[1]
        num_whole = builder.sdiv(width, _index(LANES))
        sums = _sum_loop(builder, num_whole, [_ZEROS] * (HEAD_TILE * KEY_TILE), step)
        rest = builder.srem(width, _index(LANES))
        mask = _first_lanes(builder, rest)
        has_rest = builder.select(builder.icmp_signed(">", rest, _index(0)), _index(1), _index(0))
        start = builder.mul(num_whole, _index(LANES))
        sums = _sum_loop(
            builder, has_rest, sums, lambda _, s: products(lambda place: _masked_load(builder, place, mask), start, s)
        )
        total = _sums_of(builder, sums)
        half = ir.VectorType(_Float, KEY_TILE)
        for a, row in enumerate(heads):
            lanes = list(range(a * KEY_TILE, (a + 1) * KEY_TILE))
            part = builder.shuffle_vector(total, total, ir.Constant(ir.VectorType(_Word, KEY_TILE), lanes))
            builder.store(part, scores_array.at(row, args[4], kind=half), align=4)
        return context.get_dummy_value()

    return types.void(q, types.int64, keys, slots, types.int64, scores), emit


def _value_tile(
    typing: Any, weights: Any, head: Any, count: Any, keys: Any, slots: Any, column: Any, decay: Any, out: Any
) -> Any:
    """out[head + a, column : column + n] = decay[head + a] * itself + sum_j weights[head + a, j] * keys[slots[j], ...]

    j < count, in order; n is VALUE_TILE, or 16 where fewer are left, the last of them masked.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        weights_array, keys_array, slots_array, decay_array, out_array = (
            _Array(context, builder, signature.args[place], args[place]) for place in (0, 3, 4, 6, 7)
        )
        count, column = args[2], args[5]
        heads = _rows_from(builder, args[1], weights_array.shape[0])

        def columns(num_vectors: int, load: Callable[[Any], Any], store: Callable[[Any, Any], Any]) -> None:
            starts = [builder.add(column, _index(v * LANES)) for v in range(num_vectors)]
            sums = []
            for row in heads:
                factor = _splat(builder, builder.load(decay_array.at(row, kind=_Float)))
                sums += [builder.fmul(factor, load(out_array.at(row, start))) for start in starts]

            def step(j: Any, sums: list[Any]) -> list[Any]:
                slot = builder.load(slots_array.at(j, kind=_Index))
                vectors = [load(keys_array.at(slot, start)) for start in starts]
                factors = [_splat(builder, builder.load(weights_array.at(row, j, kind=_Float))) for row in heads]
                pairs = [(factor, vector) for factor in factors for vector in vectors]
                return [_fma(builder, *pair, total) for pair, total in zip(pairs, sums, strict=True)]

            sums = _sum_loop(builder, count, sums, step)
            places = [out_array.at(row, start) for row in heads for start in starts]
            for values, place in zip(sums, places, strict=True):
                store(values, place)

        left = builder.sub(out_array.shape[1], column)
        with builder.if_else(builder.icmp_signed(">=", left, _index(VALUE_TILE))) as (whole, part):
            with whole:
                columns(
                    VALUE_TILE // LANES,
                    lambda place: builder.load(place, align=4),
                    lambda values, place: builder.store(values, place, align=4),
                )
            with part:
                mask = _first_lanes(builder, left)
                columns(
                    1,
                    lambda place: _masked_load(builder, place, mask),
                    lambda values, place: _masked_store(builder, values, place, mask),
                )
        return context.get_dummy_value()

    return types.void(weights, types.int64, types.int64, keys, slots, types.int64, decay, out), emit


multiply_tile: Any = intrinsic(_multiply_tile)
add_tile: Any = intrinsic(_add_tile)
score_tile: Any = intrinsic(_score_tile)
value_tile: Any = intrinsic(_value_tile)
