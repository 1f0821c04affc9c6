from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deltasync.fingerprint import MASK
from deltasync.kernels import cpu, reference, torch_ops
from tests import strategies as our

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
    for found, expected in zip(cpu.diff(*pair), reference.diff(*pair), strict=True):
        np.testing.assert_array_equal(found, expected)
        assert found.dtype == expected.dtype


@pytest.mark.parametrize("density", [0.0, 0.001, 1.0])
def test_cpu_kernels_are_the_reference_over_several_parallel_chunks(density: float) -> None:
    random = np.random.default_rng(0)
    old_N = random.integers(0, 1 << 16, 3 * (1 << 18) + 5, np.uint16)
    new_N = np.where(random.random(old_N.size) < density, ~old_N, old_N)
    for found, expected in zip(cpu.diff(old_N, new_N), reference.diff(old_N, new_N), strict=True):
        np.testing.assert_array_equal(found, expected)
    assert cpu.fingerprint(5, new_N) == reference.fingerprint(5, new_N)


@given(keys, our.bit_pairs())
def test_fingerprint_is_the_reference(key: int, pair: tuple[np.ndarray, np.ndarray]) -> None:
    _, bits_N = pair
    expected = reference.fingerprint(key, bits_N)
    assert 0 <= expected <= MASK
    assert cpu.fingerprint(key, bits_N) == expected
    hashes = torch_ops.cell_hash(key, torch.arange(bits_N.size), _signed(bits_N))
    assert int(hashes.sum()) & MASK == expected


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
def test_scatter_is_the_reference_on_every_machine(
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

    results = []
    for scatter in (reference.scatter, cpu.scatter):
        dest = memory.copy()
        results.append((scatter(key, dest, address_N[index_K], data_K, absolute, index_K), dest))
    dest_torch = _signed(memory)
    at, index = torch.from_numpy(address_N[index_K]), torch.from_numpy(index_K)
    old, added = torch_ops.scatter(key, dest_torch, at, _signed(data_K), absolute, index)
    results.append(((old.numpy().view(old_N.dtype), added), dest_torch.numpy().view(old_N.dtype)))

    wanted = (reference.fingerprint(key, new_N) - reference.fingerprint(key, old_N)) & MASK
    for (old_K, added), dest in results:
        np.testing.assert_array_equal(old_K, old_N[index_K])
        np.testing.assert_array_equal(dest, expected_memory)
        assert added == wanted
