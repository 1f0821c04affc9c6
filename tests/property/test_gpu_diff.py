"""Comparing on a GPU, against the reference: there where there is one, else in a subprocess through Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deltasync.kernels import ACCELERATORS, device_diff, groups, reference, torch_ops
from deltasync.tensors import index_dtype
from tests import strategies as our
from tests.conftest import assert_same_bits
from tests.interpreter import DEVICE, HAS_TRITON, INTERPRETED

if HAS_TRITON:
    from deltasync.kernels import gpu_diff

on_gpu = pytest.mark.gpu
pytestmark = pytest.mark.gpu
some = settings(max_examples=25 if INTERPRETED else 200)

Pair = tuple[np.ndarray, np.ndarray]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """So that small tensors have several, and groups several tensors; the interpreter takes milliseconds per program."""
    if INTERPRETED:
        ACCELERATORS.add("cpu")
        _set_sizes(monkeypatch, 128, 16, 1024)
    yield
    ACCELERATORS.discard("cpu")


def _set_sizes(monkeypatch: pytest.MonkeyPatch, block: int, words: int, group: int) -> None:
    monkeypatch.setattr(groups, "BLOCK", block)
    monkeypatch.setattr(gpu_diff, "_WORDS", words)
    monkeypatch.setattr(groups, "GROUP", group)


def _signed(bits: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(bits.copy().view(f"i{bits.itemsize}")).to(DEVICE)


def _bits(view: torch.Tensor) -> np.ndarray:
    array = view.cpu().numpy()
    return array.view(f"u{array.itemsize}")


def _assert_finds(pairs: Sequence[Pair], expected: int = 8) -> None:
    """Compare them all at once; the shadows then hold the new bits."""
    diff = device_diff(torch.device(DEVICE))
    shadows, news = ([_signed(bits) for bits in side] for side in zip(*pairs, strict=True))
    for number, (shadow, new) in enumerate(zip(shadows, news, strict=True)):
        diff.add(str(number), shadow, new, expected)
    found = diff.finish()
    for number, (old_N, new_N) in enumerate(pairs):
        index_K, step_K = reference.diff(old_N, new_N)
        if not index_K.size:
            assert str(number) not in found
            continue
        found_K, found_step_K = found.pop(str(number))
        assert found_K.dtype == index_K.dtype and found_step_K.dtype == step_K.dtype
        np.testing.assert_array_equal(found_K, index_K)
        np.testing.assert_array_equal(found_step_K, step_K)
    assert not found
    for shadow, new, (_, new_N) in zip(shadows, news, pairs, strict=True):
        np.testing.assert_array_equal(_bits(shadow), new_N)
        np.testing.assert_array_equal(_bits(new), new_N)


def _bfloat16_of(master_N: np.ndarray) -> np.ndarray:
    """float32 bits to bfloat16 bits as torch rounds; NaNs, of which torch keeps nothing, truncated and made quiet."""
    values_N = torch.from_numpy(master_N.view("f4").copy())
    rounded_N = values_N.to(torch.bfloat16).view(torch.int16).numpy().view("u2")
    return np.where(np.isnan(values_N.numpy()), (master_N >> 16).astype("u2") | np.uint16(0x40), rounded_N)


def _random_pair(random: np.random.Generator, size: int, width: int, density: float) -> Pair:
    old_N = random.integers(0, 256, width * size, np.uint8).view(f"u{width}")
    return old_N, np.where(random.random(size) < density, ~old_N, old_N)


@on_gpu
@some
@given(st.lists(our.bit_pairs(), min_size=1, max_size=5))
def test_all_tensors_of_all_widths_at_once_are_the_reference(pairs: list[Pair]) -> None:
    _assert_finds(pairs)


@on_gpu
@pytest.mark.parametrize("expected", [0, 10_000])
@pytest.mark.parametrize("density", [0.0, 0.01, 1.0])
def test_tensors_of_several_groups_and_groups_of_several_tensors(
    density: float, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More changes than were expected, and than the buffer holds, are found by comparing again."""
    monkeypatch.setattr(groups, "LEAST", 16)
    monkeypatch.setattr(groups, "BUFFER_BYTES", 2048)
    random = np.random.default_rng(0)
    _assert_finds([_random_pair(random, size, 2, density) for size in (0, 700, 1, 128, 1024, 77)], expected)


