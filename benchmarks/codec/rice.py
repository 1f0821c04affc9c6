"""Golomb-Rice codes and ranks inside exponent classes, for the peers' encodings. Single-threaded, as theirs are.

A number g is g >> k ones, a zero and the k low bits of g, least significant bit first; from `_UNARY_CAP` ones on it is
that many ones and 32 bits of g.
"""

from __future__ import annotations

import numpy as np
from numba import njit

_UNARY_CAP = 32
_MAX_K = 24
_CLASSES = 256


@njit(nogil=True, cache=True)
def _code_bits(gap_K, k):
    total = 0
    for gap in gap_K:
        quotient = gap >> k
        total += quotient + 1 + k if quotient < _UNARY_CAP else _UNARY_CAP + 32
    return total


@njit(nogil=True, cache=True)
def _best_k(gap_K):
    best, least = 0, _code_bits(gap_K, 0)
    for k in range(1, _MAX_K):
        bits = _code_bits(gap_K, k)
        if bits < least:
            best, least = k, bits
    return best


@njit(nogil=True, cache=True)
def _encode(gap_K, k, out, position):
    at = position >> 3
    held = position & 7
    bits = np.uint64(out[at])
    one = np.uint64(1)
    for gap in gap_K:
        quotient = gap >> k
        capped = quotient >= _UNARY_CAP
        ones = _UNARY_CAP if capped else quotient
        bits |= ((one << np.uint64(ones)) - one) << np.uint64(held)
        held += ones if capped else ones + 1
        while held >= 8:
            out[at] = bits & np.uint64(255)
            at += 1
            bits >>= np.uint64(8)
            held -= 8
        low = 32 if capped else k
        bits |= (np.uint64(gap) & ((one << np.uint64(low)) - one)) << np.uint64(held)
        held += low
        while held >= 8:
            out[at] = bits & np.uint64(255)
            at += 1
            bits >>= np.uint64(8)
            held -= 8
    out[at] = bits
    return at * 8 + held


@njit(nogil=True, cache=True)
def _decode(stream, k, gap_K, position):
    for i in range(gap_K.size):
        ones = 0
        while ones < _UNARY_CAP and (stream[position >> 3] >> (position & 7)) & 1:
            ones += 1
            position += 1
        low = 32
        if ones < _UNARY_CAP:
            position += 1
            low = k
        value = 0
        for bit in range(low):
            value |= ((stream[position >> 3] >> (position & 7)) & 1) << bit
            position += 1
        gap_K[i] = value if ones == _UNARY_CAP else (ones << k) | value
    return position


@njit(nogil=True, cache=True)
def _classes(old_N, index_K):
    size_C = np.zeros(_CLASSES, np.int64)
    changed_C = np.zeros(_CLASSES, np.int64)
    for bits in old_N:
        size_C[(bits >> 7) & 255] += 1
    for index in index_K:
        changed_C[(old_N[index] >> 7) & 255] += 1
    return size_C, changed_C


@njit(nogil=True, cache=True)
def _class_gaps(old_N, index_K, complement_C, start_C, gap_L):
    rank_C = np.zeros(_CLASSES, np.int64)
    last_C = np.full(_CLASSES, -1, np.int64)
    fill_C = start_C.copy()
    k = 0
    for i in range(old_N.size):
        c = (old_N[i] >> 7) & 255
        changed = k < index_K.size and index_K[k] == i
        k += changed
        if changed != complement_C[c]:
            gap_L[fill_C[c]] = rank_C[c] - last_C[c] - 1
            fill_C[c] += 1
            last_C[c] = rank_C[c]
        rank_C[c] += 1


@njit(nogil=True, cache=True)
def _class_indices(old_N, gap_L, complement_C, start_C, index_K):
    rank_C = np.zeros(_CLASSES, np.int64)
    fill_C = start_C[:-1].copy()
    next_C = np.full(_CLASSES, -1, np.int64)
    for c in range(_CLASSES):
        if fill_C[c] < start_C[c + 1]:
            next_C[c] = gap_L[fill_C[c]]
    k = 0
    for i in range(old_N.size):
        c = (old_N[i] >> 7) & 255
        listed = next_C[c] == rank_C[c]
        if listed:
            fill_C[c] += 1
            next_C[c] = next_C[c] + 1 + gap_L[fill_C[c]] if fill_C[c] < start_C[c + 1] else -1
        rank_C[c] += 1
        if listed != complement_C[c]:
            index_K[k] = i
            k += 1


def best_k(gap_K: np.ndarray) -> int:
    """Return the parameter with the shortest code."""
    return int(_best_k(gap_K))


def encode(parts: list[tuple[np.ndarray, int]]) -> bytes:
    """Encode several arrays of gaps (int64, below 2**32), each with its parameter, as one bit stream."""
    bit_count = sum(int(_code_bits(gap_K, k)) for gap_K, k in parts)
    out = np.zeros(bit_count // 8 + 1, np.uint8)
    position = 0
    for gap_K, k in parts:
        position = int(_encode(gap_K, k, out, position))
    return out.tobytes()


def decode(stream: np.ndarray, parts: list[tuple[int, int]]) -> np.ndarray:
    """Return the gaps of a bit stream, int64, given the count and the parameter of each array. Trusts the stream."""
    gap_K = np.empty(sum(count for count, _ in parts), np.int64)
    position = start = 0
    for count, k in parts:
        position = int(_decode(stream, k, gap_K[start : start + count], position))
        start += count
    return gap_K


def class_gaps(old_N: np.ndarray, index_K: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Turn changed elements into gaps between their ranks inside the class of the old bfloat16 exponent.

    If more than half of a class changed, its unchanged elements are listed instead. Returns the gaps of all classes, int64;
    where each class starts in them, and the end; whether it lists the unchanged ones.
    """
    size_C, changed_C = _classes(old_N, index_K)
    complement_C = 2 * changed_C > size_C
    listed_C = np.where(complement_C, size_C - changed_C, changed_C)
    start_C = np.concatenate(([0], np.cumsum(listed_C)))
    gap_L = np.empty(start_C[-1], np.int64)
    _class_gaps(old_N, index_K, complement_C, start_C, gap_L)
    return gap_L, start_C, complement_C


def class_indices(
    old_N: np.ndarray, gap_L: np.ndarray, start_C: np.ndarray, complement_C: np.ndarray, changed: int
) -> np.ndarray:
    """The inverse of `class_gaps`; `changed` is K."""
    index_K = np.empty(changed, np.int64)
    _class_indices(old_N, gap_L, complement_C, start_C, index_K)
    return index_K
