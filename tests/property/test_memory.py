from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from deltasync.errors import CommitError, StageError
from deltasync.kernels import native, reference, table
from deltasync.live import HostMemory, LiveMemory, Segment, Union, model_fingerprint, staging
from deltasync.live.staging import Staged
from deltasync.tensors import Changed, Delta, Layout, Sparse, TensorSpec, fingerprint, region_end, region_size
from deltasync.tensors.bits import bits_of, int_view, tensor_of
from tests import deltas
from tests import strategies as our


@dataclasses.dataclass(frozen=True)
class Place:
    """A view of a row-major checkpoint tensor, and live memory of the same shape somewhere else."""

    element_count: int
    segment: Segment


@st.composite
def places(draw: st.DrawFn) -> Place:
    """Slices of every dimension with steps, then a permutation; live memory with any order and gaps."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple))
    checkpoint = torch.arange(math.prod(shape), dtype=torch.int32).reshape(shape)
    view = checkpoint
    for dim, size in enumerate(shape):
        start = draw(st.integers(0, size - 1))
        view = view[
            (slice(None),) * dim + (slice(start, draw(st.integers(start, size)), draw(st.integers(1, 2))),)
        ]
    view = view.permute(*draw(st.permutations(range(view.ndim))))
    order = draw(st.permutations(range(view.ndim)))
    padded = torch.zeros([view.shape[dim] + draw(st.integers(0, 2)) for dim in order], dtype=torch.int32)
    live = padded.permute(*np.argsort(order).tolist())[tuple(slice(0, size) for size in view.shape)]
    return Place(checkpoint.numel(), Segment(live, view.stride(), view.storage_offset()))


@given(places())
def test_a_region_ends_behind_its_last_element(place: Place) -> None:
    region = place.segment.region()
    index_N = place.segment.source(torch.arange(place.element_count))
    assert region_size(region) == index_N.numel()
    assert (region[0], region_end(region)) == (
        (int(index_N.min()), int(index_N.max()) + 1) if index_N.numel() else (region[0], region[0])
    )


@pytest.mark.parametrize("shape", [(), (0,), (3, 4), (2, 3, 4)])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.bool])
def test_a_whole_tensors_segment_is_its_memory_whatever_its_strides(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    backwards = torch.zeros(shape[::-1]).to(dtype).permute([*range(len(shape))][::-1])
    for tensor in (backwards, backwards.contiguous()):
        segment = Segment.whole(tensor)
        segment.live.fill_(1)
        assert bool((int_view(tensor) == 1).all())
        assert segment.region() == Segment.whole(torch.zeros(shape, dtype=dtype)).region()


def test_an_empty_segment_holds_nothing() -> None:
    segment = Segment(torch.zeros((0, 3), dtype=torch.int16), (3, 1), 0)
    assert segment.flat().numel() == 0


def _memory_in_pieces(spec: TensorSpec, bits_N: np.ndarray) -> LiveMemory:
    """A matrix as a fleet holds it: the left columns transposed, the right ones as they are, each in a larger
    buffer.
    """
    rows, columns = spec.shape
    half = columns // 2
    full = int_view(tensor_of(bits_N.copy(), spec)).reshape(rows, columns)
    left = torch.zeros((half + 1, rows), dtype=full.dtype)[1:].T
    right = torch.zeros((rows, 2 * (columns - half)), dtype=full.dtype)[:, ::2]
    left.copy_(full[:, :half])
    right.copy_(full[:, half:])
    segments = [Segment(left, (columns, 1), 0), Segment(right, (columns, 1), half)]
    return LiveMemory({spec.name: spec}, {spec.name: segments})


def _zeros(specs: dict[str, TensorSpec]) -> tuple[LiveMemory, dict[str, torch.Tensor]]:
    memory, tensors = HostMemory.on_host(specs)
    for tensor in tensors.values():
        int_view(tensor).zero_()
    return memory, tensors


def _host_memory(spec: TensorSpec, bits_N: np.ndarray) -> LiveMemory:
    memory, tensors = HostMemory.on_host({spec.name: spec})
    int_view(tensors[spec.name]).copy_(int_view(tensor_of(bits_N.copy(), spec)))
    return memory


@st.composite
def matrix_pairs(draw: st.DrawFn) -> tuple[TensorSpec, np.ndarray, np.ndarray]:
    spec = TensorSpec("w", draw(our.dtypes), (draw(st.integers(1, 12)), draw(st.integers(2, 12))))
    old_N = draw(our.bit_arrays(spec.dtype, spec.element_count))
    return spec, old_N, draw(our.new_bits(old_N, spec.dtype))


def _stage(memory: LiveMemory, kind: str, old_N: np.ndarray, new_N: np.ndarray, wanted: int | None) -> Staged:
    if kind == "weights":
        return memory.stage_weights([("w", new_N, wanted)])
    return memory.stage(Changed(deltas.between(memory._layout, {"w": old_N}, {"w": new_N}), {"w": wanted}))


@pytest.mark.parametrize("kind", ["delta", "weights"])
@pytest.mark.parametrize("make_memory", [_host_memory, _memory_in_pieces], ids=["host", "pieces"])
@given(pair=matrix_pairs())
def test_stage_touches_nothing_commit_gives_new_bits_rollback_the_old_ones(
    make_memory: object, kind: str, pair: tuple[TensorSpec, np.ndarray, np.ndarray]
) -> None:
    spec, old_N, new_N = pair
    assert callable(make_memory)
    memory: LiveMemory = make_memory(spec, old_N)
    memory.audit()
    before = dict(memory.fingerprints)
    wanted = reference.fingerprint(fingerprint.tensor_key("w"), new_N)

    staged = _stage(memory, kind, old_N, new_N, wanted)
    np.testing.assert_array_equal(memory.gather("w"), old_N)
    np.testing.assert_array_equal(memory.bits("w"), old_N)
    assert memory.fingerprints == before

    report = memory.commit(staged)
    np.testing.assert_array_equal(memory.gather("w"), new_N)
    assert memory.fingerprints == staged.fingerprints == {"w": wanted}
    assert memory.compare(report) == ([], wanted)

    memory.rollback(report)
    np.testing.assert_array_equal(memory.gather("w"), old_N)
    assert memory.fingerprints == before
    memory.audit()
    assert memory.fingerprints == before


@pytest.mark.parametrize("kind", ["delta", "weights"])
@given(pair=matrix_pairs())
def test_shards_hold_the_tensor_together_and_their_fingerprints_add_up(
    kind: str, pair: tuple[TensorSpec, np.ndarray, np.ndarray]
) -> None:
    """Two workers: each has half of the columns, and both have a copy of the first row."""
    spec, old_N, new_N = pair
    rows, columns = spec.shape
    half = columns // 2
    full = int_view(tensor_of(old_N.copy(), spec)).reshape(rows, columns)
    shards = [
        [Segment(full[:1].clone(), (columns, 1), 0), Segment(full[1:, :half].clone(), (columns, 1), columns)],
        [
            Segment(full[0].clone(), (1,), 0),
            Segment(full[1:, half:].T.clone(), (1, columns), columns + half),
        ],
    ]
    memories = [LiveMemory({"w": spec}, {"w": segments}) for segments in shards]
    key = fingerprint.tensor_key("w")
    for memory in memories:
        memory.audit()
    assert _sum_of(memories) == reference.fingerprint(key, old_N)
    reports = [memory.commit(_stage(memory, kind, old_N, new_N, 0)) for memory in memories]
    assert _sum_of(memories) == reference.fingerprint(key, new_N)
    for memory in memories:
        memory.audit()
    assert _sum_of(memories) == reference.fingerprint(key, new_N)
    flat_N = np.zeros(spec.element_count, new_N.dtype)
    for segment in (segment for segments in shards for segment in segments):
        view = torch.from_numpy(flat_N.view(f"i{flat_N.itemsize}"))
        segment.source(view).copy_(segment.live)
    np.testing.assert_array_equal(flat_N, new_N)
    for memory, report in zip(memories, reports, strict=True):
        memory.rollback(report)
        memory.audit()
    assert _sum_of(memories) == reference.fingerprint(key, old_N)


def _sum_of(memories: list[LiveMemory]) -> int:
    union = Union(["w"], [memory.regions for memory in memories])
    return union.of(np.concatenate([memory.known_parts for memory in memories])).total


def test_copies_that_differ_have_no_fingerprint() -> None:
    spec = TensorSpec("w", "bfloat16", (4,))
    memory = LiveMemory(
        {"w": spec}, {"w": [Segment(torch.zeros(4, dtype=torch.int16), (1,), 0) for _ in range(2)]}
    )
    memory.audit()
    assert memory.fingerprints == {
        "w": reference.fingerprint(fingerprint.tensor_key("w"), np.zeros(4, np.uint16))
    }
    memory._segments["w"][1].live[2] = 1
    memory.audit()
    assert memory.fingerprints == {"w": -1}
    assert model_fingerprint({"v": 5, **memory.fingerprints}) == -1


def test_a_tensor_that_is_held_in_part_is_gathered_where_it_is_held() -> None:
    spec = TensorSpec("w", "bfloat16", (4, 2))
    memory = LiveMemory({"w": spec}, {"w": [Segment(torch.ones(2, 2, dtype=torch.int16), (2, 1), 4)]})
    assert memory.gather("w").tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert memory.held("w") == [(4, ((4, 1),))]


@given(our.specs(), st.data())
def test_host_memory_takes_every_shape_and_dtype(spec: TensorSpec, data: st.DataObject) -> None:
    new_N = data.draw(our.bit_arrays(spec.dtype, spec.element_count))
    memory, tensors = HostMemory.on_host({spec.name: spec})
    memory.audit()
    wanted = reference.fingerprint(fingerprint.tensor_key(spec.name), new_N)
    memory.commit(memory.stage_weights([(spec.name, new_N, wanted)]))
    assert memory.fingerprints == {spec.name: wanted}
    assert tensors[spec.name].shape == spec.shape
    np.testing.assert_array_equal(bits_of(tensors[spec.name]), new_N)


@st.composite
def models(draw: st.DrawFn) -> tuple[dict[str, TensorSpec], dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Several widths, each of several tensors, of any shape."""
    count = draw(st.integers(1, 6))
    specs = {str(number): draw(our.specs(str(number))) for number in range(count)}
    old = {name: draw(our.bit_arrays(spec.dtype, spec.element_count)) for name, spec in specs.items()}
    return specs, old, {name: draw(our.new_bits(old[name], spec.dtype)) for name, spec in specs.items()}


