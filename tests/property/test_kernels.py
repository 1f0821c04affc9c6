from __future__ import annotations

import itertools
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deltasync.kernels import cpu, cpu_diff, reference, torch_ops
from deltasync.tensors.fingerprint import MASK
from tests import one_tensor
from tests import strategies as our

keys = st.integers(0, MASK)


def _signed(bits: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(bits.copy().view(f"i{bits.itemsize}"))


def _shared(bits: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(bits.view(np.int16))


def _swap(writes: list[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> int:
    return cpu.swap_by(cpu.swap_table(writes))


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
    for found, expected in zip(cpu_diff.diff(*pair), reference.diff(*pair), strict=True):
        np.testing.assert_array_equal(found, expected)
        assert found.dtype == expected.dtype


@pytest.mark.parametrize("density", [0.0, 0.001, 1.0])
def test_cpu_kernels_are_the_reference_over_several_parallel_chunks(density: float) -> None:
    random = np.random.default_rng(0)
    old_N = random.integers(0, 1 << 16, (1 << 22) + 3 * (1 << 16) + 5, np.uint16)
    new_N = np.where(random.random(old_N.size) < density, ~old_N, old_N)
    fingerprint_before = cpu.fingerprint(5, old_N)
    for found, expected in zip(cpu_diff.diff(old_N, new_N), reference.diff(old_N, new_N), strict=True):
        np.testing.assert_array_equal(found, expected)
    assert cpu.fingerprint(5, new_N) == reference.fingerprint(5, new_N)
    index_K, step_K = reference.diff(old_N, new_N)
    added, _ = one_tensor.add(5, old_N.copy(), index_K, step_K, (0, 0))
    assert added == (cpu.fingerprint(5, new_N) - fingerprint_before) & MASK
    for found, expected in zip(
        one_tensor.advance(5, old_N, new_N, (0, 0), 0, index_K.dtype), (index_K, step_K, added), strict=False
    ):
        np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(old_N, new_N)


@given(keys, our.bit_pairs())
def test_fingerprint_is_the_reference(key: int, pair: tuple[np.ndarray, np.ndarray]) -> None:
    _, bits_N = pair
    expected = reference.fingerprint(key, bits_N)
    assert 0 <= expected <= MASK
    assert cpu.fingerprint(key, bits_N) == expected
    hashes = torch_ops.cell_hash(key, torch.arange(bits_N.size), _signed(bits_N))
    assert int(hashes.sum()) & MASK == expected


@given(keys, our.bit_pairs())
def test_take_copies_and_tells_of_what_it_copied(key: int, pair: tuple[np.ndarray, np.ndarray]) -> None:
    out_N, bits_N = pair[0].copy(), pair[1].copy()
    bits_N.flags.writeable = False
    found = cpu.take(key, bits_N, out_N)
    np.testing.assert_array_equal(out_N, bits_N)
    assert found == cpu.fingerprint(key, bits_N)


@given(keys, st.lists(st.tuples(st.integers(0, (1 << 62) - 1), st.integers(0, MASK)), max_size=20), our.widths)
def test_cell_hash_is_splitmix64_for_indices_past_every_limit(key: int, cells: list[tuple[int, int]], width: int) -> None:
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


@given(keys, our.bit_pairs(), st.booleans(), st.data())
def test_a_scatter_changes_the_fingerprint_by_what_it_returns(
    key: int, pair: tuple[np.ndarray, np.ndarray], absolute: bool, data: st.DataObject
) -> None:
    old_N, new_N = pair
    index_K, step_K = reference.diff(old_N, new_N)
    data_K = new_N[index_K] if absolute else step_K
    # The destination may lie anywhere: another order, with gaps.
    address_N = np.random.default_rng(data.draw(our.seeds)).permutation(2 * old_N.size)[: old_N.size]
    memory = np.zeros(2 * old_N.size, old_N.dtype)
    memory[address_N] = old_N
    expected_memory = memory.copy()
    expected_memory[address_N] = new_N

    wanted = (reference.fingerprint(key, new_N) - reference.fingerprint(key, old_N)) & MASK
    old_K, added = reference.scatter(key, memory, address_N[index_K], data_K, absolute, index_K)
    np.testing.assert_array_equal(old_K, old_N[index_K])
    np.testing.assert_array_equal(memory, expected_memory)
    assert added == wanted


@given(keys, our.bit_pairs(), st.integers(0, 1 << 33))
def test_steps_are_added_as_the_reference_scatters_them(key: int, pair: tuple[np.ndarray, np.ndarray], start: int) -> None:
    old_N, new_N = pair
    index_K, step_K = reference.diff(old_N, new_N)
    after_N = old_N.copy()
    mask, limit = (1 << (8 * old_N.itemsize - 1)) - 1, int(new_N[new_N.size // 2]) if new_N.size else 0
    added, above = one_tensor.add(key, after_N, index_K, step_K, (mask, limit), start)
    assert above == any(int(bits) & mask > limit for bits in new_N[index_K])
    np.testing.assert_array_equal(after_N, new_N)
    _, wanted = reference.scatter(key, old_N.copy(), index_K, step_K, False, index_K + np.int64(start))
    assert added == wanted


@given(keys, our.bit_pairs(), st.integers(0, 1 << 30), st.sampled_from([np.int32, np.int64]))
def test_to_advance_is_to_diff_and_add(key: int, pair: tuple[np.ndarray, np.ndarray], start: int, index: type) -> None:
    old_N, new_N = pair
    bounds = (1 << (8 * old_N.itemsize - 1)) - 1, int(new_N[0]) if new_N.size else 0
    wanted_K, wanted_step_K = reference.diff(old_N, new_N)
    added = one_tensor.add(key, old_N.copy(), wanted_K, wanted_step_K, bounds, start)
    index_K, step_K, *found = one_tensor.advance(key, old_N, new_N, bounds, start, np.dtype(index))
    assert (index_K.dtype, tuple(found)) == (index, added)
    np.testing.assert_array_equal(index_K, wanted_K + np.int64(start))
    np.testing.assert_array_equal(step_K, wanted_step_K)
    np.testing.assert_array_equal(old_N, new_N)


@given(keys, our.bit_pairs(), st.booleans(), st.sampled_from([np.int32, np.int64]), st.data())
def test_prepare_and_swap_on_the_host_are_the_reference(
    key: int, pair: tuple[np.ndarray, np.ndarray], absolute: bool, index_type: type, data: st.DataObject
) -> None:
    old_N, new_N = pair
    index_K, step_K = reference.diff(old_N, new_N)
    data_K = new_N[index_K] if absolute else step_K
    address_N = np.random.default_rng(data.draw(our.seeds)).permutation(2 * old_N.size)[: old_N.size].astype(index_type)
    memory = np.zeros(2 * old_N.size, old_N.dtype)
    memory[address_N] = old_N
    expected_memory = memory.copy()
    expected_memory[address_N] = new_N
    at_K = address_N[index_K]
    arguments = key, memory, at_K, data_K, absolute, index_K
    new_K, added, check = reference.prepare(*arguments)
    np.testing.assert_array_equal(new_K, new_N[index_K])
    assert added == (reference.fingerprint(key, new_N) - reference.fingerprint(key, old_N)) & MASK
    (cpu_new_K, *cpu_sums) = cpu.prepare(*arguments)
    np.testing.assert_array_equal(cpu_new_K, new_K)
    assert cpu_sums == [added, check]

    # In two writes, the second of which has other elements of the same memory.
    half = at_K.size // 2
    for swap in (reference.swap, _swap):
        dest, values = memory.copy(), [new_K[:half].copy(), new_K[half:].copy()]
        writes = list(zip([dest, dest], [at_K[:half], at_K[half:]], values, strict=True))
        assert swap(writes) == check
        np.testing.assert_array_equal(dest, expected_memory)
        np.testing.assert_array_equal(np.concatenate(values), old_N[index_K])
        swap(writes)
        np.testing.assert_array_equal(dest, memory)
        np.testing.assert_array_equal(np.concatenate(values), new_K)
        if at_K.size:
            dest[int(at_K[0])] ^= 1
            assert swap(writes) != check


def test_a_swap_of_many_writes_of_every_size_reaches_all_of_them() -> None:
    random = np.random.default_rng(0)
    writes = []
    for width, index, size in itertools.product((1, 2, 4, 8), (np.int32, np.int64), (1, 70, 5_000, 100_000)):
        dest = random.integers(0, 256, size * width, np.uint8).view(f"u{width}")
        at_K = np.flatnonzero(random.random(size) < 0.5).astype(index)
        writes.append((dest, at_K, random.integers(0, 256, at_K.size * width, np.uint8).view(f"u{width}")))
    expected = [tuple(array.copy() for array in write) for write in writes]
    assert _swap(writes) == reference.swap(expected)
    for write, wanted in zip(writes, expected, strict=True):
        for array, right in zip(write, wanted, strict=True):
            np.testing.assert_array_equal(array, right)


def test_kernels_run_where_two_threads_may_not_use_them_at_once() -> None:
    code = """
import numpy as np
from deltasync.kernels import cpu, cpu_diff
from tests import one_tensor
old_N, new_N = np.zeros(1 << 18, np.uint16), np.ones(1 << 18, np.uint16)
print(cpu.threading_layer(), cpu_diff.diff(old_N, new_N)[0].size)
print(one_tensor.advance(5, old_N, new_N, (0, 0), 0, np.dtype(np.int32))[0].size, (old_N == new_N).all())
"""
    environ = {**os.environ, "NUMBA_THREADING_LAYER": "workqueue"}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["workqueue", "262144", "262144", "True"]
