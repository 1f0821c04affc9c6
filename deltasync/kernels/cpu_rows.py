"""The kernels of `cpu` and `cpu_diff` for many tensors at once: one launch over a table of rows, in numba.

A row has the address of its memory, so that no array is made for a tensor. Callers keep that memory alive. Rows are cut into
chunks, which threads share.

Shapes: R rows, F columns, T tensors of one element width, K changed elements.
"""

from __future__ import annotations

import numpy as np
from numba import carray, prange

from deltasync.kernels.compiled import kernel
from deltasync.kernels.cpu import AHEAD, CHANGES, cell, threads
from deltasync.kernels.cpu_diff import ROW, find, room, scratch
from deltasync.kernels.intrinsics import pointer, prefetch, prefetch_to_write
from deltasync.tensors import Sparse, Vector

_U1, _U2 = np.uint64(1), np.uint64(2)
_MOST_DIMS = 8
_GAP = 64  # room behind each row of scratch, for what `find` writes where nothing changed


@kernel
def _advance(row_RF, key_T, bound_T2, like, offset_P, step_P, value_P, count_R, gain_R, above_R):
    """Set memory to new bits and note the changes. A row: tensor, first index, count, memory, new bits, place in scratch."""
    all_bits = ~np.uint64(0) >> np.uint64(64 - 8 * like.itemsize)
    for r in prange(row_RF.shape[0]):
        tensor, first, count, at = row_RF[r, 0], np.uint64(row_RF[r, 1]), row_RF[r, 2], row_RF[r, 5]
        bits_C = carray(pointer(row_RF[r, 3], like), count)
        new_C = carray(pointer(row_RF[r, 4], like), count)
        found = find(bits_C, new_C, 0, count, offset_P[at : at + count + _GAP], step_P[at : at + count + _GAP])
        offset_C, step_C, value_C = offset_P[at : at + found], step_P[at : at + found], value_P[at : at + found]
        for k in range(found):
            i = np.uint64(offset_C[k])
            value_C[k] = bits_C[i] + step_C[k]
            bits_C[i] = value_C[k]
        count_R[r] = found
        # A separate loop, which the compiler vectorizes.
        key, mask, largest = key_T[tensor], bound_T2[tensor, 0], bound_T2[tensor, 1]
        part, above = np.uint64(0), np.int64(0)
        for k in range(offset_C.size):
            new, index = np.uint64(value_C[k]), first + np.uint64(offset_C[k])
            part += cell(key, index, new) - cell(key, index, (new - np.uint64(step_C[k])) & all_bits)
            above += (new & mask) > largest
        gain_R[r], above_R[r] = part, above


@kernel
def _join(position_R, row_RF, start_R, offset_P, step_P, at_K, step_K):
    for r in prange(position_R.size):
        position, place, low = position_R[r], row_RF[r, 5], start_R[r]
        count = start_R[r + 1] - low
        offset_C, found_C = offset_P[place : place + count], step_P[place : place + count]
        at_C, step_C = at_K[low : low + count], step_K[low : low + count]
        for k in range(count):
            at_C[k] = position + np.int64(offset_C[k])
            step_C[k] = found_C[k]


@kernel
def _add(row_RF, key_T, bound_T2, first_T, like, at_K, step_K, old_K, gain_R, above_R):
    """Add steps to memory. A row: tensor, first change, behind the last change, address of position 0."""
    all_bits = ~np.uint64(0) >> np.uint64(64 - 8 * like.itemsize)
    for r in prange(row_RF.shape[0]):
        tensor, low, high = row_RF[r, 0], row_RF[r, 1], row_RF[r, 2]
        bits = carray(pointer(row_RF[r, 3], like), 1 << 62)
        at_C, step_C, old_C = at_K[low:high], step_K[low:high], old_K[low:high]
        for k in range(at_C.size):
            if k + AHEAD < at_C.size:
                prefetch_to_write(bits, np.uint64(at_C[k + AHEAD]))
            i = np.uint64(at_C[k])
            old_C[k] = bits[i]
            bits[i] = old_C[k] + step_C[k]
        key, mask, largest, first = key_T[tensor], bound_T2[tensor, 0], bound_T2[tensor, 1], np.uint64(first_T[tensor])
        part, above = np.uint64(0), np.int64(0)
        for k in range(at_C.size):
            old, index = np.uint64(old_C[k]), np.uint64(at_C[k]) - first
            new = (old + np.uint64(step_C[k])) & all_bits
            part += cell(key, index, new) - cell(key, index, old)
            above += (new & mask) > largest
        gain_R[r], above_R[r] = part, above


