"""Comparing on a GPU, against the reference: there where there is one, else in a subprocess through Triton's
interpreter.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import tracemalloc
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deltasync.gpu import groups
from deltasync.gpu.delta import DeviceDelta
from deltasync.kernels import ACCELERATORS, native, reference
from deltasync.publish.detect import Difference
from deltasync.publish.shadow import Shadow
from deltasync.tensors import Layout, TensorSpec, index_dtype
from deltasync.tensors.bits import bits_of
from tests import strategies as our
from tests.builders import Compared
from tests.interpreter import DEVICE, HAS_TRITON, INTERPRETED
from tests.unit.test_detect import calls_of

if HAS_TRITON:
    from deltasync.gpu import detect as gpu_diff
    from deltasync.gpu.shadow import DeviceShadow

pytestmark = pytest.mark.gpu
some = settings(max_examples=10 if INTERPRETED else 200)

Pair = tuple[np.ndarray, np.ndarray]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """So that small tensors have several, and groups too; the interpreter takes milliseconds per program."""
    if INTERPRETED:
        ACCELERATORS.add("cpu")
        _set_sizes(monkeypatch, 64, 4, 8)
    yield
    ACCELERATORS.discard("cpu")


def _set_sizes(monkeypatch: pytest.MonkeyPatch, block: int, group: int, slot: int) -> None:
    monkeypatch.setattr(gpu_diff, "BLOCK", block)
    monkeypatch.setattr(groups, "GROUP_BLOCKS", group)
    monkeypatch.setattr(groups, "SLOT", slot)


def _tensor(bits: np.ndarray) -> torch.Tensor:
    signed = torch.from_numpy(bits.copy().view(f"i{bits.itemsize}" if bits.itemsize > 1 else "u1"))
    return signed.to(DEVICE)


def _compared(weights: dict[str, torch.Tensor], dtype: str = "keep") -> Compared:
    known = Compared(weights, dtype, place="device")
    assert known.shadow.size_bytes["host"] == 0
    return known


def _check(shadow: Shadow, found: Difference, old: dict[str, np.ndarray], new: dict[str, np.ndarray]) -> None:
    """The shadow is as it was; once the difference is applied it has the new bits."""
    for name, bits_N in old.items():
        np.testing.assert_array_equal(shadow.bits[name], bits_N)
    steps = {}
    assert all(isinstance(piece, DeviceDelta) for piece in found.pieces)
    for piece in found.pieces:
        assert isinstance(piece, DeviceDelta)
        steps |= piece.host().steps
        assert piece.counts() == {
            n: int((new[n] != old[n]).sum()) for n in shadow.specs if (new[n] != old[n]).any()
        }
    for width, vector in shadow.layout.vectors.items():
        index, step = [], []
        for t, name in enumerate(vector.names):
            index_K, step_K = reference.diff(old[name], new[name])
            index.append(index_K.astype(vector.index_dtype) + vector.index_dtype.type(vector.first_T[t]))
            step.append(step_K)
        wanted_K, wanted_step_K = np.concatenate(index), np.concatenate(step)
        if not wanted_K.size:
            assert width not in steps
            continue
        np.testing.assert_array_equal(steps[width].at_K, wanted_K)
        np.testing.assert_array_equal(steps[width].data_K, wanted_step_K)
        assert steps[width].at_K.dtype == wanted_K.dtype
    before = dict(shadow.fingerprints)
    shadow.apply(found)
    for name, bits_N in new.items():
        np.testing.assert_array_equal(shadow.bits[name], bits_N)
    fresh, _ = shadow._memory.fingerprints()
    assert dict(shadow.fingerprints) == dict(fresh)
    some = [*shadow.specs][::-2]
    assert shadow._memory.digests(some) == [fresh[name] for name in some]
    assert {name for name in old if before[name] != fresh[name]} <= {
        n for n in old if (new[n] != old[n]).any()
    }


def _assert_finds(pairs: Sequence[Pair]) -> None:
    """Compare them all at once, and one by one."""
    old, new = ({str(n): bits for n, bits in enumerate(side)} for side in zip(*pairs, strict=True))
    for lasting in (True, False):
        known = _compared({name: _tensor(bits) for name, bits in old.items()})
        weights = {name: _tensor(bits) for name, bits in new.items()}
        found = known.compare(weights if lasting else iter(weights.items()))
        _check(known.shadow, found, old, new)
        assert not known.compare(weights).pieces


@pytest.mark.skipif(not INTERPRETED, reason="the host writes the memory meanwhile")
@pytest.mark.parametrize("back", [False, True], ids=["to other bits", "back to the old bits"])
@pytest.mark.parametrize("lasting", [True, False], ids=["a mapping", "a generator"])
@pytest.mark.parametrize(
    ("density", "kind"), [(0.05, "as it is"), (0.6, "as it is"), (0.6, "float32"), (0.05, "turned")]
)
def test_elements_that_are_written_between_two_reads(
    density: float, kind: str, lasting: bool, back: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gain, steps and count are of one read: the shadow's fingerprints are those of the bits that it
    takes.
    """
    random = np.random.default_rng(7)
    old_N = random.integers(0, 1 << 12, 600, np.uint16)
    first_N = np.where(random.random(600) < density, old_N + 1, old_N).astype(np.uint16)
    later_N = np.where(random.random(600) < 0.5, old_N if back else first_N + 5, first_N).astype(np.uint16)
    if not back:
        # more changes than before, in blocks whose place has no room for them
        later_N[100:300] = old_N[100:300] + 9

    def tensor(bits_N: np.ndarray) -> torch.Tensor:
        held = _tensor(bits_N).view(torch.bfloat16)
        if kind == "float32":
            return held.float()
        return held.view(20, 30).t().contiguous().t() if kind == "turned" else held

    known, weights = _compared({"w": tensor(old_N)}, "bfloat16"), {"w": tensor(first_N)}
    marks, overflowing = gpu_diff._marks, gpu_diff.Comparison._overflowing
    left = [3]  # blocks, after whose first read the writer comes

    def write() -> None:
        left[0] -= 1
        if left[0] >= 0:
            weights["w"].copy_(tensor(later_N).view(weights["w"].shape))

    def marked(*arguments: Any) -> Any:
        found = marks(*arguments)
        write()
        return found

    def overflown(*arguments: Any) -> None:
        write()
        overflowing(*arguments)

    monkeypatch.setattr(gpu_diff, "_marks", marked)
    monkeypatch.setattr(gpu_diff.Comparison, "_overflowing", overflown)
    for _ in range(3):
        found = known.compare(weights if lasting else iter(weights.items()))
        for piece in found.pieces:
            assert isinstance(piece, DeviceDelta)
            host = piece.host()
            assert host.steps[2].data_K.all() and host.counts() == piece.counts()
        known.shadow.apply(found)
        fresh, _ = known.shadow._memory.fingerprints()
        assert dict(known.shadow.fingerprints) == dict(fresh)
        held_N, allowed = known.shadow.bits["w"], (old_N, first_N, later_N)
        assert np.any([held_N == each for each in allowed], axis=0).all()
    assert left[0] < 0
    np.testing.assert_array_equal(known.shadow.bits["w"], later_N)


