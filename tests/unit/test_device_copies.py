"""Where the trainer's tensors are compared: copies on an accelerator, which the host plays, are taken and given up."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from deltasync import Publisher, Replica
from deltasync.errors import ConfigError
from deltasync.kernels import ACCELERATORS, torch_ops
from deltasync.publish import detect, device_copies
from deltasync.publish.shadow import Shadow
from deltasync.tensors.bits import bits_of
from deltasync.tensors.delta import joined
from tests.conftest import assert_same_bits

GIB = 1 << 30
Weights = dict[str, torch.Tensor]


class Driver:
    """The memory of an accelerator of 100 GiB, as torch.cuda tells it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free, self.allocated, self.peak, self.reserved, self.retries = 100 * GIB, 0, 0, 0, 0
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (self.free, 100 * GIB))
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: self.allocated)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: self.peak)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: self.reserved)
        monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {"num_alloc_retries": self.retries})


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    """The host's tensors count as an accelerator's, whose memory this is."""
    monkeypatch.setattr(device_copies, "device_diff", torch_ops.Diff)
    ACCELERATORS.add("cpu")
    yield Driver(monkeypatch)
    ACCELERATORS.remove("cpu")


def _weights(seed: int = 0) -> Weights:
    random = torch.Generator().manual_seed(seed)
    shapes = {"matrix": (64, 48), "vector": (33,), "scalar": (), "empty": (0, 4)}
    return {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}


def _trained(weights: Weights, seed: int) -> Weights:
    random = torch.Generator().manual_seed(seed)
    return {
        name: torch.where(torch.rand(tensor.shape, generator=random) < 0.1, tensor * 1.5, tensor)
        for name, tensor in weights.items()
    }


def _advance(shadow: Shadow, weights: Weights, placement: str = "auto") -> None:
    """Afterwards the shadow has the weights' bits and fingerprints."""
    shadow.advance(weights.items(), "bfloat16", 0, placement)
    fresh = Shadow.of(weights.items(), "bfloat16", 0)
    for name, bits in fresh.bits.items():
        np.testing.assert_array_equal(shadow.bits[name], bits)
    assert shadow.fingerprints == fresh.fingerprints


