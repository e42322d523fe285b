"""Vector instructions that Numba's own loops do not become, put down as LLVM code.

A vector is 16 fp32 numbers: one register where the processor has AVX-512, several elsewhere.
"""

from __future__ import annotations

from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16
PANEL = 2 * LANES  # outputs of a product that are computed together
# Rows that share a pass over a panel: as many as have their sums in registers.
ROW_TILE = 8 if binding.get_host_cpu_features().get("avx512f") else 3
_Float, _Word, _Index = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_Floats, _Words = ir.VectorType(_Float, LANES), ir.VectorType(_Word, LANES)
_declare: Any = cgutils.get_or_insert_function
_unpack: Any = cgutils.unpack_tuple


def _splat(builder: Any, value: Any, vector: Any) -> Any:
    undefined = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(undefined, value, ir.Constant(_Word, 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(_Words, [0] * LANES))


def _load_panel_row(builder: Any, panel: Any, k: Any, is_narrow: bool) -> tuple[Any, Any]:
    """The 32 weights of one inner index, as two vectors."""
    if not is_narrow:
        first = builder.mul(k, ir.Constant(_Index, 2))
        places = (first, builder.add(first, ir.Constant(_Index, 1)))
        low, high = (builder.load(builder.gep(panel, [place]), align=64) for place in places)
        return low, high
    words = builder.load(builder.gep(panel, [k]), align=64)
    low = builder.shl(words, ir.Constant(_Words, [16] * LANES))
    high = builder.and_(words, ir.Constant(_Words, [0xFFFF0000] * LANES))
    return builder.bitcast(low, _Floats), builder.bitcast(high, _Floats)


def _multiply_rows(builder: Any, x_rows: list[Any], panel: Any, inner: Any, is_narrow: bool) -> list[Any]:
    """The loop over k for a fixed number of rows: 2 vectors of sums per row, in registers."""
    name = f"llvm.fma.v{LANES}f32"
    fma = _declare(builder.module, ir.FunctionType(_Floats, [_Floats] * 3), name)
    before, loop = builder.block, builder.append_basic_block("inner")
    after = builder.append_basic_block("summed")
    zero, one = ir.Constant(_Index, 0), ir.Constant(_Index, 1)
    zeros = ir.Constant(_Floats, [0.0] * LANES)
    builder.cbranch(builder.icmp_signed(">", inner, zero), loop, after)
    builder.position_at_end(loop)
    k = builder.phi(_Index)
    sums = [builder.phi(_Floats) for _ in range(2 * len(x_rows))]
    weights = _load_panel_row(builder, panel, k, is_narrow)
    grown = []
    for row, x_row in enumerate(x_rows):
        factor = _splat(builder, builder.load(builder.gep(x_row, [k])), _Floats)
        grown += [builder.call(fma, [factor, weights[half], sums[2 * row + half]]) for half in (0, 1)]
    following = builder.add(k, one)
    k.add_incoming(zero, before)
    k.add_incoming(following, loop)
    for total, value in zip(sums, grown, strict=True):
        total.add_incoming(zeros, before)
        total.add_incoming(value, loop)
    builder.cbranch(builder.icmp_signed("<", following, inner), loop, after)
    builder.position_at_end(after)
    results = []
    for value in grown:
        result = builder.phi(_Floats)
        result.add_incoming(zeros, before)
        result.add_incoming(value, loop)
        results.append(result)
    return results


def _store_row(builder: Any, row: Any, num_columns: Any, halves: list[Any]) -> None:
    """The first num_columns of 32 results; what lies after them is not touched."""
    store_type = ir.FunctionType(
        ir.VoidType(), [_Floats, _Floats.as_pointer(), _Word, ir.VectorType(ir.IntType(1), LANES)]
    )
    store = _declare(builder.module, store_type, f"llvm.masked.store.v{LANES}f32.p0")
    limit = _splat(builder, builder.trunc(num_columns, _Word), _Words)
    for half, values in enumerate(halves):
        first = half * LANES
        mask = builder.icmp_signed("<", ir.Constant(_Words, list(range(first, first + LANES))), limit)
        place = builder.bitcast(builder.gep(row, [ir.Constant(_Index, first)]), _Floats.as_pointer())
        builder.call(store, [values, place, ir.Constant(_Word, 4), mask])


def _multiply_tile(typing: Any, x: Any, first: Any, panels: Any, panel: Any, out: Any) -> Any:
    """out[first : first + ROW_TILE, the panel's columns] = x[the same rows] @ the panel; fewer rows at x's end.

    Numba's own loops keep no sums in registers here.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x_type, _, panels_type, _, out_type = signature.args
        x_array, panels_array, out_array = (
            context.make_array(kind)(context, builder, value)
            for kind, value in ((x_type, args[0]), (panels_type, args[2]), (out_type, args[4]))
        )
        floats, first_row, panel_index = _Float.as_pointer(), args[1], args[3]
        num_rows, inner = _unpack(builder, x_array.shape)
        column = builder.mul(panel_index, ir.Constant(_Index, PANEL))
        num_columns = builder.sub(_unpack(builder, out_array.shape)[1], column)
        panel_stride = _unpack(builder, panels_array.strides)[0]

        def place(array: Any, offset: Any, kind: Any) -> Any:
            return builder.inttoptr(builder.add(builder.ptrtoint(array.data, _Index), offset), kind)

        def rows_of(array: Any, count: int, offset: Any) -> list[Any]:
            stride = _unpack(builder, array.strides)[0]
            rows = [builder.add(first_row, ir.Constant(_Index, row)) for row in range(count)]
            return [place(array, builder.add(offset, builder.mul(row, stride)), floats) for row in rows]

        is_narrow = panels_type.dtype == types.uint32
        weights = place(panels_array, builder.mul(panel_index, panel_stride),
                        (_Words if is_narrow else _Floats).as_pointer())  # fmt: skip
        done = builder.append_basic_block("done")
        choice = builder.switch(builder.sub(num_rows, first_row), builder.append_basic_block("whole"))
        for count in range(ROW_TILE, 0, -1):
            if count == ROW_TILE:
                builder.position_at_end(choice.default)
            else:
                block = builder.append_basic_block(f"rows{count}")
                choice.add_case(ir.Constant(_Index, count), block)
                builder.position_at_end(block)
            sums = _multiply_rows(builder, rows_of(x_array, count, ir.Constant(_Index, 0)), weights, inner, is_narrow)
            for row, target in enumerate(rows_of(out_array, count, builder.mul(column, ir.Constant(_Index, 4)))):
                _store_row(builder, target, num_columns, sums[2 * row : 2 * row + 2])
            builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    return types.void(x, types.int64, panels, types.int64, out), emit


multiply_tile: Any = intrinsic(_multiply_tile)
