"""The kernels over tables of segments against the reference: torch's operations, and Triton's kernels.

Triton's run on a GPU where there is one, else in a subprocess through its interpreter, which runs this file
again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deltasync.errors import CommitError, StageError
from deltasync.kernels import host_segments, reference, segment_kernels, table, torch_ops
from deltasync.kernels.table import Line, Table, Writes
from deltasync.live import Segment
from deltasync.tensors import count_below, region_end
from deltasync.tensors.fingerprint import MASK
from tests.interpreter import DEVICE, HAS_TRITON, INTERPRETED, RUNS

KERNELS: list[ModuleType] = [host_segments, torch_ops] if DEVICE == "cpu" else [torch_ops]
if HAS_TRITON:
    from deltasync.gpu import segments as gpu_segments

    if RUNS:
        KERNELS.append(gpu_segments)
    if INTERPRETED:
        gpu_segments._READ_BLOCK = 32

with_kernels = pytest.mark.parametrize(
    "kernels", KERNELS, ids=lambda module: module.__name__.rpartition(".")[2]
)
# The interpreter takes milliseconds per program.
some = settings(max_examples=30 if INTERPRETED else 100)


@pytest.fixture(autouse=True, scope="module")
def small_blocks() -> Any:
    """So that small segments have several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table, "SCATTER_BLOCK", 16)
        patch.setattr(table, "STREAM_BLOCK", 64)
        yield


@dataclasses.dataclass(eq=False)
class Room:
    kernels: ModuleType
    is_host = False

    def allocate(self, size_bytes: int) -> torch.Tensor:
        return torch.full((size_bytes,), 0xA5, dtype=torch.uint8, device=DEVICE)

    def send(self, pairs: Iterable[tuple[np.ndarray, torch.Tensor]]) -> None:
        for host, to in pairs:
            to.view(-1).copy_(torch.from_numpy(host.reshape(-1).astype(f"i{to.element_size()}")))


def line(key: int, segment: Segment, first: int = 0, part: int = 0) -> Line:
    """A segment of a tensor whose first element is at position `first` of the vector."""
    last = first + region_end(segment.region())
    return Line(key, segment.flat(), segment.offset, first + segment.offset, last, segment.layout(), part)


@dataclasses.dataclass
class Case:
    """A segment of a whole checkpoint tensor of so many elements, and which elements of that are written."""

    segment: Segment
    key: int
    count: int
    index_N: np.ndarray
    """Checkpoint index of each element of the segment, row-major."""
    position_N: np.ndarray
    """Where it lies in live memory."""
    old_N: np.ndarray
    changed_K: np.ndarray
    """Checkpoint indices; elements outside of the segment are in other shards."""


@st.composite
def cases(draw: st.DrawFn, width: int) -> Case:
    """A view of a row-major checkpoint tensor, at live memory with another order of dimensions and gaps; or
    all of it.
    """
    random = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple))
    view = torch.arange(int(np.prod(shape))).reshape(shape)
    is_whole = draw(st.booleans())
    for dim, size in enumerate(() if is_whole else shape):
        start = draw(st.integers(0, size - 1))
        view = view[
            (slice(None),) * dim
            + (slice(start, draw(st.integers(start + 1, size)), draw(st.integers(1, 2))),)
        ]
    order = range(view.ndim) if is_whole else draw(st.permutations(range(view.ndim)))
    padded = torch.zeros(
        [view.shape[dim] + (0 if is_whole else draw(st.integers(0, 2))) for dim in order],
        dtype=getattr(torch, f"int{8 * width}"),
        device=DEVICE,
    )
    live = padded.permute(*np.argsort(order).tolist())[tuple(slice(0, size) for size in view.shape)]
    segment = Segment(live, view.stride(), int(view.storage_offset()))
    position_N = (
        torch.arange(segment.flat().numel()).as_strided(live.shape, live.stride()).reshape(-1).numpy()
    )
    old_N = random.integers(0, 256, live.numel() * width, np.uint8).view(f"u{width}")
    live.copy_(torch.from_numpy(old_N.view(f"i{width}")).reshape(live.shape))
    count = int(np.prod(shape))
    changed_K = np.flatnonzero(random.random(count) < draw(st.sampled_from([0.0, 0.1, 0.6, 1.0])))
    return Case(
        segment, draw(st.integers(0, MASK)), count, view.reshape(-1).numpy(), position_N, old_N, changed_K
    )


@st.composite
def models(draw: st.DrawFn) -> tuple[list[Case], int, np.random.Generator]:
    """Segments of one width, the first position of the vector's tensors, past limits of 32 bits, and random
    numbers.
    """
    width = draw(st.sampled_from([1, 2, 4, 8]))
    held = draw(st.lists(cases(width), min_size=1, max_size=6))
    first = draw(st.sampled_from([0, 5, (1 << 31) - 9, (1 << 32) - 7, (3 << 32) - 1]))
    return held, first, np.random.default_rng(draw(st.integers(0, 1 << 32)))


