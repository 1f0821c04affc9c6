"""Merge consecutive patches of one tensor, exactly and without the weights.

The later of two new values wins, steps add up, and what cancels out is dropped.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from deltasync.tensors.specs import Patch

_Sparse = tuple[np.ndarray, np.ndarray]  # ascending indices, and new bits or steps


def fold_all(patches: Sequence[Patch]) -> list[Patch]:
    """Merge patches of one tensor into as few patches as possible.

    Args:
        patches: Oldest first, at least one. Not mutated.

    Returns:
        Zero to two disjoint patches: one of steps, and one of new bits, which is dense if any of `patches` is.
    """
    name, dtype = patches[0].name, patches[0].data.dtype
    whole = max((at for at, patch in enumerate(patches) if patch.index_K is None), default=None)
    if whole is not None:
        bits_N, later = patches[whole].data, [patch for patch in patches[whole + 1 :] if patch.data.size]
        if later:
            bits_N = bits_N.copy()
        for patch in later:
            patch.apply(bits_N)
        return [Patch(name, None, bits_N, absolute=True)] if bits_N.size else []
    pairs = [(patch.absolute, patch.index_K, patch.data) for patch in patches if patch.index_K is not None]
    steps: _Sparse = pairs[0][1][:0], np.empty(0, dtype)
    known = steps
    for absolute, group in itertools.groupby(pairs, key=lambda pair: pair[0]):
        added = [(index_K, data_K) for _, index_K, data_K in group]
        if absolute:
            for index_K, data_K in added:
                steps, known = _without(steps, index_K), _joined(_without(known, index_K), (index_K, data_K))
        else:
            steps, known = _step(steps, known, _sum(added))
    folded = [Patch(name, *steps, absolute=False)] if steps[0].size else []
    if known[0].size:
        folded.append(Patch(name, *known, absolute=True))
    assert all(patch.data.dtype == dtype for patch in folded)
    return folded


def _outside(index_K: np.ndarray, other_K: np.ndarray) -> np.ndarray:
    """Return which of the ascending indices are not among the ascending others, as a mask."""
    at = np.searchsorted(other_K, index_K)
    inside = at < other_K.size
    inside[inside] = other_K[at[inside]] == index_K[inside]
    return ~inside


def _without(sparse: _Sparse, index_K: np.ndarray) -> _Sparse:
    left = _outside(sparse[0], index_K)
    return sparse[0][left], sparse[1][left]


def _joined(first: _Sparse, second: _Sparse) -> _Sparse:
    """Join disjoint elements."""
    index = np.concatenate((first[0], second[0]))
    order = np.argsort(index, kind="stable")
    return index[order], np.concatenate((first[1], second[1]))[order]


def _step(steps: _Sparse, known: _Sparse, added: _Sparse) -> tuple[_Sparse, _Sparse]:
    """Add steps to the new bits where those are known, and to the steps elsewhere."""
    index_K, step_K = added
    outside = _outside(index_K, known[0])
    if not outside.all():
        data = known[1].copy()
        data[np.searchsorted(known[0], index_K[~outside])] += step_K[~outside]
        known = known[0], data
    left = index_K[outside], step_K[outside]
    return (_sum([steps, left]) if steps[0].size else left), known


def _sum(steps: Sequence[_Sparse]) -> _Sparse:
    """Add steps of the same index, and drop those that add up to zero."""
    index = np.concatenate([index_K for index_K, _ in steps])
    order = np.argsort(index, kind="stable")  # merges the ascending runs
    index = index[order]
    if not index.size:
        return index, steps[0][1]
    first = np.append(0, np.flatnonzero(index[1:] != index[:-1]) + 1)
    step = np.concatenate([step_K for _, step_K in steps])[order]
    step_K = np.add.reduceat(step, first, dtype=step.dtype)
    kept = step_K != 0
    return index[first[kept]], step_K[kept]
