from __future__ import annotations

import hashlib

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from deltasync.kernels import native, reference
from deltasync.tensors.fingerprint import MASK, tensor_key, to_hex
from tests import one_tensor
from tests import strategies as our

keys = st.integers(0, MASK)


@given(keys, our.bit_pairs(), st.integers(0, 700))
def test_parts_add_up_to_the_whole(key: int, pair: tuple[np.ndarray, np.ndarray], cut: int) -> None:
    _, bits_N = pair
    parts = [np.arange(bits_N.size)[:cut], np.arange(bits_N.size)[cut:]]
    sums = [int(reference.cell_hash(key, index, bits_N[index]).sum(dtype=np.uint64)) for index in parts]
    assert sum(sums) & MASK == native.fingerprint(key, bits_N)


@given(keys, our.bit_pairs())
def test_updating_with_what_changed_gives_the_full_fingerprint(
    key: int, pair: tuple[np.ndarray, np.ndarray]
) -> None:
    old_N, new_N = pair
    index_K, step_K = native.diff(old_N, new_N)
    before = native.fingerprint(key, old_N)
    live_N = old_N.copy()
    added, _ = one_tensor.add(key, live_N, index_K, step_K, (0, 0))
    assert (before + added) & MASK == native.fingerprint(key, live_N) == native.fingerprint(key, new_N)


@given(keys, our.bit_pairs(), st.data())
def test_a_wrong_old_value_under_a_step_changes_the_outcome(
    key: int, pair: tuple[np.ndarray, np.ndarray], data: st.DataObject
) -> None:
    # The published chain: fingerprint before, and after. A replica whose bits rotted in between updates
    # incrementally.
    old_N, new_N = pair
    index_K, step_K = native.diff(old_N, new_N)
    assume(index_K.size > 0)
    rotten_N = old_N.copy()
    at = int(index_K[data.draw(st.integers(0, index_K.size - 1))])
    rotten_N[at] ^= old_N.dtype.type(1 << data.draw(st.integers(0, 8 * old_N.itemsize - 1)))
    added, _ = one_tensor.add(key, rotten_N, index_K, step_K, (0, 0))
    assert (native.fingerprint(key, old_N) + added) & MASK != native.fingerprint(key, new_N)


@given(keys, our.bit_pairs(), st.data())
def test_every_flipped_bit_changes_the_fingerprint(
    key: int, pair: tuple[np.ndarray, np.ndarray], data: st.DataObject
) -> None:
    _, bits_N = pair
    assume(bits_N.size > 0)
    flipped_N = bits_N.copy()
    bit = bits_N.dtype.type(1 << data.draw(st.integers(0, 8 * bits_N.itemsize - 1)))
    flipped_N[data.draw(st.integers(0, bits_N.size - 1))] ^= bit
    assert native.fingerprint(key, flipped_N) != native.fingerprint(key, bits_N)


def test_swapped_elements_change_the_fingerprint() -> None:
    bits_N = np.array([1, 2], np.uint16)
    assert native.fingerprint(0, bits_N) != native.fingerprint(0, bits_N[::-1].copy())


def test_the_zeros_differ() -> None:
    assert native.fingerprint(0, np.array([0x0000], np.uint16)) != native.fingerprint(
        0, np.array([0x8000], np.uint16)
    )


@given(st.text(), st.text())
def test_each_name_has_its_own_key(first: str, second: str) -> None:
    assume(first != second)
    assert tensor_key(first) != tensor_key(second)


def test_the_format_is_fixed() -> None:
    assert tensor_key("w") == int.from_bytes(hashlib.sha256(b"w").digest()[:8], "little")
    assert to_hex(1) == "0000000000000001"
    assert to_hex(-1) == "f" * 16
    bits_N = np.array([0x3F80, 0xBF80], np.uint16)
    assert to_hex(native.fingerprint(tensor_key("w"), bits_N)) == "71c7ea615a8493cf"
