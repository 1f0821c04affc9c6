"""Merge consecutive deltas of one tensor, exactly and without the weights: later wins, steps add, nothing that cancels out
remains.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from deltasync.tensors.specs import Patch

_Sparse = tuple[np.ndarray, np.ndarray]
_Known = tuple[np.ndarray | None, np.ndarray]


def fold_all(patches: Sequence[Patch]) -> list[Patch]:
    """What these patches of one tensor do, one after the other, in as few patches as can say it.

    Args:
        patches: Oldest first; not empty, all of the same tensor. Not mutated.

    Returns:
        Zero to two disjoint patches: one of the steps, and one of the elements whose new bits are known, which is dense if
        any of `patches` was.
    """
    name, dtype = patches[0].name, patches[0].data.dtype
    steps: _Sparse = _nothing(patches[0])
    known: _Known = _nothing(patches[0])
    pending: list[Patch] = []
    for patch in patches:
        if not patch.absolute:
            pending.append(patch)
            continue
        steps, known = _step(steps, known, pending)
        pending = []
        if patch.index_K is None:
            steps, known = _nothing(patch), (None, patch.data)
        else:
            left = _outside(steps[0], patch.index_K)
            steps, known = (steps[0][left], steps[1][left]), _overwrite(known, patch.index_K, patch.data)
    steps, known = _step(steps, known, pending)
    folded = [Patch(name, steps[0], steps[1], absolute=False)] if steps[0].size else []
    if known[1].size:
        folded.append(Patch(name, *known, absolute=True))
    assert all(patch.data.dtype == dtype for patch in folded)
    return folded


def _nothing(patch: Patch) -> _Sparse:
    index_dtype = np.int32 if patch.index_K is None else patch.index_K.dtype
    return np.empty(0, index_dtype), np.empty(0, patch.data.dtype)


def _outside(index_K: np.ndarray, other_K: np.ndarray) -> np.ndarray:
    """Which of the ascending indices are not among the ascending others."""
    at = np.searchsorted(other_K, index_K)
    inside = at < other_K.size
    inside[inside] = other_K[at[inside]] == index_K[inside]
    return ~inside


def _overwrite(known: _Known, index_K: np.ndarray, data_K: np.ndarray) -> _Known:
    before_K, before = known
    if before_K is None:
        data_N = before.copy()
        data_N[index_K] = data_K
        return None, data_N
    left = _outside(before_K, index_K)
    index = np.concatenate((before_K[left], index_K))
    order = np.argsort(index, kind="stable")
    return index[order], np.concatenate((before[left], data_K))[order]


def _step(steps: _Sparse, known: _Known, patches: Sequence[Patch]) -> tuple[_Sparse, _Known]:
    """Add the steps of these patches to what is known, and where nothing is known to the steps."""
    if not patches:
        return steps, known
    index_K, step_K = _sum([(patch.index_K, patch.data) for patch in patches if patch.index_K is not None])
    known_K, data = known
    if known_K is None:
        data = data.copy()
        data[index_K] += step_K
        return steps, (None, data)
    outside = _outside(index_K, known_K)
    if not outside.all():
        data = data.copy()
        data[np.searchsorted(known_K, index_K[~outside])] += step_K[~outside]
    left = index_K[outside], step_K[outside]
    return (_sum([steps, left]) if steps[0].size else left), (known_K, data)


def _sum(steps: Sequence[_Sparse]) -> _Sparse:
    """Steps of the same index added, and dropped where they add up to none."""
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