@pytest.mark.parametrize("lasting", [True, False], ids=["a dict's items", "a generator"])
@pytest.mark.parametrize("placement", ["auto", "device", "host"])
def test_every_version_is_what_was_published(placement: str, lasting: bool, driver: Driver, memory_url: str) -> None:
    states = [_weights()]
    for seed in range(3):
        states.append(_trained(states[-1], seed))

    def overwritten(weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        """Each tensor is worth nothing once the next one is asked for."""
        for name, tensor in weights.items():
            given = tensor.clone()
            yield name, given
            given.fill_(7)

    with Publisher(memory_url, shadow_placement=placement) as publisher:
        for state in states:
            publisher.publish(state.items() if lasting else overwritten(state)).wait(60)
        bytes_published = publisher.shadow_bytes["host"]
        assert publisher.shadow_bytes["device"] == (0 if placement == "host" else bytes_published)
    replica = Replica(memory_url)
    for version, state in enumerate(states, start=1):
        replica.sync(version)
        assert_same_bits(replica.state_dict(), {name: tensor.bfloat16() for name, tensor in state.items()})


def test_a_function_is_called_when_the_stream_is_read(memory_url: str) -> None:
    with Publisher(memory_url) as publisher:
        publisher.publish(lambda: _weights().items()).wait(60)
        with pytest.raises(RuntimeError, match="gathering failed"):
            publisher.publish(_failing)
        publisher.publish(lambda: _trained(_weights(), 1).items()).wait(60)
    replica = Replica(memory_url)
    assert replica.sync() == 2


def _failing() -> Iterator[tuple[str, torch.Tensor]]:
    raise RuntimeError("gathering failed")


def test_auto_counts_pytorchs_cache_as_free_but_not_what_training_needs(driver: Driver) -> None:
    device = torch.device("cpu")
    driver.free, driver.reserved, driver.allocated, driver.peak = 5 * GIB, 60 * GIB, 20 * GIB, 20 * GIB
    assert device_copies.room_bytes(device) == (5 + 60 - 20 - 10) * GIB
    driver.peak = 58 * GIB  # activations that are gone while a publish looks
    assert device_copies.room_bytes(device) == (5 + 60 - 58 - 10) * GIB


def test_auto_takes_what_fits(driver: Driver) -> None:
    weights = _weights()
    shadow = Shadow.of(weights.items(), "bfloat16", 0)
    driver.free = 10 * GIB + 2 * 33
    _advance(shadow, _trained(weights, 1))
    assert shadow.size_bytes["device"] == 2 * 33  # the matrix came first, and did not fit; the scalar came last
    driver.free = 10 * GIB + 2 * (64 * 48 + 1)
    _advance(shadow, _trained(weights, 2))
    assert shadow.size_bytes["device"] == 2 * (33 + 64 * 48 + 1)


@pytest.mark.parametrize("pressure", ["the allocator had to retry", "others took the memory"])
def test_copies_are_given_up_under_pressure_and_stay_so(
    pressure: str, driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    weights = _weights()
    shadow = Shadow.of(weights.items(), "bfloat16", 0)
    driver.retries = 4  # before any copy was taken
    _advance(shadow, _trained(weights, 1))
    taken = shadow.size_bytes["device"]
    assert taken == sum(bits.nbytes for bits in shadow.bits.values())
    driver.free = 6 * GIB  # below a tenth, above half of that
    _advance(shadow, _trained(weights, 2))
    assert shadow.size_bytes["device"] == taken
    if pressure == "others took the memory":
        driver.free = 4 * GIB
    else:
        driver.retries += 1
    with caplog.at_level(logging.WARNING):
        _advance(shadow, _trained(weights, 3))
    assert shadow.size_bytes["device"] == 0
    assert f"freed_bytes={taken}" in caplog.text
    driver.free = 100 * GIB
    _advance(shadow, _trained(weights, 4))
    assert shadow.size_bytes["device"] == 0


class NoMemory(torch_ops.Diff):
    """Runs out of memory at this call, counted over `add` and `finish`."""

    at = 0
    calls = 0

    def _call(self) -> None:
        NoMemory.calls += 1
        if NoMemory.calls == NoMemory.at:
            raise torch.OutOfMemoryError("out of memory")

    def add(self, name: str, shadow_N: torch.Tensor, new_N: torch.Tensor, expected: int) -> None:
        self._call()
        super().add(name, shadow_N, new_N, expected)

    def finish(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        self._call()
        return super().finish()


@pytest.mark.parametrize("lasting", [True, False])
@pytest.mark.parametrize("at", range(1, 7))
def test_a_device_without_memory_is_compared_on_the_host(
    at: int, lasting: bool, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_copies, "device_diff", NoMemory)
    monkeypatch.setattr(NoMemory, "at", at)
    monkeypatch.setattr(NoMemory, "calls", 0)
    weights = _weights()
    shadow = Shadow.of(weights.items(), "bfloat16", 0)
    for seed in range(3):  # the first takes the copies
        weights = _trained(weights, seed)
        before = {name: bits.copy() for name, bits in shadow.bits.items()}
        changes = shadow.advance(weights.items() if lasting else iter(weights.items()), "bfloat16", 0, "auto")
        fresh = Shadow.of(weights.items(), "bfloat16", 0)
        counts = {name: int((bits != before[name]).sum()) for name, bits in fresh.bits.items()}
        assert joined(changes).counts() == {name: count for name, count in counts.items() if count}
        assert shadow.fingerprints == fresh.fingerprints
        for name, bits in fresh.bits.items():
            np.testing.assert_array_equal(shadow.bits[name], bits)
    assert NoMemory.calls >= at
    assert shadow.size_bytes["device"] == 0


def test_a_copy_for_which_there_is_no_memory_is_not_taken(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = _weights()
    shadow = Shadow.of(weights.items(), "bfloat16", 0)

    def full(tensor: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(device_copies, "int_view", full)
        _advance(shadow, _trained(weights, 1))
    _advance(shadow, _trained(weights, 2))
    assert shadow.size_bytes["device"] == 0


class _Reads(TorchDispatchMode):
    """Addresses of the storages that torch's operations read or write."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        self.found |= {each.untyped_storage().data_ptr() for each in given}
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", ["bfloat16", "keep"])
def test_copies_are_clones_of_the_weights_and_never_uploaded(dtype: str, driver: Driver) -> None:
    """No operation on a device reads the shadow on the host, from where an upload takes seconds."""
    weights = _weights()
    shadow = Shadow.of(weights.items(), dtype, 0)
    with _Reads() as reads:
        shadow.advance(_trained(weights, 1).items(), dtype, 0, "auto")
    copies = shadow._detector.copies._held
    assert copies.keys() == {"matrix", "vector", "scalar"}
    assert not reads.found & {bits.ctypes.data for bits in shadow.bits.values()}
    for name, copy in copies.items():
        np.testing.assert_array_equal(copy.numpy(), shadow.bits[name].view(f"i{copy.itemsize}"))
        assert copy.untyped_storage().data_ptr() not in {weights[name].untyped_storage().data_ptr()}


@pytest.mark.parametrize("placement", ["auto", "device"])
@pytest.mark.parametrize("dtype", ["bfloat16", "keep"])
def test_tensors_cross_to_the_host_in_pieces(
    dtype: str, placement: str, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of which two are held at a time, so that the memory of a piece is soon another's."""
    monkeypatch.setattr(device_copies, "PIECE_BYTES", 256)
    monkeypatch.setattr(detect, "_COPIED", 32)  # so that whole pieces are compared where they are
    driver.free = 0  # with `auto` nothing may stay
    weights = _weights()
    weights["transposed"] = torch.randn(30, 20).T
    shadow = Shadow.of(weights.items(), dtype, 0)
    for name, tensor in weights.items():
        served = tensor.bfloat16() if dtype == "bfloat16" else tensor
        np.testing.assert_array_equal(shadow.bits[name].reshape(-1), bits_of(served))
    for seed in range(3):
        weights = _trained(weights, seed)
        shadow.advance(iter(weights.items()) if seed % 2 else weights.items(), dtype, 0, placement)
        fresh = Shadow.of(weights.items(), dtype, 0)
        assert shadow.fingerprints == fresh.fingerprints
        for name, bits in fresh.bits.items():
            np.testing.assert_array_equal(shadow.bits[name].reshape(-1), bits.reshape(-1))
    assert bool(shadow.size_bytes["device"]) == (placement == "device")


def test_converted_tensors_do_not_all_wait_at_once(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are served in another dtype than float32 to bfloat16, for which a copy has to be made."""
    finished: list[int] = []

    class Counting(torch_ops.Diff):
        def finish(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
            finished.append(len(self._found))
            return super().finish()

    monkeypatch.setattr(device_copies, "device_diff", Counting)
    monkeypatch.setattr(device_copies, "HELD_BYTES", 1000)
    weights = {str(number): torch.randn(100) for number in range(12)}
    for dtype, waits in (("bfloat16", [12]), ("float16", [6, 6, 0])):
        shadow = Shadow.of(weights.items(), dtype, 0)
        shadow.advance(weights.items(), dtype, 0, "auto")  # takes the copies
        finished.clear()
        shadow.advance(_trained(weights, 1).items(), dtype, 0, "auto")
        assert finished == waits


def test_offloaded_parameters_are_refused_in_one_sentence(memory_url: str) -> None:
    offloaded = {"layer.weight": torch.empty(3, 4, device="meta")}
    with (
        Publisher(memory_url) as publisher,
        pytest.raises(ConfigError, match=r"layer\.weight is offloaded: it is on the meta device, without values"),
    ):
        publisher.publish(offloaded.items())