@given(models())
def test_a_delta_of_a_whole_model_is_staged_committed_and_brought_back(model: tuple) -> None:
    specs, old, new = model
    memory, tensors = HostMemory.on_host(specs)
    for name, tensor in tensors.items():
        bits_of(tensor)[:] = old[name]
    memory.audit()
    before = dict(memory.fingerprints)
    changed = deltas.changed(Layout(specs), old, new)
    staged = memory.stage(changed)
    assert staged.changed == changed.delta.changed
    assert all(memory.bits(name).tobytes() == old[name].tobytes() for name in specs)
    memory.commit(staged)
    assert all(memory.bits(name).tobytes() == new[name].tobytes() for name in specs)
    assert memory.fingerprints == deltas.digests(new) == staged.fingerprints
    assert memory.compare(staged) == ([], model_fingerprint(deltas.digests(new)))
    memory.audit()
    assert memory.fingerprints == deltas.digests(new)
    memory.rollback(staged)
    assert all(memory.bits(name).tobytes() == old[name].tobytes() for name in specs)
    assert memory.fingerprints == before
    memory.audit()
    assert memory.fingerprints == before


@given(models())
def test_memory_that_nobody_uses_takes_a_delta_at_once(model: tuple) -> None:
    specs, old, new = model
    memory, _ = HostMemory.on_host(specs)
    memory.load(
        (name, bits_N, digest)
        for (name, bits_N), digest in zip(old.items(), deltas.digests(old).values(), strict=True)
    )
    memory.apply(deltas.between(Layout(specs), old, new))
    assert all(memory.bits(name).tobytes() == new[name].tobytes() for name in specs)
    assert memory.fingerprints == deltas.digests(new)


