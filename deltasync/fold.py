"""Merge consecutive deltas of one tensor into one, exactly and without the weights: later wins, steps add, nothing
that cancels out remains.
"""

from __future__ import annotations

import numpy as np

from deltasync.types import Patch


def fold(first: Patch, second: Patch) -> Patch | None:
    """The patch that does what `first` then `second` do, both of steps; None if they cancel out.

    Args:
        first: Steps, with indices.
        second: Steps, with indices, of the same tensor.
    """
    assert first.index_K is not None and second.index_K is not None
    assert not first.absolute and not second.absolute
    index = np.concatenate((first.index_K, second.index_K))
    index_K, where = np.unique(index, return_inverse=True)
    step_K = np.zeros(index_K.size, first.data.dtype)
    step_K[where[: first.data.size]] = first.data
    step_K[where[first.data.size :]] += second.data
    kept = step_K != 0
    if not kept.any():
        return None
    return Patch(first.name, index_K[kept], step_K[kept], absolute=False)
