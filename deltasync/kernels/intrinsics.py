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


LANES = 16
"""Elements that `lanes_time` looks up at once."""

WINDOW = 32
"""Consecutive classes whose hazards `lanes_time` holds in registers."""


@intrinsic
def lanes_time(_context, bits, at, count, shift, mask, first, hazard_W):
    """Sum the hazards of `count` elements from `at` on, at most `LANES`. Their classes are (bits >> shift) & mask.

    `hazard_W` has the hazards, int32, of the `WINDOW` classes from `first` on. Returns -1 if a class is none of these, if
    the array has fewer than `LANES` elements from `at` on, or if this CPU has no AVX-512.
    """
    i32, i64, flags = ir.IntType(32), ir.IntType(64), ir.IntType(LANES)
    lanes = ir.VectorType(i32, LANES)

    def constant(values):
        return ir.Constant(ir.VectorType(i32, len(values)), list(values))

    def generate(context, builder, signature, arguments):
        if "+avx512f" not in context.codegen().magic_tuple()[2].split(","):
            return i64(-1)
        bits, at, count, shift, mask, first, hazard_W = arguments
        bits, hazard_W = (context.make_array(signature.args[n])(context, builder, arguments[n]) for n in (0, 6))
        time = cgutils.alloca_once_value(builder, i64(-1))

        def load(pointer, kind):
            loaded = builder.load(builder.bitcast(pointer, kind.as_pointer()))
            loaded.align = kind.element.width // 8
            return loaded

        def all_lanes(value):
            lane = builder.insert_element(ir.Constant(ir.VectorType(value.type, LANES), ir.Undefined), value, i32(0))
            return builder.shuffle_vector(lane, lane, constant([0] * LANES))

        def call(name, kind, *operands):
            function = ir.FunctionType(kind, [operand.type for operand in operands])
            return builder.call(cgutils.get_or_insert_function(builder.module, function, name), operands)

        size = cgutils.unpack_tuple(builder, bits.shape)[0]
        with builder.if_then(builder.icmp_unsigned("<=", builder.add(at, i64(LANES)), size), likely=True):
            pattern = load(builder.gep(bits.data, [at]), ir.VectorType(shift.type, LANES))
            found = builder.and_(builder.lshr(pattern, all_lanes(shift)), all_lanes(mask))
            if shift.type.width != 32:
                found = (builder.zext if shift.type.width < 32 else builder.trunc)(found, lanes)
            place = builder.sub(found, all_lanes(builder.trunc(first, i32)))
            wanted = builder.icmp_signed("<", constant(range(LANES)), all_lanes(builder.trunc(count, i32)))
            outside = builder.and_(wanted, builder.icmp_unsigned(">=", place, constant([WINDOW] * LANES)))
            with builder.if_then(builder.icmp_unsigned("==", builder.bitcast(outside, flags), flags(0)), likely=True):
                window = load(hazard_W.data, ir.VectorType(i32, WINDOW))
                low, high = (
                    builder.shuffle_vector(window, window, constant(range(begin, begin + LANES))) for begin in (0, LANES)
                )
                hazard = call("llvm.x86.avx512.vpermi2var.d.512", lanes, low, place, high)
                hazard = builder.select(wanted, hazard, constant([0] * LANES))
                builder.store(builder.zext(call("llvm.vector.reduce.add.v16i32", i32, hazard), i64), time)
        return builder.load(time)

    return types.int64(bits, types.int64, types.int64, bits.dtype, bits.dtype, types.int64, hazard_W), generate


if config.DISABLE_JIT:  # the kernels run as Python, for fuzzing

    def prefetch(array, at):
        """Do nothing."""

    def lanes_time(bits, at, count, shift, mask, first, hazard_W):
        """Return -1: the caller then sums by itself."""
        return -1
