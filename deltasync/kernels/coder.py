"""The coder of `coder_reference` in numba: blocks in parallel, without the GIL, every read and write inside its bounds.

Shapes: K changed elements of a tensor, B blocks of it, N its elements, W words.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from llvmlite import ir
from numba import njit, prange, types
from numba.extending import intrinsic

from deltasync.kernels import coder_reference as reference
from deltasync.kernels.cpu import threads

_STATE_MIN = np.uint64(reference.STATE_MIN)
_TABLE_BITS = np.uint64(reference.TABLE_BITS)
_TIME_BITS = np.uint64(reference.TIME_BITS)
_TIME_SLOTS = np.uint64(1 << reference.TIME_BITS)
_SEGMENT_BITS = reference.SEGMENT_BITS
_TIME_END = reference.TIME_END
_TIME_END_BITS = _TIME_END.bit_length() - 1
_TIME_START = reference.TIME_START
_LAST_SLOT = int(_TIME_START[-1])
# Segment of the first slot of each 256th of the distribution: where the search for a slot's segment begins.
_LOOKUP_BITS = reference.TIME_BITS - 8
_SEGMENT_AT = (np.searchsorted(_TIME_START, np.arange(256) << _LOOKUP_BITS, side="right") - 1).astype(np.int64)
_U0, _U1, _U3, _U4, _U16, _U24, _U32, _U63, _U64 = (np.uint64(n) for n in (0, 1, 3, 4, 16, 24, 32, 63, 64))
_U2 = np.uint64(2)
_WORD = np.uint64(0xFFFFFFFF)

# Changed elements are counted in at most so many parts, of at least so many elements.
_PARTS, _PART = 4, 1 << 13
_PACKED = 1 << 17  # words


@intrinsic
def _leading_zeros(_context, _value):
    def generate(_context, builder, _signature, arguments):
        return builder.ctlz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.uint64(types.uint64), generate


@intrinsic
def _high_product(_context, _left, _right):
    """The upper 64 bits of a product."""

    def generate(_context, builder, _signature, arguments):
        wide = ir.IntType(128)
        left, right = (builder.zext(argument, wide) for argument in arguments)
        return builder.trunc(builder.lshr(builder.mul(left, right), ir.Constant(wide, 64)), ir.IntType(64))

    return types.uint64(types.uint64, types.uint64), generate


# LLVM inlines these, not numba: `_encode_packed` holds dozens of them, and would take six times as long to compile.
@njit(forceinline=True)
def _bucket(value):
    if value < _U16:
        return value, _U0
    exponent = _U63 - _leading_zeros(value)
    extra = exponent - _U2
    return _U4 * exponent + ((value >> extra) & _U3), extra


@njit(forceinline=True)
def _zigzag(step, top):
    """`top` is 2**(width - 1) as uint64."""
    value = np.uint64(step)
    if value & top:
        return ((top - value) << _U1) + (top << _U1) - _U2
    return (value << _U1) - _U1


@njit(forceinline=True)
def _flush(out, at, x, full):
    """Move the lower word of the state out if it is full; without a branch, which would be mispredicted often."""
    out[at - 1] = np.uint32(x & _WORD)
    return at - np.int64(full), x >> (np.uint64(full) * _U32)


@njit(forceinline=True)
def _push(out, at, x, start, freq, bits):
    at, x = _flush(out, at, x, (x >> (_U64 - bits)) >= freq)
    quotient = x // freq
    return at, (quotient << bits) + (x - quotient * freq) + start


@njit(forceinline=True)
def _push_symbol(out, at, x, symbol, freq_S, start_S, inverse_S):
    """As `_push` by a table, whose inverses of the frequencies make the quotient, or one less."""
    freq = np.uint64(freq_S[symbol])
    at, x = _flush(out, at, x, (x >> (_U64 - _TABLE_BITS)) >= freq)
    quotient = _high_product(x, inverse_S[symbol])
    rest = x - quotient * freq
    more = np.uint64(rest >= freq)
    return at, ((quotient + more) << _TABLE_BITS) + (rest - more * freq) + np.uint64(start_S[symbol])


@njit(forceinline=True)
def _push_bits(out, at, x, value, bits):
    at, x = _flush(out, at, x, ((x >> _U1) >> (_U63 - bits)) != _U0)
    return at, (x << bits) | (value & ((_U1 << bits) - _U1))


@njit(forceinline=True)
def _push_number(out, at, x, value, freq_S, start_S, inverse_S):
    symbol, extra = _bucket(value)
    # Groups of 24 bits from the top, in decoding order: the last one is the shortest.
    done = _U0
    if extra > _U24:
        while done < extra:
            bits = (extra - done) % _U24 if done == _U0 else _U24
            if bits == _U0:
                bits = _U24
            at, x = _push_bits(out, at, x, value >> done, bits)
            done += bits
    else:
        at, x = _push_bits(out, at, x, value, extra)
    return _push_symbol(out, at, x, symbol, freq_S, start_S, inverse_S)


@njit(forceinline=True)
def _push_state(out, at, x):
    out[at - 1] = np.uint32(x >> _U32)
    out[at - 2] = np.uint32(x & _WORD)
    return at - 2


@njit(forceinline=True)
def _pull(words, at, end, x):
    """Renormalise; beyond the end of the stream `at` goes on without reading, so that it ends up wrong."""
    if x < _STATE_MIN:
        if at < end:
            x = (x << _U32) | np.uint64(words[at])
        at += 1
    return at, x


@njit(forceinline=True)
def _pull_number(words, at, end, x, symbol_L, freq_S, start_S):
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


@njit(forceinline=True)
def _unzigzag(value):
    magnitude = (value >> _U1) + _U1
    return magnitude if value & _U1 else _U0 - magnitude


@njit(forceinline=True)
def _time_slot(time):
    segment = time >> _SEGMENT_BITS
    if time >= _TIME_END:
        return _LAST_SLOT
    start = _TIME_START[segment]
    inside = time - (segment << _SEGMENT_BITS)
    return start + ((inside * (_TIME_START[segment + 1] - start)) >> _SEGMENT_BITS)


@njit(forceinline=True)
def _time_after(slot):
    """The least time that has more than `slot` slots below it; `slot` is below _LAST_SLOT."""
    segment = _SEGMENT_AT[slot >> _LOOKUP_BITS]
    while _TIME_START[segment + 1] <= slot:
        segment += 1
    start = _TIME_START[segment]
    weight = np.uint64(_TIME_START[segment + 1] - start)
    inside = (np.uint64(slot - start + 1) << np.uint64(_SEGMENT_BITS)) + weight - _U1
    return (segment << _SEGMENT_BITS) + np.int64(inside // weight)


@njit(parallel=True, nogil=True, cache=True)
def _count_packed(base_B, bound_B, index_K, step_K, top, count_BS):
    for b in prange(base_B.size):
        before = base_B[b] - 1
        for k in range(bound_B[b], bound_B[b + 1]):
            gap, _ = _bucket(np.uint64(index_K[k] - before - 1))
            step, _ = _bucket(_zigzag(step_K[k], top))
            count_BS[b, 0, gap] += 1
            count_BS[b, 1, step] += 1
            before = np.int64(index_K[k])


@njit(forceinline=True)
def _push_change(out, at, x, gap, step, freq_TS, start_TS, inverse_TS):
    at, x = _push_number(out, at, x, step, freq_TS[1], start_TS[1], inverse_TS[1])
    return _push_number(out, at, x, np.uint64(gap), freq_TS[0], start_TS[0], inverse_TS[0])


@njit(parallel=True, nogil=True, cache=True)
def _encode_packed(base_B, bound_B, index_K, step_K, top, freq_TS, start_TS, inverse_TS, room_B, out, first_B):
    """Two blocks at a time, because each symbol of one waits for the symbol before."""
    for pair in prange((base_B.size + 1) // 2):
        a, b = 2 * pair, min(2 * pair + 1, base_B.size - 1)
        low_a, high_a, low_b, high_b = bound_B[a], bound_B[a + 1], bound_B[b], bound_B[b + 1]
        if a == b:
            low_b = high_b
        at_a, at_b = room_B[a + 1], room_B[b + 1]
        x_a, x_b = _STATE_MIN, _STATE_MIN
        k_a, k_b = high_a - 1, high_b - 1
        while k_a > low_a and k_b > low_b:
            gap_a, gap_b = index_K[k_a] - index_K[k_a - 1] - 1, index_K[k_b] - index_K[k_b - 1] - 1
            step_a, step_b = _zigzag(step_K[k_a], top), _zigzag(step_K[k_b], top)
            at_a, x_a = _push_change(out, at_a, x_a, gap_a, step_a, freq_TS, start_TS, inverse_TS)
            at_b, x_b = _push_change(out, at_b, x_b, gap_b, step_b, freq_TS, start_TS, inverse_TS)
            k_a -= 1
            k_b -= 1
        while k_a >= low_a:
            gap_a = index_K[k_a] - (np.int64(index_K[k_a - 1]) if k_a > low_a else base_B[a] - 1) - 1
            step_a = _zigzag(step_K[k_a], top)
            at_a, x_a = _push_change(out, at_a, x_a, gap_a, step_a, freq_TS, start_TS, inverse_TS)
            k_a -= 1
        while k_b >= low_b:
            gap_b = index_K[k_b] - (np.int64(index_K[k_b - 1]) if k_b > low_b else base_B[b] - 1) - 1
            step_b = _zigzag(step_K[k_b], top)
            at_b, x_b = _push_change(out, at_b, x_b, gap_b, step_b, freq_TS, start_TS, inverse_TS)
            k_b -= 1
        first_B[a] = _push_state(out, at_a, x_a) if high_a > low_a else at_a
        if a != b:
            first_B[b] = _push_state(out, at_b, x_b) if high_b > low_b else at_b


@njit(parallel=True, nogil=True, cache=True)
def _decode_packed(words, word_B, base_B, end_B, bound_B, symbol_L, freq_S, start_S, top, index_K, step_K, good_B):
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
def _count_classes(base_B, end_B, bits_N, shift, mask, run, period, count_BC):
    for b in prange(base_B.size):
        for start in range(base_B[b], end_B[b], period):
            for i in range(start, min(start + run, end_B[b])):
                count_BC[b, (bits_N[i] >> shift) & mask] += 1


@njit(parallel=True, nogil=True, cache=True)
def _count_context(part_P, bits_N, index_K, step_K, shift, mask, top, class_K, step_PCS):
    for p in prange(part_P.size - 1):
        # Nothing but loads first: many of them miss the cache, and so they wait together.
        for k in range(part_P[p], part_P[p + 1]):
            old = bits_N[index_K[k]]
            old -= step_K[k]
            class_K[k] = (old >> shift) & mask
        for k in range(part_P[p], part_P[p + 1]):
            step, _ = _bucket(_zigzag(step_K[k], top))
            step_PCS[p, class_K[k], step] += 1


@njit(parallel=True, nogil=True, cache=True)
def _times(base_B, bound_B, bits_N, index_K, shift, mask, hazard_BC, time_K, wait_B):
    """Time between the changes; `bits_N` may be old or new, it is read only where nothing changed."""
    for b in prange(base_B.size):
        hazard_C = hazard_BC[b]
        # Unsigned, so that numba need not look for negative ones; four sums, so that none waits for another.
        i = np.uint64(base_B[b])
        waits = np.int64(0)
        for k in range(bound_B[b], bound_B[b + 1]):
            index = np.uint64(index_K[k])
            t0, t1, t2, t3 = np.int64(0), np.int64(0), np.int64(0), np.int64(0)
            while i + _U4 <= index:
                t0 += hazard_C[(bits_N[i] >> shift) & mask]
                t1 += hazard_C[(bits_N[i + _U1] >> shift) & mask]
                t2 += hazard_C[(bits_N[i + _U2] >> shift) & mask]
                t3 += hazard_C[(bits_N[i + _U3] >> shift) & mask]
                i += _U4
            while i < index:
                t0 += hazard_C[(bits_N[i] >> shift) & mask]
                i += _U1
            time = t0 + t1 + t2 + t3
            time_K[k] = time
            waits += time >> _TIME_END_BITS
            i = index + _U1
        wait_B[b] = waits


@njit(parallel=True, nogil=True, cache=True)
def _encode_context(
    bound_B, step_K, class_K, top, hazard_BC, table_C, freq_TS, start_TS, inverse_TS, time_K, room_B, out, first_B
):
    for b in prange(first_B.size):
        low, high = bound_B[b], bound_B[b + 1]
        at = room_B[b + 1]
        x = _STATE_MIN
        hazard_C = hazard_BC[b]
        for k in range(high - 1, low - 1, -1):
            c = class_K[k]
            table = table_C[c]
            step = _zigzag(step_K[k], top)
            at, x = _push_number(out, at, x, step, freq_TS[table], start_TS[table], inverse_TS[table])
            waits = time_K[k] >> _TIME_END_BITS
            time = time_K[k] - (waits << _TIME_END_BITS)
            start = _time_slot(time)
            freq = _time_slot(time + hazard_C[c]) - start
            at, x = _push(out, at, x, np.uint64(start), np.uint64(freq), _TIME_BITS)
            for _ in range(waits):
                at, x = _push(out, at, x, np.uint64(_LAST_SLOT), _TIME_SLOTS - np.uint64(_LAST_SLOT), _TIME_BITS)
        first_B[b] = _push_state(out, at, x) if high > low else at


@njit(parallel=True, nogil=True, cache=True)
def _decode_context(
    words,
    word_B,
    base_B,
    end_B,
    bound_B,
    old_N,
    shift,
    mask,
    hazard_BC,
    table_C,
    symbol_L,
    freq_S,
    start_S,
    top,
    index_K,
    step_K,
    good_B,
):
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
            hazard = np.int64(0)
            i = np.uint64(index)
            while i < np.uint64(last):
                hazard = hazard_C[(old_N[i] >> shift) & mask]
                if begin + hazard >= wanted:
                    break
                begin += hazard
                i += _U1
            index = np.int64(i)
            if index == last or begin < 0:
                good = False
                break
            start = _time_slot(begin)
            freq = _time_slot(begin + hazard) - start
            x = np.uint64(freq) * (x >> _TIME_BITS) + slot - np.uint64(start)
            at, x = _pull(words, at, end, x)
            table = table_C[(old_N[i] >> shift) & mask]
            at, x, step = _pull_number(words, at, end, x, symbol_L[table], freq_S[table], start_S[table])
            if step > limit:
                good = False
                break
            index_K[k] = index
            step_K[k] = _unzigzag(step)
            index += 1
        good_B[b] = good and at == end and x == _STATE_MIN


@njit(parallel=True, nogil=True, cache=True)
def _pack(out, first_B, room_B, word_B, words):
    for b in prange(first_B.size):
        words[word_B[b] : word_B[b + 1]] = out[first_B[b] : room_B[b + 1]]


@dataclasses.dataclass(frozen=True, slots=True)
class Blocks:
    """A tensor cut into blocks.

    Attributes:
        base_B, end_B: First element of each block, and the one behind its last.
        bound_B: First change of each block in the tensor's, and how many there are; shape B + 1.
    """

    base_B: np.ndarray
    end_B: np.ndarray
    bound_B: np.ndarray

    @classmethod
    def of(cls, element_count: int, block_elements: int, bound_B: np.ndarray, first: int = 0) -> Blocks:
        """The blocks of a tensor, from a first one on, whose changes are counted by `bound_B`."""
        base_B = np.arange(first, first + bound_B.size - 1, dtype=np.int64) * block_elements
        return cls(base_B, np.minimum(base_B + block_elements, element_count), bound_B)

    @classmethod
    def around(
        cls, element_count: int, block_elements: int, index_K: np.ndarray, first: int = 0, last: int | None = None
    ) -> Blocks:
        """The blocks of a tensor that changes at these indices, or of them those from `first` to the one before `last`."""
        last = -(-element_count // block_elements) if last is None else last
        edges = np.arange(first, last + 1, dtype=np.int64) * block_elements
        edges[-1] = min(edges[-1], element_count)
        return cls(edges[:-1], edges[1:], np.searchsorted(index_K, edges).astype(np.int64))


@dataclasses.dataclass(frozen=True, slots=True)
class Tables:
    """Static tables of numbers: slots of each symbol, slots below it, the symbol of each slot.

    Attributes:
        freq_TS: uint32[T, 256], each row sums to 2**12.
        inverse_TS: uint64, 2**64 / freq rounded down, which is 2**64 - 1 for a symbol of one slot or none.
    """

    freq_TS: np.ndarray
    start_TS: np.ndarray
    inverse_TS: np.ndarray
    symbol_TL: np.ndarray

    @classmethod
    def of(cls, freq_TS: np.ndarray) -> Tables:
        """Tables of these frequencies."""
        symbols = np.arange(freq_TS.shape[1], dtype=np.uint8)
        start_TS = np.cumsum(freq_TS, axis=1, dtype=np.uint32) - freq_TS
        inverse_TS = np.uint64(2**64 - 1) // np.maximum(freq_TS, 1).astype(np.uint64)
        # Rounded down from 2**64, not from 2**64 - 1: they differ where freq is a power of two.
        inverse_TS += (freq_TS > 1) & (freq_TS & (freq_TS - np.uint32(1)) == 0)
        return cls(freq_TS, start_TS, inverse_TS, np.stack([np.repeat(symbols, freq_S) for freq_S in freq_TS]))


@dataclasses.dataclass(frozen=True, slots=True)
class Classes:
    """Class of a bit pattern: (bits >> shift) & mask."""

    shift: int
    mask: int

    @property
    def count(self) -> int:
        """How many there are."""
        return self.mask + 1

    def arguments(self, dtype: np.dtype) -> tuple[np.generic, np.generic]:
        """Shift and mask in the dtype of the bit patterns."""
        return dtype.type(self.shift), dtype.type(self.mask)


def _top(step_K: np.ndarray) -> np.uint64:
    return np.uint64(1 << (8 * step_K.itemsize - 1))


def _tasks(blocks: Blocks, index_K: np.ndarray) -> int:
    """How many threads are worth starting for work on the changes."""
    return min(blocks.base_B.size, index_K.size // _PART)


def _room(blocks: Blocks, item_bytes: int, extra_B: np.ndarray | int = 0) -> np.ndarray:
    """Where the room for each block's words ends, first that of the first begins; enough for the rarest symbols."""
    words_per_change = -(-(2 * reference.TABLE_BITS + 30 + 8 * item_bytes) // 32)
    room_B = np.zeros(blocks.bound_B.size, np.int64)
    np.cumsum(words_per_change * np.diff(blocks.bound_B) + extra_B + 4, out=room_B[1:])
    return room_B


def _packed_words(out: np.ndarray, first_B: np.ndarray, room_B: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    count_B = room_B[1:] - first_B
    word_B = np.zeros(count_B.size + 1, np.int64)
    np.cumsum(count_B, out=word_B[1:])
    words = np.empty(word_B[-1], np.uint32)
    with threads(words.size // _PACKED):
        _pack(out, first_B, room_B, word_B, words)
    return words, count_B


def count_packed(blocks: Blocks, index_K: np.ndarray, step_K: np.ndarray) -> np.ndarray:
    """How often each bucket occurs among gaps (row 0) and steps (row 1), int64[2, 256]."""
    count_BS = np.zeros((blocks.base_B.size, 2, 256), np.int64)
    with threads(_tasks(blocks, index_K)):
        _count_packed(blocks.base_B, blocks.bound_B, index_K, step_K, _top(step_K), count_BS)
    return count_BS.sum(axis=0)


def encode_packed(blocks: Blocks, index_K: np.ndarray, step_K: np.ndarray, tables: Tables) -> tuple[np.ndarray, np.ndarray]:
    """Words of all blocks and how many each has; as `coder_reference.encode_packed`, none for a block without changes."""
    room_B = _room(blocks, step_K.itemsize)
    out = np.empty(room_B[-1], np.uint32)
    first_B = np.empty(blocks.base_B.size, np.int64)
    with threads(_tasks(blocks, index_K)):
        _encode_packed(
            blocks.base_B,
            blocks.bound_B,
            index_K,
            step_K,
            _top(step_K),
            tables.freq_TS,
            tables.start_TS,
            tables.inverse_TS,
            room_B,
            out,
            first_B,
        )
    return _packed_words(out, first_B, room_B)


def decode_packed(
    blocks: Blocks, words: np.ndarray, word_B: np.ndarray, tables: Tables, index_K: np.ndarray, step_K: np.ndarray
) -> bool:
    """Fill `index_K` and `step_K`; False if a block is malformed.

    Args:
        blocks: Of the tensor.
        words: uint32, of the whole payload.
        word_B: Where the words of each block begin, and end, shape B + 1; inside `words`.
        tables: Of gaps and steps.
        index_K: Output.
        step_K: Output.
    """
    good_B = np.zeros(blocks.base_B.size, np.bool_)
    with threads(_tasks(blocks, index_K)):
        _decode_packed(
            words,
            word_B,
            blocks.base_B,
            blocks.end_B,
            blocks.bound_B,
            tables.symbol_TL,
            tables.freq_TS,
            tables.start_TS,
            _top(step_K),
            index_K,
            step_K,
            good_B,
        )
    return bool(good_B.all())


def count_classes(blocks: Blocks, bits_N: np.ndarray, classes: Classes, run: int, period: int) -> np.ndarray:
    """Elements of each class in the first `run` of every `period` elements, int64[B, C]."""
    count_BC = np.zeros((blocks.base_B.size, classes.count), np.int64)
    shift, mask = classes.arguments(bits_N.dtype)
    with threads(blocks.base_B.size):
        _count_classes(blocks.base_B, blocks.end_B, bits_N, shift, mask, run, period, count_BC)
    return count_BC


def count_context(
    new_N: np.ndarray, index_K: np.ndarray, step_K: np.ndarray, classes: Classes
) -> tuple[np.ndarray, np.ndarray]:
    """Class of each changed element's old value, uint8[K], and steps by class and bucket, int64[C, 256]."""
    part_count = max(1, min(_PARTS, index_K.size // _PART))
    part_P = np.linspace(0, index_K.size, part_count + 1).astype(np.int64)
    class_K = np.empty(index_K.size, np.uint8)
    step_PCS = np.zeros((part_count, classes.count, 256), np.uint32)
    shift, mask = classes.arguments(new_N.dtype)
    with threads(part_count):
        _count_context(part_P, new_N, index_K, step_K, shift, mask, _top(step_K), class_K, step_PCS)
    return class_K, step_PCS.sum(axis=0, dtype=np.int64)


def encode_context(
    blocks: Blocks,
    new_N: np.ndarray,
    index_K: np.ndarray,
    step_K: np.ndarray,
    class_K: np.ndarray,
    classes: Classes,
    hazard_BC: np.ndarray,
    table_C: np.ndarray,
    tables: Tables,
) -> tuple[np.ndarray, np.ndarray]:
    """As `encode_packed`, given the hazard of each class in each block and the step table of each class."""
    shift, mask = classes.arguments(new_N.dtype)
    time_K = np.empty(index_K.size, np.int64)
    wait_B = np.empty(blocks.base_B.size, np.int64)
    with threads(blocks.base_B.size):
        _times(blocks.base_B, blocks.bound_B, new_N, index_K, shift, mask, hazard_BC, time_K, wait_B)
    room_B = _room(blocks, step_K.itemsize, wait_B // 7 + 1)
    out = np.empty(room_B[-1], np.uint32)
    first_B = np.empty(blocks.base_B.size, np.int64)
    with threads(_tasks(blocks, index_K)):
        _encode_context(
            blocks.bound_B,
            step_K,
            class_K,
            _top(step_K),
            hazard_BC,
            table_C,
            tables.freq_TS,
            tables.start_TS,
            tables.inverse_TS,
            time_K,
            room_B,
            out,
            first_B,
        )
    return _packed_words(out, first_B, room_B)


def decode_context(
    blocks: Blocks,
    words: np.ndarray,
    word_B: np.ndarray,
    old_N: np.ndarray,
    classes: Classes,
    hazard_BC: np.ndarray,
    table_C: np.ndarray,
    tables: Tables,
    index_K: np.ndarray,
    step_K: np.ndarray,
) -> bool:
    """As `decode_packed`, given the old bits of the tensor."""
    shift, mask = classes.arguments(old_N.dtype)
    good_B = np.zeros(blocks.base_B.size, np.bool_)
    with threads(blocks.base_B.size):
        _decode_context(
            words,
            word_B,
            blocks.base_B,
            blocks.end_B,
            blocks.bound_B,
            old_N,
            shift,
            mask,
            hazard_BC,
            table_C,
            tables.symbol_TL,
            tables.freq_TS,
            tables.start_TS,
            _top(step_K),
            index_K,
            step_K,
            good_B,
        )
    return bool(good_B.all())
