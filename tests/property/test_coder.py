from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltasync.codec import tables
from deltasync.errors import CorruptDataError
from deltasync.kernels import rans
from tests import coder_reference
from tests import strategies as our


@given(st.integers(0, (1 << 64) - 1) | st.integers(0, 100))
def test_every_number_lies_in_one_bucket(value: int) -> None:
    symbol, extra, low = coder_reference.bucket(value)
    assert 0 <= symbol < 256 and 0 <= low < 1 << extra
    assert value == (symbol if symbol < 16 else ((4 + symbol % 4) << extra) + low)
    assert extra == (0 if symbol < 16 else symbol // 4 - 2)


@given(our.widths, st.data())
def test_zigzag_is_a_bijection_of_the_steps(width: int, data: st.DataObject) -> None:
    step = data.draw(st.integers(1, (1 << 8 * width) - 1))
    value = coder_reference.zigzag(step, 8 * width)
    assert 0 <= value <= (1 << 8 * width) - 2
    assert coder_reference.unzigzag(value, 8 * width) == step


def test_zigzag_of_the_smallest_steps() -> None:
    assert [coder_reference.zigzag(step & 0xFFFF, 16) for step in (-1, 1, -2, 2)] == [0, 1, 2, 3]


def test_time_is_strictly_monotone_and_halves() -> None:
    assert (np.diff(rans.TIME_START) >= 1 << rans.SEGMENT_BITS).all()
    slots = [coder_reference.time_slot(time) for time in (0, 1 << 20, 1 << 21, 1 << 22)]
    assert slots == [0, 1 << 27, 3 << 26, 15 << 24]
    assert rans.HAZARD[[0, 8, 80, 176]].tolist() == [1, 2, 1 << 10, 1 << 22]


@given(st.lists(st.integers(0, 1 << 40) | st.just(0), max_size=256))
def test_tables_round_trip(counts: list[int]) -> None:
    count_S = np.array(counts + [0] * (256 - len(counts)), np.int64)
    freq_S = tables.fit(count_S)
    assert freq_S.sum() == tables.SLOTS and (freq_S[count_S > 0] > 0).all()
    cursor = tables.Cursor(tables.to_bytes(freq_S))
    np.testing.assert_array_equal(cursor.table(), freq_S)
    assert cursor.at == len(cursor.data)


@pytest.mark.parametrize(
    "data",
    [b"", b"\0", b"\0\0", b"\0\x80", b"\0\x81\x20", b"\1\x80\x20\0", b"\1\x80\x20", b"\xff" + b"\x10" * 255],
    ids=["empty", "no slots", "none", "cut", "too many", "last is none", "short", "too few"],
)
def test_malformed_tables_are_refused(data: bytes) -> None:
    with pytest.raises(CorruptDataError):
        tables.Cursor(data).table()
