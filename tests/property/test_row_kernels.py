"""The kernels over tables of rows against the reference, tensor by tensor."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltasync.kernels import native, reference
from deltasync.tensors import Layout, Sparse, TensorSpec, Vector
from deltasync.tensors.bits import nan_bounds
from deltasync.tensors.fingerprint import MASK
from tests import deltas
from tests import strategies as our
from tests.instructions import instructions as instructions

WIDTHS = {
    1: ("uint8", "float8_e4m3fn"),
    2: ("bfloat16", "float16"),
    4: ("float32", "int32"),
    8: ("float64", "int64"),
}


@pytest.fixture(params=[None, 100], ids=["chunks as they are", "small chunks"], scope="module")
def chunks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Also so small that a tensor has several."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param is not None:
            patch.setattr(native, "_ROW", request.param)
            patch.setattr(native, "_CHUNK", request.param // 4)
            patch.setattr(native, "_LAUNCH", 5 * request.param)
        yield


@st.composite
def vectors(draw: st.DrawFn) -> tuple[Vector, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """A vector of a few tensors, some of them empty, with old and new bits, special ones and wraps
    included.
    """
    width = draw(our.widths)
    dtypes = draw(st.lists(st.sampled_from(WIDTHS[width]), min_size=1, max_size=5))
    specs = [
        TensorSpec(str(n), dtype, (draw(st.sampled_from([0, 1, 64, 130, 700])),))
        for n, dtype in enumerate(dtypes)
    ]
    old = {spec.name: draw(our.bit_arrays(spec.dtype, spec.element_count)) for spec in specs}
    new = {spec.name: draw(our.new_bits(old[spec.name], spec.dtype)) for spec in specs}
    return Layout({spec.name: spec for spec in specs}).vectors[width], old, new


def _bounds(vector: Vector) -> np.ndarray:
    return np.array([nan_bounds(spec) for spec in vector.specs], np.uint64)


def _expected(vector: Vector, old: Any, new: Any) -> tuple[list[int], list[int]]:
    """What the fingerprints gain, and how many changed elements exceed the bounds, in Python's integers."""
    gains, above = [], []
    for key, spec, (mask, largest) in zip(
        vector.key_T.tolist(), vector.specs, _bounds(vector).tolist(), strict=True
    ):
        before, after = old[spec.name], new[spec.name]
        gains.append((reference.fingerprint(key, after) - reference.fingerprint(key, before)) & MASK)
        above.append(sum((bits & mask) > largest for bits in after[before != after].tolist()))
    return gains, above


def _whole(vector: Vector, old: Any, new: Any) -> Sparse:
    layout = Layout({spec.name: spec for spec in vector.specs})
    empty = Sparse(np.empty(0, vector.index_dtype), np.empty(0, vector.bits_dtype))
    return deltas.between(layout, old, new).steps.get(vector.width, empty)


@given(vectors(), st.data())
def test_compare_is_the_reference(chunks: None, model: tuple, data: st.DataObject) -> None:
    """Ranges of each tensor, as a rank holds them, in one call."""
    vector, old, new = model
    held, rows, reached = {}, [], {name: bits_N.copy() for name, bits_N in old.items()}
    for t, name in enumerate(vector.names):
        edges = sorted(data.draw(st.tuples(*[st.integers(0, old[name].size)] * 2)))
        start, stop = edges if data.draw(st.booleans()) else (0, old[name].size)
        held[name] = old[name][start:stop].copy()
        reached[name][start:stop] = new[name][start:stop]
        to = new[name][start:stop].copy()
        rows.append((t, start, stop - start, held[name].ctypes.data, to.ctypes.data, to))
    row_RF = np.array([row[:5] for row in rows], np.int64)
    steps, gain_T, above_T = native.compare(
        row_RF, vector, _bounds(vector), data.draw(st.sampled_from([0, 1, 10_000]))
    )
    expected = _whole(vector, old, reached)
    np.testing.assert_array_equal(steps.at_K, expected.at_K)
    np.testing.assert_array_equal(steps.data_K, expected.data_K)
    assert (gain_T.tolist(), above_T.tolist()) == _expected(vector, old, reached)
    assert (steps.at_K.dtype, steps.data_K.dtype) == (vector.index_dtype, vector.bits_dtype)


