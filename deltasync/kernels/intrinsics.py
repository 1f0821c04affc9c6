"""Instructions that the kernels need and numba does not offer, as LLVM IR."""

from __future__ import annotations

from llvmlite import ir
from numba import config, types
from numba.core import cgutils
from numba.extending import intrinsic


@intrinsic
def pointer(_context, address, like):
    """Return an address as a pointer to elements of the type of the array `like`."""

    def generate(_context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], _context.get_value_type(signature.return_type))

    return types.CPointer(like.dtype)(types.int64, like), generate


@intrinsic
def prefetch(_context, array, at):
    """Prefetch the cache line of an element, for writing."""

    def generate(context, builder, signature, arguments):
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        byte = builder.bitcast(builder.gep(data, [arguments[1]]), ir.IntType(8).as_pointer())
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte.type, number, number, number])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(function, [byte, number(1), number(3), number(1)])
        return context.get_dummy_value()

    return types.void(array, at), generate


@intrinsic
def differing_lanes(_context, _left, _right, _at):
    """Return which of the 64 elements from `at` on differ between two arrays: a bit each, the lowest for element `at`."""

    def generate(context, builder, signature, arguments):
        lanes = []
        for array, type_ in zip(arguments[:2], signature.args[:2], strict=True):
            data = builder.gep(context.make_array(type_)(context, builder, array).data, [arguments[2]])
            width = context.get_value_type(type_.dtype)
            load = builder.load(builder.bitcast(data, ir.VectorType(width, 64).as_pointer()))
            load.align = width.width // 8
            lanes.append(load)
        return builder.bitcast(builder.icmp_unsigned("!=", *lanes), ir.IntType(64))

    return types.uint64(_left, _right, types.int64), generate


LANES = 64
"""Elements that `lanes_time` and `lanes_until` look up at once."""

WINDOW = 32
"""Consecutive classes whose hazards they hold in registers."""

_I32, _I64 = ir.IntType(32), ir.IntType(64)


def _vector(values):
    return ir.Constant(ir.VectorType(_I32, len(values)), list(values))


def _call(builder, name, kind, *operands):
    function = ir.FunctionType(kind, [operand.type for operand in operands])
    return builder.call(cgutils.get_or_insert_function(builder.module, function, name), operands)


def _all_lanes(builder, value, count):
    lane = builder.insert_element(ir.Constant(ir.VectorType(value.type, count), ir.Undefined), value, _I32(0))
    return builder.shuffle_vector(lane, lane, _vector([0] * count))


def _has_avx512(context):
    return "+avx512f" in context.codegen().magic_tuple()[2].split(",")


