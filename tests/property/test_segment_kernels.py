"""The kernels over tables of segments against the reference: torch's operations, and Triton's kernels.

Triton's run on a GPU where there is one, else in a subprocess through its interpreter, which runs this file again.
"""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deltasync.errors import CommitError, StageError
from deltasync.kernels import reference, segment_kernels, table, torch_ops
from deltasync.kernels.table import Entry, Table
from deltasync.live import Segment
from deltasync.tensors.fingerprint import MASK
from tests.interpreter import DEVICE, HAS_TRITON, INTERPRETED, RUNS

KERNELS: list[ModuleType] = [torch_ops]
if HAS_TRITON:
    from deltasync.kernels import gpu_segments

    if RUNS:
        KERNELS.append(gpu_segments)
    if INTERPRETED:
        gpu_segments._READ_BLOCK = 32

with_kernels = pytest.mark.parametrize("kernels", KERNELS, ids=lambda module: module.__name__.rpartition(".")[2])
# The interpreter takes milliseconds per program.
some = settings(max_examples=30 if INTERPRETED else 100)


@pytest.fixture(autouse=True, scope="module")
def small_blocks() -> Any:
    """So that small segments have several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table, "SCATTER_BLOCK", 16)
        patch.setattr(table, "STREAM_BLOCK", 64)
        yield


class Room:
    def allocate(self, size_bytes: int) -> torch.Tensor:
        return torch.full((size_bytes,), 0xA5, dtype=torch.uint8, device=DEVICE)

    def send(self, host: torch.Tensor, to: torch.Tensor) -> None:
        to.copy_(host)


@dataclasses.dataclass
class Case:
    """A segment, a whole checkpoint tensor, and which of the segment's elements are written."""

    segment: Segment
    entry: Entry
    index_N: np.ndarray
    """Checkpoint index of each element of the segment, row-major."""
    position_N: np.ndarray
    old_N: np.ndarray
    chosen: np.ndarray
    data_K: np.ndarray


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A view of a row-major checkpoint tensor, at live memory with another order of dimensions and gaps."""
    width = draw(st.sampled_from([1, 2, 4, 8]))
    random = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple))
    view = torch.arange(int(np.prod(shape))).reshape(shape)
    for dim, size in enumerate(shape):
        start = draw(st.integers(0, size - 1))
        view = view[(slice(None),) * dim + (slice(start, draw(st.integers(start + 1, size)), draw(st.integers(1, 2))),)]
    order = draw(st.permutations(range(view.ndim)))
    padded = torch.zeros(
        [view.shape[dim] + draw(st.integers(0, 2)) for dim in order], dtype=getattr(torch, f"int{8 * width}")
    )
    padded = padded.to(DEVICE)
    live = padded.permute(*np.argsort(order).tolist())[tuple(slice(0, size) for size in view.shape)]
    segment = Segment(live, view.stride(), int(view.storage_offset()))
    position_N = torch.arange(segment.flat().numel()).as_strided(live.shape, live.stride()).reshape(-1).numpy()
    old_N = random.integers(0, 256, live.numel() * width, np.uint8).view(f"u{width}")
    live.copy_(torch.from_numpy(old_N.view(f"i{width}")).reshape(live.shape))
    chosen = np.flatnonzero(random.random(live.numel()) < draw(st.sampled_from([0.1, 0.6, 1.0])))
    data_K = random.integers(0, 256, chosen.size * width, np.uint8).view(f"u{width}")
    entry = Entry(draw(st.integers(0, MASK)), segment.flat(), segment.offset, segment.layout())
    entry = dataclasses.replace(
        entry,
        at_K=position_N[chosen].astype(draw(st.sampled_from([np.int32, np.int64]))),
        value_K=data_K,
        absolute=draw(st.booleans()),
    )
    return Case(segment, entry, view.reshape(-1).numpy(), position_N, old_N, chosen, data_K)


def _bits(live: torch.Tensor) -> np.ndarray:
    array = live.cpu().contiguous().reshape(-1).numpy()
    return array.view(f"u{array.itemsize}")


@with_kernels
@some
@given(st.lists(cases(), min_size=1, max_size=6))
def test_prepare_and_swap_are_the_reference(kernels: ModuleType, found: list[Case]) -> None:
    found = [case for case in found if case.chosen.size]
    if not found:
        return
    whole = [_bits(case.segment.flat()) for case in found]
    of = Table([case.entry for case in found], Room())
    assert of.changed == sum(case.chosen.size for case in found)
    assert len(of.kinds) == len({(case.old_N.itemsize, case.entry.at_K.itemsize) for case in found})  # type: ignore[union-attr]
    kernels.prepare(of)
    new, gained, check = [], [], 0
    for case, before in zip(found, whole, strict=True):
        np.testing.assert_array_equal(_bits(case.segment.flat()), before)
        entry = case.entry
        assert entry.at_K is not None
        index_K = case.index_N[case.chosen]
        new_K, added, expected = reference.prepare(entry.key, before, entry.at_K, case.data_K, entry.absolute, index_K)
        after = before.copy()
        after[entry.at_K] = new_K
        new.append(after)
        gained.append(added)
        check = (check + expected) & MASK
    assert of.gained() == gained
    assert of.check() == check

    kernels.swap(of)
    assert of.check() == check
    for case, after in zip(found, new, strict=True):
        np.testing.assert_array_equal(_bits(case.segment.flat()), after)
    kernels.swap(of)
    for case, before in zip(found, whole, strict=True):
        np.testing.assert_array_equal(_bits(case.segment.flat()), before)


@with_kernels
@some
@given(st.lists(cases(), min_size=1, max_size=6))
def test_fingerprints_are_the_reference(kernels: ModuleType, found: list[Case]) -> None:
    for case in found:  # what lies in gaps does not count
        case.segment.flat()[np.setdiff1d(np.arange(case.segment.flat().numel()), case.position_N)] = 1
    entries = [dataclasses.replace(case.entry, at_K=None, value_K=None) for case in found]
    of = Table(entries, Room())
    kernels.fingerprint(of)
    assert of.gained() == [
        int(reference.cell_hash(case.entry.key, case.index_N, case.old_N).sum(dtype=np.uint64)) for case in found
    ]


@with_kernels
def test_elements_past_every_limit_of_int32(kernels: ModuleType) -> None:
    # On the host memory is never touched where nothing is written.
    size = (1 << 32) + 5
    dest = torch.empty(size, dtype=torch.int8, device=DEVICE)
    at_K = np.array([0, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, size - 1])
    old_K = _bits(dest[torch.from_numpy(at_K)])
    new_K = np.arange(1, 6, dtype=np.uint8)
    of = Table([Entry(3, dest, 0, ((1, size, 1),), at_K, new_K)], Room())
    kernels.prepare(of)
    added = reference.cell_hash(3, at_K, new_K) - reference.cell_hash(3, at_K, old_K)
    assert of.gained() == [int(added.sum(dtype=np.uint64))]
    kernels.swap(of)
    assert dest[torch.from_numpy(at_K)].tolist() == [1, 2, 3, 4, 5]


def test_more_dimensions_than_a_line_has_room_for_are_refused() -> None:
    entry = Entry(0, torch.zeros(1 << 10, dtype=torch.int8, device=DEVICE), 0, ((2, 1, 1),) * 9)
    with pytest.raises(StageError, match="has 9 dimensions, which"):
        Table([entry], Room())


@with_kernels
@pytest.mark.parametrize("fails", range(3))
def test_a_swap_whose_launch_fails_has_exchanged_nothing(
    kernels: ModuleType, fails: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lives = [torch.zeros(9, dtype=dtype, device=DEVICE) for dtype in (torch.int8, torch.int16, torch.int32)]
    entries = [
        Entry(0, live, 0, ((1, 9, 1),), np.arange(9, dtype=np.int32), np.ones(9, f"u{live.element_size()}"))
        for live in lives
    ]
    of = Table(entries, Room())
    kernels.prepare(of)
    number = iter(range(100))

    def failing(original: Any, from_then_on: bool = False) -> Any:
        def launch(*arguments: Any, **options: Any) -> Any:
            at = next(number)
            if at == fails or (from_then_on and at > fails):
                raise RuntimeError("no launch")
            return original(*arguments, **options)

        return launch

    owner, name = (torch.Tensor, "index_copy_") if kernels is torch_ops else (kernels, "_launch")
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, failing(getattr(owner, name)))
        with pytest.raises(RuntimeError, match="no launch"):
            kernels.swap(of)
    assert not any(live.any() for live in lives)
    number = iter(range(100))
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, failing(getattr(owner, name), from_then_on=True))
        with pytest.raises(CommitError if fails or kernels is torch_ops else RuntimeError):  # nothing to undo: as above
            kernels.swap(of)


def test_a_segment_that_overlaps_itself_is_refused() -> None:
    live = torch.zeros(9, dtype=torch.int16)
    with pytest.raises(StageError, match="overlaps"):
        Segment(live.as_strided((2, 3), (2, 1)), (3, 1), 0).layout()
    assert Segment(live.as_strided((3, 3), (3, 1)), (3, 1), 7).layout() == ((1, 9, 1),)
    assert Segment(live.as_strided((3, 3), (1, 3)), (3, 1), 0).layout() == ((3, 3, 1), (1, 3, 3))


@pytest.mark.parametrize("most", [1, 2, 5, 7, 100])
def test_pieces_are_the_segment(most: int) -> None:
    live = torch.zeros((4, 3, 2), dtype=torch.int16).permute(2, 0, 1)
    segment = Segment(live, (12, 3, 1), 0)
    pieces = list(segment.pieces(most))
    assert all(piece.live.numel() <= most for piece in pieces)
    for piece in pieces:
        piece.live.add_(piece.source(torch.arange(24, dtype=torch.int16)))
    assert torch.equal(live, segment.source(torch.arange(24, dtype=torch.int16)))


def test_a_device_without_kernels_of_its_own_is_served_by_torch() -> None:
    assert segment_kernels(torch.device("meta")) is torch_ops
    assert segment_kernels(torch.device("cuda")) is (gpu_segments if HAS_TRITON else torch_ops)


@pytest.mark.gpu
def test_warming_up_compiles_all_that_commits_need() -> None:
    gpu_segments.warm_up.cache_clear()
    gpu_segments.warm_up(torch.device(DEVICE), torch.int16)
    if INTERPRETED:
        return
    of_device = torch.cuda.current_device()
    kernels = (gpu_segments._prepare, gpu_segments._swap, gpu_segments._fingerprint)
    compiled = [len(kernel.device_caches[of_device][0]) for kernel in kernels]
    for count in (1, 3, 16, 1024):
        dest = torch.zeros(2048, dtype=torch.int16, device=DEVICE)[count % 16 :]
        for at in (np.int32, np.int64):
            for absolute in (True, False):
                entry = Entry(count << 50, dest, 1, ((1, 2048 - count % 16, 1),))
                chosen = dataclasses.replace(
                    entry, at_K=np.arange(count, dtype=at), value_K=np.zeros(count, np.uint16), absolute=absolute
                )
                of = Table([chosen], Room())
                gpu_segments.prepare(of)
                gpu_segments.swap(of)
                gpu_segments.fingerprint(Table([entry], Room()))
    assert [len(kernel.device_caches[of_device][0]) for kernel in kernels] == compiled
