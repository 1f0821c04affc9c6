"""Instructions that the kernels need and numba does not offer, as LLVM IR."""

from __future__ import annotations

import ctypes

import numpy as np
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


@intrinsic
def field_bytes(_context, bits, at, shift, mask, out, to):
    """Write (bits >> shift) & mask of the 64 elements from `at` on as bytes into `out`, from `to` on."""

    def generate(context, builder, signature, arguments):
        bits, at, shift, mask, out, to = arguments
        bits, out = (
            context.make_array(type_)(context, builder, array).data
            for type_, array in ((signature.args[0], bits), (signature.args[4], out))
        )
        kind = context.get_value_type(signature.args[0].dtype)
        lanes = builder.load(builder.bitcast(builder.gep(bits, [at]), ir.VectorType(kind, 64).as_pointer()))
        lanes.align = kind.width // 8
        shift, mask = (_all_lanes(builder, _narrow(builder, value, kind)) for value in (shift, mask))
        lanes = builder.and_(builder.lshr(lanes, shift), mask)
        bytes_ = ir.VectorType(ir.IntType(8), 64)
        store = builder.store(
            builder.trunc(lanes, bytes_) if kind.width > 8 else lanes,
            builder.bitcast(builder.gep(out, [to]), bytes_.as_pointer()),
        )
        store.align = 1
        return context.get_dummy_value()

    return types.void(bits, types.int64, types.uint64, types.uint64, out, types.int64), generate


def _narrow(builder, value, kind):
    return builder.trunc(value, kind) if kind.width < 64 else value


def _all_lanes(builder, value):
    lane = builder.insert_element(ir.Constant(ir.VectorType(value.type, 64), ir.Undefined), value, ir.IntType(32)(0))
    return builder.shuffle_vector(lane, lane, ir.Constant(ir.VectorType(ir.IntType(32), 64), [0] * 64))


@intrinsic
def lanes_between(_context, field, at, low, span):
    """Return which of the 64 bytes from `at` on lie from `low` to `low + span`: a bit each, the lowest for byte `at`."""

    def generate(context, builder, signature, arguments):
        field, at, low, span = arguments
        data = builder.gep(context.make_array(signature.args[0])(context, builder, field).data, [at])
        lanes = builder.load(builder.bitcast(data, ir.VectorType(ir.IntType(8), 64).as_pointer()))
        lanes.align = 1
        lanes = builder.sub(lanes, _all_lanes(builder, low))
        return builder.bitcast(builder.icmp_unsigned("<=", lanes, _all_lanes(builder, span)), ir.IntType(64))

    return types.uint64(field, types.int64, types.uint8, types.uint8), generate


@intrinsic
def popcount(_context, _value):
    """Return the number of ones in 64 bits."""
    return types.uint64(types.uint64), lambda _c, builder, _s, arguments: builder.ctpop(arguments[0])


if config.DISABLE_JIT:  # the kernels run as Python, for fuzzing

    def pointer(address, like):
        """Return an address as a pointer to elements of the type of the array `like`."""
        return ctypes.cast(int(address), ctypes.POINTER(np.ctypeslib.as_ctypes_type(like.dtype)))

    def prefetch(array, at):
        """Do nothing."""

    prefetch_to_write = prefetch

    def field_bytes(bits, at, shift, mask, out, to):
        """Write (bits >> shift) & mask of the 64 elements from `at` on as bytes into `out`, from `to` on."""
        out[to : to + 64] = (bits[at : at + 64].astype(np.uint64) >> shift) & mask

    def lanes_between(field, at, low, span):
        """Return which of the 64 bytes from `at` on lie from `low` to `low + span`, as 64 bits."""
        return np.packbits(field[at : at + 64] - low <= span, bitorder="little").view(np.uint64)[0]

    def popcount(value):
        """Return the number of ones in 64 bits."""
        return int(value).bit_count()