def _random_pair(random: np.random.Generator, size: int, width: int, density: float) -> Pair:
    old_N = random.integers(0, 256, width * size, np.uint8).view(f"u{width}")
    return old_N, np.where(random.random(size) < density, ~old_N, old_N)


@some
@given(st.lists(our.bit_pairs(), min_size=1, max_size=4))
def test_all_tensors_of_all_widths_at_once_are_the_reference(pairs: list[Pair]) -> None:
    _assert_finds(pairs)


def test_tensors_of_which_only_other_ranks_hold_anything_are_not_compared() -> None:
    old = {name: np.arange(300 * n, 300 * n + 300, dtype=np.uint16) for n, name in enumerate("abcd")}
    known = _compared({name: _tensor(bits) for name, bits in old.items()})
    new = {
        name: bits + (np.arange(300) % 7 == 0).astype(np.uint16) * (name in "bd")
        for name, bits in old.items()
    }
    found = known.shadow.compare([_tensor(new[name]) for name in "db"], ["d", "b"])
    _check(known.shadow, found, old, new)


@pytest.mark.parametrize("density", [0.0, 0.02, 0.3, 1.0])
@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_more_changes_than_slots_or_the_result_have_room_for(
    width: int, density: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "LEAST", 2)
    random = np.random.default_rng(0)
    _assert_finds([_random_pair(random, size, width, density) for size in (0, 170, 1, 64, 99)])


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_tensors_that_are_not_aligned_or_strided_or_elsewhere(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "COPIED", 30)
    monkeypatch.setattr(groups, "COPIES_BYTES", 40 * width)
    random = np.random.default_rng(1)
    held_N, _ = _random_pair(random, 301, width, 0)
    weights = {
        "unaligned": _tensor(held_N)[1:],
        "turned": _tensor(held_N)[:300].view(20, 15).T,
        "every second": _tensor(held_N)[::2],
        "one": _tensor(held_N)[0],
        "expanded": _tensor(held_N)[:7].expand(3, 7),
        "plain": _tensor(held_N),
        "deep": _tensor(held_N)[:240].view(4, 3, 20).permute(2, 0, 1),
    }
    known = _compared({name: tensor.contiguous() for name, tensor in weights.items()})
    for round_ in range(2):
        old = {name: known.shadow.bits[name].copy() for name in weights}
        for name in weights.keys() - {"expanded"}:
            at = torch.arange(weights[name].numel(), device=DEVICE) % (5 + round_) == 0
            weights[name] += at.view(weights[name].shape).to(weights[name].dtype)
        new = {name: bits_of(tensor.contiguous()) for name, tensor in weights.items()}
        _check(known.shadow, known.compare(weights), old, new)


