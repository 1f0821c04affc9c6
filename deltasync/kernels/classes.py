"""The classes of the elements of blocks (`context`): their places by class and back, in numba.

A block is rows of a matrix, or one row. Its elements are numbered by row; of each class they are numbered alone. A table has
a row for each block: address of its first element, columns, elements from row to row, rows, position of its first element in
the vector, shift and mask of the field that an element's class follows from. Callers keep that memory alive.

Shapes: B blocks, F fields, K changed elements, C classes, E values of the field (256), G bands of blocks, R runs of blocks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import carray, njit, prange

from deltasync.kernels.coder import decode_pair, limit_of
from deltasync.kernels.compiled import kernel
from deltasync.kernels.counts import PART, bucket, top_of, zigzag
from deltasync.kernels.cpu import prefetch_range, threads
from deltasync.kernels.intrinsics import field_bytes, lanes_between, pointer, popcount, prefetch
from deltasync.kernels.rans import Blocks, Tables

FIELDS = 7
_U0, _U1, _U2, _U4, _U8, _U16, _U32, _U64 = map(np.uint64, (0, 1, 2, 4, 8, 16, 32, 64))
_MOST = np.int32(2**31 - 1)
_LANES = 64
_AHEAD = 8  # prefetch distance, in rows of a tile; hardware does not predict where they lie
_CHANGES_AHEAD = 64
_SAMPLE = 32  # consecutive elements of a sample


class Classes(NamedTuple):
    """Which elements are of which class: those whose field is from `low_C` to `low_C + span_C`; uint8."""

    low_C: np.ndarray
    span_C: np.ndarray


@njit
def _fields(row_F, like):
    """Return the elements of a block, and their fields, uint8[E], filled up with 0 to a multiple of 64."""
    columns, stride, rows = row_F[1], row_F[2], row_F[3]
    bits = carray(pointer(row_F[0], like), (rows - 1) * stride + columns)
    shift, mask = np.uint64(row_F[5]), np.uint64(row_F[6])
    field = np.empty((rows * columns + _LANES - 1) // _LANES * _LANES, np.uint8)
    field[rows * columns :] = 0
    whole = columns // _LANES * _LANES
    for row in range(rows):
        start, to = row * stride, row * columns
        if row + _AHEAD < rows:
            prefetch_range(bits, start + _AHEAD * stride, start + _AHEAD * stride + columns)
        for i in range(0, whole, _LANES):
            field_bytes(bits, start + i, shift, mask, field, to + i)
        for i in range(whole, columns):
            field[np.uint64(to + i)] = np.uint8((np.uint64(bits[np.uint64(start + i)]) >> shift) & mask)
    return bits, field


@njit(forceinline=True)
def _nth_lane(lanes, n):
    """Return the number of the bit that is set after `n` others, without branches, which would often be mispredicted."""
    lane = _U0
    for half in (_U32, _U16, _U8, _U4, _U2, _U1):
        below = popcount(lanes & ((_U1 << half) - _U1))
        is_above = np.uint64(below <= n)
        n -= below * is_above
        lanes >>= half * is_above
        lane += half * is_above
    return lane


@njit
def _ahead(field, count, low_C, span_C, size_BC, b):
    """Return how many elements of each class come before each 64 elements; `size_BC` gets how many there are in all.

    The array is int32[C, a power of two]: places beyond the end have the largest number, so that a search stops before them.
    """
    words, width = field.size // _LANES, 1
    while width <= words:
        width *= 2
    ahead_CW = np.empty((low_C.size, width), np.int32)
    for c in range(low_C.size):
        low, span, total = low_C[c], span_C[c], np.int64(0)
        ahead_W = ahead_CW[c]
        for w in range(words):
            ahead_W[w] = total
            total += np.int64(popcount(lanes_between(field, w * _LANES, low, span)))
        ahead_W[words:] = _MOST
        size_BC[b, c] = total - (field.size - count if low == 0 else 0)
    return ahead_CW


@kernel
def _ranks(row_BF, like, class_E, classes, bound_B, at_K, step_K, size_BC, rank_K, class_K, to_step_K):
    low_C, span_C = classes
    for b in prange(row_BF.shape[0]):
        low, high = bound_B[b], bound_B[b + 1]
        if low == high:
            continue
        row_F = row_BF[b]
        columns, stride, first = row_F[1], row_F[2], row_F[4]
        shift, mask = np.uint64(row_F[5]), np.uint64(row_F[6])
        bits, field = _fields(row_F, like)
        place_C, next_C = np.empty(high - low, np.int64), np.zeros(low_C.size + 1, np.int64)
        row_part = 1.0 / stride  # as in `_regroup`
        for k in range(low, high):
            offset = np.int64(at_K[np.uint64(k)]) - first
            row = np.int64((offset + 0.5) * row_part)
            place = offset - row * (stride - columns)
            of = np.uint8(((np.uint64(bits[np.uint64(offset)]) - np.uint64(step_K[np.uint64(k)])) >> shift) & mask)
            field[np.uint64(place)] = of
            place_C[k - low] = place
            next_C[np.int64(class_E[of]) + 1] += 1
        ahead_CW = _ahead(field, columns * row_F[3], low_C, span_C, size_BC, b)
        for c in range(low_C.size):
            next_C[c + 1] += next_C[c]
        for k in range(low, high):
            place = place_C[k - low]
            c = np.int64(class_E[field[np.uint64(place)]])
            w, below = np.uint64(place) // _U64, (_U1 << (np.uint64(place) % _U64)) - _U1
            lanes = lanes_between(field, np.int64(w * _U64), low_C[c], span_C[c])
            rank = np.int64(ahead_CW[np.uint64(c), w]) + np.int64(popcount(lanes & below))
            to = low + next_C[c]
            next_C[c] += 1
            rank_K[to], class_K[to], to_step_K[to] = rank, c, step_K[k]


@njit
def _place(row_F, field, low_C, span_C, ahead_CW, low, high, rank_K, class_K, at_K, step_K):
    """Turn the decoded places by class of a block into ascending positions."""
    count, steps = high - low, _U0
    place_K, left_K, lanes_K = np.empty(count, np.int64), np.empty(count, np.uint64), np.empty(count, np.uint64)
    while (_U1 << steps) < np.uint64(ahead_CW.shape[1]):
        steps += _U1
    for k in range(count):  # without branches, which would often be mispredicted
        c, rank = np.uint64(class_K[np.uint64(low + k)]), rank_K[np.uint64(low + k)]
        w = _U0  # the last 64 elements before which there are at most `rank` of the class
        for done in range(steps):
            step = steps - done - _U1
            w += np.uint64(ahead_CW[c, w + (_U1 << step)] <= rank) << step
        at = np.int64(w * _U64)
        left_K[k] = np.uint64(rank - ahead_CW[c, w])
        place_K[k], lanes_K[k] = at, lanes_between(field, at, low_C[c], span_C[c])
    for k in range(count):  # a loop of its own, which LLVM vectorizes
        place_K[k] += np.int64(_nth_lane(lanes_K[k], left_K[k]))
    marks, decoded_K = np.zeros(field.size // _LANES, np.uint64), step_K[low:high].copy()
    for k in range(count):
        marks[np.uint64(place_K[k]) // _U64] |= _U1 << (np.uint64(place_K[k]) % _U64)
    to_W, to = np.empty(marks.size, np.int64), low
    for w in range(marks.size):
        to_W[w] = to
        to += np.int64(popcount(marks[w]))
    columns, row_part = row_F[1], 1.0 / row_F[1]  # as in `_regroup`
    for k in range(count):
        place = place_K[k]
        below = (_U1 << np.uint64(place % _LANES)) - _U1
        to = to_W[place // _LANES] + np.int64(popcount(marks[place // _LANES] & below))
        row = np.int64((place + 0.5) * row_part)
        at_K[np.uint64(to)] = row_F[4] + row * row_F[2] + place - row * columns
        step_K[np.uint64(to)] = decoded_K[k]


@kernel
def _decode(row_BF, like, classes, words, word_B2, blocks, tables, limit, rank_K, class_K, at_K, step_K, good_B):
    low_C, span_C = classes
    _, size_BC, bound_B = blocks
    for pair in prange((word_B2.shape[0] + 1) // 2):
        a, b = 2 * pair, min(2 * pair + 1, word_B2.shape[0] - 1)
        _, field_a = _fields(row_BF[a], like)
        ahead_a = _ahead(field_a, row_BF[a, 1] * row_BF[a, 3], low_C, span_C, size_BC, a)
        field_b, ahead_b = field_a, ahead_a
        if a != b:
            _, field_b = _fields(row_BF[b], like)
            ahead_b = _ahead(field_b, row_BF[b, 1] * row_BF[b, 3], low_C, span_C, size_BC, b)
        decode_pair(words, word_B2, blocks, a, b, tables, limit, rank_K, class_K, step_K, good_B)
        if good_B[a]:
            low, high = bound_B[a], bound_B[a + 1]
            _place(row_BF[a], field_a, low_C, span_C, ahead_a, low, high, rank_K, class_K, at_K, step_K)
        if a != b and good_B[b]:
            low, high = bound_B[b], bound_B[b + 1]
            _place(row_BF[b], field_b, low_C, span_C, ahead_b, low, high, rank_K, class_K, at_K, step_K)


@kernel
def _survey(run_R, row_BF, like, bound_B, at_K, step_K, top, period_R, element_RE, step_RES):
    for r in prange(run_R.size - 1):
        element_E, step_ES = element_RE[r], step_RES[r]
        at = np.int64(0)
        for b in range(run_R[r], run_R[r + 1]):
            columns, stride, rows, first = row_BF[b, 1], row_BF[b, 2], row_BF[b, 3], row_BF[b, 4]
            shift, mask = np.uint64(row_BF[b, 5]), np.uint64(row_BF[b, 6])
            bits = carray(pointer(row_BF[b, 0], like), (rows - 1) * stride + columns)
            samples = (columns + _SAMPLE - 1) // _SAMPLE  # of a row
            while at < rows * samples:
                row = at // samples
                start = row * stride + (at - row * samples) * _SAMPLE
                ahead = at + _AHEAD * period_R[r]
                if ahead < rows * samples:
                    row_ahead = ahead // samples
                    prefetch(bits, row_ahead * stride + (ahead - row_ahead * samples) * _SAMPLE)
                for i in range(np.uint64(start), np.uint64(min(start + _SAMPLE, row * stride + columns))):
                    element_E[(np.uint64(bits[i]) >> shift) & mask] += 1
                at += period_R[r]
            at -= rows * samples
            for k in range(bound_B[b], bound_B[b + 1]):
                if k + _CHANGES_AHEAD < bound_B[b + 1]:
                    prefetch(bits, np.int64(at_K[np.uint64(k + _CHANGES_AHEAD)]) - first)
                old = np.uint64(bits[np.uint64(np.int64(at_K[np.uint64(k)]) - first)]) - np.uint64(step_K[np.uint64(k)])
                step, _ = bucket(zigzag(step_K[np.uint64(k)], top))
                step_ES[(old >> shift) & mask, step] += 1


@kernel
def _regroup(bound_G, band_GF, by_tile, at_K, step_K, to_at_K, to_step_K, count_B):
    for g in prange(band_GF.shape[0]):
        first, stride, columns, across = band_GF[g, 0], band_GF[g, 1], band_GF[g, 2], band_GF[g, 3]
        keys = across if by_tile else band_GF[g, 4]
        # Multiply by inverses: a division takes longer than all the rest. With 0.5 added, rounding does not matter.
        row_part, tile_part = 1.0 / stride, 1.0 / columns
        next_C = np.zeros(keys + 1, np.int64)
        next_C[0] = bound_G[g]
        for counting in (True, False):
            for k in range(bound_G[g], bound_G[g + 1]):
                offset = np.int64(at_K[np.uint64(k)]) - first
                c = np.int64((offset + 0.5) * row_part)
                if by_tile:
                    c = np.int64((offset - c * stride + 0.5) * tile_part)
                if counting:
                    next_C[np.uint64(c + 1)] += 1
                else:
                    to = next_C[np.uint64(c)]
                    next_C[np.uint64(c)] += 1
                    to_at_K[np.uint64(to)] = at_K[np.uint64(k)]
                    to_step_K[np.uint64(to)] = step_K[np.uint64(k)]
            if counting:
                for c in range(keys):
                    if by_tile:
                        count_B[band_GF[g, 5] + c] = next_C[c + 1]
                    next_C[c + 1] += next_C[c]


def survey(
    run_R: np.ndarray, row_BF: np.ndarray, bound_B: np.ndarray, at_K: np.ndarray, step_K: np.ndarray, most: int
) -> tuple[np.ndarray, np.ndarray]:
    """Count values of the field in runs of blocks.

    Args:
        run_R: First block of each run, and the number of all blocks.
        row_BF: The table of blocks, over the new bits.
        bound_B: First change of each block, and the number of all changes.
        at_K: Positions of the changes.
        step_K: Their steps.
        most: About how many elements of a run are looked at.

    Returns:
        Estimates for the elements, by their new bits, which hardly differ, float64[R, 256]; and the symbols of the steps of
        changed elements by their old bits, exact, uint32[R, 256, 256].
    """
    size_R = np.add.reduceat(row_BF[:, 1] * row_BF[:, 3], run_R[:-1])
    period_R = np.clip(size_R // most, 1, 64) | 1  # an odd period does not meet the same columns in every row
    element_RE, step_RES = np.zeros((run_R.size - 1, 256), np.int64), np.zeros((run_R.size - 1, 256, 256), np.uint32)
    like = np.empty(0, step_K.dtype)
    with threads(run_R.size - 1):
        _survey(run_R, row_BF, like, bound_B, at_K, step_K, top_of(step_K), period_R, element_RE, step_RES)
    scale_R = size_R / np.maximum(element_RE.sum(axis=1), 1)
    return element_RE * scale_R[:, None], step_RES


def rank(
    row_BF: np.ndarray, bound_B: np.ndarray, at_K: np.ndarray, step_K: np.ndarray, classes: Classes
) -> tuple[Blocks, np.ndarray, np.ndarray, np.ndarray]:
    """Order the changes of blocks by class.

    Args:
        row_BF: The table of blocks, over the new bits.
        bound_B: First change of each block, and the number of all changes.
        at_K: Positions of the changes, block after block, ascending in each.
        step_K: Their steps.
        classes: Every changed element is of one of these by its old bits.

    Returns:
        The arguments of `coder.encode` but the last.
    """
    class_E = np.zeros(256, np.uint8)
    for c, (low, span) in enumerate(zip(*(each.tolist() for each in classes), strict=True)):
        class_E[low : low + span + 1] = c
    size_BC = np.zeros((len(row_BF), classes.low_C.size), np.int64)
    rank_K, class_K, to_step_K = np.empty(at_K.size, np.int32), np.empty(at_K.size, np.uint8), np.empty_like(step_K)
    like = np.empty(0, step_K.dtype)
    with threads(len(row_BF)):
        found = size_BC, rank_K, class_K, to_step_K
        _ranks(row_BF, like, class_E, tuple(classes), bound_B, at_K, step_K, *found)
    return Blocks(np.zeros(len(row_BF), np.int64), size_BC, bound_B), rank_K, class_K, to_step_K


def decode(
    row_BF: np.ndarray,
    bound_B: np.ndarray,
    words: np.ndarray,
    word_B2: np.ndarray,
    classes: Classes,
    tables: Tables,
    at_K: np.ndarray,
    step_K: np.ndarray,
) -> bool:
    """Decode the changes of blocks, as `coder.decode`.

    Args:
        row_BF: The table of blocks, over the old bits.
        bound_B: First change of each block, and the number of all changes.
        words: See `coder.decode`.
        word_B2: See `coder.decode`.
        classes: The classes.
        tables: Their tables.
        at_K: Gets the positions of the changes, block after block, ascending in each; mutated.
        step_K: Gets their steps, unsigned; mutated.
    """
    good_B = np.zeros(len(row_BF), np.bool_)
    blocks = np.zeros(len(row_BF), np.int64), np.zeros((len(row_BF), classes.low_C.size), np.int64), bound_B
    table = *tables[:2], tables.symbol_TL, tables.ratio_CC
    rank_K, class_K = np.empty(at_K.size, np.int32), np.empty(at_K.size, np.uint8)
    with threads(len(row_BF)):
        found = rank_K, class_K, at_K, step_K, good_B
        like = np.empty(0, step_K.dtype)
        _decode(row_BF, like, tuple(classes), words, word_B2, blocks, table, limit_of(step_K), *found)
    return bool(good_B.all())


def regroup(
    bound_G: np.ndarray, band_GF: np.ndarray, by_tile: bool, at_K: np.ndarray, step_K: np.ndarray, block_count: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sort the changes in each band of tiles, by tile or by row, stably.

    Args:
        bound_G: First change of each band, and the number of changes; shape G + 1.
        band_GF: For each band the position of its first element, elements from row to row, columns of a tile, tiles, rows,
            number of the first tile.
        by_tile: Whether to sort by tile; else by row.
        at_K: Positions of the changes, band after band.
        step_K: Steps of the changes.
        block_count: Number of all tiles.

    Returns:
        New arrays of the sorted positions and steps, and, by tile, the number of changes of each.
    """
    to_at_K, to_step_K, count_B = np.empty_like(at_K), np.empty_like(step_K), np.zeros(block_count, np.int64)
    with threads(min(len(band_GF), at_K.size // PART)):
        _regroup(bound_G, band_GF, by_tile, at_K, step_K, to_at_K, to_step_K, count_B)
    return to_at_K, to_step_K, count_B