@given(our.tensors())
def test_bits_of_any_layout_are_the_row_major_ones(tensor: torch.Tensor) -> None:
    expected = int_view(tensor.clone(memory_format=torch.contiguous_format)).numpy()
    np.testing.assert_array_equal(bits_of(tensor), expected.view(f"u{expected.itemsize}"))


def test_a_patch_without_a_place_is_refused_before_anything_is_written() -> None:
    specs = {name: TensorSpec(name, "bfloat16", (3,)) for name in "wx"}
    live = torch.zeros(3, dtype=torch.int16)
    memory = LiveMemory(specs, {"w": [Segment(live, (1,), 0)]})
    old, new = ({name: np.full(3, value, np.uint16) for name in specs} for value in (0, 1))
    with pytest.raises(StageError, match="x has no"):
        memory.stage(deltas.changed(Layout(specs), old, new))
    with pytest.raises(StageError, match="x has no"):
        memory.stage_weights((name, bits_N, 0) for name, bits_N in new.items())
    assert not live.any()


def test_an_audit_of_some_tensors_reads_no_others() -> None:
    specs = {name: TensorSpec(name, "bfloat16", (3,)) for name in "abc"}
    memory, tensors = _zeros(specs)
    memory.audit()
    read = mock.Mock(wraps=native.fingerprint_runs)
    for name in "ab":
        int_view(tensors[name]).fill_(7)
    with mock.patch.object(native, "fingerprint_runs", read):
        assert memory.is_intact({"c"})
        assert not memory.is_intact({"b", "c"})
        memory.audit({"b"})
        assert memory.is_intact({"b", "c"})
    keys = [fingerprint.tensor_key(name) for name in specs]
    assert [call.args[0] for call in read.mock_calls].count(keys[0]) == 0
    assert {call.args[0] for call in read.mock_calls} == {*keys[1:]}
    assert not memory.is_intact()
    memory.audit()
    assert memory.is_intact()


