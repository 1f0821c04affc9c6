"""Live memory on accelerators: what runs on a GPU, with host memory that stands for its, and the kernels of a
GPU.

Those run through Triton's interpreter in a subprocess, which runs this file again; torch's operations run
here as well.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import mmap
import sys
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from deltasync.errors import CommitError, StageError
from deltasync.gpu import backend as gpu_backend
from deltasync.gpu import devices
from deltasync.gpu import staging as gpu_staging
from deltasync.gpu.delta import BLOCK, DeviceDelta, DeviceSparse
from deltasync.kernels import host_segments, reference, table, torch_ops
from deltasync.kernels.backend import Backend, backend_of
from deltasync.live import LiveMemory, Segment, staging
from deltasync.live.staging import Staged
from deltasync.tensors import Changed, Delta, Layout, Sparse, TensorSpec
from deltasync.tensors.bits import signed_view
from deltasync.tensors.fingerprint import MASK, tensor_key
from tests import deltas
from tests.devices import StandIn, on
from tests.interpreter import INTERPRETED

KERNELS: list[ModuleType] = [host_segments, torch_ops]
if INTERPRETED:
    from deltasync.gpu import segments as gpu_segments

    KERNELS.append(gpu_segments)
with_kernels = pytest.mark.parametrize(
    "kernels", KERNELS, ids=lambda module: module.__name__.rpartition(".")[2]
)
with_patches = pytest.mark.parametrize("kind", ["steps", "whole", "whole with few differences"])

MIB = 1 << 20


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small tensors take several programs and pieces."""
    monkeypatch.setattr(table, "SCATTER_BLOCK", 64)
    monkeypatch.setattr(table, "STREAM_BLOCK", 256)
    monkeypatch.setattr(table, "WRITTEN_AT_ONCE", 3 * 64)
    monkeypatch.setattr(table, "READ_AT_ONCE", 3 * 256)
    monkeypatch.setattr(gpu_staging, "_PIECE_BYTES", 512)
    monkeypatch.setattr(staging, "_COMPARED_BYTES", 512)
    if INTERPRETED:
        monkeypatch.setattr(gpu_segments, "_READ_BLOCK", 128)


@dataclasses.dataclass
class Model:
    """Two tensors, each in two segments that live in storages of their own."""

    memory: LiveMemory
    bits: dict[str, np.ndarray]

    def after(self, kind: str, seed: int = 0) -> dict[str, np.ndarray]:
        """The bits of a next version."""
        random = np.random.default_rng(seed)
        after = {}
        for name, old_N in self.bits.items():
            new_N = random.integers(0, 256, old_N.nbytes, np.uint8).view(old_N.dtype)
            if kind != "whole":
                new_N = np.where(random.random(old_N.size) < 0.05, new_N, old_N)
            after[name] = new_N
        return after

    def stage(self, kind: str, after: dict[str, np.ndarray]) -> Staged:
        """Stage a version, as a delta or as full weights."""
        if kind.startswith("whole"):
            digests = deltas.digests(after)
            return self.memory.stage_weights((name, bits_N, digests[name]) for name, bits_N in after.items())
        return self.memory.stage(deltas.changed(self.memory._layout, self.bits, after))

    def assert_holds(self, bits: dict[str, np.ndarray]) -> None:
        for name, bits_N in bits.items():
            np.testing.assert_array_equal(self.memory.gather(name), bits_N)
            assert not self.memory.differs(name, signed_view(bits_N))


def make(*places: Backend | None, rows: int = 40, columns: int = 24) -> Model:
    """Half of the columns transposed, the other half in a wider buffer, on devices in turn."""
    specs = {
        name: TensorSpec(name, dtype, (rows, columns))
        for name, dtype in (("a", "bfloat16"), ("b", "float32"))
    }
    segments, bits = {}, {}
    random = np.random.default_rng(1)
    half = columns // 2
    for name, spec in specs.items():
        bits[name] = random.integers(0, 256, spec.element_count * spec.item_bytes, np.uint8).view(
            spec.bits_dtype
        )
        full = signed_view(bits[name].copy()).reshape(rows, columns)
        left = full[:, :half].T.contiguous().T
        right = torch.zeros((rows, columns + 3), dtype=full.dtype)[:, 2 : 2 + columns - half]
        right.copy_(full[:, half:])
        segments[name] = [Segment(left, (columns, 1), 0), Segment(right, (columns, 1), half)]
    model = Model(LiveMemory(specs, segments, on(*places)), bits)
    model.memory.audit()
    return model


