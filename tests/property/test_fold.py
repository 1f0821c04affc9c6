from __future__ import annotations

import itertools

import numpy as np
from deltasync.tensors.fold import fold_all
from hypothesis import given
from hypothesis import strategies as st

from deltasync.kernels import reference
from deltasync.tensors import Patch
from tests import strategies as our


def _patch(old_N: np.ndarray, new_N: np.ndarray) -> Patch:
    index_K, step_K = reference.diff(old_N, new_N)
    return Patch("w", index_K, step_K, absolute=False)


def fold(first: Patch, second: Patch) -> Patch | None:
    folded = fold_all((first, second))
    assert len(folded) < 2
    return folded[0] if folded else None


def _assert_is_the_diff(patch: Patch | None, old_N: np.ndarray, new_N: np.ndarray) -> None:
    index_K, step_K = reference.diff(old_N, new_N)
    if patch is None:
        assert index_K.size == 0
        return
    assert index_K.size
    assert not patch.absolute
    np.testing.assert_array_equal(patch.index_K, index_K)
    np.testing.assert_array_equal(patch.data, step_K)
    assert patch.data.dtype == old_N.dtype


@given(st.data(), our.dtypes)
def test_a_fold_is_the_diff_of_first_and_last(data: st.DataObject, dtype: str) -> None:
    old_N, middle_N = data.draw(our.bit_pairs(dtype, max_size=80))
    new_N = data.draw(our.new_bits(middle_N, dtype) | st.just(old_N))
    _assert_is_the_diff(fold(_patch(old_N, middle_N), _patch(middle_N, new_N)), old_N, new_N)


@given(our.bit_pairs())
def test_there_and_back_cancels_out(pair: tuple[np.ndarray, np.ndarray]) -> None:
    old_N, new_N = pair
    assert fold(_patch(old_N, new_N), _patch(new_N, old_N)) is None


@given(st.data(), our.dtypes)
def test_folding_does_not_depend_on_the_grouping(data: st.DataObject, dtype: str) -> None:
    states = list(data.draw(our.bit_pairs(dtype, max_size=40)))
    states += [data.draw(our.new_bits(states[-1], dtype))]
    states += [data.draw(our.new_bits(states[-1], dtype))]
    patches = [_patch(a, b) for a, b in itertools.pairwise(states)]
    empty = Patch("w", np.empty(0, np.int64), np.empty(0, states[0].dtype), absolute=False)
    left = fold(fold(patches[0], patches[1]) or empty, patches[2])
    right = fold(patches[0], fold(patches[1], patches[2]) or empty)
    _assert_is_the_diff(left, states[0], states[-1])
    _assert_is_the_diff(right, states[0], states[-1])


@given(our.bit_pairs())
def test_the_arguments_are_not_changed(pair: tuple[np.ndarray, np.ndarray]) -> None:
    first, second = _patch(*pair), _patch(*pair)
    fold(first, second)
    for patch in (first, second):
        _assert_is_the_diff(patch if patch.changed else None, *pair)


@given(st.data(), our.dtypes)
def test_a_fold_of_steps_values_and_whole_tensors_does_what_they_do(data: st.DataObject, dtype: str) -> None:
    states = list(data.draw(our.bit_pairs(dtype, max_size=40)))
    for _ in range(data.draw(st.integers(0, 4))):
        states.append(data.draw(our.new_bits(states[-1], dtype)))
    patches, written_N = [], np.zeros(states[0].size, bool)
    for old_N, new_N in itertools.pairwise(states):
        patch = _patch(old_N, new_N)
        assert patch.index_K is not None
        kind = data.draw(st.sampled_from(["steps", "values", "dense"]))
        if kind == "values":
            patch = Patch("w", patch.index_K, new_N[patch.index_K], absolute=True)
        elif kind == "dense":
            patch = Patch("w", None, new_N.copy(), absolute=True)
        written_N[patch.index_K if patch.index_K is not None else slice(None)] |= kind != "steps"
        patches.append(patch)
    before = [(None if p.index_K is None else p.index_K.copy(), p.data.copy()) for p in patches]
    reached_N, touched_N = states[0].copy(), np.zeros(states[0].size, int)
    folded = fold_all(patches)
    for patch in folded:
        at = slice(None) if patch.index_K is None else patch.index_K
        touched_N[at] += 1
        assert patch.index_K is None or (np.diff(patch.index_K) > 0).all()
        if patch.absolute:
            reached_N[at] = patch.data
        else:
            assert (patch.data != 0).all()
            reached_N[at] += patch.data
        assert patch.data.dtype == states[0].dtype
    np.testing.assert_array_equal(reached_N, states[-1])
    np.testing.assert_array_equal(touched_N, ((states[0] != states[-1]) | written_N).astype(int))
    assert [patch.absolute for patch in folded] in ([], [False], [True], [False, True])
    for (index_K, values), patch in zip(before, patches, strict=True):
        np.testing.assert_array_equal(values, patch.data)
        assert (index_K is None) == (patch.index_K is None)
        if index_K is not None:
            np.testing.assert_array_equal(index_K, patch.index_K)