def _bfloat16_of(master_N: np.ndarray) -> np.ndarray:
    """float32 bits to bfloat16 bits as torch rounds; NaNs, of which torch keeps nothing, truncated and made
    quiet.
    """
    values_N = torch.from_numpy(master_N.view("f4").copy())
    rounded_N = values_N.to(torch.bfloat16).view(torch.int16).numpy().view("u2")
    return np.where(np.isnan(values_N.numpy()), (master_N >> 16).astype("u2") | np.uint16(0x40), rounded_N)


def _assert_rounds(old_N: np.ndarray, new_N: np.ndarray) -> None:
    known = _compared({"w": _tensor(_bfloat16_of(old_N)).view(torch.bfloat16)}, "bfloat16")
    found = known.compare({"w": _tensor(new_N).view(torch.float32)})
    _check(known.shadow, found, {"w": _bfloat16_of(old_N)}, {"w": _bfloat16_of(new_N)})


@some
@given(our.bit_pairs("float32"))
def test_a_float32_master_is_rounded_to_nearest_even(pair: Pair) -> None:
    _assert_rounds(*pair)


def test_ties_carries_and_the_step_to_infinity_round_as_in_torch() -> None:
    upper = np.arange(1 << 16, dtype=np.uint32)[:: 7 if INTERPRETED else 1] << 16
    master_N = (upper[:, None] + np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)).ravel()
    if INTERPRETED:
        master_N = np.concatenate(
            [master_N[::229], master_N[master_N >> 16 == 0x7F7F], np.array([0x7F7FFFFF], np.uint32)]
        )
    _assert_rounds(np.zeros_like(master_N), master_N)


def test_new_nan_is_told_by_name(caplog: pytest.LogCaptureFixture) -> None:
    weights = {name: torch.zeros(70, device=DEVICE) for name in "abc"}
    known = _compared(weights, "bfloat16")
    weights["b"][69] = float("nan")
    weights["c"][0] = float("inf")
    known.shadow.apply(known.compare(weights))
    assert known.shadow.with_nan == ["b"]
    fresh, with_nan = known.shadow._memory.fingerprints()
    assert with_nan == ["b"] and dict(fresh) == dict(known.shadow.fingerprints)


