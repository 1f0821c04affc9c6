"""The kernels in plain numpy. Every other implementation must give the same results."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from deltasync.tensors import index_dtype

# Odd 64-bit constants: the golden ratio and two from Steele, Lea and Flood, "Fast Splittable Pseudorandom Number
# Generators" (OOPSLA 2014, splitmix64), and one more odd one for the value.
INDEX_STEP = np.uint64(0x9E3779B97F4A7C15)
VALUE_STEP = np.uint64(0xD1B54A32D192ED03)
MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
MIX_2 = np.uint64(0x94D049BB133111EB)


def cell_hash(key: int, index_K: np.ndarray, bits_K: np.ndarray) -> np.ndarray:
    """Return a hash of each (index, bit pattern) under `key`, uint64[K]: splitmix64's finalizer of a linear combination."""
    with np.errstate(over="ignore"):
        z = np.uint64(key) + index_K.astype(np.uint64) * INDEX_STEP + bits_K.astype(np.uint64) * VALUE_STEP
        z = (z ^ (z >> np.uint64(30))) * MIX_1
        z = (z ^ (z >> np.uint64(27))) * MIX_2
        hashed: np.ndarray = z ^ (z >> np.uint64(31))
    return hashed


def fingerprint(key: int, bits_N: np.ndarray) -> int:
    """Return the sum of the cell hashes of a whole tensor, modulo 2**64."""
    return int(cell_hash(key, np.arange(bits_N.size), bits_N).sum(dtype=np.uint64))


def diff(old_N: np.ndarray, new_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return flat indices (`index_dtype`, ascending) and steps (new minus old, modulo 2**width) of the changed elements."""
    index_K = np.flatnonzero(old_N != new_N).astype(index_dtype(old_N.size))
    return index_K, new_N[index_K] - old_N[index_K]


def scatter(
    key: int, dest: np.ndarray, dest_index_K: np.ndarray, data_K: np.ndarray, absolute: bool, index_K: np.ndarray
) -> tuple[np.ndarray, int]:
    """Write one patch into `dest`, which is mutated.

    Args:
        key: Fingerprint key of the tensor.
        dest: Flat unsigned bit patterns of the destination memory.
        dest_index_K: Position of each element in `dest`; distinct.
        data_K: New bit patterns if `absolute`, else steps.
        absolute: Whether `data_K` holds new bit patterns.
        index_K: Flat checkpoint index of each element, for the fingerprint.

    Returns:
        The old bit patterns, shape K, and what the writes add to the tensor's fingerprint, modulo 2**64.
    """
    old_K = dest[dest_index_K]
    new_K = data_K if absolute else old_K + data_K
    dest[dest_index_K] = new_K
    with np.errstate(over="ignore"):
        added = cell_hash(key, index_K, new_K).sum(dtype=np.uint64) - cell_hash(key, index_K, old_K).sum(dtype=np.uint64)
    return old_K, int(added)


def prepare(
    key: int, dest: np.ndarray, dest_index_K: np.ndarray, data_K: np.ndarray, absolute: bool, index_K: np.ndarray
) -> tuple[np.ndarray, int, int]:
    """Compute what `scatter` with the same arguments would write. Nothing is mutated.

    Returns:
        The new bit patterns, shape K; what the writes add to the fingerprint, modulo 2**64; the checksum that `swap` will
        return.
    """
    after = dest.copy()
    old_K, added = scatter(key, after, dest_index_K, data_K, absolute, index_K)
    return after[dest_index_K], added, _checksum(dest_index_K, old_K)


def swap(writes: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> int:
    """Exchange values with memory; a second call with the same writes restores everything.

    An implementation for live memory must leave it unchanged if it raises.

    Args:
        writes: Memory, positions in it, and the values to put there. Memory and values are mutated. No position of a memory
            occurs twice.

    Returns:
        A checksum of the values that were in memory, modulo 2**64.
    """
    check = 0
    for dest, dest_index_K, value_K in writes:
        old_K = dest[dest_index_K]
        dest[dest_index_K] = value_K
        value_K[:] = old_K
        check += _checksum(dest_index_K, old_K)
    return check % (1 << 64)


def _checksum(dest_index_K: np.ndarray, bits_K: np.ndarray) -> int:
    """Sum the values, weighted by odd numbers, modulo 2**64. So every change of a single value changes the sum."""
    with np.errstate(over="ignore"):
        weight_K = np.uint64(2) * dest_index_K.astype(np.uint64) + np.uint64(1)
        return int((weight_K * bits_K.astype(np.uint64)).sum(dtype=np.uint64))