def test_full_weights_of_several_widths_are_copied_together() -> None:
    specs = {
        name: TensorSpec(name, dtype, (3,))
        for name, dtype in (("a", "uint8"), ("b", "bfloat16"), ("c", "float64"))
    }
    for names in (["a", "b"], ["a", "c"], ["b", "a"], ["a", "b", "c"]):
        memory, tensors = _zeros({name: specs[name] for name in names})
        memory.audit()
        weights = [(name, np.ones(3, specs[name].bits_dtype), 0) for name in names]
        report = memory.commit(memory.stage_weights(weights))
        assert all(int_view(tensor).tolist() == [1, 1, 1] for tensor in tensors.values())
        memory.rollback(report)
        assert not any(int_view(tensor).any() for tensor in tensors.values())


class _Failure(RuntimeError):
    pass


def _two_tensors() -> tuple[LiveMemory, dict[str, torch.Tensor], Changed]:
    specs = {name: TensorSpec(name, "bfloat16", (3,)) for name in ("a", "b")}
    memory, tensors = _zeros(specs)
    memory.audit()
    steps = Sparse(np.array([1, 4], np.int32), np.ones(2, np.uint16))
    return memory, tensors, Changed(Delta(Layout(specs), {2: steps}), {"a": 0, "b": 0})


def _mixed(*dtypes: str) -> tuple[LiveMemory, dict[str, torch.Tensor], list[tuple[str, np.ndarray, int]]]:
    """Zeros, and full weights of which the last tensor differs everywhere and the others in one element."""
    specs = {
        f"t{n}": TensorSpec(f"t{n}", dtype, (9 if n < len(dtypes) - 1 else 3,))
        for n, dtype in enumerate(dtypes)
    }
    memory, tensors = _zeros(specs)
    memory.audit()
    new = {name: np.zeros(spec.element_count, spec.bits_dtype) for name, spec in specs.items()}
    for bits_N in new.values():
        bits_N[0 if bits_N.size == 9 else slice(None)] = 1
    return memory, tensors, [(name, bits_N, 0) for name, bits_N in new.items()]


