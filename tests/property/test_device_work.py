"""What the host does where a device encodes, proves and decodes: calls of Python, and arrays of the size of
the changes.

`test_gpu_diff.py` has the same of comparing, `test_live_devices.py` of staging and commits.

Kernels run through Triton's interpreter. What that calls and allocates is left out.
"""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.weak import WeakTensorKeyDictionary

from deltasync import codec
from deltasync.codec import tiles
from deltasync.kernels.rans import Classes
from deltasync.publish.encode import record_of
from tests.interpreter import INTERPRETED

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="test_interpreted.py runs it")

if INTERPRETED:
    from triton.runtime.interpreter import GridExecutor

    from deltasync.gpu import classes as gpu_classes
    from deltasync.gpu import codec as on_device
    from deltasync.gpu.encode import DeviceCoder
    from tests.property.test_device_codec import Case, case

SIZES = {"TILE": 40, "SMALL": 60, "LEAST": 40, "FEW": 1}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "BLOCK", 1 << 12)
    for name, value in SIZES.items():
        monkeypatch.setattr(tiles, name, value)


class Work:
    """Counts what the host does outside of kernels.

    Attributes:
        calls: Functions called, Python's and C's; not counted while memory is traced.
        peak_bytes: The most bytes that NumPy and Python allocate between two launches. Torch's memory is the
            device's.
        crossed_bytes: Bytes of tensors that were copied from the device, without words.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, traced: bool = False) -> None:
        self.calls = self.peak_bytes = self.crossed_bytes = 0
        self._traced = traced
        run, to_host = GridExecutor.__call__, torch.Tensor.cpu

        def launch(executor: Any, *arguments: Any, **options: Any) -> None:
            running = self._pause()
            run(executor, *arguments, **options)
            if running:
                self._go_on()

        def cpu(tensor: torch.Tensor) -> torch.Tensor:
            self.crossed_bytes += tensor.nbytes
            return to_host(tensor)

        monkeypatch.setattr(GridExecutor, "__call__", launch)
        monkeypatch.setattr(torch.Tensor, "cpu", cpu)

    def __enter__(self) -> Work:
        gc.collect()
        gc.disable()  # others' callbacks would count
        self.calls = self.peak_bytes = self.crossed_bytes = 0
        self._go_on()
        return self

    def __exit__(self, *_: object) -> None:
        self._pause()
        gc.enable()

    def _pause(self) -> bool:
        running = sys.getprofile() is not None or tracemalloc.is_tracing()
        sys.setprofile(None)
        if tracemalloc.is_tracing():
            self.peak_bytes = max(self.peak_bytes, tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
        return running

    def _go_on(self) -> None:
        if self._traced:
            tracemalloc.start()
        else:
            sys.setprofile(self._profile)

    def _profile(self, frame: object, event: str, argument: object) -> None:
        self.calls += event in ("call", "c_call")


class Held(TorchDispatchMode):
    """Within it, `peak_bytes` has the most bytes that arrays of so many elements, or more, took together."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.peak_bytes, self._elements = 0, elements
        self._arrays = WeakTensorKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor) and found.dim() == 1 and found.numel() >= self._elements:
            self._arrays[found] = found.nbytes
        storages = {
            each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in self._arrays
        }
        self.peak_bytes = max(self.peak_bytes, sum(storages.values()))
        return found


class Room(TorchDispatchMode):
    """Within it, `requests` has what may be held after each request for room, and the most that then is; bytes
    of all arrays.
    """

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[tuple[int, int]] = []
        self._arrays = WeakTensorKeyDictionary()

    def ask(self, size_bytes: int) -> None:
        self.requests.append((self._held_bytes() + size_bytes, 0))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor):
            self._arrays[found] = found.nbytes
        if self.requests:
            most, held = self.requests[-1]
            self.requests[-1] = most, max(held, self._held_bytes())
        return found

    def _held_bytes(self) -> int:
        storages = (each.untyped_storage() for each in self._arrays)
        return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


