"""The kernels over tables of rows against the reference, tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deltasync.kernels import native, reference
from deltasync.live import Segment, staging
from deltasync.live.exchange import Target
from deltasync.live.staging import HostPlaces
from deltasync.tensors import Layout, Sparse, TensorSpec, Vector
from deltasync.tensors.bits import nan_bounds, signed_view
from deltasync.tensors.fingerprint import MASK
from tests import deltas
from tests import strategies as our
from tests.instructions import instructions as instructions

WIDTHS = {1: ("uint8", "float8_e4m3fn"), 2: ("bfloat16", "float16"), 4: ("float32", "int32"), 8: ("float64", "int64")}


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
    """A vector of a few tensors, some of them empty, with old and new bits, special ones and wraps included."""
    width = draw(our.widths)
    dtypes = draw(st.lists(st.sampled_from(WIDTHS[width]), min_size=1, max_size=5))
    specs = [TensorSpec(str(n), dtype, (draw(st.sampled_from([0, 1, 64, 130, 700])),)) for n, dtype in enumerate(dtypes)]
    old = {spec.name: draw(our.bit_arrays(spec.dtype, spec.element_count)) for spec in specs}
    new = {spec.name: draw(our.new_bits(old[spec.name], spec.dtype)) for spec in specs}
    return Layout({spec.name: spec for spec in specs}).vectors[width], old, new


def _bounds(vector: Vector) -> np.ndarray:
    return np.array([nan_bounds(spec) for spec in vector.specs], np.uint64)


def _expected(vector: Vector, old: Any, new: Any) -> tuple[list[int], list[int]]:
    """What the fingerprints gain, and how many changed elements exceed the bounds, in Python's integers."""
    gains, above = [], []
    for key, spec, (mask, largest) in zip(vector.key_T.tolist(), vector.specs, _bounds(vector).tolist(), strict=True):
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
    found = native.compare(row_RF, vector, _bounds(vector), data.draw(st.sampled_from([0, 1, 10_000])))
    expected = _whole(vector, old, reached)
    np.testing.assert_array_equal(found.steps.at_K, expected.at_K)
    np.testing.assert_array_equal(found.steps.data_K, expected.data_K)
    assert (found.gain_T.tolist(), found.above_T.tolist()) == _expected(vector, old, reached)
    assert (found.steps.at_K.dtype, found.steps.data_K.dtype) == (vector.index_dtype, vector.bits_dtype)


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
    found = native.compare(row_RF, vector, bounds)
    assert (found.gain_T.tolist(), found.above_T.tolist()) == ([gain], [0 if step == 1 else 200])
    np.testing.assert_array_equal(found.steps.at_K, at_K)
    np.testing.assert_array_equal(found.steps.data_K, step_K)

    row_RF = np.array([[0, 0, 200, old_N.ctypes.data, 0, -1, 200]], np.int64)
    dims = np.empty((0, 8, 3), np.int64)
    _, to_K, new_K, gain_R, kept_R, check = native.prepare(
        row_RF, dims, vector.key_T, vector.first_T, at_K, step_K, np.dtype(np.int32)
    )
    np.testing.assert_array_equal(to_K, at_K)
    np.testing.assert_array_equal(new_K, new_N)
    assert (gain_R.tolist(), kept_R.tolist()) == ([gain], [200])
    assert check == reference.prepare(key, old_N, at_K, step_K, False, at_K)[2]


@st.composite
def segments(draw: st.DrawFn, spec: TensorSpec) -> Segment:
    """A view of a row-major checkpoint tensor; live memory with another order of dimensions and gaps."""
    view = torch.arange(spec.element_count).reshape(spec.shape)
    for dim, size in enumerate(spec.shape):
        start = draw(st.integers(0, size))
        view = view[(slice(None),) * dim + (slice(start, draw(st.integers(start, size)), draw(st.integers(1, 2))),)]
    view = view.permute(*draw(st.permutations(range(view.ndim))))
    order = draw(st.permutations(range(view.ndim)))
    padded = torch.zeros(
        [view.shape[dim] + draw(st.integers(0, 2)) for dim in order], dtype=getattr(torch, f"int{8 * spec.item_bytes}")
    )
    live = padded.permute(*np.argsort(order).tolist())[tuple(slice(0, size) for size in view.shape)]
    if draw(st.booleans()):
        live = torch.zeros(tuple(view.shape), dtype=live.dtype)
    return Segment(live, view.stride(), int(view.storage_offset()))