@kernel
def _subtract(row_RF, like, at_K, step_K):
    """Subtract steps from memory. A row is one of `_add`."""
    for r in prange(row_RF.shape[0]):
        low, high = row_RF[r, 1], row_RF[r, 2]
        bits = carray(pointer(row_RF[r, 3], like), 1 << 62)
        at_C, step_C = at_K[low:high], step_K[low:high]
        for k in range(at_C.size):
            bits[np.uint64(at_C[k])] -= step_C[k]


@kernel
def _undo(row_RF, count_R, like, offset_P, step_P):
    """Subtract from memory the changes that `_advance` left in the scratch. A row is one of `_advance`."""
    for r in prange(row_RF.shape[0]):
        at, count = row_RF[r, 5], count_R[r]
        bits_C = carray(pointer(row_RF[r, 3], like), row_RF[r, 2])
        offset_C, step_C = offset_P[at : at + count], step_P[at : at + count]
        for k in range(offset_C.size):
            bits_C[np.uint64(offset_C[k])] -= step_C[k]


@kernel
def _prepare(row_RF, dim_D83, key_T, first_T, like, at_K, step_K, to_K, new_K, kept_R, gain_R, check_R):
    """Find what to write where; memory is only read.

    A row: tensor, first change, behind the last change, address of the segment's memory, position of the segment's first
    element, number of its dimensions in `dim_D83` or -1 if it is contiguous, place in the results. A dimension: stride in
    the tensor, size, stride in memory; the largest stride first, size 0 behind the last one.
    """
    for r in prange(row_RF.shape[0]):
        tensor, low, high, position, dims, place = (
            row_RF[r, 0], row_RF[r, 1], row_RF[r, 2], row_RF[r, 4], row_RF[r, 5], row_RF[r, 6],
        )  # fmt: skip
        memory = carray(pointer(row_RF[r, 3], like), 1 << 62)
        to_C, new_C, index_C = (
            to_K[place : place + high - low],
            new_K[place : place + high - low],
            np.empty(high - low, np.uint64),
        )
        first, kept = first_T[tensor], 0
        for k in range(low, high):
            rest = np.int64(at_K[np.uint64(k)]) - position
            to = rest
            if dims >= 0:
                to = np.int64(0)
                for d in range(_MOST_DIMS):
                    stride, size, live_stride = dim_D83[dims, d, 0], dim_D83[dims, d, 1], dim_D83[dims, d, 2]
                    if size == 0:
                        break
                    coordinate = rest // stride
                    rest -= coordinate * stride
                    if coordinate >= size:
                        rest = np.int64(-1)
                        break
                    to += coordinate * live_stride
                if rest != 0:
                    continue
            to_C[kept] = to
            new_C[kept] = step_K[np.uint64(k)]
            index_C[kept] = np.uint64(np.int64(at_K[np.uint64(k)]) - first)
            kept += 1
        kept_R[r] = kept
        old_C = np.empty(kept, like.dtype)
        for k in range(kept):
            if k + AHEAD < kept:
                prefetch(memory, np.uint64(to_C[k + AHEAD]))
            old_C[k] = memory[np.uint64(to_C[k])]
        key, part, check = key_T[tensor], np.uint64(0), np.uint64(0)
        for k in range(old_C.size):
            old = old_C[k]
            new_C[k] += old
            part += cell(key, index_C[k], new_C[k]) - cell(key, index_C[k], old)  # of the stored value, which wraps
            check += np.uint64(old) * (_U2 * np.uint64(to_C[k]) + _U1)
        gain_R[r], check_R[r] = part, check