class Calls(TorchDispatchMode):
    """Within it, counts calls of torch that launch something: all that neither make a view nor only allocate."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not (func.is_view or "empty" in func.name())
        return func(*args, **(kwargs or {}))


def _send(pairs: Iterable[tuple[np.ndarray, torch.Tensor]]) -> None:
    """Copy words without an array in between, as on a GPU."""
    for host, to in pairs:
        np.copyto(to.numpy(), host.view(np.int32))


Steps = dict[str, tuple[int, int, int]]


def works(made: Case, name: str, work: Work) -> Steps:
    """Encode, prove and decode a version; return calls, most bytes and bytes that crossed, of each."""
    ((width, of),) = made.layout.vectors.items()
    delta, digests, bits = made.there(), made.digests, made.there(are_new=False).bits
    places = {width: on_device.BitAddresses.of(of, bits[width])}
    cpu = torch.device("cpu")
    coder, decoder = DeviceCoder(made.layout, cpu), on_device.DeviceCodec(made.layout, cpu, _send)
    tiles.tiling(of, places[width].range_T2)  # made once for a model
    tiles.counts(of, tiles.TILE, tiles.BLOCK)
    found = {}
    with work:
        encoded = [*coder.encode(name, delta, digests, 8, list(delta.split(10**6)))]
    found["encode"] = work.calls, work.peak_bytes, work.crossed_bytes
    files = [("payload", each.to_bytes()) for each in encoded]
    opened, record = [codec.open_payload(data) for _, data in files], record_of(name, 8, 7, delta.changed)
    with work:
        coder.prove(record, delta, digests, files)
    found["prove"] = work.calls, work.peak_bytes, work.crossed_bytes
    with work:
        decoder.decode(opened, places)
    found["decode"] = work.calls, work.peak_bytes, work.crossed_bytes
    return found


@pytest.mark.parametrize(
    ("name", "few", "many"),
    [("packed", [(222,)] * 90, [(4,)] * 5_000), ("context", [(64, 32)] * 2, [(8, 5)] * 111)],
    ids=["packed", "context"],
)
def test_as_many_calls_for_many_tensors_as_for_few(
    name: str, few: list[tuple[int, ...]], many: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """55 times as many tensors, of about the same elements, and in `context` about the same blocks."""
    work = Work(monkeypatch)
    works(case(0.2, {"bfloat16": [*few[:2], *many[:2]]}), name, work)  # the interpreter reads the kernels
    counted = [works(case(0.02, {"bfloat16": shapes}, seed=1), name, work) for shapes in (few, many)]
    calls = [{step: found[0] for step, found in each.items()} for each in counted]
    assert all(calls[1][step] <= 1.1 * calls[0][step] for step in calls[0]), calls


@pytest.mark.parametrize("name", ["packed", "context"])
def test_no_array_of_the_size_of_the_changes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four times the changes in the same tensors, blocks and runs."""
    monkeypatch.setattr(tiles, "BLOCK", 1 << 8)  # short streams, which the interpreter takes change by change
    work, found = Work(monkeypatch, traced=True), []
    for fraction in (0.05, 0.25):
        made = case(fraction, {"bfloat16": [(64, 96), (100,)]}, seed=2)
        found.append((made.delta.changed, works(made, name, work)))
    (few, before), (many, after) = found
    assert many > 3 * few
    for step in ("encode", "decode"):
        for what, least, most in zip(("allocated", "copied"), before[step][1:], after[step][1:], strict=True):
            assert most - least < (many - few), (step, what, least, most)


def _decode(
    made: Case, monkeypatch: pytest.MonkeyPatch, within: TorchDispatchMode, asked: list[int]
) -> list[str]:
    """Decode `context`, note how many bytes are asked for, and return the names of launched kernels."""
    run, launched = GridExecutor.__call__, list[str]()

    def launch(executor: Any, *arguments: Any, **options: Any) -> None:
        launched.append(executor.fn.__name__)
        with _disable_current_modes():  # the interpreter copies what a kernel gets
            run(executor, *arguments, **options)

    monkeypatch.setattr(GridExecutor, "__call__", launch)
    ((width, of),) = made.layout.vectors.items()
    bits = made.there(are_new=False).bits[width]
    places = {width: on_device.BitAddresses.of(of, bits)}
    decoder = on_device.DeviceCodec(made.layout, torch.device("cpu"), _send, asked.append)
    opened = [codec.open_payload(each.to_bytes()) for each in made.encoded("context", 10**6)]
    with within:
        found, _ = decoder.decode(opened, places)
    np.testing.assert_array_equal(found.steps[width].low_K.numpy(), made.delta.steps[width].at_K)
    return launched


