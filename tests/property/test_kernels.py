from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deltasync.kernels import native, reference, torch_ops
from deltasync.tensors import Sparse
from deltasync.tensors.fingerprint import MASK
from tests import one_tensor
from tests import strategies as our
from tests.instructions import instructions as instructions

keys = st.integers(0, MASK)


def _signed(bits: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(bits.copy().view(f"i{bits.itemsize}"))


@given(our.bit_pairs())
def test_diff_finds_exactly_the_changed_bits_and_leads_there(pair: tuple[np.ndarray, np.ndarray]) -> None:
    old_N, new_N = pair
    index_K, step_K = reference.diff(old_N, new_N)
    assert index_K.tolist() == [i for i in range(old_N.size) if int(old_N[i]) != int(new_N[i])]
    reached_N = old_N.copy()
    reached_N[index_K] += step_K
    np.testing.assert_array_equal(reached_N, new_N)


@given(our.bit_pairs())
def test_cpu_diff_is_the_reference(pair: tuple[np.ndarray, np.ndarray]) -> None:
    for found, expected in zip(native.diff(*pair), reference.diff(*pair), strict=True):
        np.testing.assert_array_equal(found, expected)
        assert found.dtype == expected.dtype


@pytest.mark.parametrize("density", [0.0, 0.001, 1.0])
def test_cpu_kernels_are_the_reference_over_several_parallel_chunks(density: float) -> None:
    random = np.random.default_rng(0)
    old_N = random.integers(0, 1 << 16, (1 << 22) + 3 * (1 << 16) + 5, np.uint16)
    new_N = np.where(random.random(old_N.size) < density, ~old_N, old_N)
    fingerprint_before = native.fingerprint(5, old_N)
    for found, expected in zip(native.diff(old_N, new_N), reference.diff(old_N, new_N), strict=True):
        np.testing.assert_array_equal(found, expected)
    assert native.fingerprint(5, new_N) == reference.fingerprint(5, new_N)
    index_K, step_K = reference.diff(old_N, new_N)
    compared = one_tensor.compare(5, old_N, new_N, (0, 0), 0)
    added, _ = one_tensor.add(5, old_N, index_K, step_K, (0, 0))
    assert added == (native.fingerprint(5, new_N) - fingerprint_before) & MASK
    for found, expected in zip(compared, (index_K, step_K, added), strict=False):
        np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(old_N, new_N)


@given(keys, our.bit_pairs())
def test_fingerprint_is_the_reference(key: int, pair: tuple[np.ndarray, np.ndarray]) -> None:
    _, bits_N = pair
    expected = reference.fingerprint(key, bits_N)
    assert 0 <= expected <= MASK
    assert native.fingerprint(key, bits_N) == expected
    hashes = torch_ops.cell_hash(key, torch.arange(bits_N.size), _signed(bits_N))
    assert int(hashes.sum()) & MASK == expected


@given(keys, our.bit_pairs())
def test_take_copies_and_tells_of_what_it_copied(key: int, pair: tuple[np.ndarray, np.ndarray]) -> None:
    out_N, bits_N = pair[0].copy(), pair[1].copy()
    bits_N.flags.writeable = False
    found = native.take(key, bits_N, out_N)
    np.testing.assert_array_equal(out_N, bits_N)
    assert found == native.fingerprint(key, bits_N)


@given(
    keys, st.lists(st.tuples(st.integers(0, (1 << 62) - 1), st.integers(0, MASK)), max_size=20), our.widths
)
def test_cell_hash_is_splitmix64_for_indices_past_every_limit(
    key: int, cells: list[tuple[int, int]], width: int
) -> None:
    index_K = np.array([index for index, _ in cells], np.int64)
    bits_K = np.array([bits & ((1 << (8 * width)) - 1) for _, bits in cells], f"u{width}")
    found = reference.cell_hash(key, index_K, bits_K).tolist()
    for index, bits, value in zip(index_K.tolist(), bits_K.tolist(), found, strict=True):
        z = (key + index * 0x9E3779B97F4A7C15 + bits * 0xD1B54A32D192ED03) & MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        assert value == z ^ (z >> 31)
    in_torch = torch_ops.cell_hash(key, torch.from_numpy(index_K), _signed(bits_K))
    assert [value & MASK for value in in_torch.tolist()] == found


@given(keys, our.bit_pairs(), st.integers(0, 1 << 30) | st.just(1 << 32))
def test_to_compare_is_to_diff_and_only_reads(
    key: int, pair: tuple[np.ndarray, np.ndarray], start: int
) -> None:
    old_N, new_N = pair
    before_N, bounds = old_N.copy(), ((1 << (8 * old_N.itemsize - 1)) - 1, int(new_N[0]) if new_N.size else 0)
    wanted_K, wanted_step_K = reference.diff(old_N, new_N)
    at_K, step_K, *found = one_tensor.compare(key, old_N, new_N, bounds, start)
    np.testing.assert_array_equal(old_N, before_N)
    assert tuple(found) == one_tensor.add(key, old_N, wanted_K, wanted_step_K, bounds, start)
    assert at_K.dtype == (np.int32 if start < 1 << 31 else np.int64)
    np.testing.assert_array_equal(at_K, wanted_K + np.int64(start))
    np.testing.assert_array_equal(step_K, wanted_step_K)
    np.testing.assert_array_equal(old_N, new_N)


@given(our.bit_pairs(), st.data())
def test_a_position_outside_of_its_tensor_is_refused_before_anything_is_written(
    pair: tuple[np.ndarray, np.ndarray], data: st.DataObject
) -> None:
    bits_N = pair[0]
    before_N, at = bits_N.copy(), data.draw(st.sampled_from([-1, bits_N.size, 1 << 30]))
    vector = one_tensor.vector_of(1, bits_N)
    vars(vector)["count"] = lambda at_K: np.array([at_K.size])
    steps = Sparse(
        np.array([*range(min(bits_N.size, 1)), at], np.int32), np.ones(1 + min(bits_N.size, 1), bits_N.dtype)
    )
    with pytest.raises(ValueError, match="outside"):
        native.add(vector, np.array([bits_N.ctypes.data]), steps)
    np.testing.assert_array_equal(bits_N, before_N)


def test_kernels_run_in_forks_and_in_several_threads_at_once() -> None:
    code = """
import os, threading
import numpy as np
from deltasync.kernels import native

old_N, new_N = np.zeros(1 << 22, np.uint16), np.arange(1 << 22).astype(np.uint16)
expected = native.fingerprint(1, new_N), native.diff(old_N, new_N)[0].size

def check():
    for _ in range(20):
        assert (native.fingerprint(1, new_N), native.diff(old_N, new_N)[0].size) == expected

native.threads = lambda elements: 4  # also on a machine with one core
threads = [threading.Thread(target=check) for _ in range(4)]
for thread in threads:
    thread.start()
children = []
for _ in range(5):  # while others compute
    if not (child := os.fork()):
        check()
        os._exit(0)
    children.append(child)
for thread in threads:
    thread.join()
print([os.waitpid(child, 0)[1] for child in children])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "[0, 0, 0, 0, 0]", done.stderr


def test_arrays_of_wrong_sizes_are_refused() -> None:
    extension = native.extension() or pytest.skip("numpy")
    one, none, tables = np.zeros(1, np.int64), np.empty(0, np.int64), np.zeros((2, 256), np.uint32)
    for name, arguments in {
        "fingerprint": (1, 0, one, np.zeros(3, np.uint16), np.zeros(2, np.uint16)),
        "scan": (1, np.array([[5, 0, 1, 0, 0, 0]]), one, np.zeros((1, 2), np.uint64), one, one, one, one),
        "add": (1, 0, np.array([[0, 0, 2, 0, 0, 1]]), one, np.zeros((1, 2), np.uint64), one, one, one, one),
        "decode": (
            1,
            np.zeros(1, np.uint32),
            np.array([[0, 2]]),
            one,
            one,
            np.array([0, 1]),
            np.zeros((2, 256), np.uint32),
            one,
            one,
        ),
        "encode": (1, one, one, np.array([0, 1]), one, None, one, tables, one, none, none, one),
        "exchange": (
            1,
            64,
            np.zeros((1, 6), np.int64),
            none,
            np.array([[0, 9, 0]]),
            none,
            one,
            one,
            np.zeros((3, 1), np.int64),
        ),
        "groups": (
            1,
            np.array([0, 2]),
            np.zeros((1, 256)),
            one,
            np.zeros((1, 1, 2), np.uint32),
            np.zeros(3),
            *4 * (one,),
        ),
    }.items():
        with pytest.raises(ValueError, match="wrong sizes"):
            getattr(extension, name)(*arguments)
    with pytest.raises(TypeError):
        extension.scan(1)