@with_kernels
@with_patches
def test_commit_and_rollback(kernels: ModuleType, kind: str, small: None) -> None:
    model = make(StandIn(kernels), None, StandIn(kernels))
    memory = model.memory
    before = dict(memory.fingerprints)
    assert before == {
        name: reference.fingerprint(tensor_key(name), bits_N) for name, bits_N in model.bits.items()
    }
    model.assert_holds(model.bits)
    after = model.after(kind)

    staged = model.stage(kind, after)
    model.assert_holds(model.bits)
    assert bool(staged.copies) == (kind == "whole")

    report = memory.commit(staged)
    model.assert_holds(after)
    assert memory.fingerprints == dict(staged.fingerprints)
    assert memory.compare(report) == ([], sum(deltas.digests(after).values()) & MASK)
    assert all(memory.differs(name, signed_view(bits_N)) for name, bits_N in model.bits.items())
    committed = memory.known_parts.tolist()
    memory.audit()
    assert memory.known_parts.tolist() == committed

    memory.rollback(report)
    model.assert_holds(model.bits)
    assert memory.fingerprints == before
    memory.audit()
    assert memory.fingerprints == before


@with_kernels
@with_patches
@pytest.mark.parametrize("unequal", [False, True])
def test_a_tie_is_read_where_the_other_tensor_is_and_never_written(
    kernels: ModuleType, kind: str, unequal: bool, small: None
) -> None:
    random = np.random.default_rng(3)
    old_N = random.integers(0, 1 << 16, 900, np.uint16)
    new_N = np.where(random.random(900) < (1.0 if kind == "whole" else 0.05), old_N ^ np.uint16(5), old_N)
    live = signed_view(old_N.copy())
    specs = {name: TensorSpec(name, "bfloat16", (900,)) for name in ("embeddings", "head")}
    segments = {"embeddings": [Segment(live[:400], (1,), 0), Segment(live[400:], (1,), 400)], "head": []}
    device = StandIn(kernels)
    memory = LiveMemory(specs, segments, lambda _: device, ties={"head": "embeddings"})
    memory.audit()
    before = {"embeddings": old_N, "head": old_N}
    assert memory.fingerprints == deltas.digests(before)
    after = {"embeddings": new_N, "head": old_N if unequal else new_N}
    staged = Model(memory, before).stage(kind, after)
    memory.commit(staged)
    np.testing.assert_array_equal(live.numpy().view(np.uint16), new_N)
    wrong, total = memory.compare(staged)
    assert (total == sum(deltas.digests(after).values()) & MASK) is not unequal
    assert wrong == (["head"] if unequal else [])
    memory.rollback(staged)
    assert memory.fingerprints == deltas.digests(before)