def test_a_change_takes_seven_bytes_beside_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of bfloat16: four of a position, two of a step, one of a class until all are known. Batches take more
    for their own changes alone. Tensors by gaps lie between those by class.
    """
    monkeypatch.setattr(tiles, "BLOCK", 1 << 8)
    monkeypatch.setattr(gpu_classes, "MOST_BYTES", 3000)
    made = case(0.3, {"bfloat16": [(40,), (8, 64), (40,), (16, 48), (40,)]}, seed=4)
    _decode(made, monkeypatch, held := Held(made.delta.changed), [])
    assert held.peak_bytes == 7 * made.delta.changed


@pytest.mark.parametrize("most", [1000, 10**6])
def test_a_batch_takes_what_was_asked_for(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a band alone has more changes than a batch takes."""
    monkeypatch.setattr(tiles, "BLOCK", 1 << 8)
    monkeypatch.setattr(gpu_classes, "MOST_BYTES", most)
    made, taken, asked = case(1.0, {"bfloat16": [(4, 96), (4, 160)]}, seed=4), list[int](), list[int]()
    place = gpu_classes._place_batch

    def measured(*arguments: Any) -> None:
        with Held(65) as held:  # not what blocks have
            place(*arguments)
        taken.append(held.peak_bytes)

    monkeypatch.setattr(gpu_classes, "_place_batch", measured)
    _decode(made, monkeypatch, Held(1), asked)
    assert (len(taken) > 1) == (most == 1000)
    assert 0.7 * asked[-1] < max(taken) <= asked[-1]


def test_encoding_takes_what_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tensors by gaps between those by class, which are ranked at once."""
    monkeypatch.setattr(tiles, "BLOCK", 1 << 5)
    made = case(0.4, {"bfloat16": [(40,), (8, 24), (40,), (8, 32), (40,)]}, seed=4)
    coder = on_device.DeviceCodec(made.layout, torch.device("cpu"), _send, (room := Room()).ask)
    delta, run = made.there(), GridExecutor.__call__

    def launch(*arguments: Any, **options: Any) -> None:
        with _disable_current_modes():
            run(*arguments, **options)

    monkeypatch.setattr(GridExecutor, "__call__", launch)
    with room:
        encoded = [*coder.encode("context", delta, made.digests, 8, 7, [*delta.split(10**6)])]
    assert len(encoded) == 1
    few = 4096  # arrays of a size that nothing changes
    assert all(held <= most + few for most, held in room.requests), room.requests
    assert max(most for most, _ in room.requests) < 2 * max(held for _, held in room.requests)


def test_a_version_is_decoded_by_few_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """7.6 billion elements of which 1 % changed, by 14 classes, have as many batches as they really have; what a
    batch launches is counted with few elements.
    """
    monkeypatch.setattr(tiles, "BLOCK", 1 << 8)
    made = case(0.2, {"bfloat16": [(4, 96), (4, 160)]}, seed=4)
    found = []
    for most in (gpu_classes.MOST_BYTES, 1500):
        with monkeypatch.context() as patched:
            patched.setattr(gpu_classes, "MOST_BYTES", most)
            launched = _decode(made, patched, calls := Calls(), [])
        found.append((launched.count("_search"), len(launched) + calls.count))
    (once, few), (times, many) = found
    assert once == 1 < times
    of_batch, side = (many - few) / (times - 1), 512
    first_B = np.arange(7_600_000_000 // side**2) * side**2
    row_BF = np.tile(np.array([0, side, side, side, 0, 7, 255]), (first_B.size, 1))
    band_GF = np.array([[first, side, side, 1, side, b] for b, first in enumerate(first_B)])
    bound_B = np.arange(first_B.size + 1) * side**2 // 100
    decoded, encoded = (
        gpu_classes.BlockBits(row_BF, band_GF, bound_B, 2, torch.device("cpu"), changes)
        for changes in (None, made.there())
    )
    class_C = np.arange(14)
    for blocks in (decoded, encoded):
        blocks.divide(
            np.zeros(first_B.size, np.int64), Classes.of([np.stack((class_C, class_C, class_C), axis=1)])
        )
        assert blocks.room_bytes <= gpu_classes.MOST_BYTES
    assert few + (len(decoded.batches) - 1) * of_batch < 200
    assert len(encoded.batches) < 22  # which take no copy of old bits