class Taken:
    """What `advance` did to memory: its changes, from the moment on when they are made.

    Attributes:
        chunk_RF: The chunks.
        count_R: Changes of each chunk; 0 until the kernel has made them.
    """

    def __init__(self, chunk_RF: np.ndarray, position_R: np.ndarray) -> None:
        self.chunk_RF = chunk_RF
        self.count_R = np.zeros(len(chunk_RF), np.int64)
        self._position_R = position_R

    def join(self, index: np.dtype, bits: np.dtype) -> tuple[np.ndarray, np.ndarray]:
        """Return the positions and steps. Only before the thread's next `advance`, which reuses its scratch."""
        offset_RP, step_RP, _ = scratch(bits)
        start_R = np.concatenate(([0], np.cumsum(self.count_R)))
        at_K, step_K = room(int(start_R[-1]), index), room(int(start_R[-1]), bits)
        with threads(int(start_R[-1]) // ROW):
            places = self._position_R, self.chunk_RF, start_R
            _join(*places, offset_RP.reshape(-1), step_RP.reshape(-1), at_K, step_K)
        return at_K, step_K

    def undo(self, bits: np.dtype) -> None:
        """Undo the changes in memory. This allocates nothing. Only before the thread's next `advance`."""
        offset_RP, step_RP, _ = scratch(bits)
        _undo(self.chunk_RF, self.count_R, np.empty(0, bits), offset_RP.reshape(-1), step_RP.reshape(-1))
        self.count_R[:] = 0


def chunks(row_RF: np.ndarray, first_T: np.ndarray, bits: np.dtype) -> list[Taken]:
    """Cut rows into what one launch of `advance` takes.

    Args:
        row_RF: Rows: tensor, first flat index, count, address of the memory, address of the new bits; int64[R, 5].
        first_T: Position of the first element of each tensor.
        bits: dtype of the bit patterns.
    """
    count_R = -(-row_RF[:, 2] // ROW)
    row_C = np.repeat(np.arange(len(row_RF)), count_R)
    done_C = (np.arange(row_C.size) - np.repeat(np.cumsum(count_R) - count_R, count_R)) * ROW
    chunk_CF = np.empty((row_C.size, 6), np.int64)
    chunk_CF[:, :5] = row_RF[row_C]
    chunk_CF[:, 1] += done_C
    chunk_CF[:, 2] = np.minimum(ROW, chunk_CF[:, 2] - done_C)
    chunk_CF[:, 3] += done_C * bits.itemsize
    chunk_CF[:, 4] += done_C * bits.itemsize
    room_C = chunk_CF[:, 2] + _GAP
    most, taken, low, end_C = scratch(bits)[0].size, [], 0, np.cumsum(room_C)
    while low < len(chunk_CF):
        before = int(end_C[low - 1]) if low else 0
        high = int(np.searchsorted(end_C, before + most, side="right"))
        part = chunk_CF[low:high]
        part[:, 5] = end_C[low:high] - room_C[low:high] - before
        taken.append(Taken(part, first_T[part[:, 0]] + part[:, 1]))
        low = high
    return taken


def advance(taken: Taken, key_T: np.ndarray, bound_T2: np.ndarray, bits: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Set the memory of chunks to their new bits.

    Args:
        taken: The chunks; mutated with what changed.
        key_T: Fingerprint key of each tensor.
        bound_T2: Of each tensor a mask, and the largest masked bit pattern that is not counted; uint64[T, 2].
        bits: dtype of the bit patterns.

    Returns:
        The gain of each tensor's fingerprint, uint64[T], and how many new bit patterns exceed the bound, int64[T].
    """
    offset_RP, step_RP, value_RP = scratch(bits)
    gain_R, above_R = np.empty(len(taken.chunk_RF), np.uint64), np.empty(len(taken.chunk_RF), np.int64)
    rooms = offset_RP.reshape(-1), step_RP.reshape(-1), value_RP.reshape(-1)
    with threads(int(taken.chunk_RF[:, 2].sum()) // ROW):
        _advance(taken.chunk_RF, key_T, bound_T2, np.empty(0, bits), *rooms, taken.count_R, gain_R, above_R)
    return by_tensor(taken.chunk_RF[:, 0], key_T.size, gain_R), by_tensor(taken.chunk_RF[:, 0], key_T.size, above_R)


def add(vector: Vector, zero_T: np.ndarray, steps: Sparse, bound_T2: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Add steps to the memory of a vector's tensors, modulo 2**width. If this raises, memory is as it was.

    Args:
        vector: The vector.
        zero_T: Address that position 0 would have if all memory before each tensor's were the vector's, too; int64[T].
            Only those of changed tensors count.
        steps: The steps.
        bound_T2: As in `advance`.

    Returns:
        As `advance`.
    """
    chunk_RF, (at_K, step_K) = _by_changes(_changed_rows(vector, zero_T, steps)), steps
    gain_R, above_R = np.empty(len(chunk_RF), np.uint64), np.empty(len(chunk_RF), np.int64)
    places = vector.key_T, bound_T2, vector.first_T, np.empty(0, step_K.dtype)
    with threads(at_K.size // CHANGES):
        _add(chunk_RF, *places, at_K, step_K, np.empty_like(step_K), gain_R, above_R)
    tensors = vector.key_T.size
    return by_tensor(chunk_RF[:, 0], tensors, gain_R), by_tensor(chunk_RF[:, 0], tensors, above_R)


def subtract(vector: Vector, zero_T: np.ndarray, steps: Sparse) -> None:
    """Undo `add`. No array of the size of `steps` is allocated."""
    _subtract(_by_changes(_changed_rows(vector, zero_T, steps)), np.empty(0, steps.data_K.dtype), *steps)


def _changed_rows(vector: Vector, zero_T: np.ndarray, sparse: Sparse) -> np.ndarray:
    """Return a row for each tensor in which elements lie: tensor, first of them, behind the last, address of position 0."""
    bound_T = np.concatenate(([0], np.cumsum(vector.count(sparse.at_K))))
    row_RF = np.stack((np.arange(len(vector.specs)), bound_T[:-1], bound_T[1:], zero_T), axis=1)
    rows: np.ndarray = row_RF[bound_T[1:] > bound_T[:-1]]
    return rows


def prepare(
    row_RF: np.ndarray,
    dim_D83: np.ndarray,
    key_T: np.ndarray,
    first_T: np.ndarray,
    at_K: np.ndarray,
    step_K: np.ndarray,
    to: np.dtype,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, int]:
    """Compute what to write into segments of live memory, which is only read.

    Args:
        row_RF: Rows: tensor, first change, behind the last change, address of the segment's memory, position of its first
            element, number of its dimensions in `dim_D83`, or -1 if it is contiguous; int64[R, 6].
        dim_D83: Dimensions of segments: stride in the tensor, size, stride in memory; int64[D, 8, 3].
        key_T: As in `add`.
        first_T: As in `add`.
        at_K: Positions, ascending.
        step_K: Steps.
        to: dtype of positions in memory.

    Returns:
        Writes as chunks (row, address of the memory, place in the next two arrays, count); positions in memory; new bit
        patterns; what each row adds to its segment's fingerprint, uint64[R]; how many elements of it are written, int64[R];
        and the checksum that `cpu.swap_by` of these writes will find.
    """
    chunk_RF = _by_changes(row_RF)
    place_R = np.concatenate(([0], np.cumsum(chunk_RF[:, 2] - chunk_RF[:, 1])))
    chunk_RF = np.concatenate((chunk_RF, place_R[:-1, None]), axis=1)
    to_K, new_K = np.empty(place_R[-1], to), np.empty(place_R[-1], step_K.dtype)
    kept_R = np.empty(len(chunk_RF), np.int64)
    gain_R, check_R = np.empty((2, len(chunk_RF)), np.uint64)
    with threads(to_K.size // CHANGES):
        results = to_K, new_K, kept_R, gain_R, check_R
        _prepare(chunk_RF, dim_D83, key_T, first_T, np.empty(0, step_K.dtype), at_K, step_K, *results)
    row_C = np.repeat(np.arange(len(row_RF)), _chunk_counts(row_RF))
    kept = kept_R > 0
    write_CF = np.stack((row_C, chunk_RF[:, 3], place_R[:-1], kept_R), axis=1)[kept]
    rows = len(row_RF)
    check = int(check_R.sum(dtype=np.uint64))
    return write_CF, to_K, new_K, by_tensor(row_C, rows, gain_R), by_tensor(row_C, rows, kept_R), check


def by_tensor(number_R: np.ndarray, count: int, value_R: np.ndarray) -> np.ndarray:
    """Sum values by an ascending number, modulo 2**64; one sum for each of `count` numbers."""
    total = np.zeros(count, value_R.dtype)
    if number_R.size:
        first = np.append(0, np.flatnonzero(number_R[1:] != number_R[:-1]) + 1)
        np.add.at(total, number_R[first], np.add.reduceat(value_R, first))
    return total


def _chunk_counts(row_RF: np.ndarray) -> np.ndarray:
    counts: np.ndarray = -(-(row_RF[:, 2] - row_RF[:, 1]) // CHANGES)
    return counts


def _by_changes(row_RF: np.ndarray) -> np.ndarray:
    """Cut rows whose columns 1 and 2 bound their changes into rows of at most `CHANGES`."""
    count_R = _chunk_counts(row_RF)
    chunk_CF = np.repeat(row_RF, count_R, axis=0)
    done_C = (np.arange(len(chunk_CF)) - np.repeat(np.cumsum(count_R) - count_R, count_R)) * CHANGES
    chunk_CF[:, 1] += done_C
    chunk_CF[:, 2] = np.minimum(chunk_CF[:, 2], chunk_CF[:, 1] + CHANGES)
    return chunk_CF
