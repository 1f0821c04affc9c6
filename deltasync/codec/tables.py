"""Symbol tables, fitted to counts, and their bytes.

A table divides 2**12 slots among 256 symbols. Its bytes are the highest symbol that occurs, then for each
symbol from 0 up to it the number of its slots as LEB128 (7 bits per byte, low ones first, the top bit set
where another byte follows; at most two bytes). The numbers add up to 2**12, and the last is not 0.
"""

from __future__ import annotations

import numpy as np

from deltasync.errors import CorruptDataError
from deltasync.kernels.rans import TABLE_BITS

SYMBOLS = 256
SLOTS = 1 << TABLE_BITS


def fit(count_TS: np.ndarray) -> np.ndarray:
    """Return the slots of each symbol, uint32[T, 256]: about proportional to its count, at least one if it
    occurs.
    """
    total_T = count_TS.sum(axis=1)
    if not total_T.all():
        count_TS = count_TS.copy()
        count_TS[total_T == 0, 0] = 1
    freq_TS = np.rint(count_TS * (SLOTS / np.maximum(total_T, 1))[:, None]).astype(np.int64)
    np.maximum(freq_TS, count_TS > 0, out=freq_TS)
    table_T = np.arange(len(freq_TS))
    while (excess_T := freq_TS.sum(axis=1) - SLOTS).any():
        largest_T = freq_TS.argmax(axis=1)
        freq_TS[table_T, largest_T] -= np.minimum(excess_T, freq_TS[table_T, largest_T] // 2)
    return freq_TS.astype(np.uint32)


def all_bytes(freq_TS: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the bytes of tables, one after the other, and where each one ends; uint8 and int64[T]."""
    freq_TS = freq_TS.astype(np.int64, copy=False)
    highest_T = freq_TS.shape[1] - 1 - (freq_TS[:, ::-1] != 0).argmax(axis=1)
    byte_TS2 = np.empty((*freq_TS.shape, 2), np.uint8)
    more_TS = freq_TS >= 128
    byte_TS2[..., 0] = freq_TS & 127 | more_TS << 7
    byte_TS2[..., 1] = freq_TS >> 7
    held_TS2 = np.repeat((np.arange(freq_TS.shape[1]) <= highest_T[:, None])[..., None], 2, axis=2)
    held_TS2[..., 1] &= more_TS
    line_TB = np.concatenate(
        (highest_T[:, None].astype(np.uint8), byte_TS2.reshape(len(freq_TS), -1)), axis=1
    )
    held_TB = np.concatenate(
        (np.ones((len(freq_TS), 1), np.bool_), held_TS2.reshape(len(freq_TS), -1)), axis=1
    )
    return line_TB[held_TB], np.cumsum(held_TB.sum(axis=1))


class Parsed:
    """Reads many tables from their bytes, without looking at each number by itself.

    Raises:
        CorruptDataError: (any method) the bytes are too short or malformed.
    """

    def __init__(self, data: bytes) -> None:
        self._data = np.frombuffer(data, np.uint8)
        last_N = self._data < 128
        self._end_M = np.flatnonzero(last_N)  # the last byte of each number
        self._before = np.append(0, np.cumsum(last_N)).tolist()  # numbers that end before each byte
        self._ends, self.data, self.at = self._end_M.tolist(), data, 0
        self._found: list[tuple[int, int]] = []

    def bytes(self, count: int) -> np.ndarray:
        """Read the next `count` bytes."""
        if count > len(self.data) - self.at:
            raise CorruptDataError("Payload tables are too short.")
        self.at += count
        return self._data[self.at - count : self.at]

    def skip(self, count: int) -> None:
        """Read `count` tables, which `freq_TS` returns."""
        at, data, ends, before = self.at, self.data, self._ends, self._before
        try:
            for _ in range(count):
                self._found.append((at, data[at]))
                at = ends[before[at + 1] + data[at]] + 1
        except IndexError:
            raise CorruptDataError("Payload tables are too short.") from None
        self.at = at

    def finish(self) -> None:
        """Check that all bytes were read."""
        if self.at != len(self.data):
            raise CorruptDataError("Payload has more tables than groups.")

    def freq_TS(self) -> np.ndarray:
        """Return the slots of each symbol of the tables that were read, int64[T, 256]."""
        found_T2 = np.array(self._found, np.int64).reshape(-1, 2)
        count_T = found_T2[:, 1] + 1
        table_N = np.repeat(np.arange(count_T.size), count_T)
        symbol_N = np.arange(table_N.size) - np.repeat(np.cumsum(count_T) - count_T, count_T)
        end_N = self._end_M[np.array(self._before)[found_T2[table_N, 0] + 1] + symbol_N]
        begin_N = np.where(symbol_N > 0, np.append(-1, end_N[:-1]) + 1, found_T2[table_N, 0] + 1)
        if (end_N - begin_N > 1).any():
            raise CorruptDataError("Payload table has a number of more than two bytes.")
        low_N, high_N = self._data[begin_N].astype(np.int64), self._data[end_N].astype(np.int64)
        freq_TS = np.zeros((count_T.size, SYMBOLS), np.int64)
        freq_TS[table_N, symbol_N] = np.where(end_N > begin_N, low_N + ((high_N - 1) << 7), low_N)
        last_T = np.take_along_axis(freq_TS, found_T2[:, 1:], axis=1)
        if (freq_TS.sum(axis=1) != SLOTS).any() or (last_T == 0).any():
            raise CorruptDataError(f"Payload has a table that has not {SLOTS} slots.")
        return freq_TS


def read(data: bytes, count: int) -> np.ndarray:
    """Return the slots of each symbol of so many tables and no more, int64[T, 256]. Raises as `Parsed`."""
    parsed = Parsed(data)
    parsed.skip(count)
    parsed.finish()
    return parsed.freq_TS()
