"""Arrays out of shared pieces of memory."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from deltasync.tensors.slabs import Slabs

_ARRAYS = st.lists(st.tuples(st.integers(0, 300_000), st.sampled_from([1, 2, 4, 8])), max_size=12)


@given(_ARRAYS)
def test_arrays_are_zero_aligned_and_apart(arrays: list[tuple[int, int]]) -> None:
    slabs = Slabs()
    made = [slabs.zeros(count, np.dtype(f"u{size}")) for count, size in arrays]
    for at, (array, (count, size)) in enumerate(zip(made, arrays, strict=True), 1):
        assert (array.size, array.itemsize) == (count, size)
        assert array.flags.writeable and array.flags.aligned and not array.any()
        array[:] = at
    assert all((array == at).all() for at, array in enumerate(made, 1))