def _bits(live: torch.Tensor) -> np.ndarray:
    array = live.cpu().contiguous().reshape(-1).numpy()
    return array.view(f"u{array.itemsize}")


def _prepared(
    key: int, dest: np.ndarray, to_K: np.ndarray, step_K: np.ndarray, index_K: np.ndarray
) -> tuple[np.ndarray, int, int]:
    """What adding steps to memory writes, what that adds to the fingerprint, and the checksum of old values
    by place.
    """
    old_K = dest[to_K]
    new_K = old_K + step_K
    with np.errstate(over="ignore"):
        gained = reference.cell_hash(key, index_K, new_K) - reference.cell_hash(key, index_K, old_K)
        check = (np.uint64(2) * to_K.astype(np.uint64) + np.uint64(1)) * old_K.astype(np.uint64)
    return new_K, int(gained.sum(dtype=np.uint64)), int(check.sum(dtype=np.uint64))


@with_kernels
@some
@given(models(), st.booleans(), st.booleans())
def test_prepare_and_swap_are_the_reference(
    kernels: ModuleType, model: Any, twice: bool, mutates: bool
) -> None:
    """Also where a tensor has two copies in live memory."""
    found, first, random = model
    places, at_K, lines = [], [], []
    for number, case in enumerate(found):
        places.append(first)
        at_K.append(case.changed_K + first)
        lines.append(line(case.key, case.segment, first, number))
        first += case.count
    if twice:
        copy = torch.zeros_like(found[0].segment.live).copy_(found[0].segment.live)
        lines.append(
            line(found[0].key, dataclasses.replace(found[0].segment, live=copy), places[0], len(found))
        )
        found = [
            *found,
            dataclasses.replace(found[0], segment=dataclasses.replace(found[0].segment, live=copy)),
        ]
        stride = copy.stride()
        position_N = torch.arange(lines[-1].dest.numel()).as_strided(copy.shape, stride).reshape(-1).numpy()
        found[-1].position_N = position_N
        at = [*range(len(found) - 1), 0]
    else:
        at = [*range(len(found))]
    of = Table(lines, Room(kernels))
    at_K = np.concatenate(at_K)
    step_K = random.integers(0, 256, at_K.size * of.width, np.uint8).view(f"u{of.width}")
    low_S, count_S = of.bounds(count_below(at_K, of.limit_L))
    low_K, steps = of.crossed((at_K, torch.int32), (step_K, of.dtype))
    writes = Writes(of, low_K, steps, low_S, count_S, mutates=mutates)
    writes.prepare()
    parts, gains = writes.gains
    if not mutates:
        np.testing.assert_array_equal(_bits(steps), step_K)
    gained = dict(zip(parts.tolist(), gains.tolist(), strict=True))
    before, after, expected, changed = [], [], 0, 0
    for number, case in enumerate(found):
        whole = _bits(case.segment.flat())
        before.append(whole)
        steps_of = step_K[np.searchsorted(at_K, places[at[number]]) :][: case.changed_K.size]
        inside = np.isin(case.index_N, case.changed_K)
        index_K, to_K = case.index_N[inside], case.position_N[inside]
        data_K = steps_of[np.searchsorted(case.changed_K, index_K)]
        new_K, added, of_swap = _prepared(case.key, whole, to_K, data_K, index_K)
        result = whole.copy()
        result[to_K] = new_K
        after.append(result)
        assert gained.get(number, 0) == added
        expected = (expected + of_swap) & MASK
        changed += index_K.size
    assert (writes.check, writes.changed) == (expected, changed)

    for bits in (after, before):
        writes.exchange()
        for case, wanted in zip(found, bits, strict=True):
            np.testing.assert_array_equal(_bits(case.segment.flat()), wanted)
        if bits is after:
            assert writes.found() == expected


@with_kernels
@some
@given(models())
def test_fingerprints_are_the_reference(kernels: ModuleType, model: Any) -> None:
    found, first, random = model
    for case in found:  # what lies in gaps does not count
        case.segment.flat()[np.setdiff1d(np.arange(case.segment.flat().numel()), case.position_N)] = 1
    lines = [line(case.key, case.segment, first, number) for number, case in enumerate(found)]
    of = Table(lines, Room(kernels))
    chosen = np.flatnonzero(random.random(len(lines)) < 0.7)
    for rows in (of.whole, of.rows(chosen)):
        (gain_S,) = of.empty(((len(lines),), torch.int64))
        kernels.fingerprint(of, rows, gain_S)
        sums = gain_S.cpu().numpy().view(np.uint64)
        for number in rows.lines.tolist():
            case = found[of.part_S[number]]
            wanted = reference.cell_hash(case.key, case.index_N, case.old_N).sum(dtype=np.uint64)
            assert sums[number] == wanted
        assert not sums[np.setdiff1d(np.arange(len(lines)), rows.lines)].any()


