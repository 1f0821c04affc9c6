"""The classes of the elements of blocks (`context`) in Triton: places by class and back, for any number of
blocks at once.

A block is as in `kernels.native`. Its elements follow each other by *place*, and each 128 of them are a
*chunk*, 16 chunks a *span*. Of each class of a block it is counted how many elements lie in each chunk, and
before each span, which takes 1.25 bytes for each class and chunk, so callers take blocks in batches. A changed
element's *rank*, how many of its class lie before it, is the sum of these and of what is found in its chunk;
and the other way round.

Changes are ordered by a bitmap: a bit for each place that something may take, of which those before are
counted.

Shapes: K changed elements, B blocks, G bands of blocks, R runs of blocks, P pairs of a block and one of its
classes, E values of the field (256), L classes of all groups.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from deltasync.gpu.coder import LANES, _bucket, _groups, _open, _pull_number, _unzigzag, _zigzag
from deltasync.gpu.common import UNSIGNED, on, popcount
from deltasync.kernels import native
from deltasync.kernels.native import ADDRESS, COLUMNS, ROWS, STRIDE
from deltasync.kernels.rans import RATIO, RATIO_BITS, Classes
from deltasync.tensors import bounds

CHUNK = 128
"""Elements of a chunk."""

SPAN = 16
"""Chunks of a span. Chunks and counts of blocks are filled up to whole ones."""

GROUP, CLASS, CLASSES, PAIR, CHUNKS, COUNT, BEFORE, WIDTH, FIELDS = range(native.FIELDS, 16)
"""Columns of a table of blocks: those of `kernels.native.FIELDS`; number of the group, of its first class,
how many it has; number of the block's first pair; number of chunks; the numbers of counts, and of chunks, of
all blocks before; positions from row to row."""

_CHANGES = 256  # changes of a band or block that a program takes at once
_UNIT = 8  # elements that are read at once
_RANKED = {1: 4, _UNIT: 16}  # changes of which a program reads the chunks at once, by the unit
_CHUNKS = {1: 8, _UNIT: 32}  # chunks that a program counts at once, likewise
_TURNS = 4  # times that a program counts, so that its beginning costs less
_MOVED = 512  # changes that a program moves
_SAMPLE = 32  # consecutive elements of a sample, as in `kernels.native`
_MOST_PROGRAMS = (1 << 16) - 1  # of the second dimension of a launch
_MARKS = 1024  # words of a bitmap that a program counts
_ADDRESS, _COLUMNS, _STRIDE, _ROWS, _FIRST, _SHIFT, _MASK = map(tl.constexpr, range(7))
_GROUP, _CLASS, _CLASSES, _PAIR, _CHUNK_COUNT, _COUNT, _BEFORE, _WIDTH, _FIELDS = map(
    tl.constexpr, range(7, 16)
)
SIZES, COUNTS, LISTS = range(3)  # what `_correct` does
_SIZES, _COUNTS, _LISTS = map(tl.constexpr, (SIZES, COUNTS, LISTS))
_CHUNK, _SPAN = tl.constexpr(CHUNK), tl.constexpr(SPAN)
_RATIO_BITS = tl.constexpr(RATIO_BITS)


@triton.jit
def _field(block, bits, inside):
    """Return the field of elements of blocks by which they have a class."""
    shift = tl.load(block + _SHIFT, inside, other=0).to(bits.dtype)
    return (bits >> shift).to(tl.int32) & tl.load(block + _MASK, inside, other=0).to(tl.int32)


@triton.jit
def _bits(block, row, column, is_in, BITS: tl.constexpr):
    """Return the bits of elements of blocks, by row and column."""
    address = tl.load(block + _ADDRESS, is_in, other=0).to(tl.pointer_type(BITS))
    return tl.load(address + (row * tl.load(block + _STRIDE, is_in, other=0) + column), is_in, other=0)


@triton.jit
def _chunk_fields(block, chunk, inside, BITS: tl.constexpr, UNIT: tl.constexpr):
    """Return the fields of chunks of blocks, int32[chunks, 128 / UNIT, UNIT], and which of them are elements.

    `block` are the rows of their blocks, or of the one that all are in, and `inside` tells which chunks there
    are; all of shape [chunks, 1, 1]. Rows begin and end at multiples of `UNIT` elements, in memory too.
    """
    columns = (tl.load(block + _COLUMNS) // UNIT).to(tl.uint32)
    units = columns * tl.load(block + _ROWS).to(tl.uint32)
    unit = (chunk * (_CHUNK // UNIT)).to(tl.uint32)
    unit += tl.arange(0, _CHUNK // UNIT).to(tl.uint32)[None, :, None]
    row = unit // columns
    begin = row.to(tl.int64) * tl.load(block + _STRIDE) + (unit - row * columns).to(tl.int64) * UNIT
    address = tl.load(block + _ADDRESS).to(tl.pointer_type(BITS)) + begin
    wide: tl.constexpr = UNIT * BITS.primitive_bitwidth // 8
    bytes_: tl.constexpr = wide if wide < 16 else 16  # Triton 3.5 has no `min` of constants
    address = tl.multiple_of(address, [bytes_, bytes_, bytes_])
    element = inside & (unit < units)
    bits = tl.load(address + tl.arange(0, UNIT)[None, None, :], element, other=0)
    field = (bits >> tl.load(block + _SHIFT).to(BITS)).to(tl.int32) & tl.load(block + _MASK).to(tl.int32)
    return field, element


@triton.jit
def _of_class(
    block, chunk, inside, c, class_ptr, end_ptr, listed_ptr, base, BITS: tl.constexpr, UNIT: tl.constexpr,
    ARE_NEW: tl.constexpr,
):  # fmt: skip
    """Return which elements of chunks of blocks are of class `c`; see `_chunk_fields`. Where the bits
    `ARE_NEW`, `_correct` has listed the elements that were of another class.
    """
    of_chunk = end_ptr + (tl.load(block + _BEFORE, inside, other=0) - base + chunk)
    block = block[:, None, None]
    field, element = _chunk_fields(block, chunk[:, None, None], inside[:, None, None], BITS, UNIT)
    found = tl.load(class_ptr + tl.load(block + _GROUP) * 256 + field)
    if ARE_NEW:
        first = tl.load(of_chunk, inside, other=0)
        count = tl.load(of_chunk + 1, inside, other=0) - first
        for number in range(tl.max(count, axis=0)):
            line = tl.load(listed_ptr + first + number, number < count, other=0).to(tl.int32) & 0xFFFF
            own = _elements(UNIT) == (line & 0xFF)[:, None, None]
            own = own & (number < count)[:, None, None]
            found = tl.where(own, (line >> 8).to(tl.uint8)[:, None, None], found)
    return element & (found == c[:, None, None])


@triton.jit
def _elements(UNIT: tl.constexpr):
    """Return the number of each element in its chunk, as `_chunk_fields` orders them."""
    return (tl.arange(0, _CHUNK // UNIT) * UNIT)[None, :, None] + tl.arange(0, UNIT)[None, None, :]


@triton.jit
def _change(band, at_ptr, k, is_in):
    """Return block, row and column in it, and place of changes of a band."""
    # Of positions only the low 32 bits are known; a band is smaller.
    offset = tl.load(at_ptr + k, is_in, other=0).to(tl.uint32) - tl.load(band).to(tl.uint32)
    offset = tl.where(is_in, offset, 0)
    stride = tl.load(band + 1).to(tl.uint32)
    columns = tl.load(band + 2).to(tl.uint32)
    row = offset // stride
    column = offset - row * stride
    tile = column // columns
    column -= tile * columns
    return tl.load(band + 5) + tile.to(tl.int64), row.to(tl.int64), column.to(tl.int64)


@triton.jit
def _begin(low, CHANGES: tl.constexpr):
    """Return the first change that a program takes of those of a band, which several programs share, and how
    far its next ones are.
    """
    return low + tl.program_id(1).to(tl.int64) * CHANGES, tl.num_programs(1) * CHANGES


@triton.jit
def _tally(band_ptr, begin_ptr, end_ptr, at_ptr, count_ptr, CHANGES: tl.constexpr):
    """Count the changes of each block."""
    g = tl.program_id(0).to(tl.int64)
    high = tl.load(end_ptr + g)
    first, jump = _begin(tl.load(begin_ptr + g), CHANGES)
    for start in range(first, high, jump):
        k = start + tl.arange(0, CHANGES)
        block, _, _ = _change(band_ptr + 6 * g, at_ptr, k, k < high)
        tl.atomic_add(count_ptr + block, tl.full((CHANGES,), 1, tl.int32), k < high, sem="relaxed")


@triton.jit
def _survey_steps(
    band_ptr, begin_ptr, end_ptr, block_ptr, run_ptr, at_ptr, step_ptr, count_ptr, BITS: tl.constexpr,
    SYMBOLS: tl.constexpr, CHANGES: tl.constexpr,
):  # fmt: skip
    """Count the symbols of steps by the old field; the bits are new."""
    g = tl.program_id(0).to(tl.int64)
    high = tl.load(end_ptr + g)
    first, jump = _begin(tl.load(begin_ptr + g), CHANGES)
    for start in range(first, high, jump):
        k = start + tl.arange(0, CHANGES)
        is_in = k < high
        number, row, column = _change(band_ptr + 6 * g, at_ptr, k, is_in)
        block = block_ptr + number * _FIELDS
        step = tl.load(step_ptr + k, is_in, other=1)
        old = _bits(block, row, column, is_in, BITS) - step
        field = _field(block, old, is_in)
        symbol, _ = _bucket(_zigzag(step))
        run = tl.load(run_ptr + number, is_in, other=0).to(tl.int64)
        tl.atomic_add(
            count_ptr + (run * 256 + field) * SYMBOLS + symbol,
            tl.full((CHANGES,), 1, tl.int32),
            is_in,
            sem="relaxed",
        )


@triton.jit
def _survey_elements(
    block_ptr, run_ptr, before_ptr, period_ptr, element_ptr, BITS: tl.constexpr, SAMPLES: tl.constexpr
):  # fmt: skip
    """Count the fields of sampled elements."""
    b = tl.program_id(0).to(tl.int64)
    block = block_ptr + b * _FIELDS
    run = tl.load(run_ptr + b).to(tl.int64)
    period = tl.load(period_ptr + run)
    columns = tl.load(block + _COLUMNS)
    stride = tl.load(block + _STRIDE)
    samples = (columns + 31) // 32
    count = samples * tl.load(block + _ROWS)
    address = tl.load(block + _ADDRESS).to(tl.pointer_type(BITS))
    mask = tl.load(block + _MASK).to(tl.int32)
    first = (period - tl.load(before_ptr + b) % period) % period
    found = tl.zeros((256,), tl.int32)
    for start in range(first, count, SAMPLES * period):
        sample = start + tl.arange(0, SAMPLES)[:, None] * period
        row = sample // samples
        column = (sample - row * samples) * 32 + tl.arange(0, 32)[None, :]
        element = (sample < count) & (column < columns)
        bits = tl.load(address + row * stride + column, element, other=0)
        field = (bits >> tl.load(block + _SHIFT).to(bits.dtype)).to(tl.int32) & mask
        found += tl.histogram(tl.reshape(field, (SAMPLES * 32,)), 256, tl.reshape(element, (SAMPLES * 32,)))
    tl.atomic_add(element_ptr + run * 256 + tl.arange(0, 256), found, found != 0, sem="relaxed")


@triton.jit(do_not_specialize=["b_base", "base"])
def _count_chunks(
    block_ptr, word_ptr, count_ptr, b_base: tl.int64, base: tl.int64, BITS: tl.constexpr, UNIT: tl.constexpr,
    CHUNKS: tl.constexpr, ARE_SUMMED: tl.constexpr,
):  # fmt: skip
    """Count the elements of each class in chunks of a block, or, `ARE_SUMMED`, add them to the classes' sizes;
    its programs take several chunks each if there are many.
    """
    block = block_ptr + (tl.program_id(0).to(tl.int64) + b_base) * _FIELDS
    chunks = tl.load(block + _CHUNK_COUNT)
    classes = tl.load(block + _CLASSES)
    to = count_ptr + (tl.load(block + _PAIR) if ARE_SUMMED else tl.load(block + _COUNT) - base)
    words = word_ptr + (tl.load(block + _CLASS) // 8 + tl.load(block + _GROUP)) * 256
    eight = tl.arange(0, 8)
    for start in range(tl.program_id(1).to(tl.int64) * CHUNKS, chunks, tl.num_programs(1) * CHUNKS):
        chunk = start + tl.arange(0, CHUNKS)
        inside = (chunk < chunks)[:, None, None]
        field, element = _chunk_fields(block, chunk[:, None, None], inside, BITS, UNIT)
        # Each word has a byte for each of eight classes, of which a chunk has 128 elements at most.
        for page in range((classes + 7) // 8):
            word = tl.load(words + (page * 256 + field), element, other=0)
            sums = tl.sum(tl.sum(word, axis=2), axis=1)
            count = (sums[:, None] >> (eight * 8)[None, :]).to(tl.uint8)
            of = page * 8 + eight
            if ARE_SUMMED:
                size = tl.sum(count.to(tl.int32), axis=0).to(tl.int64)
                tl.atomic_add(to + of, size, (of < classes) & (size > 0), sem="relaxed")
            else:
                here = (of < classes)[None, :] & (chunk < chunks)[:, None]
                tl.store(to + (of * chunks)[None, :] + chunk[:, None], count, here)


@triton.jit(do_not_specialize=["b_base", "base"])
def _sum_chunks(
    block_ptr, count_ptr, before_ptr, size_ptr, b_base: tl.int64, base: tl.int64, SPANS: tl.constexpr
):  # fmt: skip
    """Write how many elements of a class of a block are before each span, and its size."""
    block = block_ptr + (tl.program_id(0).to(tl.int64) + b_base) * _FIELDS
    c = tl.program_id(1)
    if c < tl.load(block + _CLASSES):
        spans = tl.load(block + _CHUNK_COUNT) // _SPAN
        first = (tl.load(block + _COUNT) - base) // _SPAN + c * spans
        total = spans * 0
        for start in range(0, spans, SPANS):
            span = start + tl.arange(0, SPANS)
            count = tl.sum(_span_counts(count_ptr, first + span, span < spans), axis=1)
            before = total + tl.cumsum(count, axis=0) - count
            tl.store(before_ptr + first + span, before.to(tl.int32), span < spans)
            total += tl.sum(count, axis=0)
        tl.store(size_ptr + tl.load(block + _PAIR) + c, total)


@triton.jit
def _span_counts(count_ptr, span, inside):
    """Return the counts of the chunks of spans, int32[spans, 16]."""
    first = tl.multiple_of(count_ptr + span * _SPAN, _SPAN)
    return tl.load(first[:, None] + tl.arange(0, _SPAN)[None, :], inside[:, None], other=0).to(tl.int32)


@triton.jit(do_not_specialize=["blocks"], do_not_specialize_on_alignment=["block_ptr", "first_ptr"])
def _first_classes(block_ptr, size_ptr, first_ptr, blocks: tl.int64, LANES: tl.constexpr):
    """Return the first class of each block that has an element, or the last of all; `rans`."""
    b = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    there = b < blocks
    block = block_ptr + b * _FIELDS
    classes = tl.load(block + _CLASSES, there, other=1)
    pair = tl.load(block + _PAIR, there, other=0)
    first = classes - 1
    for back in range(tl.max(classes, axis=0)):
        c = classes - 1 - back
        size = tl.load(size_ptr + pair + c, there & (c >= 0), other=0)
        first = tl.where(size > 0, c, first)
    tl.store(first_ptr + b, first.to(tl.int32), there)


@triton.jit(do_not_specialize=["base", "chunk_base"])
def _correct(
    band_ptr, begin_ptr, end_ptr, block_ptr, class_ptr, at_ptr, step_ptr, count_ptr, chunk_ptr, listed_ptr,
    base: tl.int64, chunk_base: tl.int64, BITS: tl.constexpr, DOES: tl.constexpr, CHANGES: tl.constexpr,
):  # fmt: skip
    """Turn what was counted of new bits of bands into what old bits have, by the changes whose class differs:
    sizes of classes, or counts in chunks, and how many such changes each chunk has. Then, with the end of each
    chunk's list instead of that number, list them: place in the chunk, and class << 8.
    """
    g = tl.program_id(0).to(tl.int64)
    high = tl.load(end_ptr + g)
    first, jump = _begin(tl.load(begin_ptr + g), CHANGES)
    for start in range(first, high, jump):
        k = start + tl.arange(0, CHANGES)
        is_in = k < high
        number, row, column = _change(band_ptr + 6 * g, at_ptr, k, is_in)
        block = block_ptr + number * _FIELDS
        new = _bits(block, row, column, is_in, BITS)
        old = new - tl.load(step_ptr + k, is_in, other=0)
        classes_ptr = class_ptr + tl.load(block + _GROUP, is_in, other=0) * 256
        before = tl.load(classes_ptr + _field(block, old, is_in), is_in, other=0).to(tl.int32)
        after = tl.load(classes_ptr + _field(block, new, is_in), is_in, other=0).to(tl.int32)
        differs = is_in & (before != after)
        place = row * tl.load(block + _COLUMNS, is_in, other=0) + column
        chunk = place // _CHUNK
        of_chunk = chunk_ptr + (tl.load(block + _BEFORE, is_in, other=0) - chunk_base + chunk)
        one = tl.full((CHANGES,), 1, tl.int32)
        if DOES == _LISTS:
            to = tl.atomic_add(of_chunk, -one, differs, sem="relaxed") - 1
            line = (place % _CHUNK).to(tl.int32) | (before << 8)
            tl.store(listed_ptr + to, line.to(tl.int16), differs)
        else:
            classes = tl.load(block + _CLASSES, is_in, other=0)
            for side in tl.static_range(2):
                c = before if side == 0 else after
                gain = one if side == 0 else -one
                counts = differs & (c < classes)
                if DOES == _SIZES:
                    pair = count_ptr + tl.load(block + _PAIR, is_in, other=0) + c
                    tl.atomic_add(pair, gain.to(tl.int64), counts, sem="relaxed")
                else:  # four bytes at once: in the end none of them has borrowed from the next
                    byte = tl.load(block + _COUNT, is_in, other=0) - base + chunk
                    byte += c * tl.load(block + _CHUNK_COUNT, is_in, other=0)
                    gain = gain << ((byte & 3) * 8).to(tl.int32)
                    tl.atomic_add(count_ptr + (byte >> 2), gain, counts, sem="relaxed")
            if DOES == _COUNTS:
                tl.atomic_add(of_chunk, one, differs, sem="relaxed")


@triton.jit(do_not_specialize=["k_base"])
def _classify(
    band_ptr, begin_ptr, end_ptr, bound_ptr, block_ptr, class_ptr, at_ptr, step_ptr, number_ptr, place_ptr, to_class_ptr,
    to_step_ptr, k_base: tl.int64, BITS: tl.constexpr, CHANGES: tl.constexpr,
):  # fmt: skip
    """Write block, place in it, class and step of each change of bands, whose bits are new."""
    g = tl.program_id(0).to(tl.int64)
    low_k = tl.load(begin_ptr + g)
    high = tl.load(end_ptr + g)
    to = tl.load(bound_ptr + g) - k_base - low_k
    first, jump = _begin(low_k, CHANGES)
    for start in range(first, high, jump):
        k = start + tl.arange(0, CHANGES)
        is_in = k < high
        number, row, column = _change(band_ptr + 6 * g, at_ptr, k, is_in)
        block = block_ptr + number * _FIELDS
        step = tl.load(step_ptr + k, is_in, other=0)
        field = _field(block, _bits(block, row, column, is_in, BITS) - step, is_in)
        c = tl.load(class_ptr + tl.load(block + _GROUP, is_in, other=0) * 256 + field, is_in, other=0)
        place = row * tl.load(block + _COLUMNS, is_in, other=0) + column
        tl.store(number_ptr + to + k, number.to(tl.int32), is_in)
        tl.store(place_ptr + to + k, place.to(tl.int32), is_in)
        tl.store(to_class_ptr + to + k, c, is_in)
        tl.store(to_step_ptr + to + k, step, is_in)


@triton.jit(do_not_specialize=["base", "pair_base", "chunk_base", "last"])
def _rank(
    block_ptr, of_ptr, count_ptr, before_ptr, end_ptr, listed_ptr, pair_ptr, number_ptr, place_ptr, class_ptr, key_ptr,
    base: tl.int64, pair_base: tl.int64, chunk_base: tl.int64, last: tl.int64, BITS: tl.constexpr, UNIT: tl.constexpr,
    CHANGES: tl.constexpr,
):  # fmt: skip
    """Write where each change comes if elements are ordered by block, class and rank; the bits are new."""
    k = tl.program_id(0).to(tl.int64) * CHANGES + tl.arange(0, CHANGES)
    is_in = k < last
    block = block_ptr + tl.load(number_ptr + k, is_in, other=0).to(tl.int64) * _FIELDS
    place = tl.load(place_ptr + k, is_in, other=0)
    c = tl.load(class_ptr + k, is_in, other=0)
    chunk = place // _CHUNK
    span = tl.load(block + _COUNT, is_in, other=0) - base + chunk
    span = (span + c.to(tl.int64) * tl.load(block + _CHUNK_COUNT, is_in, other=0)) // _SPAN
    first_key = tl.load(pair_ptr + tl.load(block + _PAIR, is_in, other=0) - pair_base + c, is_in, other=0)
    first_key += tl.load(before_ptr + span, is_in, other=0)
    is_before = tl.arange(0, _SPAN)[None, :] < (chunk % _SPAN)[:, None]
    first_key += tl.sum(tl.where(is_before, _span_counts(count_ptr, span, is_in), 0), axis=1)
    is_of = _of_class(block, chunk, is_in, c, of_ptr, end_ptr, listed_ptr, chunk_base, BITS, UNIT, True)
    is_of = is_of & (_elements(UNIT) < (place % _CHUNK)[:, None, None])
    tl.store(key_ptr + k, first_key + tl.sum(tl.sum(is_of.to(tl.int32), axis=2), axis=1), is_in)


@triton.jit(do_not_specialize=["first", "last", "size"])
def _mark(key_ptr, mark_ptr, first: tl.int64, last: tl.int64, size: tl.int64, CHANGES: tl.constexpr):
    """Set the bits of keys that are at least `first` and less than that plus `size`."""
    k = tl.program_id(0).to(tl.int64) * CHANGES + tl.arange(0, CHANGES)
    key = tl.load(key_ptr + k, k < last, other=-1) - first
    inside = (key >= 0) & (key < size) & (k < last)
    bit = tl.full((CHANGES,), 1, tl.int32) << (key & 31).to(tl.int32)
    tl.atomic_or(mark_ptr + (key >> 5), bit, inside, sem="relaxed")


@triton.jit(do_not_specialize=["words"])
def _count_marks(mark_ptr, count_ptr, words: tl.int64, WORDS: tl.constexpr):
    word = tl.program_id(0).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    marks = tl.load(mark_ptr + word, word < words, other=0).to(tl.uint32, bitcast=True)
    tl.store(count_ptr + word, popcount(marks), word < words)


@triton.jit
def _order(mark_ptr, end_ptr, key, inside):
    """Return how many marked keys are less than each of these."""
    word = tl.load(mark_ptr + (key >> 5), inside, other=0).to(tl.uint32, bitcast=True)
    above = word >> (key & 31).to(tl.uint32)
    return tl.load(end_ptr + (key >> 5), inside, other=0).to(tl.int64) - popcount(above)


@triton.jit(do_not_specialize=["last"])
def _move_ranked(
    key_ptr, mark_ptr, end_ptr, from_class_ptr, step_ptr, key_out_ptr, class_ptr, to_step_ptr, last: tl.int64,
    CHANGES: tl.constexpr,
):  # fmt: skip
    k = tl.program_id(0).to(tl.int64) * CHANGES + tl.arange(0, CHANGES)
    is_in = k < last
    key = tl.load(key_ptr + k, is_in, other=0)
    to = _order(mark_ptr, end_ptr, key, is_in)
    tl.store(key_out_ptr + to, key, is_in)
    tl.store(class_ptr + to, tl.load(from_class_ptr + k, is_in, other=0), is_in)
    tl.store(to_step_ptr + to, tl.load(step_ptr + k, is_in, other=0), is_in)


@triton.jit(do_not_specialize=["first", "last", "size", "done"])
def _move_placed(
    key_ptr, mark_ptr, end_ptr, number_ptr, moved_ptr, step_ptr, at_ptr, to_step_ptr, first: tl.int64, last: tl.int64,
    size: tl.int64, done: tl.int64, CHANGES: tl.constexpr,
):  # fmt: skip
    k = tl.program_id(0).to(tl.int64) * CHANGES + tl.arange(0, CHANGES)
    position = tl.load(key_ptr + k, k < last, other=-1)
    key = position - first
    inside = (key >= 0) & (key < size) & (k < last)
    to = _order(mark_ptr, end_ptr, key, inside) + done
    to += tl.load(moved_ptr + tl.load(number_ptr + k, inside, other=0), inside, other=0)
    tl.store(at_ptr + to, position.to(tl.int32), inside)
    tl.store(to_step_ptr + to, tl.load(step_ptr + k, inside, other=0), inside)


@triton.jit(do_not_specialize=["b_base", "pair_base", "k_base"])
def _gaps(
    bound_ptr, block_ptr, class_ptr, key_ptr, place_ptr, size_ptr, level_ptr, ratio_ptr, first_ptr, gap_ptr,
    b_base: tl.int64, pair_base: tl.int64, k_base: tl.int64, GAP: tl.constexpr, CHANGES: tl.constexpr,
):  # fmt: skip
    """Write the gap before each change of blocks whose changes are ordered by class and rank;
    `counts.gap_before`.
    """
    b = tl.program_id(0).to(tl.int64) + b_base
    block = block_ptr + b * _FIELDS
    pair = tl.load(block + _PAIR)
    first = tl.load(block + _CLASS)
    low = tl.load(bound_ptr + b)
    high = tl.load(bound_ptr + b + 1)
    for start in range(low, high, CHANGES):
        k = start + tl.arange(0, CHANGES)
        is_in = k < high
        later = is_in & (k > low)
        c = tl.load(class_ptr + k, is_in, other=0).to(tl.int64)
        rank = tl.load(key_ptr + k - k_base, is_in, other=0) - tl.load(
            place_ptr + pair - pair_base + c, is_in, other=0
        )
        begin = tl.load(class_ptr + k - 1, later, other=0).to(tl.int64)
        begin = tl.where(later, begin, tl.load(first_ptr + b).to(tl.int64))
        begin = tl.where(is_in, begin, c)
        before = tl.load(key_ptr + k - 1 - k_base, later, other=0) - tl.load(
            place_ptr + pair - pair_base + begin, later, other=0
        )
        before = tl.where(later, before, -1)
        gap = rank - before - 1
        # Only where a class begins
        crosses = is_in & (begin != c)
        most = tl.max(tl.where(crosses, c - begin, 0), axis=0)
        if most > 0:
            level = tl.load(level_ptr + first + begin, crosses, other=0)
            cross = tl.load(size_ptr + pair + begin, crosses, other=0) - before - 1
            for j in range(1, most):
                to = begin + j
                over = crosses & (to < c)
                ratio = tl.load(
                    ratio_ptr + (level - tl.load(level_ptr + first + to, over, other=0)), over, other=0
                )
                cross += (tl.load(size_ptr + pair + to, over, other=0) * ratio) >> _RATIO_BITS
            ratio = tl.load(
                ratio_ptr + (level - tl.load(level_ptr + first + c, crosses, other=0)), crosses, other=0
            )
            cross += (((rank + 1) * ratio) >> _RATIO_BITS) - 1
            gap = tl.where(crosses, cross, gap)
        tl.store(gap_ptr + k, gap.to(GAP), is_in)


@triton.jit(do_not_specialize=["streams"])
def _decode(
    words_ptr, word_ptr, bound_ptr, moved_ptr, block_ptr, first_ptr, size_ptr, level_ptr, ratio_ptr, slot_ptr, rank_ptr,
    class_ptr, step_ptr, good_ptr, streams: tl.int64, limit, STEP: tl.constexpr, NUMBER: tl.constexpr,
    STEPS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Decode a stream of each block: class and rank of each change, and its step."""
    s = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    there = s < streams
    at = tl.load(word_ptr + s, there, other=0)
    end = tl.load(word_ptr + s + 1, there, other=0)
    moved = tl.load(moved_ptr + s, there, other=0)
    k = tl.load(bound_ptr + s, there, other=0) + moved
    last = tl.load(bound_ptr + s + 1, there, other=0) + moved
    block = block_ptr + s * _FIELDS
    pair = tl.load(block + _PAIR, there, other=0)
    group = tl.load(block + _CLASS, there, other=0)
    classes = tl.load(block + _CLASSES, there, other=1)
    c = tl.load(first_ptr + s, there, other=0).to(tl.int64)
    size = tl.load(size_ptr + pair + c, there, other=0)
    x, at, good = _open(words_ptr, at, end, there & (k < last))
    rank = tl.full((LANES,), -1, tl.int64)
    for _ in range(tl.max(last - k, axis=0)):
        on = good & (k < last)
        gap, at, x, fits = _pull_number(words_ptr, at, end, x, 2 * (group + c), slot_ptr, on, tl.uint64, 3)
        good = good & ((fits & ((gap >> 56) == 0)) | (on == 0))
        on = on & good
        rest = gap.to(tl.int64)
        left = size - rank - 1
        rank += tl.where(on & (rest < left), rest + 1, 0)
        crossing = on & (rest >= left)
        if tl.max(crossing.to(tl.int32), axis=0) > 0:
            rest -= left
            to = c
            level = tl.load(level_ptr + group + c, crossing, other=0)
            searching = crossing
            while tl.max(searching.to(tl.int32), axis=0) > 0:
                to += searching.to(tl.int64)
                good = good & ((to < classes) | (searching == 0))
                searching = searching & (to < classes)
                ratio = tl.load(
                    ratio_ptr + (level - tl.load(level_ptr + group + to, searching, other=0)),
                    searching,
                    other=1,
                )
                span = (tl.load(size_ptr + pair + to, searching, other=0) * ratio) >> _RATIO_BITS
                found = searching & (rest < span)
                wanted = tl.where(found, rest + 1, 1) << _RATIO_BITS
                place = (wanted + ratio - 1) // ratio
                right = ((place * ratio) >> _RATIO_BITS) == rest + 1
                good = good & (right | (found == 0))
                rank = tl.where(found, place - 1, rank)
                rest = tl.where(searching & (found == 0), rest - span, rest)
                searching = searching & (found == 0)
            c = tl.where(crossing & good, to, c)
            size = tl.where(crossing & good, tl.load(size_ptr + pair + c, crossing & good, other=0), size)
            on = on & good
        step, at, x, fits = _pull_number(
            words_ptr, at, end, x, 2 * (group + c) + 1, slot_ptr, on, NUMBER, STEPS
        )
        good = good & ((fits & (step <= limit.to(NUMBER))) | (on == 0))
        on = on & good
        tl.store(rank_ptr + k, rank.to(tl.int32), on)
        tl.store(class_ptr + k, c.to(tl.uint8), on)
        tl.store(step_ptr + k, _unzigzag(step, STEP), on)
        k += on.to(tl.int64)
    tl.store(good_ptr + s, (good & (x == 1) & (at == end)).to(tl.int8), there)


