"""The entropy coder (`rans`) in numba: blocks in parallel, without the GIL, every read and write within bounds."""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, prange, types
from numba.extending import intrinsic

from deltasync.kernels import rans
from deltasync.kernels.compiled import kernel
from deltasync.kernels.counts import bucket, first_class, gap_before, tasks, top_of, zigzag
from deltasync.kernels.cpu import threads
from deltasync.kernels.rans import Blocks, Tables

_STATE_MIN = np.uint64(rans.STATE_MIN)
_TABLE_BITS = np.uint64(rans.TABLE_BITS)
_TABLE_SLOTS = np.uint64(1 << rans.TABLE_BITS)
_U0, _U1, _U2, _U3, _U4, _U16, _U24, _U32, _U56, _U64 = map(np.uint64, (0, 1, 2, 3, 4, 16, 24, 32, 56, 64))
_WORD = np.uint64(0xFFFFFFFF)
_RATIO_BITS = rans.RATIO_BITS


@intrinsic
def _high_product(_context, _left, _right):
    """Return the upper 64 bits of a product."""

    def generate(_context, builder, _signature, arguments):
        wide = ir.IntType(128)
        left, right = (builder.zext(argument, wide) for argument in arguments)
        return builder.trunc(builder.lshr(builder.mul(left, right), ir.Constant(wide, 64)), ir.IntType(64))

    return types.uint64(types.uint64, types.uint64), generate


# LLVM inlines these functions. If numba did, `_encode`, which calls dozens of them, would take six times as long to compile.
@njit(forceinline=True)
def _unzigzag(value):
    magnitude = (value >> _U1) + _U1
    return magnitude if value & _U1 else _U0 - magnitude


@njit(forceinline=True)
def _flush(out, at, x, freq, bits):
    """Write the low word of the state out if the state is full. Without a branch, which would often be mispredicted."""
    out[at - _U1] = np.uint32(x & _WORD)
    full = (x >> (_U64 - bits)) >= freq
    return at - np.uint64(full), (x >> _U32) if full else x


@njit(forceinline=True)
def _push(out, at, x, start, freq, bits):
    at, x = _flush(out, at, x, freq, bits)
    quotient = x // freq
    return at, (quotient << bits) + (x - quotient * freq) + start


@njit(forceinline=True)
def _push_bits(out, at, x, value, bits):
    return _push(out, at, x, value & ((_U1 << bits) - _U1), _U1, bits)


@njit(forceinline=True)
def _push_number(out, at, x, value, table, freq_TS, start_TS, inverse_TS):
    symbol, extra = bucket(value)
    # Decoding reads groups of 24 bits from the top and the shortest one last, so encoding begins with that.
    if extra:
        done = extra
        if extra > _U24:
            done = (extra - _U1) % _U24 + _U1
        at, x = _push_bits(out, at, x, value, done)
        while done < extra:
            at, x = _push_bits(out, at, x, value >> done, _U24)
            done += _U24
    # As `_push`, but the inverse of the frequency gives the quotient, or one less.
    freq = np.uint64(freq_TS[table, symbol])
    at, x = _flush(out, at, x, freq, _TABLE_BITS)
    quotient = _high_product(x, inverse_TS[table, symbol])
    quotient += np.uint64(x - quotient * freq >= freq)
    return at, x + quotient * (_TABLE_SLOTS - freq) + np.uint64(start_TS[table, symbol])


@njit(forceinline=True)
def _push_state(out, at, x, any_change):
    if not any_change:
        return at
    if x >= _STATE_MIN:
        at -= _U1
        out[at] = np.uint32(x >> _U32)
    out[at - _U1] = np.uint32(x & _WORD)
    return at - _U1


@njit(forceinline=True)
def _pull(words, at, end, x):
    """Renormalise without a branch, which would often be mispredicted; behind the last word of the block not at all."""
    short = (x < _STATE_MIN) & (at < end)
    word = np.uint64(words[np.uint64(min(at, words.size - 1))])
    return at + np.int64(short), (x << _U32) | word if short else x


@njit(forceinline=True)
def _pull_number(words, at, end, x, table, symbol_TL, freq_TS, start_TS):
    slot = x & ((_U1 << _TABLE_BITS) - _U1)
    symbol = np.uint64(symbol_TL[table, slot])
    x = np.uint64(freq_TS[table, symbol]) * (x >> _TABLE_BITS) + slot - np.uint64(start_TS[table, symbol])
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


@njit(forceinline=True)
def _push_change(
    out, at, x, b, k, base_B, size_BC, bound_B, at_K, class_K, step_K, top, freq_TS, start_TS, inverse_TS, ratio_CC
):
    """Write change `k`. Indices are unsigned, so that numba omits checks for negative ones."""
    table, gap = gap_before(np.uint64(k), bound_B[b], base_B[b], size_BC, b, at_K, class_K, ratio_CC)
    of = np.uint64(2 * class_K[np.uint64(k)] + 1)
    at, x = _push_number(out, at, x, zigzag(step_K[np.uint64(k)], top), of, freq_TS, start_TS, inverse_TS)
    return _push_number(out, at, x, np.uint64(gap), np.uint64(2 * table), freq_TS, start_TS, inverse_TS)