@pytest.mark.parametrize("kernels", KERNELS[-1:])
@pytest.mark.parametrize("segment_count", [339, pytest.param(18_819, marks=pytest.mark.slow)])
def test_a_commit_is_a_constant_number_of_launches(segment_count: int, kernels: ModuleType) -> None:
    if INTERPRETED:
        segment_count //= 30  # the interpreter takes milliseconds per program
    specs = {str(number): TensorSpec(str(number), "bfloat16", (16,)) for number in range(segment_count)}
    held = [StandIn(kernels), StandIn(kernels)]
    buffers = [torch.zeros(16 * segment_count, dtype=torch.int16) for _ in held]
    places = {
        buffer.untyped_storage().data_ptr(): device for buffer, device in zip(buffers, held, strict=True)
    }
    segments = {
        name: [Segment(buffers[number % 2][16 * number : 16 * number + 16], (1,), 0)]
        for number, name in enumerate(specs)
    }
    memory = LiveMemory(specs, segments, lambda live: places[live.untyped_storage().data_ptr()])
    memory.audit()
    at_K = np.add.outer(16 * np.arange(segment_count), [3, 9]).reshape(-1).astype(np.int32)
    steps = Sparse(at_K, np.tile(np.array([1, 2], np.uint16), segment_count))
    staged = memory.stage(Changed(Delta(Layout(specs), {2: steps}), dict.fromkeys(specs, 0)))
    for device in held:
        assert device.launches == ["fingerprint", "prepare"]
        assert len(device.allocated) == 7  # three for a table, four for a version
        device.launches.clear()
    launched = []
    with contextlib.ExitStack() as stack:
        if kernels is not torch_ops:
            launch = kernels._launch

            def count(kernel, *rest, **options):
                launched.append(kernel)
                return launch(kernel, *rest, **options)

            stack.enter_context(mock.patch.object(kernels, "_launch", count))
        report = memory.commit(staged)
    assert [device.launches for device in held] == [["swap"], ["swap"]]
    assert len(launched) == (0 if kernels is torch_ops else 2)
    assert sum(int(buffer.sum()) for buffer in buffers) == 3 * segment_count
    memory.rollback(report)
    assert [device.launches for device in held] == [["swap", "swap"]] * 2
    assert not any(buffer.any() for buffer in buffers)


class _Failure(RuntimeError):
    pass


@pytest.mark.parametrize("kind", ["steps", "whole"])
def test_a_failure_at_any_launch_of_any_device_leaves_the_old_bits(kind: str, small: None) -> None:
    """A launch that fails, an exchange that has ended before its checksum cannot be read, a fingerprint that
    fails.
    """
    for number in itertools.count():
        held = [StandIn(), StandIn(), StandIn()]
        model = make(*held)
        before = dict(model.memory.fingerprints)
        after = model.after(kind)
        staged = model.stage(kind, after)
        points = iter(range(1000))
        failed = []

        def fail(
            name: str, points: Iterator[int] = points, at: int = number, failed: list[str] = failed
        ) -> None:
            if next(points) == at:
                failed.append(name)
                raise _Failure(name)

        for device in held:
            device.fail_at = fail
        check = table.Writes.found

        def failing_check(self: table.Writes, fail: Any = fail, check: Any = check) -> int:
            fail("check")
            return int(check(self))

        with mock.patch.object(table.Writes, "found", failing_check):
            try:
                model.memory.commit(staged)
            except _Failure:
                assert failed
                model.assert_holds(model.bits)
                assert model.memory.fingerprints == before
            else:
                break
    model.assert_holds(after)
    assert number == (8 if kind == "steps" else 4)  # one device has segments of two widths


def test_a_device_that_cannot_be_undone_makes_the_weights_uncertain(small: None) -> None:
    held = [StandIn(), StandIn()]
    model = make(*held)
    staged = model.stage("steps", model.after("steps"))

    def fail(name: str) -> None:
        raise _Failure(name)

    def then_fail(name: str) -> None:
        held[0].fail_at = fail

    held[0].fail_at = then_fail  # once
    held[1].fail_at = fail
    with pytest.raises(CommitError, match="uncertain"):
        model.memory.commit(staged)


def test_memory_that_somebody_else_wrote_on_one_device_is_left_alone_on_all(small: None) -> None:
    model = make(StandIn(), None, StandIn())
    staged = model.stage("steps", model.after("steps"))
    live = model.memory._segments["b"][1].live
    live.add_(1)
    with pytest.raises(StageError, match="someone else"):
        model.memory.commit(staged)
    live.sub_(1)
    model.assert_holds(model.bits)


class _Allocations(TorchDispatchMode):
    """Bytes of the tensors that operations make, in all, and of the largest one."""

    def __init__(self) -> None:
        super().__init__()
        self.total = self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {
            each.untyped_storage().data_ptr()
            for each in tree_leaves((args, kwargs))
            if isinstance(each, torch.Tensor)
        }
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, torch.Tensor) and each.untyped_storage().data_ptr() not in known:
                self.total += each.nbytes
                if "aten.empty" not in str(func):  # pinned memory
                    self.largest = max(self.largest, each.nbytes)
        return result