class _FailingCopy(TorchFunctionMode):
    """The n-th copy between tensors fails."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.left = number

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.copy_:
            self.left -= 1
            if self.left == 0:
                raise _Failure
        return func(*args, **(kwargs or {}))


def test_a_commit_that_fails_anywhere_leaves_the_old_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "_PIECE_BYTES", 4)  # two pieces
    memory, tensors, weights = _mixed("bfloat16", "bfloat16")
    before = dict(memory.fingerprints)
    for number in itertools.count(1):
        staged = memory.stage_weights(weights)
        assert staged.swaps and staged.copies
        mode = _FailingCopy(number)
        try:
            with mode:
                memory.commit(staged)
        except _Failure:
            assert not any(int_view(tensor).any() for tensor in tensors.values())
            assert memory.fingerprints == before
        else:
            break
    assert number == 2 * 3 + 1
    assert [int_view(tensor).tolist() for tensor in tensors.values()] == [[1] + [0] * 8, [1] * 3]


@pytest.mark.parametrize("lacking", ["tables of the exchange", "fingerprints of what was copied"])
def test_without_memory_the_old_bits_stay(lacking: str) -> None:
    memory, tensors, weights = _mixed("bfloat16", "float32", "uint8")
    if lacking == "tables of the exchange":
        with mock.patch.object(table, "_rows", side_effect=MemoryError), pytest.raises(MemoryError):
            memory.stage_weights(weights)
    else:
        with (
            mock.patch.object(native, "fingerprint_runs", side_effect=MemoryError),
            pytest.raises(MemoryError),
        ):
            memory.commit(memory.stage_weights(weights))
    assert not any(int_view(tensor).any() for tensor in tensors.values())
    memory.commit(memory.stage_weights(weights))
    assert [int_view(tensor).sum() for tensor in tensors.values()] == [1, 1, 3]


def test_without_memory_to_stage_a_delta_nothing_is_written() -> None:
    memory, tensors, changed = _two_tensors()
    before = dict(memory.fingerprints)
    with mock.patch.object(table, "_rows", side_effect=MemoryError), pytest.raises(MemoryError):
        memory.stage(changed)
    assert not any(int_view(tensor).any() for tensor in tensors.values())
    assert memory.fingerprints == before
    memory.commit(memory.stage(changed))
    assert [int_view(tensor).tolist() for tensor in tensors.values()] == [[0, 1, 0]] * 2


def test_live_memory_that_changed_since_staging_is_left_alone() -> None:
    memory, tensors, changed = _two_tensors()
    staged = memory.stage(changed)
    before = dict(memory.fingerprints)
    int_view(tensors["b"])[1] = 7
    with pytest.raises(StageError, match="someone else"):
        memory.commit(staged)
    assert [int_view(tensors[name]).tolist() for name in ("a", "b")] == [[0, 0, 0], [0, 7, 0]]
    assert memory.fingerprints == before


def test_a_commit_that_cannot_be_undone_says_that_the_weights_are_uncertain() -> None:
    memory, _, weights = _mixed("bfloat16", "bfloat16")
    report = memory.commit(memory.stage_weights(weights))
    report.copies[0].pieces[0][1].resize_(2)
    with pytest.raises(CommitError):
        memory.rollback(report)


def test_what_is_staged_takes_three_times_the_changed_bytes() -> None:
    spec = TensorSpec("w", "bfloat16", (1000, 100))
    memory, _ = HostMemory.on_host({"w": spec})
    memory.audit()
    index_K = np.arange(0, spec.element_count, 100, dtype=np.int32)
    steps = Sparse(index_K, np.ones(index_K.size, np.uint16))
    staged = memory.stage(Changed(Delta(Layout({"w": spec}), {2: steps}), {"w": 0}))
    assert 3 * 2 * index_K.size <= staged.device_bytes <= 3 * 2 * index_K.size + 64  # and the table of writes
