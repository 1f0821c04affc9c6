"""The entropy coder (`rans`) in numba: blocks in parallel, without the GIL, every read and write within bounds."""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, prange, types
from numba.extending import intrinsic

from deltasync.kernels import rans
from deltasync.kernels.compiled import kernel
from deltasync.kernels.counts import bucket, tasks, top_of, zigzag
from deltasync.kernels.cpu import prefetch_range, threads
from deltasync.kernels.intrinsics import WINDOW, lanes_time
from deltasync.kernels.rans import Blocks, Context, Tables

_STATE_MIN = np.uint64(rans.STATE_MIN)
_TABLE_BITS = np.uint64(rans.TABLE_BITS)
_TABLE_SLOTS = np.uint64(1 << rans.TABLE_BITS)
_TIME_BITS = np.uint64(rans.TIME_BITS)
_TIME_SLOTS = np.uint64(1 << rans.TIME_BITS)
_SEGMENT_BITS = rans.SEGMENT_BITS
_TIME_END = rans.TIME_END
_TIME_END_BITS = _TIME_END.bit_length() - 1
_TIME_START = rans.TIME_START
_LAST_SLOT = int(_TIME_START[-1])
# The segment of the first slot of each 256th of the distribution: the search for a slot's segment begins there.
_LOOKUP_BITS = rans.TIME_BITS - 8
_SEGMENT_AT = (np.searchsorted(_TIME_START, np.arange(256) << _LOOKUP_BITS, side="right") - 1).astype(np.int64)
_U0, _U1, _U2, _U3, _U4, _U16, _U24, _U32, _U64 = map(np.uint64, (0, 1, 2, 3, 4, 16, 24, 32, 64))
_AHEAD = 8  # prefetch distance, in runs of a tile; hardware does not predict where they lie
_WORD = np.uint64(0xFFFFFFFF)
_HAZARD = rans.HAZARD
_LEVEL_BITS = 10  # least bits that a block's own level must save; it takes some bits itself
_FEW, _MANY = 16, 64  # elements whose hazards are looked up at once, by decoding and by encoding
_FEW_LANES, _MANY_LANES = np.uint64(_FEW), np.uint64(_MANY)


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
    out[at - _U1] = np.uint32(x >> _U32)
    out[at - _U2] = np.uint32(x & _WORD)
    return at - _U2


@njit(forceinline=True)
def _pull(words, at, x):
    """Renormalise without a branch, which would often be mispredicted. `at` may move beyond the end of all words."""
    short = x < _STATE_MIN
    word = np.uint64(words[np.uint64(min(at, words.size - 1))])
    return at + np.int64(short), (x << _U32) | word if short else x