@pytest.mark.parametrize("kind", ["whole", "whole with few differences"])
def test_full_weights_take_little_memory_of_the_device(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All sizes a 32nd part: a model of 288 MiB on a device where 192 MiB more than the reserve are free."""
    for module, name in (
        (gpu_staging, "_PIECE_BYTES"),
        (staging, "_COMPARED_BYTES"),
        (gpu_staging, "_DIFFERING_BYTES"),
        (devices, "_STEP_BYTES"),
    ):
        monkeypatch.setattr(module, name, getattr(module, name) // 32)
    device = StandIn(free_bytes=devices.RESERVE_BYTES + 192 * MIB // 32)
    model = make(device, rows=1 << 10, columns=1536)
    after = model.after(kind)
    with _Allocations() as made:
        staged = model.stage(kind, after)
    assert made.largest <= gpu_staging._PIECE_BYTES
    with _Allocations() as made:
        for copy in staged.copies:
            copy.exchange()
            copy.exchange()
    report = model.memory.commit(staged)
    had_bytes = device.held_bytes
    model.assert_holds(after)
    assert sum(bits_N.nbytes for bits_N in model.bits.values()) == 288 * MIB // 32
    assert had_bytes <= 192 * MIB // 32
    assert made.total == 0
    assert staged.device_bytes <= had_bytes
    model.memory.rollback(report)
    model.assert_holds(model.bits)


@pytest.mark.parametrize("kind", ["steps", "whole"])
def test_staging_beyond_what_is_free_is_refused_before_it_allocates(kind: str) -> None:
    device = StandIn()
    model = make(device)
    device._free_bytes = device.held_bytes + devices.RESERVE_BYTES + 1000
    device.cache.clear()
    allocated = list(device.allocated)
    after = model.after(kind)
    with pytest.raises(
        StageError,
        match=r"[\d,]+ bytes are needed on cpu, where 268,436,456 are free, .* 268,435,456 stay",
    ):
        model.stage(kind, after)
    assert device.allocated == allocated
    device._free_bytes = 1 << 40
    model.memory.commit(model.stage(kind, after))


class _Gpu(devices.Device):
    """A GPU, as PyTorch's allocator and the driver describe it, whose memory is the host's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, free_bytes: int = 0) -> None:
        super().__init__(torch.device("cuda", 0))
        self.segments: list[dict[str, Any]] = []
        self.free = free_bytes
        vars(self)["_stream"] = SimpleNamespace(cuda_stream=7)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (self.free, 80 << 30))
        monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: self.segments)
        monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())

    def empty(self, size_bytes: int) -> torch.Tensor:
        return torch.zeros(size_bytes, dtype=torch.uint8)

    def has(self, size_bytes: int, state: str = "inactive", stream: int = 7, device: int = 0) -> None:
        """PyTorch's allocator has this block, and one of 1 KiB that is free."""
        blocks = [{"size": size_bytes, "state": state}, {"size": 1 << 10, "state": "inactive"}]
        self.segments = [{"device": device, "stream": stream, "blocks": blocks}]