@st.composite
def placed(draw: st.DrawFn) -> tuple[Vector, dict[str, np.ndarray], dict[str, np.ndarray], list[Target]]:
    """A vector, its old and new bits, and segments of its tensors, which may be several, partial and empty."""
    width = draw(our.widths)
    shapes = st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple)
    specs = [
        TensorSpec(str(n), dtype, draw(shapes))
        for n, dtype in enumerate(draw(st.lists(st.sampled_from(WIDTHS[width]), min_size=1, max_size=4)))
    ]
    vector = Layout({spec.name: spec for spec in specs}).vectors[width]
    old = {spec.name: draw(our.bit_arrays(spec.dtype, spec.element_count)) for spec in specs}
    new = {spec.name: draw(our.new_bits(old[spec.name], spec.dtype)) for spec in specs}
    targets = []
    for spec, key in zip(specs, vector.key_T.tolist(), strict=True):
        for _ in range(draw(st.integers(0, 3))):
            segment = draw(segments(spec))
            segment.live.copy_(segment.source(signed_view(old[spec.name])))
            targets.append(Target(spec.name, len(targets), segment, key))
    return vector, old, new, targets


@given(model=placed())
def test_prepare_is_the_reference_whatever_the_strides(chunks: None, model: tuple) -> None:
    vector, old, new, targets = model
    places = HostPlaces(vector, targets)
    before = [target.segment.live.clone() for target in targets]
    table, arrays, gains, check, changed = places.prepare(_whole(vector, old, new))
    assert all(torch.equal(target.segment.live, live) for target, live in zip(targets, before, strict=True))
    expected, expected_check = [], 0
    for target in targets:
        index_N = target.segment.source(torch.arange(old[target.name].size)).reshape(-1).numpy()
        differs = old[target.name][index_N] != new[target.name][index_N]
        if not differs.any():
            continue
        live = target.segment.live
        position_N = torch.arange(target.segment.flat().numel()).as_strided(live.shape, live.stride()).reshape(-1).numpy()
        at_K, index_K = position_N[differs], index_N[differs]
        dest_N = target.segment.flat().numpy()
        step_K = new[target.name][index_K] - old[target.name][index_K]
        _, added, one = reference.prepare(target.key, dest_N.view(step_K.dtype), at_K, step_K, False, index_K)
        expected.append((target, added, int(at_K.size)))
        expected_check = (expected_check + one) & MASK
    found = list(zip(gains.part_M.tolist(), gains.value_M.tolist(), strict=True))
    assert found == [(target.part, gain) for target, gain, _ in expected]
    assert (check, changed) == (expected_check, sum(count for *_, count in expected))
    assert native.swap_by(table) == check
    for target in targets:
        assert torch.equal(target.segment.live, target.segment.source(signed_view(new[target.name])))
    native.swap_by(table)
    assert all(torch.equal(target.segment.live, live) for target, live in zip(targets, before, strict=True))
    assert sum(array.nbytes for array in arrays) < 1 << 20


def test_gaps_of_live_memory_stay_as_they_are() -> None:
    spec = TensorSpec("w", "bfloat16", (4, 6))
    vector = Layout({"w": spec}).vectors[2]
    buffer = torch.full((4, 9), -1, dtype=torch.int16)
    target = Target("w", 0, Segment(buffer[:, 2:8], (6, 1), 0), int(vector.key_T[0]))
    target.segment.live.zero_()
    sparse = Sparse(np.arange(24, dtype=np.int32), np.arange(1, 25, dtype=np.uint16))
    table, kept, *_ = HostPlaces(vector, [target]).prepare(sparse)
    native.swap_by(table)
    assert kept
    assert target.segment.live.flatten().tolist() == list(range(1, 25))
    assert (buffer[:, :2] == -1).all() and (buffer[:, 8:] == -1).all()


def test_more_dimensions_than_the_kernels_know_are_refused() -> None:
    spec = TensorSpec("w", "uint8", (2,) * 10)
    live = torch.zeros((2,) * 10, dtype=torch.int8).permute(*reversed(range(10)))
    segment = Segment(live, tuple(1 << at for at in reversed(range(10))), 0)
    with pytest.raises(staging.StageError, match="10 dimensions"):
        HostPlaces(Layout({"w": spec}).vectors[1], [Target("w", 0, segment, 1)])