def _hazards(context, builder, signature, arguments, lanes):
    """Return the hazards of elements, 0 for those that are not wanted, and whether the window has all their classes."""
    bits, at, count, shift, mask, first, hazard_W = arguments[:7]
    bits, hazard_W = (context.make_array(signature.args[n])(context, builder, arguments[n]) for n in (0, 6))
    patterns, places = ir.VectorType(shift.type, lanes), ir.VectorType(_I32, lanes)
    wanted = builder.icmp_signed("<", _vector(range(lanes)), _all_lanes(builder, builder.trunc(count, _I32), lanes))
    memory = builder.bitcast(builder.gep(bits.data, [at]), patterns.as_pointer())
    load = f"llvm.masked.load.v{lanes}i{shift.type.width}.p0"
    alignment = _I32(shift.type.width // 8)
    pattern = _call(builder, load, patterns, memory, alignment, wanted, ir.Constant(patterns, [0] * lanes))
    place = builder.and_(builder.lshr(pattern, _all_lanes(builder, shift, lanes)), _all_lanes(builder, mask, lanes))
    if shift.type.width != 32:
        place = (builder.zext if shift.type.width < 32 else builder.trunc)(place, places)
    place = builder.sub(place, _all_lanes(builder, builder.trunc(first, _I32), lanes))
    outside = builder.and_(wanted, builder.icmp_unsigned(">=", place, _vector([WINDOW] * lanes)))
    known = builder.icmp_unsigned("==", builder.bitcast(outside, ir.IntType(lanes)), ir.IntType(lanes)(0))
    kind, half = ir.VectorType(_I32, WINDOW // 2), WINDOW // 2
    tables = []
    for number in range(2):
        table = builder.load(builder.gep(builder.bitcast(hazard_W.data, kind.as_pointer()), [_I32(number)]))
        table.align = 4
        tables.append(table)
    found = []
    for begin in range(0, lanes, half):
        part = builder.shuffle_vector(place, place, _vector(range(begin, begin + half)))
        found.append(_call(builder, "llvm.x86.avx512.vpermi2var.d.512", kind, tables[0], part, tables[1]))
    while len(found) > 1:
        both = _vector(range(2 * found[0].type.count))
        found = [builder.shuffle_vector(*pair, both) for pair in zip(found[::2], found[1::2], strict=True)]
    return builder.select(wanted, found[0], _vector([0] * lanes)), known


@intrinsic
def lanes_time(_context, bits, at, count, shift, mask, first, hazard_W):
    """Sum the hazards of `count` elements from `at` on, at most `LANES`. Their classes are (bits >> shift) & mask.

    `hazard_W` has the hazards, int32, of the `WINDOW` classes from `first` on. Returns -1 if a class is none of these, or if this
    CPU has no AVX-512.
    """

    def generate(context, builder, signature, arguments):
        if not _has_avx512(context):
            return _I64(-1)
        hazard, known = _hazards(context, builder, signature, arguments, LANES)
        total = _call(builder, f"llvm.vector.reduce.add.v{LANES}i32", _I32, hazard)
        return builder.select(known, builder.zext(total, _I64), _I64(-1))

    return types.int64(bits, types.int64, types.int64, bits.dtype, bits.dtype, types.int64, hazard_W), generate


@intrinsic
def lanes_until(_context, bits, at, count, shift, mask, first, hazard_W, wanted):
    """Find the first of `count` elements, at most `LANES`, by whose end the time `wanted` has passed, which has by the end of all.

    Returns its number, the time before it, and its hazard; -1 and anything where `lanes_time` returns -1.
    """
    flags = ir.IntType(LANES)

    def generate(context, builder, signature, arguments):
        if not _has_avx512(context):
            return context.make_tuple(builder, signature.return_type, [_I64(-1), _I64(0), _I64(0)])
        hazard, known = _hazards(context, builder, signature, arguments, LANES)
        passed, zeros = hazard, _vector([0] * LANES)
        step = 1
        while step < LANES:
            earlier = [max(LANES + n - step, LANES - 1) for n in range(LANES)]
            passed = builder.add(passed, builder.shuffle_vector(zeros, passed, _vector(earlier)))
            step *= 2
        wanted = _all_lanes(builder, builder.trunc(arguments[7], _I32), LANES)
        before = builder.bitcast(builder.icmp_unsigned("<", passed, wanted), flags)
        number = builder.and_(builder.cttz(builder.not_(before), ir.IntType(1)(0)), _I64(LANES - 1))
        of_lane = builder.extract_element(hazard, number)
        time = builder.sub(builder.extract_element(passed, number), of_lane)
        found = builder.select(known, number, _I64(-1)), builder.zext(time, _I64), builder.zext(of_lane, _I64)
        return context.make_tuple(builder, signature.return_type, found)

    arguments = bits, types.int64, types.int64, bits.dtype, bits.dtype, types.int64, hazard_W, types.int64
    return types.UniTuple(types.int64, 3)(*arguments), generate


if config.DISABLE_JIT:  # the kernels run as Python, for fuzzing

    def prefetch(array, at):
        """Do nothing."""

    def lanes_time(bits, at, count, shift, mask, first, hazard_W):
        """Return -1: the caller then sums by itself."""
        return -1

    def lanes_until(bits, at, count, shift, mask, first, hazard_W, wanted):
        """Return -1: the caller then searches by itself."""
        return -1, 0, 0