@on_gpu
def test_a_tensor_that_is_not_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(1)
    old_N, new_N = _random_pair(random, 1025, 2, 0.1)
    diff = device_diff(torch.device(DEVICE))
    shadow, new = _signed(old_N), _signed(new_N)
    diff.add("aligned", shadow[:512], new[:512], 0)
    diff.add("not", shadow[513:], new[513:], 0)
    found = diff.finish()
    for name, part in (("aligned", slice(512)), ("not", slice(513, None))):
        index_K, step_K = reference.diff(old_N[part], new_N[part])
        np.testing.assert_array_equal(found[name][0], index_K)
        np.testing.assert_array_equal(found[name][1], step_K)


@on_gpu
@some
@given(our.bit_pairs("float32"))
def test_a_float32_master_is_rounded_to_nearest_even(pair: Pair) -> None:
    shadow_N, served_N = (_bfloat16_of(master_N) for master_N in pair)
    shadow = _signed(shadow_N)
    diff = device_diff(torch.device(DEVICE))
    diff.add("w", shadow, _signed(pair[1]).view(torch.float32), 8)
    found = diff.finish()
    index_K, step_K = reference.diff(shadow_N, served_N)
    if index_K.size:
        np.testing.assert_array_equal(found["w"][0], index_K)
        np.testing.assert_array_equal(found["w"][1], step_K)
    np.testing.assert_array_equal(_bits(shadow), served_N)


@on_gpu
def test_ties_carries_and_the_step_to_infinity_round_as_in_torch() -> None:
    upper = np.arange(1 << 16, dtype=np.uint32)[:: 7 if INTERPRETED else 1] << 16
    master_N = (upper[:, None] + np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)).ravel()
    if INTERPRETED:
        master_N = np.concatenate([master_N[::29], master_N[master_N >> 16 == 0x7F7F], np.array([0x7F7FFFFF], np.uint32)])
    served_N = _bfloat16_of(master_N)
    shadow = _signed(np.zeros_like(served_N))
    diff = device_diff(torch.device(DEVICE))
    diff.add("w", shadow, _signed(master_N).view(torch.float32), served_N.size)
    diff.finish()
    np.testing.assert_array_equal(_bits(shadow), served_N)