@pytest.mark.parametrize("density", [0.001, 0.2])
@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_blocks_of_their_real_size(density: float, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    _set_sizes(monkeypatch, 4096, 1 << 16, 128)
    random = np.random.default_rng(0)
    _assert_finds([_random_pair(random, size, width, density) for size in (2 * 4096 + 5, 3, 4096)])


def test_positions_past_2_to_the_32() -> None:
    """The tensor is a rank's small range of a large one."""
    start, spec = (1 << 32) - 100, TensorSpec("w", "int16", (5 << 32,))
    random = np.random.default_rng(3)
    old_N, new_N = _random_pair(random, 300, 2, 0.1)
    ranges = {"w": (start, start + 300)}
    memory = DeviceShadow(Layout({"w": spec}), ranges, torch.device(DEVICE))
    memory.set("w", _tensor(old_N))
    memory.plan(["w"], [_tensor(new_N)])
    new = _tensor(new_N)
    found = memory.compare([new])
    (delta,) = found.pieces
    assert isinstance(delta, DeviceDelta)
    index_K, step_K = reference.diff(old_N, new_N)
    steps = delta.host().steps[2]
    assert steps.at_K.dtype == np.int64
    np.testing.assert_array_equal(steps.at_K, index_K + np.int64(start))
    np.testing.assert_array_equal(steps.data_K, step_K)
    limits = torch.tensor([0, start, 1 << 32, (1 << 32) + 50, 5 << 32], device=DEVICE)
    assert (
        delta.steps[2].count_below(limits).tolist()
        == np.searchsorted(steps.at_K, limits.cpu().numpy()).tolist()
    )
    key = int(memory._layout.vectors[2].key_T[0])
    wanted = native.fingerprint(key, new_N, start) - native.fingerprint(key, old_N, start)
    assert int(found.gains[2][0]) == wanted % (1 << 64)


@pytest.mark.parametrize("tensor_count", [3, 30])
def test_launches_do_not_depend_on_the_number_of_tensors(
    tensor_count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "GROUP_BLOCKS", 1 << 16)
    launched = list[str]()
    for name in ("_compare", "_pack", "_apply"):
        monkeypatch.setattr(gpu_diff, name, _Counted(getattr(gpu_diff, name), launched))
    random = np.random.default_rng(2)
    pairs = [
        _random_pair(random, 600 // tensor_count, width, 0.1) for _ in range(tensor_count) for width in (2, 4)
    ]
    weights = {str(n): _tensor(old_N) for n, (old_N, _) in enumerate(pairs)}
    known = _compared({name: tensor.clone() for name, tensor in weights.items()})
    for tensor in weights.values():
        tensor[::50] += 1
    known.shadow.apply(known.compare(weights))
    # of each width one
    assert sorted(launched) == ["_apply", "_apply", "_compare", "_compare", "_pack", "_pack"]


@dataclasses.dataclass
class _Counted:
    kernel: object
    launched: list[str]

    def __getitem__(self, grid: tuple[int, ...]) -> object:
        self.launched.append(self.kernel.__name__)  # type: ignore[attr-defined]
        return self.kernel[grid]  # type: ignore[index]


def test_an_interrupt_at_any_launch_leaves_the_shadow(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(5)
    old_N, new_N = _random_pair(random, 300, 2, 0.3)
    known, weights = _compared({"w": _tensor(old_N)}), {"w": _tensor(new_N)}
    before = dict(known.shadow.fingerprints)
    for name, launches in (("_compare", 2), ("_all", 2), ("_pack", 3)):
        for number in range(launches):
            with monkeypatch.context() as patched:
                patched.setattr(gpu_diff, name, _Interrupted(getattr(gpu_diff, name), number))
                with pytest.raises(KeyboardInterrupt):
                    known.compare(weights)
            assert dict(known.shadow.fingerprints) == before
    _check(known.shadow, known.compare(weights), {"w": old_N}, {"w": new_N})


@dataclasses.dataclass
class _Interrupted:
    kernel: object
    left: int

    def __getitem__(self, grid: tuple[int, ...]) -> object:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
        return self.kernel[grid]  # type: ignore[index]


def test_a_device_without_memory_gives_the_shadow_back_to_the_host(caplog: pytest.LogCaptureFixture) -> None:
    weights = {"w": torch.arange(300, device=DEVICE, dtype=torch.int32)}
    for place in ("auto", "device"):
        known = Compared(weights, "keep", place)
        shadow = known.shadow
        old = shadow.bits["w"].copy()
        assert shadow.size_bytes["device"]
        shadow._memory.compare = functools.partial(_full)  # type: ignore[method-assign]
        weights["w"][7] += 1
        if place == "device":
            with pytest.raises(torch.OutOfMemoryError):
                known.compare(weights)
            continue
        found = known.compare(weights)
        assert "The shadow moves to the host" in caplog.text
        assert shadow.size_bytes["device"] == 0
        np.testing.assert_array_equal(shadow.bits["w"], old)
        shadow.apply(found)
        np.testing.assert_array_equal(shadow.bits["w"], bits_of(weights["w"]))


def _full(held: object) -> None:
    raise torch.OutOfMemoryError("out of memory\nand more")


def test_as_many_calls_for_many_tensors_as_for_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a publish's comparison and of taking it over: the same elements in 339 and in 18,819 tensors."""
    for name in ("_pack", "_apply", "_print"):
        monkeypatch.setattr(gpu_diff, name, _Fake(_nothing))
    # one change in each block
    monkeypatch.setattr(gpu_diff, "_compare", _Fake(lambda *given, **_: given[3].fill_(1)))
    monkeypatch.setattr(groups, "GROUP_BLOCKS", 1 << 16)
    zeros = torch.zeros
    monkeypatch.setattr(torch, "empty", lambda *sizes, **options: zeros(*sizes, **options))
    calls_of(339, 100_000, "device")  # fills the caches of abstract classes
    few, many = (calls_of(count, 100_000, "device") for count in (339, 18_819))
    assert many <= 1.1 * few


@pytest.mark.skipif(
    not INTERPRETED, reason="the host's memory stands for the device's, so that its arrays are seen"
)
def test_nothing_of_the_size_of_the_changes_is_made_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy traces its arrays, and torch does not: what torch has is on the device."""
    _set_sizes(monkeypatch, 4096, 1 << 16, 4096)
    weights = {"w": torch.zeros(5 * 4096, dtype=torch.int64)}
    known = _compared(weights)
    known.shadow.apply(known.compare(weights))
    weights["w"] += 1
    tracemalloc.start()
    try:
        with _uninterpreted(monkeypatch):
            found = known.compare(weights)
            known.shadow.apply(found)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 5 * 4096 * 8


@contextlib.contextmanager
def _uninterpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leave out what the interpreter allocates: kernels report that all has changed, and write nothing."""

    def compare(*arguments: Any, **options: Any) -> None:
        arguments[3].fill_(4096)

    kernels = {"_compare": compare, "_pack": _nothing, "_apply": _nothing}
    with monkeypatch.context() as patched:
        for name, kernel in kernels.items():
            patched.setattr(gpu_diff, name, _Fake(kernel))
        yield


def _nothing(*_: object, **__: object) -> None:
    """Do nothing: the interpreter's own calls and arrays would count."""


@dataclasses.dataclass
class _Fake:
    kernel: Callable[..., None]

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self.kernel


@pytest.mark.parametrize("lasting", [True, False], ids=["a mapping", "a generator"])
def test_a_publisher_whose_shadow_is_on_the_device(lasting: bool) -> None:
    pytest.importorskip("zstandard", reason="what stores and reads is not on every machine with a GPU")
    from deltasync import Publisher, Replica

    url = f"memory://{uuid.uuid4().hex}"
    weights = {
        "router": torch.randn(7, 9),
        "half": torch.randn(65).bfloat16(),
        "one": torch.ones(()),
        "count": torch.arange(9),
    }
    weights = {name: tensor.to(DEVICE) for name, tensor in weights.items()}
    with Publisher(url, dtype="bfloat16,router=keep", shadow="device") as publisher:
        for version in range(1, 4):
            for tensor in weights.values():
                tensor.view(-1)[:: 3 * version] += 1
            publisher.publish(weights if lasting else iter(weights.items())).wait(120)
            replica = Replica(url)
            assert replica.sync() == version
            for name, found in replica.state_dict().items():
                served = (
                    weights[name].cpu() if name in ("router", "count") else weights[name].cpu().bfloat16()
                )
                np.testing.assert_array_equal(bits_of(found), bits_of(served))
        assert publisher.shadow_bytes["host"] == 0 < publisher.shadow_bytes["device"]


@pytest.mark.skipif(INTERPRETED, reason="no GPU")
def test_a_tensor_of_more_than_2_to_the_31_elements() -> None:
    size = (1 << 31) + 4099
    if torch.cuda.mem_get_info()[0] < 4 * size:
        pytest.skip("the GPU has too little free memory")
    weights = {"w": torch.zeros(size, dtype=torch.int8, device=DEVICE)}
    known = _compared(weights)
    at = torch.tensor([0, (1 << 31) - 1, 1 << 31, size - 1], device=DEVICE)
    weights["w"][at] = 7
    found = known.compare(weights)
    (delta,) = found.pieces
    assert isinstance(delta, DeviceDelta)
    assert delta.steps[1].positions().tolist() == at.tolist() and delta.steps[1].step_K.tolist() == [7] * 4
    known.shadow.apply(found)
    assert not known.compare(weights).pieces


def test_int32_indices_end_where_int64_ones_begin() -> None:
    assert index_dtype((1 << 31) - 1) == np.int32
    assert index_dtype(1 << 31) == np.int64
