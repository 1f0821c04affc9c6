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


def _prefetch(context, builder, signature, arguments, write):
    data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
    byte = builder.bitcast(builder.gep(data, [arguments[1]]), ir.IntType(8).as_pointer())
    number = ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [byte.type, number, number, number])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(function, [byte, number(write), number(3), number(1)])
    return context.get_dummy_value()


@intrinsic
def prefetch(_context, array, at):
    """Prefetch the cache line of an element. It may lie behind the array."""

    def generate(*arguments):
        return _prefetch(*arguments, write=0)

    return types.void(array, at), generate


@intrinsic
def prefetch_to_write(_context, array, at):
    """As `prefetch`, for an element that will be written."""

    def generate(*arguments):
        return _prefetch(*arguments, write=1)

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


WINDOW = 32
"""Consecutive classes whose hazards `lanes_time` holds in registers."""


@intrinsic(prefer_literal=True)
def lanes_time(_context, bits, at, count, most, shift, mask, first, hazard_W):
    """Sum the hazards of `count` elements from `at` on. Their classes are (bits >> shift) & mask.

    `count` is at most `most`, a literal: 16, 32 or 64. `hazard_W` has the hazards, int32, of the `WINDOW` classes from
    `first` on. Returns -1 if a class is none of these, or if this CPU has no AVX-512.
    """
    lanes, i32, i64 = most.literal_value, ir.IntType(32), ir.IntType(64)

    def constant(values):
        return ir.Constant(ir.VectorType(i32, len(values)), list(values))

    def generate(context, builder, signature, arguments):
        if "+avx512f" not in context.codegen().magic_tuple()[2].split(","):
            return i64(-1)
        bits, at, count, _, shift, mask, first, hazard_W = arguments
        bits, hazard_W = (context.make_array(signature.args[n])(context, builder, arguments[n]) for n in (0, 7))
        time = cgutils.alloca_once_value(builder, i64(-1))

        def all_lanes(value):
            lane = builder.insert_element(ir.Constant(ir.VectorType(value.type, lanes), ir.Undefined), value, i32(0))
            return builder.shuffle_vector(lane, lane, constant([0] * lanes))

        def call(name, kind, *operands):
            function = ir.FunctionType(kind, [operand.type for operand in operands])
            return builder.call(cgutils.get_or_insert_function(builder.module, function, name), operands)

        width, patterns = shift.type.width, ir.VectorType(shift.type, lanes)
        wanted = builder.icmp_signed("<", constant(range(lanes)), all_lanes(builder.trunc(count, i32)))
        memory = builder.bitcast(builder.gep(bits.data, [at]), patterns.as_pointer())
        zeros = ir.Constant(patterns, [0] * lanes)
        pattern = call(f"llvm.masked.load.v{lanes}i{width}.p0", patterns, memory, i32(width // 8), wanted, zeros)
        place = builder.and_(builder.lshr(pattern, all_lanes(shift)), all_lanes(mask))
        if width != 32:
            place = (builder.zext if width < 32 else builder.trunc)(place, ir.VectorType(i32, lanes))
        place = builder.sub(place, all_lanes(builder.trunc(first, i32)))
        outside = builder.and_(wanted, builder.icmp_unsigned(">=", place, constant([WINDOW] * lanes)))
        flags = ir.IntType(lanes)
        with builder.if_then(builder.icmp_unsigned("==", builder.bitcast(outside, flags), flags(0)), likely=True):
            half = WINDOW // 2
            register = ir.VectorType(i32, half)
            rows = builder.bitcast(hazard_W.data, register.as_pointer())
            low, high = (builder.load(builder.gep(rows, [i32(n)])) for n in range(2))
            low.align = high.align = 4
            total = ir.Constant(register, [0] * half)
            for begin in range(0, lanes, half):
                part = constant(range(begin, begin + half))
                place_P, wanted_P = (builder.shuffle_vector(each, each, part) for each in (place, wanted))
                hazard = call("llvm.x86.avx512.vpermi2var.d.512", register, low, place_P, high)
                total = builder.add(total, builder.select(wanted_P, hazard, constant([0] * half)))
            builder.store(builder.zext(call("llvm.vector.reduce.add.v16i32", i32, total), i64), time)
        return builder.load(time)

    kinds = bits, types.int64, types.int64, most, bits.dtype, bits.dtype, types.int64, hazard_W
    return types.int64(*kinds), generate


if config.DISABLE_JIT:  # the kernels run as Python, for fuzzing

    def prefetch(array, at):
        """Do nothing."""

    prefetch_to_write = prefetch

    def lanes_time(bits, at, count, most, shift, mask, first, hazard_W):
        """Return -1: the caller then sums by itself."""
        return -1