@on_gpu
@pytest.mark.parametrize("density", [0.0, 0.001, 1.0])
@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_blocks_of_their_real_size(density: float, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    _set_sizes(monkeypatch, 4096, 1024, 1 << 28)
    random = np.random.default_rng(0)
    _assert_finds([_random_pair(random, size, width, density) for size in (9 * 4096 + 5, 3, 4096)])


@on_gpu
@pytest.mark.parametrize("tensor_count", [3, 60])
def test_launches_and_waits_do_not_depend_on_the_number_of_tensors(
    tensor_count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "GROUP", 1 << 28)
    launched = []
    for name in ("_mark", "_compact"):
        monkeypatch.setattr(gpu_diff, name, _Counted(getattr(gpu_diff, name), launched))
    random = np.random.default_rng(2)
    pairs = [_random_pair(random, 600 // tensor_count, width, 0.2) for _ in range(tensor_count) for width in (2, 4)]
    _assert_finds(pairs)
    assert len(launched) == 4  # two kernels for each of the widths


@on_gpu
@pytest.mark.parametrize("group_count", [3, 20])
def test_pinned_memory_does_not_grow_with_the_number_of_groups(group_count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "GROUP", 1024)
    monkeypatch.setattr(groups, "LEAST", 16)
    monkeypatch.setattr(groups, "BUFFER_BYTES", 2048)
    made, empty = list[int](), torch.empty

    def counted(size: int, **options: object) -> torch.Tensor:
        if options.get("pin_memory") is not None and size > 64:  # the table of a group takes 64 bytes
            made.append(size)
        return empty(size, **options)

    monkeypatch.setattr(gpu_diff.torch, "empty", counted)
    diff = device_diff(torch.device(DEVICE))
    old_N, new_N = _random_pair(np.random.default_rng(4), group_count * 1024, 2, 0.2)
    for _ in range(2):
        shadow = _signed(old_N)
        diff.add("w", shadow, _signed(new_N), group_count * 200)
        index_K, _ = diff.finish()["w"]
        np.testing.assert_array_equal(index_K, reference.diff(old_N, new_N)[0])
        np.testing.assert_array_equal(_bits(shadow), new_N)
        assert sum(made) <= 4 * 2048  # two buffers, which grow to powers of two
    before = len(made)
    diff.add("w", _signed(old_N), _signed(new_N), group_count * 200)
    diff.finish()
    assert len(made) == before


class _Counted:
    def __init__(self, kernel, launched: list[str]) -> None:
        self._kernel, self._launched = kernel, launched

    def __getitem__(self, grid):
        self._launched.append(self._kernel.__name__)
        return self._kernel[grid]


@on_gpu
@pytest.mark.parametrize("lasting", [True, False], ids=["a dict's items", "a generator"])
@pytest.mark.parametrize("dtype", ["bfloat16", "keep"])
def test_a_publisher_with_copies_on_the_device(dtype: str, lasting: bool, memory_url: str) -> None:
    """The branch that tensors of a GPU take through the shadow, float32 rounded there or taken as it is."""
    from deltasync import Publisher, Replica

    weights = {
        "router": torch.randn(7, 9),
        "matrix": torch.randn(40, 33),
        "half": torch.randn(65).bfloat16(),
        "one": torch.ones(()),
    }
    weights = {name: tensor.to(DEVICE) for name, tensor in weights.items()}
    with Publisher(memory_url, dtype=dtype, shadow_placement="device") as publisher:
        for version in range(1, 5):
            for tensor in weights.values():
                tensor.reshape(-1)[:: 3 * version] *= 1.25
            publisher.publish(weights.items() if lasting else iter(weights.items())).wait(60)
            served = {name: tensor.cpu() if dtype == "keep" else tensor.cpu().bfloat16() for name, tensor in weights.items()}
            replica = Replica(memory_url)
            assert replica.sync() == version
            assert_same_bits(replica.state_dict(), served)
        assert publisher.shadow_bytes["device"] == publisher.shadow_bytes["host"] > 0


@on_gpu
def test_what_was_dropped_is_not_found() -> None:
    diff = device_diff(torch.device(DEVICE))
    diff.add("w", _signed(np.zeros(2000, np.uint16)), _signed(np.ones(2000, np.uint16)), 8)
    diff.drop()
    assert diff.finish() == {}


def test_int32_indices_end_where_int64_ones_begin() -> None:
    assert index_dtype((1 << 31) - 1) == np.int32
    assert index_dtype(1 << 31) == np.int64


def test_positions_are_int64_where_the_tensor_needs_them() -> None:
    if not HAS_TRITON:
        pytest.skip("no triton")
    step_K = np.ones(2, np.int16)
    pieces = [(1 << 31, np.array([0, 5], np.int32), step_K), (0, np.array([7, 9], np.int32), step_K)]
    index_K, found_K = gpu_diff._join(pieces, (1 << 31) + 6)
    assert index_K.dtype == np.int64 and index_K.tolist() == [7, 9, 1 << 31, (1 << 31) + 5]
    assert found_K.dtype == np.uint16


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="no GPU")
def test_a_tensor_of_more_than_2_to_the_31_elements() -> None:
    size = (1 << 31) + 4099
    if torch.cuda.mem_get_info()[0] < 3 * size:
        pytest.skip("the GPU has too little free memory")
    old_N = torch.zeros(size, dtype=torch.int8, device=DEVICE)
    new_N = old_N.clone()
    at = torch.tensor([0, (1 << 31) - 1, 1 << 31, size - 1], device=DEVICE)
    new_N[at] = 7
    diff = device_diff(torch.device(DEVICE))
    diff.add("w", old_N, new_N, 0)
    index_K, step_K = diff.finish()["w"]
    assert index_K.dtype == np.int64
    assert index_K.tolist() == at.tolist() and step_K.tolist() == [7] * 4
    assert torch.equal(old_N, new_N)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.uint64])
def test_torch_alone_is_the_reference(dtype: type) -> None:
    random = np.random.default_rng(3)
    diff = torch_ops.Diff(torch.device("cpu"))
    pairs = {name: _random_pair(random, size, np.dtype(dtype).itemsize, 0.1) for name, size in (("a", 100), ("b", 0))}
    shadows = {name: torch.from_numpy(old_N.view(f"i{old_N.itemsize}")).clone() for name, (old_N, _) in pairs.items()}
    for name, (_, new_N) in pairs.items():
        diff.add(name, shadows[name], torch.from_numpy(new_N.view(f"i{new_N.itemsize}")), 0)
    found = diff.finish()
    assert found.keys() == {"a"}
    for got, wanted in zip(found["a"], reference.diff(*pairs["a"]), strict=True):
        assert got.dtype == wanted.dtype
        np.testing.assert_array_equal(got, wanted)
