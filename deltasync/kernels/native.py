"""The loops over elements on the host: `deltasync/_native.c`, without the GIL, by the threads of one pool of
the process.

Where the extension is missing, because there was neither a wheel nor a compiler, `reference` serves, with one
warning. `reference` defines the results; property tests compare them at each instruction set.

Tables of rows carry addresses, so that no array is made for a tensor. Callers keep that memory alive.

Shapes: R rows, F columns, T tensors of one element width, K changed elements, B blocks, C classes, S symbols,
E values of the field of classes (256), G bands or groups of blocks.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import platform
import threading
from typing import Any

import numpy as np

from deltasync import config
from deltasync.kernels import reference
from deltasync.kernels.rans import LEVELS, TABLE_BITS, Blocks, Classes, Costs
from deltasync.tensors import Sparse, TensorSpec, Vector, bounds
from deltasync.tensors.fingerprint import INDEX_STEP

_native: Any = None
with contextlib.suppress(ImportError):
    _native = importlib.import_module("deltasync._native")

logger = logging.getLogger(__name__)

CURE = "Install a C compiler and deltasync again; in a checkout: python setup.py build_ext --inplace."

ADDRESS, COLUMNS, STRIDE, ROWS, FIRST, SHIFT, MASK, FIELDS = range(8)
"""Columns of a table of blocks, and how many there are: address of the first element, columns, elements from
row to row, rows, position of the first element in the vector, shift and mask of the field that an element's
class follows from."""

_ROW, _CHUNK = 1 << 16, 1 << 12  # most elements, and most changes, of a row of the extension
_LAUNCH = 1 << 28  # elements that one call compares
_SMALL = 1 << 15  # elements, or eight times the changes, that one thread handles sooner than several
_PIECE = 8 << 20  # bytes that `_room` allocates at once

_most: int | None = None  # most threads of one call; None for all cores


def limit_threads(count: int) -> None:
    """Use at most `count` threads, but at least one, in each call of this process from now on."""
    global _most
    _most = max(1, count)


@functools.cache
def extension() -> Any:
    """Return the extension, or None where it is missing, with a warning."""
    level = config.simd()
    if level == "none":
        return None
    if _native is None:
        logger.warning(
            "deltasync was installed without its compiled extension, so its loops over elements run in "
            "numpy: comparing "
            "takes about 10 times as long, encoding and decoding 200 times. %s",
            CURE,
        )
        return None
    _native.simd(("plain", "avx2", "avx512").index(level))
    return _native


def instructions() -> str:
    """Return the instructions that the extension uses."""
    return (
        ("plain C", "AVX2", "AVX-512")[extension().simd(-1)]
        if platform.machine() == "x86_64"
        else platform.machine()
    )


def threads(elements: int) -> int:
    """Return how many threads a call for this many elements uses."""
    if elements < 2 * _SMALL:
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, _most or cores, elements // _SMALL)


def _run(name: str, work: int, *given: Any) -> bool:
    """Run a kernel of the extension, or of `reference` where it is missing.

    Args:
        name: Its name, the same in both.
        work: Elements, as `threads` counts them.
        given: Arrays and numbers, the arrays that it writes last. Those that it reads may have any order in
            memory.

    Returns:
        Whether what came from a store is well formed.
    """
    if (native := extension()) is None:
        return getattr(reference, name)(*given) is not False
    arrays = (np.ascontiguousarray(each) if isinstance(each, np.ndarray) else each for each in given)
    good: bool = getattr(native, name)(threads(work), *arrays)
    return good


def _checked(name: str, work: int, *given: Any) -> None:
    """As `_run`, for positions that are ours."""
    if not _run(name, work, *given):
        raise ValueError("a position is outside of its tensor or block")


def key_from(key: int, start: int) -> int:
    """Return the key under which elements from flat index `start` on hash as if that index were 0."""
    return (key + start * INDEX_STEP) % (1 << 64)


def fingerprint(key: int, bits_N: np.ndarray, start: int = 0) -> int:
    """Return what consecutive elements, from flat index `start` on, add to their tensor's
    `reference.fingerprint`.
    """
    return fingerprint_runs(key, np.array([start]), bits_N.reshape(1, -1))


def fingerprint_runs(
    key: int, start_R: np.ndarray, bits_RL: np.ndarray, out_RL: np.ndarray | None = None
) -> int:
    """Return what runs of consecutive elements add to a tensor's fingerprint. `start_R` has their first flat
    indices.
    """
    if (native := extension()) is None:
        return reference.fingerprint_runs(key, start_R, bits_RL, out_RL)
    return native.fingerprint(threads(bits_RL.size), key, start_R, np.ascontiguousarray(bits_RL), out_RL)


def take(key: int, bits_N: np.ndarray, out_N: np.ndarray) -> int:
    """Copy a tensor's bits into `out_N`, of the same shape and dtype. Return the fingerprint of what was
    written.
    """
    return fingerprint_runs(key, np.zeros(1, np.int64), bits_N.reshape(1, -1), out_N)


def compare(
    row_RF: np.ndarray, vector: Vector, bound_T2: np.ndarray | None = None, expected: int = 0
) -> tuple[Sparse, np.ndarray, np.ndarray]:
    """Compare rows of old bits with new ones. Nothing is mutated.

    Args:
        row_RF: Rows: tensor, first flat index, count, address of the old bits, address of the new bits;
            int64[R, 5], in the order of positions.
        vector: The vector.
        bound_T2: Of each tensor a mask, and the largest masked bit pattern that is not counted; uint64[T, 2].
            None counts nothing.
        expected: About how many elements differ; a good guess saves time.

    Returns:
        The steps from the old bits to the new ones; what each tensor's fingerprint gains, uint64[T]; and how
        many new bit patterns of each exceed its bound, int64[T].
    """
    gain_T, above_T = np.zeros(vector.key_T.size, np.uint64), np.zeros(vector.key_T.size, np.int64)
    bound_T2 = (
        np.zeros((vector.key_T.size, 2), np.uint64) if bound_T2 is None else np.ascontiguousarray(bound_T2)
    )
    elements = int(row_RF[:, 2].sum())
    row_RF = np.column_stack((row_RF, vector.first_T[row_RF[:, 0]] + row_RF[:, 1]))
    rows, done_C = _cut(row_RF, row_RF[:, 2], _ROW)
    rows[:, 2] = np.minimum(_ROW, rows[:, 2] - done_C)
    rows[:, [1, 5]] += done_C[:, None]
    rows[:, 3:5] += (done_C * vector.width)[:, None]
    parts = []
    edges: Any = (
        np.searchsorted(np.cumsum(rows[:, 2]), np.arange(_LAUNCH, elements + _LAUNCH, _LAUNCH))
        if elements
        else []
    )
    low = 0
    for high in (*np.unique(np.add(edges, 1))[:-1].tolist(), len(rows)):
        part = np.ascontiguousarray(rows[low:high])
        count = int(part[:, 2].sum())
        parts.append(
            _compare(
                part,
                vector,
                bound_T2,
                int(1.25 * expected * count / max(elements, 1)) or count >> 5,
                gain_T,
                above_T,
            )
        )
        low = high
    if len(parts) == 1:
        return parts[0], gain_T, above_T
    return Sparse(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True))), gain_T, above_T


def _cut(row_RF: np.ndarray, size_R: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Split rows into chunks of at most `most`; return a copy of the row for each chunk, and the chunk's offset
    in it.
    """
    count_R = -(-size_R // most)
    cut_CF = np.repeat(row_RF, count_R, axis=0).astype(np.int64)
    return cut_CF, (np.arange(len(cut_CF)) - np.repeat(np.cumsum(count_R) - count_R, count_R)) * most


def _compare(
    row_RF: np.ndarray,
    vector: Vector,
    bound_T2: np.ndarray,
    room: int,
    gain_T: np.ndarray,
    above_T: np.ndarray,
) -> Sparse:
    native, room = extension(), room + 4096
    if native is None:
        return reference.compare(row_RF, vector, bound_T2, gain_T, above_T)
    while True:
        at_K, step_K = _room(room, vector.index_dtype), _room(room, vector.bits_dtype)
        given = vector.key_T, bound_T2, at_K, step_K, gain_T, above_T
        found = native.scan(threads(int(row_RF[:, 2].sum())), row_RF, *given)
        if found <= room:
            return Sparse(at_K[:found], step_K[:found])
        room = found


class _Kept(threading.local):
    """Memory of a thread that `_room` cuts up."""

    left = np.empty(0, np.uint8)


_kept = _Kept()


def _room(count: int, dtype: np.dtype) -> np.ndarray:
    """Return an array, cut out of memory that has huge pages: small pages take longer to clear than to
    fill.
    """
    size = -(-count * dtype.itemsize // 64) * 64
    if _kept.left.size < size:
        _kept.left = np.empty(max(_PIECE, size), np.uint8)
    array, _kept.left = _kept.left[: count * dtype.itemsize], _kept.left[size:]
    return array.view(dtype)


def diff(old_N: np.ndarray, new_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """As `reference.diff`."""
    if extension() is None:
        return reference.diff(old_N, new_N)
    old_N, new_N = np.ascontiguousarray(old_N), np.ascontiguousarray(new_N)
    vector = Vector(
        old_N.itemsize, (TensorSpec("", f"int{8 * old_N.itemsize}", old_N.shape),), np.array([0, old_N.size])
    )
    row_RF = np.array([[0, 0, old_N.size, old_N.ctypes.data, new_N.ctypes.data]], np.int64)
    return compare(row_RF, vector)[0]


def add(
    vector: Vector,
    zero_T: np.ndarray,
    steps: Sparse,
    bound_T2: np.ndarray | None = None,
    *,
    is_done: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Add steps to the memory of a vector's tensors, modulo 2**width. If this raises, memory is as it was.

    Args:
        vector: The vector.
        zero_T: Address that position 0 would have if all memory before each tensor's were the vector's, too;
            int64[T]. Only those of changed tensors count.
        steps: The steps; ascending.
        bound_T2: As in `compare`.
        is_done: Whether memory has taken the steps; it is only read then.

    Returns:
        As `compare`, without the steps.
    """
    tensors = vector.key_T.size
    gain_T, above_T = np.zeros(tensors, np.uint64), np.zeros(tensors, np.int64)
    bound_T2 = np.zeros((tensors, 2), np.uint64) if bound_T2 is None else bound_T2
    bound_T = bounds(vector.count(steps.at_K))
    columns = np.arange(tensors), bound_T[:-1], bound_T[1:], zero_T, vector.first_T[:-1], vector.first_T[1:]
    row_RF = np.stack(columns, axis=1)[bound_T[1:] > bound_T[:-1]]
    row_RF, done_C = _cut(row_RF, row_RF[:, 2] - row_RF[:, 1], _CHUNK)
    row_RF[:, 1] += done_C
    row_RF[:, 2] = np.minimum(row_RF[:, 2], row_RF[:, 1] + _CHUNK)
    _checked(
        "add", 8 * steps.at_K.size, int(is_done), row_RF, vector.key_T, bound_T2, *steps, gain_T, above_T
    )
    return gain_T, above_T


def count_runs(
    run_R: np.ndarray,
    blocks: Blocks,
    at_K: np.ndarray,
    class_K: np.ndarray | None,
    step_K: np.ndarray,
    ratio_CC: np.ndarray,
) -> np.ndarray:
    """Count each symbol of each table for each run of blocks, from `run_R[r]` on and below `run_R[r + 1]`.

    Other arguments are as in `encode`. Returns int64[R, 2 C, 256].
    """
    count_RTS = np.zeros((run_R.size - 1, 2 * len(ratio_CC), 256), np.int64)
    _checked("count", 8 * at_K.size, run_R, *blocks, at_K, class_K, step_K, ratio_CC, count_RTS)
    return count_RTS


def count(
    blocks: Blocks, at_K: np.ndarray, class_K: np.ndarray | None, step_K: np.ndarray, ratio_CC: np.ndarray
) -> np.ndarray:
    """As `count_runs`, for all blocks; int64[2 C, 256]."""
    parts = min(threads(8 * at_K.size), 4)
    part_P = np.searchsorted(blocks.bound_B[:-1], np.linspace(0, at_K.size, parts + 1).astype(np.int64))
    part_P[0], part_P[-1] = 0, blocks.base_B.size
    count_TS: np.ndarray = count_runs(part_P, blocks, at_K, class_K, step_K, ratio_CC).sum(axis=0)
    return count_TS


def encode(
    blocks: Blocks,
    at_K: np.ndarray,
    class_K: np.ndarray | None,
    step_K: np.ndarray,
    freq_TS: np.ndarray,
    ratio_CC: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Encode the changes of blocks.

    Args:
        blocks: The blocks.
        at_K: Number of each changed element, among those of its class in the block, plus `base_B`; in each
            block by class.
        class_K: Class of each changed element, uint8; None if there is one.
        step_K: Steps of the changes, unsigned.
        freq_TS: Slots of each symbol, uint32[2 C, 256]: for each class the table of its gaps, then the one of
            its steps.
        ratio_CC: By how much gaps are longer in one class than in another, in 256ths.

    Returns:
        The words of all blocks, uint32[W], and how many each block has; a block without changes has none.
    """
    if (native := extension()) is None:
        return reference.encode(blocks, at_K, class_K, step_K, freq_TS, ratio_CC)
    # Words fill a block's room from its end. `room_B` is 0, then where each room ends. Even the rarest
    # symbols fit.
    words_per_change = (2 * TABLE_BITS + 61 + 8 * step_K.itemsize + 31) // 32
    room_B = np.zeros(blocks.bound_B.size, np.int64)
    np.cumsum(words_per_change * np.diff(blocks.bound_B) + 5, out=room_B[1:])
    out, size_B = np.empty(room_B[-1], np.uint32), np.empty(blocks.base_B.size, np.int64)
    native.encode(
        threads(8 * at_K.size),
        *blocks,
        at_K,
        class_K,
        step_K,
        np.ascontiguousarray(freq_TS),
        ratio_CC,
        room_B,
        out,
        size_B,
    )
    return out[: int(size_B.sum())].copy(), size_B


def decode(
    blocks: Blocks,
    words: np.ndarray,
    word_B2: np.ndarray,
    freq_TS: np.ndarray,
    at_K: np.ndarray,
    step_K: np.ndarray,
) -> bool:
    """Decode the changes of blocks of one class.

    Args:
        blocks: The blocks.
        words: The words of all blocks, uint32[W].
        word_B2: The words of block b are `words[word_B2[b, 0] : word_B2[b, 1]]`; int64[B, 2].
        freq_TS: As in `encode`.
        at_K: Gets the numbers of the changed elements; mutated.
        step_K: Gets their steps, unsigned; mutated.

    Returns:
        False if a block is malformed; the arrays are then not to be used.
    """
    return _run("decode", 8 * at_K.size, words, word_B2, *blocks, freq_TS.astype(np.uint32), at_K, step_K)


def rank(
    row_BF: np.ndarray, bound_B: np.ndarray, at_K: np.ndarray, step_K: np.ndarray, classes: Classes
) -> tuple[Blocks, np.ndarray, np.ndarray, np.ndarray]:
    """Order the changes of blocks by class.

    Args:
        row_BF: The table of blocks (`FIELDS`), over the new bits.
        bound_B: First change of each block, and the number of all changes.
        at_K: Positions of the changes, block after block, ascending in each.
        step_K: Their steps.
        classes: Those of a group. Every changed element is of one of them by its old bits.

    Returns:
        The first arguments of `encode`.
    """
    size_BC = np.zeros((len(row_BF), classes.low_L.size), np.int64)
    rank_K, class_K, to_step_K = (
        np.empty(at_K.size, np.int32),
        np.empty(at_K.size, np.uint8),
        np.empty_like(step_K),
    )
    given = row_BF, bound_B, at_K, step_K, classes.by_value()[0], *classes[:2]
    _checked("rank", 8 * at_K.size, *given, size_BC, rank_K, class_K, to_step_K)
    return Blocks(np.zeros(len(row_BF), np.int64), size_BC, bound_B), rank_K, class_K, to_step_K


def decode_classes(
    row_BF: np.ndarray,
    bound_B: np.ndarray,
    words: np.ndarray,
    word_B2: np.ndarray,
    classes: Classes,
    freq_TS: np.ndarray,
    at_K: np.ndarray,
    step_K: np.ndarray,
) -> bool:
    """Decode the changes of blocks, as `decode`.

    Args:
        row_BF: The table of blocks (`FIELDS`), over the old bits.
        bound_B: First change of each block, and the number of all changes.
        words: See `decode`.
        word_B2: See `decode`.
        classes: Those of the blocks' group.
        freq_TS: As in `encode`.
        at_K: Gets the positions of the changes, block after block, ascending in each; mutated.
        step_K: Gets their steps, unsigned; mutated.
    """
    given = row_BF, bound_B, words, word_B2, *classes[:2], freq_TS.astype(np.uint32), classes.ratio_CC
    return _run("decode_classes", 8 * at_K.size, *given, at_K, step_K)


def survey(
    run_R: np.ndarray,
    row_BF: np.ndarray,
    bound_B: np.ndarray,
    at_K: np.ndarray,
    step_K: np.ndarray,
    most: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Count values of the field in runs of blocks.

    Args:
        run_R: First block of each run, and the number of all blocks.
        row_BF: The table of blocks (`FIELDS`), over the new bits.
        bound_B: First change of each block, and the number of all changes.
        at_K: Positions of the changes.
        step_K: Their steps.
        most: About how many elements of a run are looked at.

    Returns:
        Estimates for the elements, by their new bits, which hardly differ, float64[R, 256]; and the symbols
        of the steps of changed elements by their old bits, exact, uint32[R, 256, 256].
    """
    size_R = np.add.reduceat(row_BF[:, 1] * row_BF[:, 3], run_R[:-1])
    period_R = np.clip(size_R // most, 1, 64) | 1  # an odd period does not meet the same columns in every row
    element_RE, step_RES = (
        np.zeros((run_R.size - 1, 256), np.int64),
        np.zeros((run_R.size - 1, 256, 256), np.uint32),
    )
    _checked("survey", 8 * at_K.size, run_R, row_BF, bound_B, at_K, step_K, period_R, element_RE, step_RES)
    scale_R = size_R / np.maximum(element_RE.sum(axis=1), 1)
    return element_RE * scale_R[:, None], step_RES


def regroup(
    bound_G: np.ndarray,
    band_GF: np.ndarray,
    by_tile: bool,
    at_K: np.ndarray,
    step_K: np.ndarray,
    block_count: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sort the changes in each band of tiles, by tile or by row, stably.

    Args:
        bound_G: First change of each band, and the number of changes; shape G + 1.
        band_GF: For each band the position of its first element, elements from row to row, columns of a tile,
            tiles, rows, number of the first tile.
        by_tile: Whether to sort by tile; else by row.
        at_K: Positions of the changes, band after band.
        step_K: Steps of the changes.
        block_count: Number of all tiles.

    Returns:
        New arrays of the sorted positions and steps, and, by tile, the number of changes of each.
    """
    to_at_K, to_step_K, count_B = np.empty_like(at_K), np.empty_like(step_K), np.zeros(block_count, np.int64)
    given = bound_G, band_GF, by_tile, at_K, step_K
    _checked("regroup", 8 * at_K.size, *given, to_at_K, to_step_K, count_B)
    return to_at_K, to_step_K, count_B


def groups(
    bound_P: np.ndarray, element_RE: np.ndarray, value_V: np.ndarray, step_RVS: np.ndarray, costs: Costs
) -> tuple[np.ndarray, Classes]:
    """Join runs of blocks as long as common classes take no more bits, and fit classes to each group.

    Args:
        bound_P: First run of each payload, and the number of runs; a group ends where a payload does.
        element_RE: Elements with each value of the field; estimates, float64[R, 256].
        value_V: The values of the field with changes, ascending.
        step_RVS: Symbols of the steps of changed elements, by these values, uint32[R, V, S]; those that none
            has left out.
        costs: Costs of a class.

    Returns:
        The first run of each group, and the classes in which its changes take the fewest bits.
    """
    runs = len(element_RE)
    begins_R, mean_RE = np.zeros(runs, np.uint8), np.ones((runs, 256))  # the elements for each change
    first_RE, last_RE = np.full((runs, 256), -1, np.int16), np.empty((runs, 256), np.int16)
    given = bound_P, element_RE, value_V, step_RVS, np.array(costs)
    _run("groups", step_RVS.size, *given, begins_R, first_RE, last_RE, mean_RE)
    first_G = np.flatnonzero(begins_R)
    level_GE = np.rint(8 * np.log2(mean_RE[first_G])).astype(np.int64).clip(0, LEVELS)
    line_GE3 = np.stack((first_RE[first_G], last_RE[first_G], level_GE), axis=2)
    return first_G, Classes.of([line_E3[line_E3[:, 0] >= 0] for line_E3 in line_GE3])
