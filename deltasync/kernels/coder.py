"""The coder of `coder_reference` in numba: blocks in parallel, without the GIL, every read and write inside its bounds.

Shapes: K changed elements of a tensor, B blocks of it, N its elements, W words.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, prange, types
from numba.extending import intrinsic

from deltasync.kernels import coder_reference as reference

_STATE_MIN = np.uint64(reference.STATE_MIN)
_TABLE_BITS = np.uint64(reference.TABLE_BITS)
_TIME_BITS = np.uint64(reference.TIME_BITS)
_TIME_SLOTS = np.uint64(1 << reference.TIME_BITS)
_SEGMENT_BITS = reference.SEGMENT_BITS
_TIME_END = reference.TIME_END
_TIME_START = reference.TIME_START
_LAST_SLOT = int(_TIME_START[-1])
# Segment of the first slot of each 256th of the distribution: where the search for a slot's segment begins.
_LOOKUP_BITS = reference.TIME_BITS - 8
_SEGMENT_AT = (np.searchsorted(_TIME_START, np.arange(256) << _LOOKUP_BITS, side="right") - 1).astype(np.int64)
_U0, _U1, _U3, _U4, _U16, _U24, _U32, _U63, _U64 = (np.uint64(n) for n in (0, 1, 3, 4, 16, 24, 32, 63, 64))
_U2 = np.uint64(2)
_WORD = np.uint64(0xFFFFFFFF)


@intrinsic
def _leading_zeros(_context, _value):  # type: ignore[no-untyped-def]
    def generate(_context, builder, _signature, arguments):  # type: ignore[no-untyped-def]
        return builder.ctlz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.uint64(types.uint64), generate


@njit(inline="always")
def _bucket(value):  # type: ignore[no-untyped-def]
    if value < _U16:
        return value, _U0
    exponent = _U63 - _leading_zeros(value)
    extra = exponent - _U2
    return _U4 * exponent + ((value >> extra) & _U3), extra


@njit(inline="always")
def _zigzag(step, top):  # type: ignore[no-untyped-def]
    """`top` is 2**(width - 1) as uint64."""
    value = np.uint64(step)
    if value & top:
        return ((top - value) << _U1) + (top << _U1) - _U2
    return (value << _U1) - _U1


@njit(inline="always")
def _push(out, at, x, start, freq, bits):  # type: ignore[no-untyped-def]
    if (x >> (_U64 - bits)) >= freq:
        at -= 1
        out[at] = np.uint32(x & _WORD)
        x >>= _U32
    quotient = x // freq
    return at, (quotient << bits) + (x - quotient * freq) + start


@njit(inline="always")
def _push_bits(out, at, x, value, bits):  # type: ignore[no-untyped-def]
    if (x >> (_U64 - bits)) != _U0:
        at -= 1
        out[at] = np.uint32(x & _WORD)
        x >>= _U32
    return at, (x << bits) | value


@njit(inline="always")
def _push_number(out, at, x, value, freq_S, start_S):  # type: ignore[no-untyped-def]
    symbol, extra = _bucket(value)
    if extra != _U0:
        # Groups of 24 bits from the top, in decoding order: the last one is the shortest.
        done = _U0
        while done < extra:
            bits = (extra - done) % _U24 if done == _U0 else _U24
            if bits == _U0:
                bits = _U24
            at, x = _push_bits(out, at, x, (value >> done) & ((_U1 << bits) - _U1), bits)
            done += bits
    return _push(out, at, x, np.uint64(start_S[symbol]), np.uint64(freq_S[symbol]), _TABLE_BITS)


@njit(inline="always")
def _push_state(out, at, x):  # type: ignore[no-untyped-def]
    out[at - 1] = np.uint32(x >> _U32)
    out[at - 2] = np.uint32(x & _WORD)
    return at - 2


@njit(inline="always")
def _pull(words, at, end, x):  # type: ignore[no-untyped-def]
    """Renormalise; beyond the end of the stream `at` goes on without reading, so that it ends up wrong."""
    if x < _STATE_MIN:
        if at < end:
            x = (x << _U32) | np.uint64(words[at])
        at += 1
    return at, x


@njit(inline="always")
def _pull_number(words, at, end, x, symbol_L, freq_S, start_S):  # type: ignore[no-untyped-def]
    slot = x & ((_U1 << _TABLE_BITS) - _U1)
    symbol = np.uint64(symbol_L[slot])
    x = np.uint64(freq_S[symbol]) * (x >> _TABLE_BITS) + slot - np.uint64(start_S[symbol])
    at, x = _pull(words, at, end, x)
    if symbol < _U16:
        return at, x, symbol
    extra = (symbol >> _U2) - _U2
    value = _U4 + (symbol & _U3)
    while extra > _U0:
        bits = min(extra, _U24)
        value = (value << bits) | (x & ((_U1 << bits) - _U1))
        x >>= bits
        at, x = _pull(words, at, end, x)
        extra -= bits
    return at, x, value


@njit(inline="always")
def _unzigzag(value):  # type: ignore[no-untyped-def]
    magnitude = (value >> _U1) + _U1
    return magnitude if value & _U1 else _U0 - magnitude


@njit(inline="always")
def _time_slot(time):  # type: ignore[no-untyped-def]
    segment = time >> _SEGMENT_BITS
    if time >= _TIME_END:
        return _LAST_SLOT
    start = _TIME_START[segment]
    inside = time - (segment << _SEGMENT_BITS)
    return start + ((inside * (_TIME_START[segment + 1] - start)) >> _SEGMENT_BITS)


@njit(inline="always")
def _time_after(slot):  # type: ignore[no-untyped-def]
    """The least time that has more than `slot` slots below it; `slot` is below _LAST_SLOT."""
    segment = _SEGMENT_AT[slot >> _LOOKUP_BITS]
    while _TIME_START[segment + 1] <= slot:
        segment += 1
    start = _TIME_START[segment]
    weight = np.uint64(_TIME_START[segment + 1] - start)
    inside = (np.uint64(slot - start + 1) << np.uint64(_SEGMENT_BITS)) + weight - _U1
    return (segment << _SEGMENT_BITS) + np.int64(inside // weight)


@njit(parallel=True, nogil=True, cache=True)
def _count_packed(base_B, bound_B, index_K, step_K, top, count_BS):  # type: ignore[no-untyped-def]
    for b in prange(base_B.size):
        before = base_B[b] - 1
        for k in range(bound_B[b], bound_B[b + 1]):
            gap, _ = _bucket(np.uint64(index_K[k] - before - 1))
            step, _ = _bucket(_zigzag(step_K[k], top))
            count_BS[b, 0, gap] += 1
            count_BS[b, 1, step] += 1
            before = np.int64(index_K[k])


@njit(parallel=True, nogil=True, cache=True)
def _encode_packed(base_B, bound_B, index_K, step_K, top, freq_S, start_S, room, out, first_B):  # type: ignore[no-untyped-def]
    for b in prange(base_B.size):
        low, high = bound_B[b], bound_B[b + 1]
        at = room * high + 2 * (b + 1)
        x = _STATE_MIN
        for k in range(high - 1, low - 1, -1):
            before = np.int64(index_K[k - 1]) if k > low else base_B[b] - 1
            at, x = _push_number(out, at, x, _zigzag(step_K[k], top), freq_S[1], start_S[1])
            at, x = _push_number(out, at, x, np.uint64(index_K[k] - before - 1), freq_S[0], start_S[0])
        first_B[b] = _push_state(out, at, x) if high > low else at


@njit(parallel=True, nogil=True, cache=True)
def _decode_packed(
    words, word_B, base_B, end_B, bound_B, symbol_L, freq_S, start_S, top, index_K, step_K, good_B
):  # type: ignore[no-untyped-def]
    gap_symbol, gap_freq, gap_start = symbol_L[0], freq_S[0], start_S[0]
    step_symbol, step_freq, step_start = symbol_L[1], freq_S[1], start_S[1]
    limit = (top - _U1) + (top - _U1)
    for b in prange(base_B.size):
        low, high = bound_B[b], bound_B[b + 1]
        at, end = word_B[b], word_B[b + 1]
        if low == high:
            good_B[b] = at == end
            continue
        if end - at < 2:
            continue
        x = np.uint64(words[at]) | (np.uint64(words[at + 1]) << _U32)
        at += 2
        good = x >= _STATE_MIN
        index = base_B[b] - 1
        for k in range(low, high):
            at, x, gap = _pull_number(words, at, end, x, gap_symbol, gap_freq, gap_start)
            at, x, step = _pull_number(words, at, end, x, step_symbol, step_freq, step_start)
            if gap >= np.uint64(end_B[b] - index - 1) or step > limit:
                good = False
                break
            index += 1 + np.int64(gap)
            index_K[k] = index
            step_K[k] = _unzigzag(step)
        good_B[b] = good and at == end and x == _STATE_MIN


@njit(parallel=True, nogil=True, cache=True)
def _count_classes(base_B, end_B, bits_N, shift, mask, run, period, count_BC):  # type: ignore[no-untyped-def]
    for b in prange(base_B.size):
        for start in range(base_B[b], end_B[b], period):
            for i in range(start, min(start + run, end_B[b])):
                count_BC[b, (bits_N[i] >> shift) & mask] += 1


@njit(parallel=True, nogil=True, cache=True)
def _count_context(bound_B, bits_N, index_K, step_K, shift, mask, top, count_BC, step_BCS):  # type: ignore[no-untyped-def]
    for b in prange(bound_B.size - 1):
        for k in range(bound_B[b], bound_B[b + 1]):
            old = bits_N[index_K[k]]
            old -= step_K[k]
            at = (old >> shift) & mask
            step, _ = _bucket(_zigzag(step_K[k], top))
            count_BC[b, at] += 1
            step_BCS[b, at, step] += 1


@njit(parallel=True, nogil=True, cache=True)
def _encode_context(
    base_B, bound_B, bits_N, index_K, step_K, shift, mask, top, hazard_BC, table_C, freq_S, start_S, time_K, room, out, first_B
):  # type: ignore[no-untyped-def]
    for b in prange(base_B.size):
        low, high = bound_B[b], bound_B[b + 1]
        hazard_C = hazard_BC[b]
        after = base_B[b]
        for k in range(low, high):
            time = np.int64(0)
            index = np.int64(index_K[k])
            for i in range(after, index):
                time += hazard_C[(bits_N[i] >> shift) & mask]
            time_K[k] = time
            after = index + 1
        at = out.size if b == base_B.size - 1 else room[b + 1]
        x = _STATE_MIN
        for k in range(high - 1, low - 1, -1):
            old = bits_N[index_K[k]]
            old -= step_K[k]
            c = (old >> shift) & mask
            table = table_C[c]
            at, x = _push_number(out, at, x, _zigzag(step_K[k], top), freq_S[table], start_S[table])
            waits = time_K[k] // _TIME_END
            time = time_K[k] - waits * _TIME_END
            start = _time_slot(time)
            freq = _time_slot(time + hazard_C[c]) - start
            at, x = _push(out, at, x, np.uint64(start), np.uint64(freq), _TIME_BITS)
            for _ in range(waits):
                at, x = _push(out, at, x, np.uint64(_LAST_SLOT), _TIME_SLOTS - np.uint64(_LAST_SLOT), _TIME_BITS)
        first_B[b] = _push_state(out, at, x) if high > low else at


@njit(parallel=True, nogil=True, cache=True)
def _decode_context(
    words, word_B, base_B, end_B, bound_B, old_N, shift, mask, hazard_BC, table_C, symbol_L, freq_S, start_S, top,
    index_K, step_K, good_B,
):  # fmt: skip  # type: ignore[no-untyped-def]
    limit = (top - _U1) + (top - _U1)
    for b in prange(base_B.size):
        low, high = bound_B[b], bound_B[b + 1]
        at, end = word_B[b], word_B[b + 1]
        if low == high:
            good_B[b] = at == end
            continue
        if end - at < 2:
            continue
        x = np.uint64(words[at]) | (np.uint64(words[at + 1]) << _U32)
        at += 2
        good = x >= _STATE_MIN
        hazard_C = hazard_BC[b]
        index, last = base_B[b], end_B[b]
        for k in range(low, high):
            begin = np.int64(0)
            slot = x & (_TIME_SLOTS - _U1)
            while slot >= np.uint64(_LAST_SLOT) and at <= end:
                x = (_TIME_SLOTS - np.uint64(_LAST_SLOT)) * (x >> _TIME_BITS) + slot - np.uint64(_LAST_SLOT)
                at, x = _pull(words, at, end, x)
                begin -= _TIME_END
                slot = x & (_TIME_SLOTS - _U1)
            if at > end:
                good = False
                break
            wanted = _time_after(np.int64(slot))
            c = np.int64(0)
            hazard = np.int64(0)
            while index < last:
                c = np.int64((old_N[index] >> shift) & mask)
                hazard = hazard_C[c]
                if begin + hazard >= wanted:
                    break
                begin += hazard
                index += 1
            if index == last or begin < 0:
                good = False
                break
            start = _time_slot(begin)
            freq = _time_slot(begin + hazard) - start
            x = np.uint64(freq) * (x >> _TIME_BITS) + slot - np.uint64(start)
            at, x = _pull(words, at, end, x)
            table = table_C[c]
            at, x, step = _pull_number(words, at, end, x, symbol_L[table], freq_S[table], start_S[table])
            if step > limit:
                good = False
                break
            index_K[k] = index
            step_K[k] = _unzigzag(step)
            index += 1
        good_B[b] = good and at == end and x == _STATE_MIN