@given(vectors())
def test_add_is_the_reference(chunks: None, model: tuple) -> None:
    vector, old, new = model
    held = {name: bits_N.copy() for name, bits_N in old.items()}
    steps = _whole(vector, old, new)
    zero_T = np.array([held[name].ctypes.data for name in vector.names]) - vector.first_T[:-1] * vector.width
    gain_T, above_T = native.add(vector, zero_T, steps, _bounds(vector))
    assert (gain_T.tolist(), above_T.tolist()) == _expected(vector, old, new)
    assert all(held[name].tobytes() == new[name].tobytes() for name in held)
    back_T, _ = native.add(vector, zero_T, Sparse(steps.at_K, np.negative(steps.data_K)), _bounds(vector))
    assert not (gain_T + back_T).any()
    assert all(held[name].tobytes() == old[name].tobytes() for name in held)


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_what_another_thread_writes_meanwhile_is_read_once(width: int) -> None:
    """Steps, gains and counts of NaN are of the same bits, which nobody knows beforehand."""
    spec = TensorSpec("w", WIDTHS[width][0], (300_000,))
    vector = Layout({"w": spec}).vectors[width]
    old_N = np.arange(300_000).astype(vector.bits_dtype)
    new_N, states = old_N.copy(), [old_N + vector.bits_dtype.type(n) for n in range(4)]
    row_RF = np.array([[0, 0, old_N.size, old_N.ctypes.data, new_N.ctypes.data]], np.int64)
    ended = threading.Event()

    def write() -> None:
        while not ended.is_set():
            for state_N in states:
                np.copyto(new_N, state_N)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        found = [native.compare(row_RF, vector, _bounds(vector)) for _ in range(20)]
    finally:
        ended.set()
        writer.join()
    for steps, gain_T, above_T in found:
        reached_N = old_N.copy()
        reached_N[steps.at_K] += steps.data_K
        assert steps.data_K.all() and steps.data_K.max(initial=0) < len(states)
        assert (gain_T.tolist(), above_T.tolist()) == _expected(vector, {"w": old_N}, {"w": reached_N})


@pytest.mark.parametrize("value", [0, 7], ids=["the old bits", "other bits"])
def test_the_reference_reads_an_element_once(value: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer comes after elements were compared, and before their steps are taken."""
    old_N = np.zeros(100, np.uint16)
    new_N = np.arange(100, dtype=np.uint16)
    index_dtype = reference.index_dtype

    def written(size: int) -> np.dtype:
        new_N[:] = value
        return index_dtype(size)

    monkeypatch.setattr(reference, "index_dtype", written)
    vector = Layout({"w": TensorSpec("w", "bfloat16", (100,))}).vectors[2]
    row_RF = np.array([[0, 0, 100, old_N.ctypes.data, new_N.ctypes.data, 0]], np.int64)
    gain_T, above_T = np.zeros(1, np.uint64), np.zeros(1, np.int64)
    steps = reference.compare(row_RF, vector, np.zeros((1, 2), np.uint64), gain_T, above_T)
    np.testing.assert_array_equal(steps.at_K, np.arange(1, 100))
    np.testing.assert_array_equal(steps.data_K, np.arange(1, 100))
    assert gain_T.tolist() == _expected(vector, {"w": old_N}, {"w": np.arange(100, dtype=np.uint16)})[0]


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("step", [1, -1], ids=["up", "down"])
def test_steps_wrap_around(width: int, step: int, chunks: None) -> None:
    """A sum past the largest number, whose fingerprint and checks have to be of what is stored."""
    top = (1 << 8 * width) - 1
    spec = TensorSpec("w", WIDTHS[width][1], (200,))
    vector = Layout({"w": spec}).vectors[width]
    old_N = np.full(200, top if step == 1 else 0, vector.bits_dtype)
    new_N = np.full(200, 0 if step == 1 else top, vector.bits_dtype)
    at_K, step_K = np.arange(200, dtype=np.int32), np.full(200, step & top, vector.bits_dtype)
    key = int(vector.key_T[0])
    gain = (reference.fingerprint(key, new_N) - reference.fingerprint(key, old_N)) & MASK

    held_N = old_N.copy()
    bounds = np.array([[top, top - 1]], np.uint64)
    gain_T, above_T = native.add(vector, np.array([held_N.ctypes.data]), Sparse(at_K, step_K), bounds)
    assert (gain_T.tolist(), above_T.tolist()) == ([gain], [0 if step == 1 else 200])
    np.testing.assert_array_equal(held_N, new_N)

    row_RF = np.array([[0, 0, 200, old_N.ctypes.data, new_N.ctypes.data]], np.int64)
    steps, gain_T, above_T = native.compare(row_RF, vector, bounds)
    assert (gain_T.tolist(), above_T.tolist()) == ([gain], [0 if step == 1 else 200])
    np.testing.assert_array_equal(steps.at_K, at_K)
    np.testing.assert_array_equal(steps.data_K, step_K)