@njit(forceinline=True)
def _pull_number(words, at, x, symbol_L, freq_S, start_S):
    slot = x & ((_U1 << _TABLE_BITS) - _U1)
    symbol = np.uint64(symbol_L[slot])
    x = np.uint64(freq_S[symbol]) * (x >> _TABLE_BITS) + slot - np.uint64(start_S[symbol])
    at, x = _pull(words, at, x)
    if symbol < _U16:
        return at, x, symbol
    extra = (symbol >> _U2) - _U2
    value = _U4 + (symbol & _U3)
    while extra > _U0:
        bits = min(extra, _U24)
        value = (value << bits) | (x & ((_U1 << bits) - _U1))
        x >>= bits
        at, x = _pull(words, at, x)
        extra -= bits
    return at, x, value


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
    """Return the least time with more than `slot` slots below it; `slot` is below _LAST_SLOT."""
    segment = _SEGMENT_AT[slot >> _LOOKUP_BITS]
    while _TIME_START[segment + 1] <= slot:
        segment += 1
    start = _TIME_START[segment]
    weight = np.uint64(_TIME_START[segment + 1] - start)
    inside = (np.uint64(slot - start + 1) << np.uint64(_SEGMENT_BITS)) + weight - _U1
    return (segment << _SEGMENT_BITS) + np.int64(inside // weight)


@njit(forceinline=True)
def _push_moment(out, at, x, time, hazard):
    waits = time >> _TIME_END_BITS
    time -= waits << _TIME_END_BITS
    start = _time_slot(time)
    at, x = _push(out, at, x, np.uint64(start), np.uint64(_time_slot(time + hazard) - start), _TIME_BITS)
    for _ in range(waits):
        at, x = _push(out, at, x, np.uint64(_LAST_SLOT), _TIME_SLOTS - np.uint64(_LAST_SLOT), _TIME_BITS)
    return at, x


@njit(forceinline=True)
def _time(bits_N, i, count, shift, mask, hazard_C, first, hazard_W):
    """Sum the hazards of `count` elements from `i` on; `count` is at most `_MANY`."""
    time = lanes_time(bits_N, i, count, _MANY, shift, mask, first, hazard_W)
    if time < 0:
        time = np.int64(0)
        for at in range(i, i + np.uint64(count)):  # unsigned, so that numba omits checks for negative ones
            time += hazard_C[(bits_N[at] >> shift) & mask]
    return time


@njit(inline="always")
def _pull_moment(words, at, end, x, index, run, last, width, stride, old_N, shift, mask, hazard_C, first, hazard_W):
    """Decode which element from `index` on changes next, and the end of its run; `last` if the stream is malformed."""
    begin = np.int64(0)
    slot = x & (_TIME_SLOTS - _U1)
    while slot >= np.uint64(_LAST_SLOT) and at <= end:
        x = (_TIME_SLOTS - np.uint64(_LAST_SLOT)) * (x >> _TIME_BITS) + slot - np.uint64(_LAST_SLOT)
        at, x = _pull(words, at, x)
        begin -= _TIME_END
        slot = x & (_TIME_SLOTS - _U1)
    if at > end:
        return at, x, last, run
    wanted = _time_after(np.int64(slot))
    hazard, i = np.int64(0), np.uint64(index)
    while True:
        end_run = np.uint64(run)
        while i < end_run:
            end_lanes = min(i + _FEW_LANES, end_run)
            time = lanes_time(old_N, i, end_lanes - i, _FEW, shift, mask, first, hazard_W)
            if time < 0 or begin + time >= wanted:
                while i < end_lanes:
                    hazard = hazard_C[(old_N[i] >> shift) & mask]
                    if begin + hazard >= wanted:
                        break
                    begin += hazard
                    i += _U1
                if i < end_lanes:
                    break
            else:
                begin += time
                i = end_lanes
        if i < end_run or run >= last:
            break
        run += stride
        i = np.uint64(run - width)
        prefetch_range(old_N, run - width + _AHEAD * stride, run + _AHEAD * stride)
    if begin < 0:
        return at, x, last, run
    start = _time_slot(begin)
    x = np.uint64(_time_slot(begin + hazard) - start) * (x >> _TIME_BITS) + slot - np.uint64(start)
    at, x = _pull(words, at, x)
    return at, x, np.int64(i), run


@njit(forceinline=True)
def _begins(bits_N, base, end, width, stride, shift, mask, hazard_C, first, hazard_W, begin_G):
    """Find when each group of up to `_MANY` elements of a run begins, and return when the block ends; it begins at 0."""
    g, time = np.uint64(0), np.int64(0)
    for start in range(base, end, stride):
        if stride < end - base:
            prefetch_range(bits_N, start + _AHEAD * stride, start + _AHEAD * stride + width)
        i, run = np.uint64(start), np.uint64(min(start + width, end))
        while i < run:
            begin_G[g] = time
            time += _time(bits_N, i, min(run - i, _MANY_LANES), shift, mask, hazard_C, first, hazard_W)
            i, g = i + _MANY_LANES, g + _U1
    return time


@njit(forceinline=True)
def _level(count, expected):
    """Return what to add to the level of a block with `count` changes instead of `expected` ones; 0 if it saves little."""
    level = np.rint(8 * np.log2(count / expected))
    ratio = 2 ** (level / 8)
    saved_bits = (count * np.log(ratio) - (ratio - 1) * expected) / np.log(2)
    return np.int64(level) if saved_bits > _LEVEL_BITS else np.int64(0)


@kernel
def _times(
    base_B, end_B, bound_B, width, stride, new_N, index_K, step_K, shift, mask, level_C, level_B, first, rate,
    class_K, time_K, hazard_K, wait_B
):  # fmt: skip
    """Find class and hazard of each change's old value, the time since the change before, and how often a block waits.

    A block whose changes are more or less than its elements let expect, `rate` for each unit of time, gets another level.
    """
    for b in prange(base_B.size):
        low, high = bound_B[b], bound_B[b + 1]
        if low == high:
            continue
        base, end = base_B[b], end_B[b]
        groups = (min(width, end - base) + _MANY - 1) // _MANY  # of a run
        begin_G = np.empty(((end - base - 1) // stride + 1) * groups, np.int64)
        hazard_C, hazard_W = np.empty(level_C.size, np.int64), np.empty(WINDOW, np.int32)
        more = np.int64(0)
        for _ in range(2):
            level_B[b] = min(max(level_B[b] + more, -rans.LEVELS), rans.LEVELS)
            for c in range(level_C.size):
                hazard_C[c] = _HAZARD[min(max(level_C[c] + level_B[b], 0), rans.LEVELS)]
            for c in range(WINDOW):
                hazard_W[c] = hazard_C[first + c]
            time = _begins(new_N, base, end, width, stride, shift, mask, hazard_C, first, hazard_W, begin_G)
            more = _level(high - low, time * rate)
            if more == 0:
                break
        index_C, step_C, class_C = index_K[low:high], step_K[low:high], class_K[low:high]
        time_C, hazard_of_C = time_K[low:high], hazard_K[low:high]
        row_part, last = 1.0 / stride, np.int64(0)  # as in `counts._regroup`; when the change before was over
        for k in range(index_C.size):
            i, offset = np.uint64(index_C[k]), np.int64(index_C[k]) - base
            row = np.int64((offset + 0.5) * row_part)
            column = np.uint64(offset - row * stride)
            inside = column % _MANY_LANES
            time = begin_G[np.uint64(row * groups) + column // _MANY_LANES]
            time += _time(new_N, i - inside, inside, shift, mask, hazard_C, first, hazard_W)
            class_C[k] = ((new_N[i] - step_C[k]) >> shift) & mask
            hazard_of_C[k] = hazard_C[class_C[k]]
            time_C[k] = time - last
            wait_B[b] += time_C[k] >> _TIME_END_BITS
            last = time + hazard_C[(new_N[i] >> shift) & mask]


@njit(inline="always")
def _push_change(out, at, x, b, k, base_B, bound_B, index_K, step_K, top, freq_TS, start_TS, inverse_TS, times):
    """Write change `k`. `times` is None for gaps. Indices are unsigned, so that numba omits checks for negative ones."""
    k = np.uint64(k)
    step = zigzag(step_K[k], top)
    if times is None:
        before = np.int64(index_K[k - _U1]) if k > np.uint64(bound_B[b]) else base_B[b] - 1
        at, x = _push_number(out, at, x, step, _U1, freq_TS, start_TS, inverse_TS)
        return _push_number(out, at, x, np.uint64(np.int64(index_K[k]) - before - 1), _U0, freq_TS, start_TS, inverse_TS)
    table_C, class_K, time_K, hazard_K = times
    at, x = _push_number(out, at, x, step, table_C[class_K[k]], freq_TS, start_TS, inverse_TS)
    return _push_moment(out, at, x, time_K[k], hazard_K[k])


@kernel
def _encode(base_B, bound_B, index_K, step_K, top, freq_TS, start_TS, inverse_TS, times, room_B, out, first_B):
    """Encode two blocks at a time, because each symbol of a block waits for the symbol before."""
    for pair in prange((base_B.size + 1) // 2):
        a, b = 2 * pair, min(2 * pair + 1, base_B.size - 1)
        low_a, low_b = bound_B[a], bound_B[b]
        k_a, k_b = bound_B[a + 1] - 1, bound_B[b + 1] - 1
        if a == b:
            k_b = low_b - 1
        any_a, any_b = k_a >= low_a, k_b >= low_b
        at_a, at_b = np.uint64(room_B[a + 1]), np.uint64(room_B[b + 1])
        x_a, x_b = _STATE_MIN, _STATE_MIN
        while k_a >= low_a or k_b >= low_b:
            if k_a >= low_a:
                at_a, x_a = _push_change(
                    out, at_a, x_a, a, k_a, base_B, bound_B, index_K, step_K, top, freq_TS, start_TS, inverse_TS, times
                )
                k_a -= 1
            if k_b >= low_b:
                at_b, x_b = _push_change(
                    out, at_b, x_b, b, k_b, base_B, bound_B, index_K, step_K, top, freq_TS, start_TS, inverse_TS, times
                )
                k_b -= 1
        first_B[a] = _push_state(out, at_a, x_a, any_a)
        if a != b:
            first_B[b] = _push_state(out, at_b, x_b, any_b)


@njit(forceinline=True)
def _open(words, word_B, bound_B, b):
    """Return the position of a block's third word, its state and its first change, beyond its last if it is malformed."""
    at, k, end_k = word_B[b], bound_B[b], bound_B[b + 1]
    if k == end_k:
        return at, _STATE_MIN, k
    if word_B[b + 1] - at < 2:
        return at, _STATE_MIN, end_k + 1
    x = np.uint64(words[at]) | (np.uint64(words[at + 1]) << _U32)
    return at + 2, x, k if x >= _STATE_MIN else end_k + 1


@njit(forceinline=True)
def _pull_change(words, at, x, k, end_k, index, last, freq_TS, start_TS, symbol_TL, limit, index_K, step_K):
    """Read change `k`, the next one after `index`. The `k` returned is beyond the last if the stream is malformed."""
    at, x, gap = _pull_number(words, at, x, symbol_TL[0], freq_TS[0], start_TS[0])
    at, x, step = _pull_number(words, at, x, symbol_TL[1], freq_TS[1], start_TS[1])
    if gap >= np.uint64(last - index - 1) or step > limit:
        return at, x, end_k + 1, index
    index += 1 + np.int64(gap)
    index_K[np.uint64(k)] = index
    step_K[np.uint64(k)] = _unzigzag(step)
    return at, x, k + 1, index


@kernel
def _decode_gaps(words, word_B, base_B, end_B, bound_B, freq_TS, start_TS, symbol_TL, limit, index_K, step_K, good_B):
    """Decode two blocks at a time, as `_encode`."""
    for pair in prange((base_B.size + 1) // 2):
        a, b = 2 * pair, min(2 * pair + 1, base_B.size - 1)
        at_a, x_a, k_a = _open(words, word_B, bound_B, a)
        at_b, x_b, k_b = _open(words, word_B, bound_B, b)
        high_a, high_b = bound_B[a + 1], bound_B[b + 1]
        index_a, index_b, last_a, last_b = base_B[a] - 1, base_B[b] - 1, end_B[a], end_B[b]
        if a == b:
            k_b = high_b
        while k_a < high_a or k_b < high_b:
            if k_a < high_a:
                at_a, x_a, k_a, index_a = _pull_change(
                    words, at_a, x_a, k_a, high_a, index_a, last_a, freq_TS, start_TS, symbol_TL, limit, index_K, step_K
                )
            if k_b < high_b:
                at_b, x_b, k_b, index_b = _pull_change(
                    words, at_b, x_b, k_b, high_b, index_b, last_b, freq_TS, start_TS, symbol_TL, limit, index_K, step_K
                )
        if a != b:
            good_B[b] = k_b == high_b and at_b == word_B[b + 1] and x_b == _STATE_MIN
        good_B[a] = k_a == high_a and at_a == word_B[a + 1] and x_a == _STATE_MIN


@kernel
def _decode_moments(
    words, word_B, base_B, end_B, bound_B, width, stride, freq_TS, start_TS, symbol_TL, limit, old, index_K, step_K, good_B
):
    old_N, shift, mask, (hazard_LC, row_B, first, hazard_LW), table_C = old
    for b in prange(base_B.size):
        at, x, k = _open(words, word_B, bound_B, b)
        index, last, end, end_k = base_B[b] - 1, end_B[b], word_B[b + 1], bound_B[b + 1]
        hazard_C, hazard_W = hazard_LC[row_B[b]], hazard_LW[row_B[b]]
        run = min(last, base_B[b] + width)
        while k < end_k:
            at, x, index, run = _pull_moment(
                words, at, end, x, index + 1, run, last, width, stride, old_N, shift, mask, hazard_C, first, hazard_W
            )
            if index >= last:
                break
            table = table_C[(old_N[np.uint64(index)] >> shift) & mask]
            at, x, step = _pull_number(words, at, x, symbol_TL[table], freq_TS[table], start_TS[table])
            if step > limit:
                break
            index_K[k] = index
            step_K[k] = _unzigzag(step)
            k += 1
        good_B[b] = k == end_k and at == end and x == _STATE_MIN


def _first_class(context: Context, blocks: Blocks) -> np.int64:
    """Return the first of the `WINDOW` classes whose hazards are held in registers.

    They lie around the median class of a few elements, three quarters of them below. There each exponent has about half
    as many weights as the one above it; above the median few exponents have any.
    """
    bits_N, (shift, mask), level_C, *_ = context
    sample = bits_N[np.concatenate([blocks.base_B, (blocks.base_B + blocks.end_B) // 2, blocks.end_B - 1])]
    middle = int(np.median((sample >> shift) & mask)) if sample.size else 0
    return np.int64(min(max(middle - 3 * WINDOW // 4, 0), level_C.size - WINDOW))


def encode(
    blocks: Blocks, index_K: np.ndarray, step_K: np.ndarray, tables: Tables, context: Context | None
) -> tuple[np.ndarray, np.ndarray]:
    """Encode the changes of blocks.

    Args:
        blocks: The blocks.
        index_K: Flat indices of the changes, block after block.
        step_K: Steps of the changes, unsigned.
        tables: The table of gaps and that of steps; with a context, tables of steps only.
        context: What `context` needs; None to encode as `packed`. Levels of blocks that do not suit them are mutated.

    Returns:
        The words of all blocks, uint32[W], and how many each block has; a block without changes has none.
    """
    base_B, bound_B = blocks.base_B, blocks.bound_B
    wait_B = np.zeros(base_B.size, np.int64)
    times = None
    if context is not None:
        class_K, time_K, hazard_K = (np.empty(index_K.size, dtype) for dtype in (np.uint8, np.int64, np.int64))
        new_N, classes, level_C, level_B, table_C, rate = context
        clock = *classes, level_C, level_B, _first_class(context, blocks), rate
        with threads(base_B.size):
            _times(*blocks, new_N, index_K, step_K, *clock, class_K, time_K, hazard_K, wait_B)
        times = table_C, class_K, time_K, hazard_K
    # Words fill a block's room from its end. `room_B` is 0, then where each room ends. Even the rarest symbols fit.
    words_per_change = -(-(2 * rans.TABLE_BITS + 30 + 8 * step_K.itemsize) // 32)
    room_B = np.zeros(bound_B.size, np.int64)
    np.cumsum(words_per_change * np.diff(bound_B) + wait_B // 7 + 5, out=room_B[1:])
    out = np.empty(room_B[-1], np.uint32)
    first_B = np.empty(base_B.size, np.int64)
    with threads(tasks(blocks, index_K)):
        _encode(base_B, bound_B, index_K, step_K, top_of(step_K), *tables[:3], times, room_B, out, first_B)
    words = np.concatenate([out[:0], *(out[first:end] for first, end in zip(first_B, room_B[1:], strict=True))])
    return words, room_B[1:] - first_B


def decode(
    blocks: Blocks,
    words: np.ndarray,
    word_B: np.ndarray,
    tables: Tables,
    context: Context | None,
    index_K: np.ndarray,
    step_K: np.ndarray,
) -> bool:
    """Decode the changes of blocks.

    Args:
        blocks: The blocks.
        words: The words of all blocks, uint32[W].
        word_B: The words of block b are `words[word_B[b] : word_B[b + 1]]`; shape B + 1.
        tables: As in `encode`.
        context: As in `encode`.
        index_K: Gets the flat indices of the changes; mutated.
        step_K: Gets their steps, unsigned; mutated.

    Returns:
        False if a block is malformed; the arrays are then not to be used.
    """
    good_B = np.zeros(blocks.base_B.size, np.bool_)
    limit = 2 * (top_of(step_K) - _U1)
    if context is None:
        with threads(tasks(blocks, index_K)):
            _decode_gaps(words, word_B, *blocks[:3], *tables[:2], tables.symbol_TL, limit, index_K, step_K, good_B)
    else:
        bits_N, classes, level_C, level_B, table_C, _ = context
        found_L, row_B = np.unique(level_B, return_inverse=True)
        hazard_LC, first = rans.hazards(level_C, found_L), _first_class(context, blocks)
        hazards = hazard_LC, row_B, first, hazard_LC[:, first : first + WINDOW].astype(np.int32)
        old = bits_N, *classes, hazards, table_C
        with threads(blocks.base_B.size):
            _decode_moments(words, word_B, *blocks, *tables[:2], tables.symbol_TL, limit, old, index_K, step_K, good_B)
    return bool(good_B.all())