@kernel
def _encode(blocks, at_K, class_K, step_K, top, freq_TS, start_TS, inverse_TS, ratio_CC, room_B, out, first_B):
    """Encode two blocks at a time, because each symbol of a block waits for the symbol before."""
    base_B, size_BC, bound_B = blocks
    for pair in prange(bound_B.size // 2):
        a, b = 2 * pair, min(2 * pair + 1, bound_B.size - 2)
        low_a, low_b = bound_B[a], bound_B[b]
        k_a, k_b = bound_B[a + 1] - 1, bound_B[b + 1] - 1
        if a == b:
            k_b = low_b - 1
        any_a, any_b = k_a >= low_a, k_b >= low_b
        at_a, at_b = np.uint64(room_B[a + 1]), np.uint64(room_B[b + 1])
        x_a, x_b = _U1, _U1
        while k_a >= low_a or k_b >= low_b:
            if k_a >= low_a:
                at_a, x_a = _push_change(
                    out, at_a, x_a, a, k_a, base_B, size_BC, bound_B, at_K, class_K, step_K, top,
                    freq_TS, start_TS, inverse_TS, ratio_CC,
                )  # fmt: skip
                k_a -= 1
            if k_b >= low_b:
                at_b, x_b = _push_change(
                    out, at_b, x_b, b, k_b, base_B, size_BC, bound_B, at_K, class_K, step_K, top,
                    freq_TS, start_TS, inverse_TS, ratio_CC,
                )  # fmt: skip
                k_b -= 1
        first_B[a] = _push_state(out, at_a, x_a, any_a)
        if a != b:
            first_B[b] = _push_state(out, at_b, x_b, any_b)


@njit(forceinline=True)
def _open(words, word_B2, bound_B, b):
    """Return the position of a block's next word, its state and its first change, beyond its last if it is malformed."""
    at, end, k, end_k = word_B2[b, 0], word_B2[b, 1], bound_B[b], bound_B[b + 1]
    if k == end_k:
        return at, _U1, k
    if at == end:
        return at, _U1, end_k + 1
    x = np.uint64(words[at])
    if end - at == 1:
        return end, x, k
    x |= np.uint64(words[at + 1]) << _U32
    return at + 2, x, k if x >= _STATE_MIN else end_k + 1


@njit(error_model="numpy")
def _cross(c, gap, size_BC, b, ratio_CC):
    """Return the class and the place in it that a gap leads to beyond the end of class `c`; -1 if there is none."""
    rest = np.int64(gap)
    for to in range(c + 1, size_BC.shape[1]):
        ratio = ratio_CC[c, to]
        span = (size_BC[b, to] * ratio) >> _RATIO_BITS
        if rest < span:
            wanted = (rest + 1) << _RATIO_BITS
            place = (wanted + ratio - 1) // ratio
            return to, place - 1 if (place * ratio) >> _RATIO_BITS == rest + 1 else np.int64(-1)
        rest -= span
    return c, np.int64(-1)


@njit(forceinline=True)
def _pull_change(
    words, at, end, x, k, end_k, c, place, base, b, size_BC, freq_TS, start_TS, symbol_TL, ratio_CC, limit,
    at_K, class_K, step_K,
):  # fmt: skip
    """Read change `k`, the next one after `place` of class `c`. The `k` returned is beyond the last if it is malformed."""
    table = np.uint64(2 * c)
    at, x, gap = _pull_number(words, at, end, x, table, symbol_TL, freq_TS, start_TS)
    left = size_BC[np.uint64(b), np.uint64(c)] - place - 1
    if gap < np.uint64(left):
        place += 1 + np.int64(gap)
    else:
        if gap >> _U56:
            return at, x, end_k + 1, c, place
        c, place = _cross(c, gap - np.uint64(left), size_BC, b, ratio_CC)
        if place < 0:
            return at, x, end_k + 1, c, place
    table = np.uint64(2 * c + 1)
    at, x, step = _pull_number(words, at, end, x, table, symbol_TL, freq_TS, start_TS)
    if step > limit:
        return at, x, end_k + 1, c, place
    at_K[np.uint64(k)] = base + place
    class_K[np.uint64(k)] = c
    step_K[np.uint64(k)] = _unzigzag(step)
    return at, x, k + 1, c, place


@njit
def decode_pair(words, word_B2, blocks, a, b, tables, limit, at_K, class_K, step_K, good_B):
    """Decode two blocks at a time, as `_encode`; one if `a` is `b`."""
    # Tuples are taken apart here: the elements of one are counted as used each time that happens, which takes long.
    base_B, size_BC, bound_B = blocks
    freq_TS, start_TS, symbol_TL, ratio_CC = tables
    at_a, x_a, k_a = _open(words, word_B2, bound_B, a)
    at_b, x_b, k_b = _open(words, word_B2, bound_B, b)
    high_a, high_b, end_a, end_b = bound_B[a + 1], bound_B[b + 1], word_B2[a, 1], word_B2[b, 1]
    c_a, c_b, place_a, place_b = first_class(size_BC, a), first_class(size_BC, b), np.int64(-1), np.int64(-1)
    base_a, base_b = base_B[a], base_B[b]
    if a == b:
        k_b = high_b
    while k_a < high_a or k_b < high_b:
        if k_a < high_a:
            at_a, x_a, k_a, c_a, place_a = _pull_change(
                words, at_a, end_a, x_a, k_a, high_a, c_a, place_a, base_a, a, size_BC,
                freq_TS, start_TS, symbol_TL, ratio_CC, limit, at_K, class_K, step_K,
            )  # fmt: skip
        if k_b < high_b:
            at_b, x_b, k_b, c_b, place_b = _pull_change(
                words, at_b, end_b, x_b, k_b, high_b, c_b, place_b, base_b, b, size_BC,
                freq_TS, start_TS, symbol_TL, ratio_CC, limit, at_K, class_K, step_K,
            )  # fmt: skip
    if a != b:
        good_B[b] = k_b == high_b and at_b == end_b and x_b == _U1
    good_B[a] = k_a == high_a and at_a == end_a and x_a == _U1


@kernel
def _decode(words, word_B2, blocks, freq_TS, start_TS, symbol_TL, ratio_CC, limit, at_K, class_K, step_K, good_B):
    tables = freq_TS, start_TS, symbol_TL, ratio_CC
    for pair in prange((word_B2.shape[0] + 1) // 2):
        a, b = 2 * pair, min(2 * pair + 1, word_B2.shape[0] - 1)
        decode_pair(words, word_B2, blocks, a, b, tables, limit, at_K, class_K, step_K, good_B)


def encode(
    blocks: Blocks, at_K: np.ndarray, class_K: np.ndarray, step_K: np.ndarray, tables: Tables
) -> tuple[np.ndarray, np.ndarray]:
    """Encode the changes of blocks.

    Args:
        blocks: The blocks.
        at_K: Number of each changed element, among those of its class in the block, plus `base_B`; in each block by class.
        class_K: Class of each changed element, uint8.
        step_K: Steps of the changes, unsigned.
        tables: The tables.

    Returns:
        The words of all blocks, uint32[W], and how many each block has; a block without changes has none.
    """
    # Words fill a block's room from its end. `room_B` is 0, then where each room ends. Even the rarest symbols fit.
    words_per_change = -(-(2 * rans.TABLE_BITS + 52 + 8 * step_K.itemsize) // 32)
    room_B = np.zeros(blocks.bound_B.size, np.int64)
    np.cumsum(words_per_change * np.diff(blocks.bound_B) + 5, out=room_B[1:])
    out = np.empty(room_B[-1], np.uint32)
    first_B = np.empty(blocks.base_B.size, np.int64)
    with threads(tasks(blocks, at_K)):
        coded = *tables[:3], tables.ratio_CC, room_B, out, first_B
        _encode(tuple(blocks), at_K, class_K, step_K, top_of(step_K), *coded)
    words = np.concatenate([out[:0], *(out[first:end] for first, end in zip(first_B, room_B[1:], strict=True))])
    return words, room_B[1:] - first_B


def decode(
    blocks: Blocks, words: np.ndarray, word_B2: np.ndarray, tables: Tables, at_K: np.ndarray, step_K: np.ndarray
) -> bool:
    """Decode the changes of blocks of one class.

    Args:
        blocks: The blocks.
        words: The words of all blocks, uint32[W].
        word_B2: The words of block b are `words[word_B2[b, 0] : word_B2[b, 1]]`; int64[B, 2].
        tables: As in `encode`.
        at_K: Gets the numbers of the changed elements; mutated.
        step_K: Gets their steps, unsigned; mutated.

    Returns:
        False if a block is malformed; the arrays are then not to be used.
    """
    good_B = np.zeros(blocks.base_B.size, np.bool_)
    class_K = np.empty(at_K.size, np.uint8)
    with threads(tasks(blocks, at_K)):
        table = *tables[:2], tables.symbol_TL, tables.ratio_CC
        _decode(words, word_B2, tuple(blocks), *table, limit_of(step_K), at_K, class_K, step_K, good_B)
    return bool(good_B.all())


def limit_of(step_K: np.ndarray) -> np.uint64:
    """Return the largest number that stands for a step of this width."""
    return np.uint64(2) * (top_of(step_K) - _U1)
