"""What the kernels of `cpu` need that numba has no word for, as LLVM's instructions."""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic


@intrinsic
def pointer(_context, address, like):
    """An address as a pointer to elements of the type of the array `like`."""

    def generate(_context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], _context.get_value_type(signature.return_type))

    return types.CPointer(like.dtype)(types.int64, like), generate


@intrinsic
def prefetch(_context, array, at):
    """Ask for the cache line of an element, to write to it."""

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
    """Which of the 64 elements of two arrays from `at` on differ, a bit each, the first one's the lowest."""

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
