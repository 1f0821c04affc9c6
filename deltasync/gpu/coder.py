"""The entropy coder (`rans`) in Triton: a lane for each stream, any number of streams and tables in one
launch.

A *stream* is the changes of one block; stream s has the changes from `bound_S[s]` on and below `bound_S[s +
1]`. Gaps and steps are numbers here, whose symbols are counted (`count`), fitted to tables (`join`, `fit`)
and coded (`encode`, `decode`). All arrays are on the device; tables are numbered over all groups, each class
has the one of its gaps and then that of its steps, and streams say which is their first one.

Every word comes from a store: no lane reads a word outside of its stream, nor writes outside of its changes.

Shapes: K changed elements, S streams, T tables, R runs of streams.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import numpy as np
import torch
import triton
import triton.language as tl

from deltasync.gpu.common import UNSIGNED, on
from deltasync.kernels.rans import LOG2, LOG_BITS, LOG_ONE_BITS, TABLE_BITS

LANES = 32
"""Streams of a program, one for each thread of a warp."""

SLOT_BYTES = 4 << TABLE_BITS
"""What `slots` returns for each table."""

_CHANGES = 1024  # changes that a program counts at once
_SLOTS = tl.constexpr(1 << TABLE_BITS)
_BITS = tl.constexpr(TABLE_BITS)
_COST = 10  # costs of symbols are in 2**-10 bits
_COST_BITS = tl.constexpr(_COST)
_COST_ONE = tl.constexpr(1 << _COST)
_LOG_BITS, _LOG_ONE_BITS = tl.constexpr(LOG_BITS), tl.constexpr(LOG_ONE_BITS)
_LOG_MASK = tl.constexpr(LOG2.size - 1)
_SYMBOL_COST = tl.constexpr(12 << LOG_ONE_BITS)
_STATE_MIN = tl.constexpr(1 << 32)
_ROUND = tl.constexpr(6755399441055744.0)  # 1.5 * 2**52: adding and subtracting it rounds to nearest even


@dataclasses.dataclass(frozen=True)
class Streams:
    """Streams of one width and what they code, on the device.

    Attributes:
        bound_S: First change of each, and the number of changes behind the last; int64[S + 1].
        base_S: Position of the first element of each one's block, of which the low 32 bits count; int64.
        table_S: Number of each one's first table, int32.
        gap_K: Gaps, uint32 or uint64; without classes positions, int32 or int64, of which the low 32 bits
            count.
        step_K: Steps, unsigned.
        class_K: Classes of changed elements, uint8. None without classes.
        first_S: Class in which each stream begins, int32. None without classes.
    """

    bound_S: torch.Tensor
    base_S: torch.Tensor
    table_S: torch.Tensor
    gap_K: torch.Tensor
    step_K: torch.Tensor
    class_K: torch.Tensor | None = None
    first_S: torch.Tensor | None = None

    @property
    def count(self) -> int:
        """Number of streams."""
        return self.bound_S.numel() - 1


@triton.jit
def _exponent(value):
    """Return the number of the highest bit of a uint32 that is not 0."""
    # Without its low bits where all upper ones are set, no value is rounded up to the next power of two.
    rounded = (value & (0xFFFFFFFF ^ (value >> 24))).to(tl.float32)
    return (rounded.to(tl.uint32, bitcast=True) >> 23).to(tl.int32) - 127


@triton.jit
def _bucket(value):
    """Return the symbol of a number, and how many extra bits follow it."""
    if value.dtype == tl.uint64:
        high = (value >> 32).to(tl.uint32)
        exponent = _exponent(tl.where(high != 0, high, value.to(tl.uint32))) + tl.where(high != 0, 32, 0)
    else:
        exponent = _exponent(value)
    extra = tl.maximum(exponent - 2, 0)
    leading = ((value >> extra.to(value.dtype)) & 3).to(tl.int32)
    small = value < 16
    return tl.where(small, value.to(tl.int32), 4 * exponent + leading), tl.where(small, 0, extra)


@triton.jit
def _zigzag(step):
    """Return a step as a number: 1, -1, 2, -2 become 1, 0, 3, 2."""
    if step.dtype == tl.uint64:
        value = step
        back = 0 - value
        negative = (value >> 63) != 0
    elif step.dtype == tl.uint32:
        value = step
        back = 0 - value
        negative = (value >> 31) != 0
    elif step.dtype == tl.uint16:
        value = step.to(tl.uint32)
        back = 0x10000 - value
        negative = (value >> 15) != 0
    else:
        value = step.to(tl.uint32)
        back = 0x100 - value
        negative = (value >> 7) != 0
    return tl.where(negative, (back << 1) - 2, (value << 1) - 1)


@triton.jit
def _gap(gap_ptr, base_ptr, class_ptr, first_ptr, s, k, low, on, CLASSES: tl.constexpr):
    """Return the gap before change `k` of stream `s`, the class in which it begins, and that of the
    change.
    """
    later = on & (k > low)
    if CLASSES:
        gap = tl.load(gap_ptr + k, on, other=0)
        of = tl.load(class_ptr + k, on, other=0).to(tl.int32)
        begin = tl.load(class_ptr + k - 1, later, other=0).to(tl.int32)
        begin = tl.where(later, begin, tl.load(first_ptr + s, on, other=0))
    else:
        at = tl.load(gap_ptr + k, on, other=0).to(tl.uint32)
        before = tl.load(gap_ptr + k - 1, later, other=0).to(tl.uint32)
        gap = tl.where(later, at - before - 1, at - tl.load(base_ptr + s, on, other=0).to(tl.uint32))
        of = tl.zeros_like(at).to(tl.int32)
        begin = of
    return gap, begin, of


@triton.jit
def _count(bound_ptr, base_ptr, run_ptr, at_ptr, step_ptr, count_ptr, CHANGES: tl.constexpr):
    s = tl.program_id(0)
    low = tl.load(bound_ptr + s)
    high = tl.load(bound_ptr + s + 1)
    symbols = tl.arange(0, 256)
    gaps = tl.zeros((256,), tl.int32)
    steps = tl.zeros((256,), tl.int32)
    for start in range(low, high, CHANGES):
        k = start + tl.arange(0, CHANGES)
        on = k < high
        gap, _, _ = _gap(at_ptr, base_ptr, at_ptr, at_ptr, s + tl.zeros_like(k), k, low, on, False)
        symbol, _ = _bucket(gap)
        gaps += tl.histogram(symbol, 256, on)
        symbol, _ = _bucket(_zigzag(tl.load(step_ptr + k, on, other=1)))
        steps += tl.histogram(symbol, 256, on)
    to = count_ptr + tl.load(run_ptr + s).to(tl.int64) * 512 + symbols
    tl.atomic_add(to, gaps, gaps != 0, sem="relaxed")
    tl.atomic_add(to + 256, steps, steps != 0, sem="relaxed")


@triton.jit
def _count_classes(
    bound_ptr, table_ptr, first_ptr, gap_ptr, class_ptr, step_ptr, count_ptr, CHANGES: tl.constexpr
):  # fmt: skip
    s = tl.program_id(0)
    low = tl.load(bound_ptr + s)
    high = tl.load(bound_ptr + s + 1)
    to = count_ptr + tl.load(table_ptr + s).to(tl.int64) * 256
    for start in range(low, high, CHANGES):
        k = start + tl.arange(0, CHANGES)
        on = k < high
        gap, begin, of = _gap(gap_ptr, gap_ptr, class_ptr, first_ptr, s + tl.zeros_like(k), k, low, on, True)
        symbol, _ = _bucket(gap)
        tl.atomic_add(to + begin * 512 + symbol, 1, on, sem="relaxed")
        symbol, _ = _bucket(_zigzag(tl.load(step_ptr + k, on, other=1)))
        tl.atomic_add(to + of * 512 + 256 + symbol, 1, on, sem="relaxed")


@triton.jit
def _log_bits(count, log_ptr):
    """See `codec.vector._log_bits`."""
    exponent = _exponent(tl.maximum(count, 1).to(tl.uint32)).to(tl.int64)
    place = ((count.to(tl.int64) << _LOG_BITS) >> exponent) & _LOG_MASK
    return count * ((exponent << _LOG_ONE_BITS) + tl.load(log_ptr + place))


@triton.jit
def _table_bits(count, log_ptr):
    """See `codec.vector._table_bits`; of one table."""
    own = tl.sum(_log_bits(count, log_ptr) - (count > 0).to(tl.int64) * _SYMBOL_COST, axis=0)
    return _log_bits(tl.sum(count, axis=0), log_ptr) - own


@triton.jit
def _run_bits(gaps, steps, log_ptr):
    return _table_bits(gaps, log_ptr) + _table_bits(steps, log_ptr)


@triton.jit
def _join(piece_ptr, count_ptr, group_ptr, log_ptr):
    piece = tl.program_id(0)
    symbol = tl.arange(0, 256)
    first = tl.load(piece_ptr + piece)
    last = tl.load(piece_ptr + piece + 1)
    group = first
    line = count_ptr + first.to(tl.int64) * 512 + symbol
    gaps = tl.load(line)
    steps = tl.load(line + 256)
    bits = _run_bits(gaps, steps, log_ptr)
    tl.store(group_ptr + first, group)
    for run in range(first + 1, last):
        line = count_ptr + run * 512 + symbol
        more_gaps = tl.load(line)
        more_steps = tl.load(line + 256)
        more = _run_bits(more_gaps, more_steps, log_ptr)
        joined = _run_bits(gaps + more_gaps, steps + more_steps, log_ptr)
        joins = joined <= bits + more
        gaps = tl.where(joins, gaps + more_gaps, more_gaps)
        steps = tl.where(joins, steps + more_steps, more_steps)
        bits = tl.where(joins, joined, more)
        group = tl.where(joins, group, run)
        tl.store(group_ptr + run, group)
        line = count_ptr + group.to(tl.int64) * 512 + symbol
        tl.store(line, gaps)
        tl.store(line + 256, steps)


@triton.jit
def _fit(count_ptr, freq_ptr, code_ptr, inverse_ptr, cost_ptr):
    """See `codec.tables.fit`, line by line; and what `_encode` and `_size` look up."""
    at = tl.program_id(0).to(tl.int64) * 256 + tl.arange(0, 256)
    count = tl.load(count_ptr + at)
    total = tl.sum(count, axis=0)
    count = tl.where((total == 0) & (tl.arange(0, 256) == 0), 1, count)
    total = tl.maximum(total, 1)
    share = count.to(tl.float64) * (_SLOTS / total.to(tl.float64))
    freq = tl.maximum(((share + _ROUND) - _ROUND).to(tl.int32), (count > 0).to(tl.int32))
    excess = tl.sum(freq, axis=0) - _SLOTS
    while excess != 0:
        largest, where = tl.max(freq, axis=0, return_indices=True, return_indices_tie_break_left=True)
        freq = tl.where(tl.arange(0, 256) == where, freq - tl.minimum(excess, largest // 2), freq)
        excess = tl.sum(freq, axis=0) - _SLOTS
    tl.store(freq_ptr + at, freq.to(tl.int16))
    start = tl.cumsum(freq, axis=0) - freq
    tl.store(code_ptr + at, (freq | (start << 16)).to(tl.uint32, bitcast=True))
    divisor = tl.maximum(freq, 1).to(tl.uint64)
    inverse = (tl.zeros_like(divisor) - 1) // divisor
    # This divided 2**64 - 1, not 2**64; the results differ where freq is a power of two.
    inverse += ((freq > 1) & ((freq & (freq - 1)) == 0)).to(tl.uint64)
    tl.store(inverse_ptr + at, inverse)
    bits = _BITS - tl.log2(tl.maximum(freq, 1).to(tl.float32))
    tl.store(cost_ptr + at, (bits * _COST_ONE).to(tl.int32) + 2)


@triton.jit
def _size(
    bound_ptr, base_ptr, table_ptr, first_ptr, gap_ptr, class_ptr, step_ptr, cost_ptr, room_ptr,
    CLASSES: tl.constexpr, CHANGES: tl.constexpr,
):  # fmt: skip
    """Bound the words of each stream from above."""
    s = tl.program_id(0)
    low = tl.load(bound_ptr + s)
    high = tl.load(bound_ptr + s + 1)
    costs = cost_ptr + tl.load(table_ptr + s).to(tl.int64) * 256
    sums = tl.zeros((CHANGES,), tl.int64)
    for start in range(low, high, CHANGES):
        k = start + tl.arange(0, CHANGES)
        on = k < high
        gap, begin, of = _gap(
            gap_ptr, base_ptr, class_ptr, first_ptr, s + tl.zeros_like(k), k, low, on, CLASSES
        )
        symbol, extra = _bucket(gap)
        bits = tl.load(costs + begin * 512 + symbol, on, other=0) + (extra << _COST_BITS)
        symbol, extra = _bucket(_zigzag(tl.load(step_ptr + k, on, other=1)))
        bits += tl.load(costs + of * 512 + 256 + symbol, on, other=0) + (extra << _COST_BITS)
        sums += tl.where(on, bits, 0)
    total = tl.sum(sums, axis=0)
    # A state of 2**32 or more wastes less than 2**-19 bits with each symbol, a smaller one a few words in
    # all.
    words = (total >> (_COST_BITS + 5)) + ((high - low) >> 20) + 8
    tl.store(room_ptr + s, tl.where(high > low, words, 0))


@triton.jit
def _flush(out_ptr, at, x, full, floor):
    """Write the low word of the state out if the state is full."""
    tl.store(out_ptr + at - 1, x.to(tl.uint32), full & (at > floor))
    return at - full.to(tl.int64), tl.where(full, x >> 32, x)


@triton.jit
def _push_bits(out_ptr, at, x, value, bits, on, floor):
    width = bits.to(tl.uint64)
    full = on & ((x >> tl.where(on, 64 - width, 63)) != 0)
    at, x = _flush(out_ptr, at, x, full, floor)
    mask = (tl.zeros_like(x) + 1 << tl.where(on, width, 0)) - 1
    return at, tl.where(on, (x << tl.where(on, width, 0)) | (value & mask), x)


@triton.jit
def _look_up(value, table, code_ptr, inverse_ptr, on):
    """Return how many extra bits a number has, and its symbol's code and inverse in a table."""
    symbol, extra = _bucket(value)
    line = table * 256 + symbol
    return extra, tl.load(code_ptr + line, on, other=1), tl.load(inverse_ptr + line, on, other=1)