@triton.jit(do_not_specialize=["base", "begin", "last"])
def _search(
    block_ptr, count_ptr, before_ptr, number_ptr, moved_ptr, rank_ptr, class_ptr, step_ptr, chunk_ptr, in_chunk_ptr,
    to_class_ptr, to_step_ptr, base: tl.int64, begin: tl.int64, last: tl.int64, CHANGES: tl.constexpr,
):  # fmt: skip
    """Write in which chunk each change is, its rank among the chunk's elements, its class and its step."""
    k = tl.program_id(0).to(tl.int64) * CHANGES + tl.arange(0, CHANGES)
    is_in = k < last
    number = tl.load(number_ptr + k, is_in, other=0)
    block = block_ptr + number.to(tl.int64) * _FIELDS
    at = k + begin + tl.load(moved_ptr + number, is_in, other=0)
    spans = tl.load(block + _CHUNK_COUNT, is_in, other=0) // _SPAN
    of = tl.load(class_ptr + at, is_in, other=0)
    c = of.to(tl.int64)
    rank = tl.load(rank_ptr + at, is_in, other=0)
    tl.store(to_class_ptr + k, of, is_in)
    tl.store(to_step_ptr + k, tl.load(step_ptr + at, is_in, other=0), is_in)
    first = (tl.load(block + _COUNT, is_in, other=0) - base) // _SPAN + c * spans
    # The last span before which there are at most `rank` elements of the class.
    span = tl.zeros((CHANGES,), tl.int64)
    half = tl.max(spans, axis=0)
    while half > 0:
        further = span + half
        fits = is_in & (further < spans)
        fits = fits & (tl.load(before_ptr + first + further, fits, other=0) <= rank)
        span = tl.where(fits, further, span)
        half = tl.where(half == 1, 0, (half + 1) // 2)
    rank -= tl.load(before_ptr + first + span, is_in, other=0)
    # And the first of its chunks up to whose end there are more.
    end = tl.cumsum(_span_counts(count_ptr, first + span, is_in), axis=1)
    is_before = end <= rank[:, None]
    tl.store(chunk_ptr + k, span * _SPAN + tl.sum(is_before.to(tl.int32), axis=1), is_in)
    rank -= tl.max(tl.where(is_before, end, 0), axis=1)
    tl.store(in_chunk_ptr + k, rank.to(tl.uint8), is_in)


@triton.jit(do_not_specialize=["chunk_base", "last"])
def _places(
    block_ptr, of_ptr, end_ptr, listed_ptr, number_ptr, rank_ptr, class_ptr, key_ptr, chunk_base: tl.int64,
    last: tl.int64, BITS: tl.constexpr, UNIT: tl.constexpr, ARE_NEW: tl.constexpr, CHANGES: tl.constexpr,
):  # fmt: skip
    """Turn the chunk of each change into its position."""
    k = tl.program_id(0).to(tl.int64) * CHANGES + tl.arange(0, CHANGES)
    is_in = k < last
    block = block_ptr + tl.load(number_ptr + k, is_in, other=0).to(tl.int64) * _FIELDS
    c = tl.load(class_ptr + k, is_in, other=0)
    rank = tl.load(rank_ptr + k, is_in, other=0).to(tl.int32)
    chunk = tl.load(key_ptr + k, is_in, other=0)
    is_of = _of_class(block, chunk, is_in, c, of_ptr, end_ptr, listed_ptr, chunk_base, BITS, UNIT, ARE_NEW)
    count = is_of.to(tl.int32)
    of_unit = tl.sum(count, axis=2)
    before = (tl.cumsum(of_unit, axis=1) - of_unit)[:, :, None] + tl.cumsum(count, axis=2) - count
    own = is_of & (before == rank[:, None, None])
    place = chunk * _CHUNK + tl.sum(tl.sum(tl.where(own, _elements(UNIT), 0), axis=2), axis=1)
    columns = tl.load(block + _COLUMNS, is_in, other=1)
    row = (place.to(tl.uint32) // columns.to(tl.uint32)).to(tl.int64)
    jump = tl.load(block + _WIDTH, is_in, other=0) - columns
    tl.store(key_ptr + k, tl.load(block + _FIRST, is_in, other=0) + row * jump + place, is_in)


@dataclasses.dataclass(frozen=True)
class Changes:
    """The changes of blocks whose bits are new, band by band, on the device.

    Attributes:
        band_GF: The table of the bands, int64[G, 6], as in `kernels.native.regroup`.
        begin_G, end_G: First change of each in the delta, and the one behind the last; int64.
        bound_G: The first change of each among those of all bands, int64.
        at_K: The low 32 bits of positions of the delta, int32.
        step_K: Its steps, unsigned.
        bits_N: The memory in which all the bits are.
    """

    band_GF: torch.Tensor
    begin_G: torch.Tensor
    end_G: torch.Tensor
    bound_G: torch.Tensor
    at_K: torch.Tensor
    step_K: torch.Tensor
    bits_N: torch.Tensor

    def of_bands(self, first: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the table of bands from number `first` on, and their first and last changes."""
        return self.band_GF[first:], self.begin_G[first:], self.end_G[first:]

    def tally(self, blocks: int) -> torch.Tensor:
        """Count the changes of each block, int32[B]."""
        count_B = torch.zeros(blocks, dtype=torch.int32, device=self.at_K.device)
        with on(self.at_K.device):
            grid = programs(len(self.band_GF), self.at_K.numel())
            _tally[grid](*self.of_bands(), self.at_K, count_B, _CHANGES)
        return count_B


def programs(bands: int, changes: int) -> tuple[int, int]:
    """Return the grid of a kernel that takes the changes of bands. A band has programs for four times the
    mean, which repeat if it has more.
    """
    return bands, min(max(-(-4 * changes // (bands * _CHANGES)), 1), _MOST_PROGRAMS)


def _words(classes: Classes) -> np.ndarray:
    """Return what `_count_chunks` sums: for each eight classes of a group, and each value of the field, 1 in
    the byte of the value's class, int64[W, 256]. Group g has rows from `bound_G[g] // 8 + g` on.
    """
    class_G, groups = classes.bound_G, classes.bound_G.size - 1
    word_WE = np.zeros((int(class_G[-1]) // 8 + groups, 256), np.uint64)
    group_L = np.repeat(np.arange(groups), np.diff(class_G))
    class_L = np.arange(group_L.size) - class_G[group_L]
    row_L, one_L = (
        class_G[group_L] // 8 + group_L + class_L // 8,
        np.uint64(1) << (class_L % 8 * 8).astype(np.uint64),
    )
    for row, low, span, one in zip(row_L, classes.low_L.astype(np.int64), classes.span_L, one_L, strict=True):
        word_WE[row, low : low + span + 1] = one
    return word_WE.view(np.int64)


class Batch(NamedTuple):
    """Blocks that are taken at once.

    Attributes:
        low, high: The first one, and the one behind the last.
        band, band_end: The same of their bands.
        chunks, classes: The most that a block has.
        first, last: Position of the first element, and the one behind the last.
        unit: How many elements are read at once, because rows begin and end at multiples of them.
        room_bytes: The most that counts, lists, keys and bitmaps of `decode` or `rank` take.
    """

    low: int
    high: int
    band: int
    band_end: int
    chunks: int
    classes: int
    first: int
    last: int
    unit: int
    room_bytes: int


class BlockBits:
    """Blocks of one width whose elements' bits are on the device: the old ones, or the new ones with their
    changes.

    Args:
        row_BF: Their table, int64[B, GROUP], on the host. Their memory has to stay as it is.
        band_GF: The bands of the blocks, int64[G, 6], on the host.
        bound_B: First change of each, and the number of changes behind the last; int64[B + 1], on the host.
        width: Bytes of an element.
        device: Where everything is.
        changes: The changes, if the bits are new. Then old ones are not made: the changes whose class differs
            are listed by chunk.

    Attributes:
        batches: What `divide` cuts all blocks into.
    """

    def __init__(
        self,
        row_BF: np.ndarray,
        band_GF: np.ndarray,
        bound_B: np.ndarray,
        width: int,
        device: torch.device,
        changes: Changes | None = None,
    ) -> None:
        self.row_BF = np.pad(row_BF, ((0, 0), (0, FIELDS - GROUP)))
        self.row_BF[:, WIDTH] = np.repeat(band_GF[:, 1], np.diff(band_GF[:, 5], append=len(row_BF)))
        self.bound_B, self.width, self.device, self.changes = bound_B, width, device, changes
        self.bound = torch.from_numpy(bound_B).to(device)
        self._band_GF, self._element_B = band_GF, row_BF[:, COLUMNS] * row_BF[:, ROWS]

    @property
    def count(self) -> int:
        """Number of blocks."""
        return len(self.row_BF)

    def survey(self, run_R: np.ndarray, period_R: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Count values of the field in runs of blocks with changes, as `kernels.native.survey` before it
        scales the first.

        Args:
            run_R: First block of each run, and the number of blocks.
            period_R: Every how manieth sample of each run counts.

        Returns:
            int32[R, 256], and int32[R, 256, S] of the S symbols that steps may have; on the device.
        """
        assert self.changes is not None
        changes, runs, symbols, device = self.changes, run_R.size - 1, 32 * self.width, self.device
        table_BF = torch.from_numpy(self.row_BF).to(device)
        sample_B = -(-self.row_BF[:, COLUMNS] // _SAMPLE) * self.row_BF[:, ROWS]
        before_B = np.cumsum(sample_B) - sample_B
        before_B -= np.repeat(before_B[run_R[:-1]], np.diff(run_R))
        run_B = torch.from_numpy(np.repeat(np.arange(runs, dtype=np.int32), np.diff(run_R))).to(device)
        before, period = torch.from_numpy(before_B).to(device), torch.from_numpy(period_R).to(device)
        element_RE = torch.zeros((runs, 256), dtype=torch.int32, device=device)
        step_RES = torch.zeros((runs, 256, symbols), dtype=torch.int32, device=device)
        bits = UNSIGNED[self.width]
        with on(device):
            _survey_elements[(self.count,)](table_BF, run_B, before, period, element_RE, bits, 32)
            _survey_steps[programs(len(changes.band_GF), changes.at_K.numel())](
                *changes.of_bands(), table_BF, run_B, changes.at_K, changes.step_K, step_RES, bits, symbols, _CHANGES
            )  # fmt: skip
        return element_RE, step_RES

    def divide(self, group_B: np.ndarray, classes: Classes) -> None:
        """Divide the blocks' elements into classes. `group_B` has the number of each block's group."""
        row_BF, class_G = self.row_BF, classes.bound_G
        class_B = np.diff(class_G)[group_B]
        chunk_B = -(-self._element_B // (CHUNK * SPAN)) * SPAN
        self.pair_B, self.count_B, self.chunk_B = map(bounds, (class_B, class_B * chunk_B, chunk_B))
        first_B3 = np.stack((self.count_B, self.chunk_B), axis=1)[:-1]
        columns = group_B, class_G[group_B], class_B, self.pair_B[:-1], chunk_B, *first_B3.T
        row_BF[:, GROUP:WIDTH] = np.stack(columns, axis=1)
        self.table_BF = torch.from_numpy(row_BF).to(self.device)
        arrays = classes.level_L, classes.by_value(255), _words(classes)
        self.level_L, self.class_GE, self.word_WE = (
            torch.from_numpy(each).to(self.device) for each in arrays
        )
        self.size_P = torch.zeros(int(self.pair_B[-1]), dtype=torch.int64, device=self.device)
        self.batches = self._batches(class_B, chunk_B)

    def _batches(self, class_B: np.ndarray, chunk_B: np.ndarray) -> list[Batch]:
        """Cut the blocks where bands begin, into batches of which what is counted is bounded."""
        row_BF, band_GF = self.row_BF, self._band_GF
        edge_E = np.append(band_GF[:, 5], self.count)
        last_G = band_GF[:, 0] + np.maximum(band_GF[:, 1] * band_GF[:, 4], band_GF[:, 2])
        position_E = np.append(band_GF[:, 0], last_G[-1:])
        room_E = self._room_bytes(0, edge_E, position_E)
        band_C = [0]
        while band_C[-1] < len(band_GF):
            low = band_C[-1]
            fits = int(np.searchsorted(room_E, room_E[low] + MOST_BYTES, side="right")) - 1
            band_C.append(max(fits, low + 1))
        low_C = edge_E[band_C[:-1]]
        is_even_B = (row_BF[:, [COLUMNS, STRIDE]] % _UNIT == 0).all(axis=1)
        is_even_B &= row_BF[:, ADDRESS] % min(_UNIT * self.width, 16) == 0
        first_C, last_C = band_GF[band_C[:-1], 0], last_G[np.array(band_C[1:]) - 1]
        columns = (
            *(low_C, edge_E[band_C[1:]], band_C[:-1], band_C[1:]),
            *(np.maximum.reduceat(chunk_B, low_C), np.maximum.reduceat(class_B, low_C)),
            *(first_C, last_C, np.where(np.logical_and.reduceat(is_even_B, low_C), _UNIT, 1)),
            self._room_bytes(low_C, edge_E[band_C[1:]], np.minimum(last_C - first_C, MOST_ELEMENTS)),
        )
        return [Batch(*line) for line in np.stack(columns, axis=1).tolist()]

    def _room_bytes(self, low: np.ndarray | int, high_C: np.ndarray, position_C: np.ndarray) -> np.ndarray:
        """Return `Batch.room_bytes` of blocks that lie at so many positions, or what `rank` takes."""
        of_change, of_chunk = (14 + self.width, 0) if self.changes is None else (27 + self.width, 4)
        of_B = self.count_B, self.chunk_B, self.bound_B
        count_C, chunk_C, changed_C = (each[high_C] - each[low] for each in of_B)
        found: np.ndarray = 5 * count_C // 4 + of_chunk * chunk_C + 8 * -(-position_C // 32)
        return found + of_change * changed_C

    def counts(self, of: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return how many elements of each class are in each chunk of the blocks of a batch, uint8, and before each
        span, int32; sets their sizes.

        Of new bits, also where the list of each chunk begins, int32, with the end of all, and the lists
        (`_correct`), int16; else any arrays.
        """
        blocks, base = of.high - of.low, int(self.count_B[of.low])
        size = int(self.count_B[of.high]) - base
        count_N = torch.empty(size, dtype=torch.uint8, device=self.device)
        before_N = torch.empty(size // SPAN, dtype=torch.int32, device=self.device)
        self._count(count_N, of, of.high, False)
        lists = count_N, count_N
        if self.changes is not None:
            chunks = int(self.chunk_B[of.high] - self.chunk_B[of.low])
            changed = int(self.bound_B[of.high] - self.bound_B[of.low])
            begin_C = torch.zeros(chunks + 1, dtype=torch.int32, device=self.device)
            lists = begin_C, torch.empty(changed, dtype=torch.int16, device=self.device)
            self._correct(self.changes, of, count_N.view(torch.int32), lists, COUNTS)
            torch.cumsum(begin_C, 0, dtype=torch.int32, out=begin_C)
            self._correct(self.changes, of, count_N, lists, LISTS)
        with on(self.device):
            _sum_chunks[(blocks, of.classes)](
                self.table_BF, count_N, before_N, self.size_P, of.low, base, 128
            )
        return count_N, before_N, *lists

    def measure(self) -> None:
        """Set the sizes of all classes, by one launch unless rows lie differently."""
        for _, some in itertools.groupby(self.batches, lambda of: of.unit):
            first, *others = some
            chunks, last = max(of.chunks for of in (first, *others)), (others or [first])[-1]
            self._count(self.size_P, first._replace(chunks=chunks), last.high, True)
            if self.changes is not None:
                every = first._replace(high=last.high, band_end=last.band_end)
                self._correct(self.changes, every, self.size_P, (self.size_P, self.size_P), SIZES)

    def _count(self, to: torch.Tensor, of: Batch, high: int, are_summed: bool) -> None:
        """Count the elements of each class in the chunks of blocks from a batch's first one on and below `high`, or
        add them to sizes.
        """
        chunks = min(_CHUNKS[of.unit], 64 // self.width)
        programs_ = min(triton.cdiv(of.chunks, _TURNS * chunks), _MOST_PROGRAMS)
        with on(self.device):
            _count_chunks[(high - of.low, programs_)](
                self.table_BF, self.word_WE, to, of.low, int(self.count_B[of.low]), UNSIGNED[self.width], of.unit,
                chunks, are_summed,
            )  # fmt: skip

    def _correct(
        self,
        changes: Changes,
        of: Batch,
        to: torch.Tensor,
        lists: tuple[torch.Tensor, torch.Tensor],
        does: int,
    ) -> None:
        """Let `_correct` take the changes of a batch; `to` are sizes or counts."""
        changed = int(self.bound_B[of.high] - self.bound_B[of.low])
        with on(self.device):
            _correct[programs(of.band_end - of.band, changed)](
                *changes.of_bands(of.band), self.table_BF, self.class_GE, changes.at_K, changes.step_K, to, *lists,
                int(self.count_B[of.low]), int(self.chunk_B[of.low]), UNSIGNED[self.width], does, _CHANGES,
            )  # fmt: skip

    @property
    def room_bytes(self) -> int:
        """The most bytes that a batch takes."""
        return max((batch.room_bytes for batch in self.batches), default=0)

    def first_classes(self) -> torch.Tensor:
        """Return the first class of each block that has an element, int32[B], once all are counted."""
        first_B = torch.empty(self.count, dtype=torch.int32, device=self.device)
        with on(self.device):
            _first_classes[(triton.cdiv(self.count, 128),)](
                self.table_BF, self.size_P, first_B, self.count, 128
            )
        return first_B


MOST_BYTES = 1 << 28
"""Most bytes of a batch, if a single band has not more; see `Batch.room_bytes`."""

MOST_ELEMENTS = 1 << 30
"""Elements that a bitmap of keys has at most."""


@functools.cache
def ratio(device: torch.device) -> torch.Tensor:
    """Return `rans.RATIO` on a device, which stays there."""
    return torch.from_numpy(RATIO).to(device)


def rank(bits: BlockBits, gap_bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Order the changes of blocks by class, as `kernels.native.rank`.

    Args:
        bits: The blocks, divided into classes, with their changes.
        gap_bits: Bits that no gap exceeds.

    Returns:
        Gaps, uint32 or uint64[K], classes, uint8, and steps, block after block; the class in which each block
        begins, int32[B].
    """
    assert bits.changes is not None
    changes, at_K, step_K = bits.changes, bits.changes.at_K, bits.changes.step_K
    device, changed = at_K.device, int(bits.bound_B[-1])
    wide = gap_bits > 32
    gap_K = torch.empty(changed, dtype=torch.int64 if wide else torch.int32, device=device)
    class_K = torch.empty(changed, dtype=torch.uint8, device=device)
    to_step_K = torch.empty(changed, dtype=step_K.dtype, device=device)
    first_B = torch.empty(bits.count, dtype=torch.int32, device=device)
    ratios, width = ratio(device), UNSIGNED[bits.width]
    gap = gap_K.view(torch.uint64 if wide else torch.uint32)
    element_B = bounds(bits.row_BF[:, COLUMNS] * bits.row_BF[:, ROWS])
    for batch in bits.batches:
        low, high, band, band_end, *_ = batch
        count_N, before_N, *lists = bits.counts(batch)
        begin, end = int(bits.bound_B[low]), int(bits.bound_B[high])
        if begin == end:
            continue
        pair, base, chunk = (int(of_B[low]) for of_B in (bits.pair_B, bits.count_B, bits.chunk_B))
        size_P = bits.size_P[pair : int(bits.pair_B[high])]
        place_P = torch.cumsum(size_P, 0) - size_P
        elements = int(element_B[high] - element_B[low])
        key_K, ordered_K = (torch.empty(end - begin, dtype=torch.int64, device=device) for _ in range(2))
        number_K, at_place_K = (torch.empty(end - begin, dtype=torch.int32, device=device) for _ in range(2))
        from_class_K = torch.empty(end - begin, dtype=torch.uint8, device=device)
        from_step_K = torch.empty(end - begin, dtype=step_K.dtype, device=device)
        with on(device):
            _classify[programs(band_end - band, end - begin)](
                *changes.of_bands(band), changes.bound_G[band:], bits.table_BF, bits.class_GE, at_K, step_K, number_K,
                at_place_K, from_class_K, from_step_K, begin, width, _CHANGES,
            )  # fmt: skip
            _rank[(triton.cdiv(end - begin, _RANKED[batch.unit]),)](
                bits.table_BF, bits.class_GE, count_N, before_N, *lists, place_P, number_K, at_place_K, from_class_K,
                key_K, base, pair, chunk, end - begin, width, batch.unit, _RANKED[batch.unit],
            )  # fmt: skip
            marks, ends = _bitmap(key_K, 0, elements)
            _move_ranked[(triton.cdiv(end - begin, _MOVED),)](
                key_K, marks, ends, from_class_K, from_step_K, ordered_K, class_K[begin:end], to_step_K[begin:end],
                end - begin, _MOVED,
            )  # fmt: skip
            _first_classes[(triton.cdiv(high - low, 128),)](
                bits.table_BF[low:high], bits.size_P, first_B[low:high], high - low, 128
            )  # fmt: skip
            _gaps[(high - low,)](
                bits.bound, bits.table_BF, class_K, ordered_K, place_P, bits.size_P, bits.level_L, ratios, first_B, gap,
                low, pair, begin, tl.uint64 if wide else tl.uint32, _CHANGES,
            )  # fmt: skip
    return gap, class_K, to_step_K, first_B


def decode(
    bits: BlockBits,
    words: torch.Tensor,
    word_B: torch.Tensor,
    slot_TL: torch.Tensor,
    moved_B: torch.Tensor,
    at_K: torch.Tensor,
    step_K: torch.Tensor,
) -> bool:
    """Decode the changes of blocks, ascending by position.

    Args:
        bits: The blocks, divided into classes.
        words: The words of all, int32[W].
        word_B: The first word of each block, and the one behind the last; int64[B + 1].
        slot_TL: The tables of all classes, as `gpu_coder.slots` returns them.
        moved_B: How many changes of other tensors lie in the arrays before those of each block, int64.
        at_K: Gets the low 32 bits of positions, int32; mutated.
        step_K: Gets steps, unsigned; mutated.

    Returns:
        Whether all blocks are well formed. If one is not, the arrays are not to be used.
    """
    device, width = bits.device, bits.width
    bits.measure()
    class_K = torch.empty(at_K.numel(), dtype=torch.uint8, device=device)
    good_B = torch.empty(bits.count, dtype=torch.int8, device=device)
    number = tl.uint64 if width == 8 else tl.uint32
    with on(device):  # ranks are where positions will be
        _decode[(triton.cdiv(bits.count, LANES),)](
            words.view(torch.uint32), word_B, bits.bound, moved_B, bits.table_BF, bits.first_classes(), bits.size_P,
            bits.level_L, ratio(device), slot_TL.view(torch.uint32), at_K, class_K, step_K, good_B, bits.count,
            (1 << 8 * width) - 2, UNSIGNED[width], number, _groups(8 * width), LANES, num_warps=1,
        )  # fmt: skip
    if not bool(good_B.all()):
        return False
    _place(bits, moved_B, class_K, at_K, step_K)
    return True


def _place(
    bits: BlockBits, moved_B: torch.Tensor, class_K: torch.Tensor, at_K: torch.Tensor, step_K: torch.Tensor
) -> None:
    """Order changes, which are by block, class and rank, by position; batch by batch, in place.

    Args:
        bits: The blocks.
        moved_B: See `decode`.
        class_K: Class of each change.
        at_K: How many elements of its class come before each in its block; gets positions.
        step_K: Steps; mutated.
    """
    number_B = torch.arange(bits.count, dtype=torch.int32, device=at_K.device)
    change_B = torch.diff(bits.bound)
    for batch in bits.batches:
        if bits.bound_B[batch.low] < bits.bound_B[batch.high]:
            _place_batch(bits, batch, (number_B, change_B, moved_B), class_K, at_K, step_K)


def _place_batch(
    bits: BlockBits,
    batch: Batch,
    of_blocks: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    class_K: torch.Tensor,
    at_K: torch.Tensor,
    step_K: torch.Tensor,
) -> None:
    """As `_place`, of one batch, beside `Batch.room_bytes`; `of_blocks` are number, changes and `moved_B`."""
    device, (number_B, change_B, moved_B), (low, high, *_) = at_K.device, of_blocks, batch
    begin, end = int(bits.bound_B[low]), int(bits.bound_B[high])
    count_N, before_N, *lists = bits.counts(batch)
    number_K = torch.repeat_interleave(number_B[low:high], change_B[low:high], output_size=end - begin)
    kinds = torch.int64, torch.uint8, torch.uint8, step_K.dtype
    key_K, rank_K, of_K, from_K = (torch.empty(end - begin, dtype=kind, device=device) for kind in kinds)
    with on(device):
        _search[(triton.cdiv(end - begin, _CHANGES),)](
            bits.table_BF, count_N, before_N, number_K, moved_B, at_K, class_K, step_K, key_K, rank_K, of_K, from_K,
            int(bits.count_B[low]), begin, end - begin, _CHANGES,
        )  # fmt: skip
        _places[(triton.cdiv(end - begin, _RANKED[batch.unit]),)](
            bits.table_BF, bits.class_GE, *lists, number_K, rank_K, of_K, key_K, int(bits.chunk_B[low]), end - begin,
            UNSIGNED[bits.width], batch.unit, bits.changes is not None, _RANKED[batch.unit],
        )  # fmt: skip
    done = begin
    # more than one only where a single band is larger
    for start in range(batch.first, batch.last, MOST_ELEMENTS):
        size = min(MOST_ELEMENTS, batch.last - start)
        marks, ends = _bitmap(key_K, start, size)
        with on(device):
            _move_placed[(triton.cdiv(end - begin, _MOVED),)](
                key_K, marks, ends, number_K, moved_B, from_K, at_K, step_K, start, end - begin, size, done, _MOVED
            )  # fmt: skip
        if start + size < batch.last:
            done += int(ends[-1])
        del marks, ends  # before there are others


def _bitmap(key_K: torch.Tensor, first: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a bitmap of the keys that are at least `first` and less than that plus `size`, and the sums of
    its bits.
    """
    words = -(-size // 32)
    marks = torch.zeros(words, dtype=torch.int32, device=key_K.device)
    ends = torch.empty_like(marks)
    with on(key_K.device):
        _mark[(triton.cdiv(key_K.numel(), 1024),)](key_K, marks, first, key_K.numel(), size, 1024)
        _count_marks[(triton.cdiv(words, _MARKS),)](marks, ends, words, _MARKS)
        torch.cumsum(ends, 0, dtype=torch.int32, out=ends)
    return marks, ends
