"""Symbol tables, fitted to counts, and their bytes.

A table divides 2**12 slots among 256 symbols. Its bytes are the highest symbol that occurs, then for each symbol from 0 up
to it the number of its slots as LEB128 (7 bits per byte, low ones first, the top bit set where another byte follows; at
most two bytes). The numbers add up to 2**12, and the last is not 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import numpy as np

from deltasync.errors import CorruptDataError
from deltasync.kernels.rans import TABLE_BITS

_Counts = TypeVar("_Counts")

SYMBOLS = 256
SLOTS = 1 << TABLE_BITS


def fit(count_S: np.ndarray) -> np.ndarray:
    """Return the slots of each symbol, uint32[256]: about proportional to its count, at least one if it occurs."""
    total = int(count_S.sum())
    if not total:
        count_S, total = np.eye(1, SYMBOLS, dtype=np.int64)[0], 1
    freq_S = np.maximum(np.rint(count_S * (SLOTS / total)).astype(np.int64), count_S > 0)
    while excess := int(freq_S.sum()) - SLOTS:
        largest = int(freq_S.argmax())
        freq_S[largest] -= min(excess, int(freq_S[largest]) // 2)
    return freq_S.astype(np.uint32)


def to_bytes(freq_S: np.ndarray) -> bytes:
    """Return the table's bytes."""
    slots = freq_S[: int(np.flatnonzero(freq_S)[-1]) + 1].tolist()
    encoded = bytearray([len(slots) - 1])
    for slot_count in slots:
        encoded += bytes([slot_count]) if slot_count < 128 else bytes([slot_count & 127 | 128, slot_count >> 7])
    return bytes(encoded)


def join_runs(
    runs: Iterable[tuple[int, _Counts]], add: Callable[[_Counts, _Counts], _Counts], bits: Callable[[_Counts], float]
) -> tuple[list[int], list[_Counts]]:
    """Join runs of blocks as long as common tables take no more bits than two of them.

    Args:
        runs: The first block of each run, and its counts.
        add: Returns the counts of two runs together.
        bits: Returns the bits that counts take, with their tables.

    Returns:
        The first block of each group, and its counts.
    """
    firsts, found, last_bits = list[int](), list[_Counts](), 0.0
    for first, run in runs:
        run_bits = bits(run)
        if found:
            both = add(found[-1], run)
            joined_bits = bits(both)
            if joined_bits <= last_bits + run_bits:
                found[-1], last_bits = both, joined_bits
                continue
        firsts.append(first)
        found.append(run)
        last_bits = run_bits
    return firsts, found


class Cursor:
    """Reads tables from their bytes, from front to back.

    Raises:
        CorruptDataError: (any method) the bytes are too short or malformed.
    """

    def __init__(self, data: bytes, at: int = 0) -> None:
        self.data = data
        self.at = at

    def byte(self) -> int:
        """Read the next byte."""
        if self.at >= len(self.data):
            raise CorruptDataError("Payload tables are too short.")
        self.at += 1
        return self.data[self.at - 1]

    def bytes(self, count: int) -> np.ndarray:
        """Read the next `count` bytes."""
        if count > len(self.data) - self.at:
            raise CorruptDataError("Payload tables are too short.")
        self.at += count
        return np.frombuffer(self.data, np.uint8, count, self.at - count)

    def table(self) -> np.ndarray:
        """Read a table: the slots of each symbol, uint32[256]."""
        slots, highest = list[int](), self.byte()
        data, at = self.data, self.at
        try:
            for _ in range(highest + 1):
                low, at = data[at], at + 1
                if low >= 128:
                    high, at = data[at], at + 1
                    if high >= 128:
                        raise CorruptDataError("Payload table has a number of more than two bytes.")
                    low += (high - 1) << 7
                slots.append(low)
        except IndexError:
            raise CorruptDataError("Payload tables are too short.") from None
        if sum(slots) != SLOTS or not slots[-1]:
            raise CorruptDataError(f"Payload table has {sum(slots)} slots instead of {SLOTS}.")
        self.at = at
        freq_S = np.zeros(SYMBOLS, np.uint32)
        freq_S[: len(slots)] = slots
        return freq_S


def all_bytes(freq_TS: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return `to_bytes` of many tables, one after the other, and where each one ends; uint8 and int64[T]."""
    freq_TS = freq_TS.astype(np.int64, copy=False)
    highest_T = freq_TS.shape[1] - 1 - (freq_TS[:, ::-1] != 0).argmax(axis=1)
    byte_TS2 = np.empty((*freq_TS.shape, 2), np.uint8)
    more_TS = freq_TS >= 128
    byte_TS2[..., 0] = freq_TS & 127 | more_TS << 7
    byte_TS2[..., 1] = freq_TS >> 7
    held_TS2 = np.repeat((np.arange(freq_TS.shape[1]) <= highest_T[:, None])[..., None], 2, axis=2)
    held_TS2[..., 1] &= more_TS
    line_TB = np.concatenate((highest_T[:, None].astype(np.uint8), byte_TS2.reshape(len(freq_TS), -1)), axis=1)
    held_TB = np.concatenate((np.ones((len(freq_TS), 1), np.bool_), held_TS2.reshape(len(freq_TS), -1)), axis=1)
    return line_TB[held_TB], np.cumsum(held_TB.sum(axis=1))


class Parsed:
    """Reads many tables from their bytes as `Cursor` does, without looking at each number by itself.

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