@triton.jit
def _push_number(out_ptr, at, x, value, extra, code, inverse, on, floor, GROUPS: tl.constexpr):
    """Write a number of at most 24 * `GROUPS` extra bits; see `_look_up`."""
    wide = value.to(tl.uint64)
    # Decoding reads groups of 24 bits from the top and the shortest one last, so encoding begins with that.
    done = tl.where(extra > 24, (extra - 1) % 24 + 1, extra)
    at, x = _push_bits(out_ptr, at, x, wide, done, on & (extra > 0), floor)
    for _ in tl.static_range(GROUPS - 1):
        more = on & (extra > done)
        at, x = _push_bits(
            out_ptr, at, x, wide >> tl.where(more, done, 0).to(tl.uint64), 24 + done * 0, more, floor
        )
        done += tl.where(more, 24, 0)
    freq = (code & 0xFFFF).to(tl.uint64)
    full = on & ((x >> (64 - _BITS)) >= freq)
    at, x = _flush(out_ptr, at, x, full, floor)
    quotient = tl.umulhi(x, inverse)
    quotient += (x - quotient * freq >= freq).to(tl.uint64)
    return at, tl.where(on, x + quotient * (_SLOTS - freq) + (code >> 16).to(tl.uint64), x)


@triton.jit
def _encode(
    bound_ptr, base_ptr, table_ptr, first_ptr, gap_ptr, class_ptr, step_ptr, code_ptr, inverse_ptr, room_ptr, out_ptr,
    begin_ptr, streams, CLASSES: tl.constexpr, GAPS: tl.constexpr, STEPS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Encode each stream from its last change to its first into the end of its room."""
    s = tl.program_id(0) * LANES + tl.arange(0, LANES)
    there = s < streams
    low = tl.load(bound_ptr + s, there, other=0)
    k = tl.load(bound_ptr + s + 1, there, other=0) - 1
    table = tl.load(table_ptr + s, there, other=0).to(tl.int64)
    floor = tl.load(room_ptr + s, there, other=0)
    at = tl.load(room_ptr + s + 1, there, other=0)
    some = there & (k >= low)
    x = tl.full((LANES,), 1, tl.uint64)
    changes = tl.max(k - low, axis=0) + 1
    gap, begin, of = _gap(gap_ptr, base_ptr, class_ptr, first_ptr, s, k, low, some, CLASSES)
    step = tl.load(step_ptr + k, some, other=1)
    for _ in range(changes):
        on = there & (k >= low)
        # The next change is on its way while this one is written; both look-ups are at once.
        k -= 1
        more = there & (k >= low)
        next_gap, next_begin, next_of = _gap(
            gap_ptr, base_ptr, class_ptr, first_ptr, s, k, low, more, CLASSES
        )
        next_step = tl.load(step_ptr + k, more, other=1)
        number = _zigzag(step)
        extra, code, inverse = _look_up(number, table + 2 * of + 1, code_ptr, inverse_ptr, on)
        gap_extra, gap_code, gap_inverse = _look_up(gap, table + 2 * begin, code_ptr, inverse_ptr, on)
        at, x = _push_number(out_ptr, at, x, number, extra, code, inverse, on, floor, STEPS)
        at, x = _push_number(out_ptr, at, x, gap, gap_extra, gap_code, gap_inverse, on, floor, GAPS)
        gap, begin, of, step = next_gap, next_begin, next_of, next_step
    two = some & (x >= _STATE_MIN)
    tl.store(out_ptr + at - 1, (x >> 32).to(tl.uint32), two & (at > floor))
    at -= two.to(tl.int64)
    tl.store(out_ptr + at - 1, x.to(tl.uint32), some & (at > floor))
    tl.store(begin_ptr + s, at - some.to(tl.int64), there)


@triton.jit
def _gather(begin_ptr, room_ptr, to_ptr, from_ptr, out_ptr, WORDS: tl.constexpr):
    """Move the words of each stream to where they belong."""
    s = tl.program_id(0)
    begin = tl.load(begin_ptr + s)
    end = tl.load(room_ptr + s + 1)
    to = out_ptr + tl.load(to_ptr + s)
    for start in range(0, end - begin, WORDS):
        word = start + tl.arange(0, WORDS)
        on = word < end - begin
        tl.store(to + word, tl.load(from_ptr + begin + word, on, other=0), on)


@triton.jit
def _slots(freq_ptr, slot_ptr, SLOTS: tl.constexpr):
    """Write what `_decode` looks up: symbol << 24 | slot - start << 12 | freq - 1 of each slot."""
    table = tl.program_id(0).to(tl.int64)
    symbol = tl.arange(0, 256)
    freq = tl.load(freq_ptr + table * 256 + symbol).to(tl.int32)
    end = tl.cumsum(freq, axis=0)
    for first in range(0, _SLOTS, SLOTS):
        slot = first + tl.arange(0, SLOTS)
        own = (end[None, :] > slot[:, None]) & ((end - freq)[None, :] <= slot[:, None])
        line = (symbol << 24)[None, :] | ((slot[:, None] - (end - freq)[None, :]) << 12) | (freq - 1)[None, :]
        tl.store(
            slot_ptr + table * _SLOTS + slot,
            tl.sum(tl.where(own, line, 0), axis=1).to(tl.uint32, bitcast=True),
        )


@triton.jit
def _pull(at, end, x, first, second, third, on):
    """Renormalise with the first of the words that follow; behind the last one of a stream not at all."""
    short = on & (x < _STATE_MIN) & (at < end)
    x = tl.where(short, (x << 32) | first.to(tl.uint64), x)
    return at + short.to(tl.int64), x, tl.where(short, second, first), tl.where(short, third, second)


@triton.jit
def _pull_number(words_ptr, at, end, x, table, slot_ptr, on, NUMBER: tl.constexpr, GROUPS: tl.constexpr):
    """Read a number as `NUMBER`; also return whether it has no more extra bits than that and 24 *
    `GROUPS`.
    """
    line = tl.load(slot_ptr + table * _SLOTS + (x & (_SLOTS - 1)).to(tl.int64), on, other=0)
    # Read at once with that, before it is known how many are wanted: two words have 64 bits, and a symbol 12.
    first = tl.load(words_ptr + at, on & (at < end), other=0)
    second = tl.load(words_ptr + at + 1, on & (at + 1 < end), other=0)
    third = second
    if GROUPS > 2:
        third = tl.load(words_ptr + at + 2, on & (at + 2 < end), other=0)
    symbol = (line >> 24).to(tl.int32)
    freq = ((line & 4095) + 1).to(tl.uint64)
    x = tl.where(on, freq * (x >> _BITS) + ((line >> 12) & 4095).to(tl.uint64), x)
    at, x, first, second = _pull(at, end, x, first, second, third, on)
    extra = tl.where(symbol < 16, 0, (symbol >> 2) - 2)
    value = tl.where(symbol < 16, symbol, 4 + (symbol & 3)).to(NUMBER)
    good = extra <= 24 * GROUPS
    most: tl.constexpr = 29 if NUMBER == tl.uint32 else 61  # noqa: SIM300 - a dtype is no constant
    good = good & (extra <= most)
    extra = tl.where(on & good, extra, 0)
    for _ in tl.static_range(GROUPS):
        bits = tl.minimum(extra, 24)
        low = x.to(tl.uint32) & ((tl.zeros_like(line) + 1 << bits.to(tl.uint32)) - 1)
        value = (value << bits.to(NUMBER)) | low.to(NUMBER)
        x = x >> bits.to(tl.uint64)
        at, x, first, second = _pull(at, end, x, first, second, third, extra > 0)
        extra -= bits
    return value, at, x, good


@triton.jit
def _open(words_ptr, at, end, some):
    """Return the state of each stream, the position behind it, and whether it is well formed."""
    one = some & (end > at)
    two = some & (end - at > 1)
    x = tl.load(words_ptr + at, one, other=1).to(tl.uint64)
    x = x | (tl.load(words_ptr + at + 1, two, other=0).to(tl.uint64) << 32)
    return x, at + one.to(tl.int64) + two.to(tl.int64), ((one == some) & ((x >= _STATE_MIN) | (two == 0)))


@triton.jit
def _unzigzag(number, STEP: tl.constexpr):
    magnitude = (number >> 1) + 1
    return tl.where((number & 1) != 0, magnitude, 0 - magnitude).to(STEP)


@triton.jit(do_not_specialize=["streams"])
def _decode(
    words_ptr, word_ptr, bound_ptr, base_ptr, size_ptr, table_ptr, slot_ptr, run_ptr, end_ptr, shift_ptr, at_ptr,
    step_ptr, good_ptr, streams: tl.int64, limit, STEP: tl.constexpr, NUMBER: tl.constexpr, STEPS: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """Decode streams without classes."""
    s = tl.program_id(0) * LANES + tl.arange(0, LANES)
    there = s < streams
    at = tl.load(word_ptr + s, there, other=0)
    end = tl.load(word_ptr + s + 1, there, other=0)
    k = tl.load(bound_ptr + s, there, other=0)
    last = tl.load(bound_ptr + s + 1, there, other=0)
    base = tl.load(base_ptr + s, there, other=0)
    left = tl.load(size_ptr + s, there, other=0)  # elements of the block behind the last change
    table = tl.load(table_ptr + s, there, other=0).to(tl.int64)
    run = tl.load(run_ptr + s, there, other=0)
    run_end = tl.load(end_ptr + run)
    shift = tl.load(shift_ptr + run)
    x, at, good = _open(words_ptr, at, end, there & (k < last))
    place = base - 1
    for _ in range(tl.max(last - k, axis=0)):
        on = good & (k < last)
        gap, at, x, fits = _pull_number(words_ptr, at, end, x, table, slot_ptr, on, tl.uint32, 2)
        good = good & (fits | (on == 0)) & ((gap.to(tl.int64) < left) | (on == 0))
        on = on & good
        place += tl.where(on, gap.to(tl.int64) + 1, 0)
        left -= tl.where(on, gap.to(tl.int64) + 1, 0)
        step, at, x, fits = _pull_number(words_ptr, at, end, x, table + 1, slot_ptr, on, NUMBER, STEPS)
        good = good & ((fits & (step <= limit.to(NUMBER))) | (on == 0))
        on = on & good
        begins = on & (k >= run_end)
        run += begins.to(tl.int32)
        run_end = tl.load(end_ptr + run, begins, other=0) + tl.where(begins, 0, run_end)
        shift = tl.load(shift_ptr + run, begins, other=0) + tl.where(begins, 0, shift)
        tl.store(at_ptr + k + shift, place.to(tl.int32), on)
        tl.store(step_ptr + k + shift, _unzigzag(step, STEP), on)
        k += on.to(tl.int64)
    tl.store(good_ptr + s, (good & (x == 1) & (at == end)).to(tl.int8), there)


@dataclasses.dataclass(frozen=True)
class Runs:
    """Runs of changes that lie one behind the other in arrays where others lie between, on the device.

    Attributes:
        first_S: The run in which each stream begins, int32.
        end_R: The number of changes before the end of each run, ascending; int64.
        shift_R: How many others lie before each, int64.
    """

    first_S: torch.Tensor
    end_R: torch.Tensor
    shift_R: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Fitted:
    """Tables that were fitted to counts, on the device.

    Attributes:
        freq_TS: Slots of each symbol, int16[T, 256].
        code_TS, inverse_TS, cost_TS: Look-up tables for encoding.
    """

    freq_TS: torch.Tensor
    code_TS: torch.Tensor
    inverse_TS: torch.Tensor
    cost_TS: torch.Tensor


def count(of: Streams, runs: int) -> torch.Tensor:
    """Count the symbols of the gaps and of the steps of each run of streams without classes, int32[R, 2,
    256].

    Instead of tables, `table_S` has the run of each stream.
    """
    count_RTS = torch.zeros((runs, 2, 256), dtype=torch.int32, device=of.bound_S.device)
    if of.count:
        with on(count_RTS.device):
            _count[(of.count,)](of.bound_S, of.base_S, of.table_S, of.gap_K, of.step_K, count_RTS, _CHANGES)
    return count_RTS


def count_classes(of: Streams, tables: int) -> torch.Tensor:
    """Count the symbols of each table of streams with classes, int32[T, 256]."""
    count_TS = torch.zeros((tables, 256), dtype=torch.int32, device=of.bound_S.device)
    if of.count:
        with on(count_TS.device):
            _count_classes[(of.count,)](
                of.bound_S, of.table_S, of.first_S, of.gap_K, of.class_K, of.step_K, count_TS, _CHANGES
            )  # fmt: skip
    return count_TS


def join(count_RTS: torch.Tensor, piece_P: torch.Tensor) -> torch.Tensor:
    """Join runs into groups as `codec.vector` does, and return the first run of each run's group, int32[R].

    Args:
        count_RTS: Counts of each run; mutated: the first run of a group gets the sum.
        piece_P: First run of each payload, and the number of runs, int32. A group ends where a payload does.
    """
    group_R = torch.zeros(len(count_RTS), dtype=torch.int32, device=count_RTS.device)
    with on(count_RTS.device):
        _join[(piece_P.numel() - 1,)](piece_P, count_RTS, group_R, _logs(group_R.device))
    return group_R


@functools.cache
def _logs(device: torch.device) -> torch.Tensor:
    """Return `rans.LOG2` on a device, which stays there."""
    return torch.from_numpy(LOG2).to(device)


def fit(count_TS: torch.Tensor) -> Fitted:
    """Fit tables to counts, int32[..., 256], as `codec.tables.fit`."""
    tables, device = count_TS.numel() // 256, count_TS.device
    kinds = torch.int16, torch.int32, torch.int64, torch.int32
    freq, code, inverse, cost = (torch.empty((tables, 256), dtype=kind, device=device) for kind in kinds)
    with on(device):  # fused, a product would be rounded with the sum that rounds it
        _fit[(tables,)](
            count_TS, freq, code.view(torch.uint32), inverse.view(torch.uint64), cost, enable_fp_fusion=False
        )  # fmt: skip
    return Fitted(freq, code, inverse, cost)


def encode(
    of: Streams,
    fitted: Fitted,
    gap_bits: int = 32,
    check_room: Callable[[int], None] = lambda size_bytes: None,
) -> tuple[torch.Tensor, np.ndarray]:
    """Encode streams.

    Args:
        of: The streams.
        fitted: The tables.
        gap_bits: Bits that no gap exceeds.
        check_room: Called before so many bytes are allocated for words.

    Returns:
        The words of all streams, int32[W], on the device; how many each has, int64[S], on the host. Without
            changes it has none.
    """
    device, width, classes = of.bound_S.device, of.step_K.element_size(), of.class_K is not None
    if not of.count:
        return torch.empty(0, dtype=torch.int32, device=device), np.empty(0, np.int64)
    room_S = torch.zeros(of.count + 1, dtype=torch.int64, device=device)
    begin_S = torch.zeros(of.count, dtype=torch.int64, device=device)
    class_K, first_S = (of.class_K, of.first_S) if classes else (of.step_K, of.table_S)
    given = of.bound_S, of.base_S, of.table_S, first_S, of.gap_K, class_K, of.step_K
    code, inverse = fitted.code_TS.view(torch.uint32), fitted.inverse_TS.view(torch.uint64)
    groups = _groups(gap_bits), _groups(8 * width)
    with on(device):
        _size[(of.count,)](*given, fitted.cost_TS, room_S[1:], classes, _CHANGES)
        torch.cumsum(room_S, 0, out=room_S)
        room = int(room_S[-1])
        check_room(8 * room + 40 * of.count)
        out = torch.empty(room, dtype=torch.int32, device=device)
        _encode[(triton.cdiv(of.count, LANES),)](
            *given, code, inverse, room_S, out.view(torch.uint32), begin_S, of.count, classes, *groups, LANES, num_warps=1
        )  # fmt: skip
        count_S = room_S[1:] - begin_S
        fits = (begin_S >= room_S[:-1]).all()
        found_S = torch.cat((count_S, fits.to(torch.int64).view(1))).cpu().numpy()
        assert found_S[-1], "a stream has more words than room"
        to_S = torch.cumsum(count_S, 0) - count_S
        words = torch.empty(int(found_S[:-1].sum()), dtype=torch.int32, device=device)
        _gather[(of.count,)](begin_S, room_S, to_S, out, words, 512)
    return words, found_S[:-1]


def slots(freq_TS: torch.Tensor) -> torch.Tensor:
    """Return what `decode` looks up: int32[T, 4096], of tables of int16[T, 256]."""
    found = torch.empty((len(freq_TS), 1 << TABLE_BITS), dtype=torch.int32, device=freq_TS.device)
    with on(found.device):
        _slots[(len(freq_TS),)](freq_TS, found.view(torch.uint32), 32)
    return found


def decode(
    bound_S: torch.Tensor,
    base_S: torch.Tensor,
    size_S: torch.Tensor,
    table_S: torch.Tensor,
    words: torch.Tensor,
    word_S: torch.Tensor,
    slot_TL: torch.Tensor,
    runs: Runs,
    at_K: torch.Tensor,
    step_K: torch.Tensor,
) -> torch.Tensor:
    """Decode streams without classes.

    Args:
        bound_S: See `Streams`, as the next one.
        base_S: See there.
        size_S: Elements of each one's block, int64.
        table_S: See there.
        words: The words of all streams, int32[W].
        word_S: The first word of each stream, and the one behind the last; int64[S + 1].
        slot_TL: The tables, as `slots` returns them.
        runs: Where their changes lie in the arrays.
        at_K: Gets the low 32 bits of positions, int32; mutated.
        step_K: Gets steps, unsigned; mutated.

    Returns:
        Whether each stream is well formed, int8[S]. If one is not, the arrays are not to be used.
    """
    width, streams = step_K.element_size(), size_S.numel()
    good_S = torch.zeros(streams, dtype=torch.int8, device=words.device)
    number = tl.uint64 if width == 8 else tl.uint32
    with on(words.device):
        _decode[(triton.cdiv(streams, LANES),)](
            words.view(torch.uint32), word_S, bound_S, base_S, size_S, table_S, slot_TL.view(torch.uint32),
            runs.first_S, runs.end_R, runs.shift_R, at_K, step_K, good_S, streams,
            (1 << 8 * width) - 2, UNSIGNED[width], number, _groups(8 * width), LANES, num_warps=1,
        )  # fmt: skip
    return good_S


def _groups(bits: int) -> int:
    """Return how many groups of extra bits the numbers of so many bits have at most."""
    return -(-max(bits - 3, 1) // 24)