@with_kernels
def test_elements_past_every_limit_of_int32(kernels: ModuleType) -> None:
    # On the host memory is never touched where nothing is written.
    size = (1 << 32) + 5
    dest = torch.empty(size, dtype=torch.int8, device=DEVICE)
    segment = Segment(dest, (1,), 0)
    pieces = [*segment.pieces(table.MOST_ELEMENTS)]
    of = Table([line(3, piece) for piece in pieces], Room(kernels))
    assert len(of.lines) == 3
    at_K = np.array([0, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, size - 1])
    old_K, step_K = _bits(dest[torch.from_numpy(at_K)]), np.arange(1, 6, dtype=np.uint8)
    low_S, count_S = of.bounds(count_below(at_K, of.limit_L))
    writes = Writes(of, *of.crossed((at_K, torch.int32), (step_K, of.dtype)), low_S, count_S)
    writes.prepare()
    parts, gains = writes.gains
    new_K = old_K + step_K
    added = reference.cell_hash(3, at_K, new_K) - reference.cell_hash(3, at_K, old_K)
    assert not parts.any() and gains.sum() == added.sum()
    writes.exchange()
    np.testing.assert_array_equal(_bits(dest[torch.from_numpy(at_K)]), new_K)


def test_more_dimensions_than_a_line_has_room_for_are_refused() -> None:
    dest = torch.zeros(1 << 10, dtype=torch.int8, device=DEVICE)
    with pytest.raises(StageError, match="has 9 dimensions, which"):
        Table([Line(0, dest, 0, 0, 1, ((2, 1, 1),) * 9)], Room(torch_ops))


@with_kernels
@pytest.mark.parametrize("fails", range(2))
def test_a_swap_whose_launch_fails_has_exchanged_nothing(
    kernels: ModuleType, fails: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lives = [torch.zeros(9, dtype=torch.int16, device=DEVICE) for _ in range(2)]
    of = Table(
        [line(0, Segment(live, (1,), 0), 9 * number) for number, live in enumerate(lives)], Room(kernels)
    )
    writes = Writes(
        of,
        *of.crossed((np.arange(18), torch.int32), (np.ones(18, "u2"), of.dtype)),
        *map(np.array, ([0, 9], [9, 9])),
    )
    writes.prepare()
    number = iter(range(100))

    def failing(original: Any, from_then_on: bool = False) -> Any:
        def launch(*arguments: Any, **options: Any) -> Any:
            at = next(number)
            if at == fails or (from_then_on and at > fails):
                raise RuntimeError("no launch")
            return original(*arguments, **options)

        return launch

    if kernels is host_segments or (kernels is not torch_ops and fails):
        pytest.skip("an exchange is one call, or one launch")
    owner, name = (torch.Tensor, "index_copy_") if kernels is torch_ops else (kernels, "_launch")
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, failing(getattr(owner, name)))
        with pytest.raises(RuntimeError, match="no launch"):
            kernels.swap(writes)
    assert not any(live.any() for live in lives)
    if kernels is torch_ops:
        number = iter(range(100))
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, failing(getattr(owner, name), from_then_on=True))
            with pytest.raises(CommitError):
                kernels.swap(writes)


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
    room = Room(gpu_segments)
    gpu_segments.warm_up(room, torch.int16)
    if INTERPRETED:
        return
    of_device = torch.cuda.current_device()
    kernels = (
        gpu_segments._prepare,
        gpu_segments._swap,
        gpu_segments._fingerprint,
        gpu_segments._fingerprint_strided,
    )
    compiled = [len(kernel.device_caches[of_device][0]) for kernel in kernels]
    for count in (1, 3, 16, 1024):
        dest = torch.zeros(2048, dtype=torch.int16, device=DEVICE)
        of = Table(
            [line(count << 50, Segment(part, (1,), 1)) for part in (dest[: 2 * count], dest[1::2][:count])],
            room,
        )
        zero, counts = np.zeros(2, np.int64), np.array([count, count])
        low_K, step_K = of.crossed((np.arange(1, count + 1), torch.int32), (np.zeros(count, "u2"), of.dtype))
        writes = Writes(of, low_K, step_K, zero, counts)
        gpu_segments.prepare(writes)
        gpu_segments.swap(writes)
        gpu_segments.fingerprint(of, of.whole, *of.empty(((2,), torch.int64)))
    assert [len(kernel.device_caches[of_device][0]) for kernel in kernels] == compiled