def test_each_allocation_leaves_the_reserve_free(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = _Gpu(monkeypatch, 300 * MIB)
    with pytest.raises(StageError, match="50,331,648 bytes are needed on cuda:0, where 314,572,800 are free"):
        gpu.allocate(45 * 10**6)
    assert gpu.allocate(40 * 10**6).numel() == 40 * 10**6
    gpu.free = 290 * MIB
    with pytest.raises(StageError):  # also for a size that there was room for before
        gpu.allocate(40 * 10**6)


def test_staging_takes_from_the_cache_what_its_own_stream_gave_back(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = _Gpu(monkeypatch)
    gpu.has(48 * MIB)
    assert gpu.allocate(45 * 10**6).numel() == 45 * 10**6
    with pytest.raises(StageError):
        gpu.allocate(49 * MIB)
    for other in ({"stream": 0}, {"device": 1}, {"state": "active_allocated"}):  # the engine's, or in use
        gpu.has(48 * MIB, **other)
        with pytest.raises(StageError):
            gpu.allocate(45 * 10**6)


class _Cudart:
    """CUDA's registration of host memory; `code` is its answer."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.pinned: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> int:
        assert address % mmap.PAGESIZE == 0
        if not self.code:
            self.pinned[address] = size_bytes
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        del self.pinned[address]
        return 0


def test_pinned_memory_has_the_size_that_is_needed_and_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    cudart, gpu = _Cudart(), _Gpu(monkeypatch)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    held = [gpu.pinned(size_bytes) for size_bytes in (5 * MIB + 3, 0)]
    views = [held[0].view(torch.uint8)[7:]]
    assert [each.numel() for each in held] == [5 * MIB + 3, 0]
    assert sorted(cudart.pinned.values()) == [1, 5 * MIB + 3]
    held.clear()
    assert list(cudart.pinned.values()) == [5 * MIB + 3]  # a view is left
    views[0][:] = 1
    views.clear()
    assert not cudart.pinned


def test_memory_that_cuda_cannot_pin_is_used_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cudart, gpu = _Cudart(code=2), _Gpu(monkeypatch)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    with caplog.at_level(logging.WARNING):
        assert gpu.pinned(100).fill_(3).sum() == 300
    assert "cannot pin 100 bytes of host memory (error 2)" in caplog.text


@pytest.mark.parametrize(
    ("of", "to"), [(np.int64, torch.int32), (np.int32, torch.int32), (np.uint16, torch.int16)]
)
def test_arrays_are_sent_through_rooms_that_stay(
    of: Any, to: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each room is filled again only once what was in it has left; integers keep their lower bits."""
    monkeypatch.setattr(devices, "_SENT_BYTES", 16)
    gpu, events = _Gpu(monkeypatch), list[tuple[str, int]]()
    rooms = [torch.zeros(16, dtype=torch.uint8) for _ in range(devices._ROOMS)]
    done = [
        SimpleNamespace(
            synchronize=lambda number=number: events.append(("wait", number)),
            record=lambda number=number: events.append(("record", number)),
        )
        for number in range(len(rooms))
    ]
    vars(gpu)["_rooms"] = list(zip(rooms, done, strict=True))
    host = (np.arange(301) * 0x1234567890AB).astype(of)
    arrived = torch.zeros(301, dtype=to)
    gpu.send([(host[:100], arrived[:100]), (host[100:], arrived[100:])])
    np.testing.assert_array_equal(arrived.numpy(), host.astype(f"i{to.itemsize}"))
    pieces = sum(-(-count * to.itemsize // 16) for count in (100, 201))
    for number in range(len(rooms)):
        of_room = [what for what, room in events if room == number]
        assert of_room == ["wait", "record"] * len(range(number, pieces, len(rooms)))


def test_pinned_chunks_are_made_once_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "CHUNK_BYTES", 3 * MIB)
    cudart, gpu = _Cudart(), _Gpu(monkeypatch)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    chunks = [gpu.chunk(), gpu.chunk()]
    addresses = {chunk.bytes_B.data_ptr() for chunk in chunks}
    assert len(addresses) == 2 and sorted(cudart.pinned.values()) == [3 * MIB] * 2
    del chunks
    again = gpu.chunk()
    assert again.bytes_B.data_ptr() in addresses and len(cudart.pinned) == 2


@pytest.mark.parametrize("kernels", KERNELS[-1:])
def test_staging_launches_little_at_a_time_and_a_commit_everything(kernels: ModuleType, small: None) -> None:
    if kernels is torch_ops:
        pytest.skip("launches are Triton's")
    launched: list[tuple[str, int]] = []
    launch = kernels._launch

    def count(kernel: Any, programs: int, *rest: Any, **options: Any) -> None:
        launched.append((kernel.__name__, programs))
        launch(kernel, programs, *rest, **options)

    model = make(StandIn(kernels), rows=300)
    with mock.patch.object(kernels, "_launch", count):
        staged = model.stage("steps", model.after("steps"))
        model.memory.audit()
        assert max(rows for _, rows in launched) <= 4 and len(launched) > 4
        launched.clear()
        model.memory.commit(staged)
    assert max(rows for name, rows in launched if name == "_swap") > 3


@pytest.mark.parametrize(
    "last", [1, 9, 1 << 31, (1 << 32) - 1, 1 << 32, (1 << 32) + 1, 3 << 32, (3 << 32) + 7]
)
def test_positions_are_searched_by_their_lower_halves(last: int) -> None:
    random = np.random.default_rng(last)
    near = np.concatenate(
        [(turn << 32) + np.arange(-3, 4) for turn in range(5)] + [random.integers(0, last, 50)]
    )
    at_K = np.unique(near[(near >= 0) & (near < last)])
    limit_L = np.unique(np.concatenate((at_K, at_K + 1, [0, last])))
    sent = lambda *arrays: [torch.from_numpy(array.astype(np.int64)) for array in arrays]  # noqa: E731
    made: Any = SimpleNamespace(limit_L=limit_L, sent=sent)
    for held in (at_K, at_K[:0], at_K[-1:]):
        low_K = torch.from_numpy(held.astype(np.uint32).view(np.int32))
        found = gpu_backend._searched(made, held, low_K)
        np.testing.assert_array_equal(found, np.searchsorted(held, limit_L))


def _calls(run: Any) -> int:
    """Return how many functions Python calls, also those of C."""
    count = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


class _Flat:
    """A model of so many tensors in one buffer, each with 20 changes in a hundred elements, as host and
    device have them.
    """

    def __init__(self, tensors: int, elements: int, kernels: ModuleType) -> None:
        size = elements // tensors
        specs = {str(number): TensorSpec(str(number), "bfloat16", (size,)) for number in range(tensors)}
        self.live = torch.zeros(size * tensors, dtype=torch.int16)
        pieces = zip(specs, self.live.split(size), strict=True)
        self.device = StandIn(kernels)
        segments = {name: [Segment(piece, (1,), 0)] for name, piece in pieces}
        self.memory = LiveMemory(specs, segments, lambda live: self.device)
        layout = Layout(specs)
        self.at_K = np.arange(0, size * tensors, 5, dtype=np.int32)
        steps = Sparse(self.at_K, np.ones(self.at_K.size, np.uint16))
        wanted = dict.fromkeys(specs, None)
        self.on_host = Changed(Delta(layout, {2: steps}), wanted)
        base_B = np.concatenate(
            [np.arange(first, first + size, BLOCK) for first in range(0, size * tensors, size)]
        )
        bound_B = np.append(np.searchsorted(self.at_K, base_B), self.at_K.size)
        on_device = DeviceSparse(
            torch.from_numpy(self.at_K),
            torch.ones(self.at_K.size, dtype=torch.int16),
            torch.from_numpy(base_B),
            torch.from_numpy(bound_B),
            layout.vectors[2].count(self.at_K),
        )
        self.on_device = Changed(DeviceDelta(layout, {2: on_device}), wanted)  # type: ignore[arg-type]


@pytest.mark.parametrize("kernels", KERNELS[-1:])
def test_python_calls_do_not_depend_on_the_number_of_tensors(kernels: ModuleType) -> None:
    """Stage, commit, comparing what a version says, rollback and audit; launches do nothing here."""
    if kernels is torch_ops:
        pytest.skip("torch's operations take one segment after the other")
    found = []
    for tensors in (339, 18_819):
        model = _Flat(tensors, 339 * 18_819 // 3, kernels)
        staged: list[Staged] = []
        with mock.patch.object(kernels, "_launch", lambda *arguments, **options: None):
            model.memory.audit()
            model.memory.stage(model.on_host)
            found.append(
                [
                    _calls(
                        lambda model=model, staged=staged: staged.append(model.memory.stage(model.on_device))
                    ),
                    _calls(
                        lambda model=model, staged=staged: staged.append(model.memory.stage(model.on_host))
                    ),
                    _calls(lambda model=model, staged=staged: model.memory.commit(staged[0])),
                    _calls(lambda model=model, staged=staged: model.memory.compare(staged[0])),
                    _calls(lambda model=model, staged=staged: model.memory.rollback(staged[0])),
                    _calls(lambda model=model: model.memory.audit()),
                ]
            )
    few, many = found
    assert all(most <= 1.1 * least + 3 for least, most in zip(few, many, strict=True)), found


def _counted(send: Callable[[Any], None], sent: list[int]) -> Callable[[Any], None]:
    """Note the bytes of all that is sent."""

    def count(pairs: Iterable[tuple[np.ndarray, torch.Tensor]]) -> None:
        held = [*pairs]
        sent.extend(to.nbytes for _, to in held)
        send(held)

    return count


@pytest.mark.parametrize("kernels", KERNELS[:1])  # Triton's interpreter computes in numpy
def test_a_delta_on_the_device_makes_no_arrays_of_its_size_on_the_host(kernels: ModuleType) -> None:
    model = _Flat(7, 7 * 40_000, kernels)
    model.memory.audit()
    tracemalloc.start()
    sent: list[int] = []
    with mock.patch.object(model.device, "send", _counted(model.device.send, sent)):
        try:
            before, _ = tracemalloc.get_traced_memory()
            tracemalloc.reset_peak()
            staged = model.memory.stage(model.on_device)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    made_bytes = sum(each for each in model.device.allocated[-2:])  # numpy's memory stands for the device's
    assert peak - before < made_bytes + model.at_K.size // 2
    assert sum(sent) < model.at_K.size // 2
    model.memory.commit(staged)
    expected = torch.zeros_like(model.live)
    expected[::5] = 1
    assert torch.equal(model.live, expected)
    sparse = model.on_device.delta.steps[2]
    assert (sparse.step_K == 1).all()  # type: ignore[attr-defined]


@with_kernels
def test_no_check_moves_the_weights_to_the_host(kernels: ModuleType, small: None) -> None:
    model = make(StandIn(kernels), rows=200, columns=100)
    model_bytes = sum(bits_N.nbytes for bits_N in model.bits.values())
    moved = []

    def to_host(self: torch.Tensor) -> torch.Tensor:
        moved.append(self.nbytes)
        return self.clone()

    staged = model.stage("steps", model.after("steps"))
    with mock.patch.object(torch.Tensor, "cpu", to_host):
        model.memory.audit()
        model.memory.commit(staged)
        assert all(model.memory.differs(name, signed_view(bits_N)) for name, bits_N in model.bits.items())
        model.stage("whole", model.after("whole", seed=2))
    assert moved
    assert sum(moved) < model_bytes / 8


def test_positions_cross_once_with_32_bits_and_checkpoint_indices_never() -> None:
    """Which segment a change lies in, and its checkpoint index, follow from the table, which is there
    already.
    """
    device = StandIn()
    model = make(device)
    sent: list[int] = []
    changed = deltas.changed(model.memory._layout, model.bits, model.after("steps"))
    with mock.patch.object(device, "send", _counted(device.send, sent)):
        staged = model.memory.stage(changed)
    segments = sum(map(len, model.memory._segments.values()))
    assert staged.changed == changed.delta.changed
    crossed = sum(steps.at_K.size * (4 + width) for width, steps in changed.delta.steps.items())
    assert crossed <= sum(sent) <= crossed + segments * 8 * (table.WRITE_COLUMNS + 8)


def test_warming_up_serves_each_dtype_of_a_device() -> None:
    device = StandIn()
    make(device).memory.warm_up()
    assert set(device.launches) == {"fingerprint", "warm_up"}


def test_the_host_is_no_device_and_a_device_is_made_once() -> None:
    assert backend_of(torch.device("cpu")).is_host
    assert backend_of(torch.device("meta")) is backend_of(torch.zeros(2, device="meta").device)
    assert not backend_of(torch.device("meta")).is_host
