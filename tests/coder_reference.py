"""The entropy coder in plain Python, one obvious line after the other: what `deltasync.kernels.coder` must equal."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from deltasync.kernels.rans import RATIO, STATE_MIN, TABLE_BITS


def bucket(value: int) -> tuple[int, int, int]:
    """Symbol, number of extra bits and their value: below 16 the value itself, above four buckets per power of two."""
    if value < 16:
        return value, 0, 0
    exponent = value.bit_length() - 1
    extra = exponent - 2
    return 4 * exponent + (value >> extra & 3), extra, value & (1 << extra) - 1


def zigzag(step: int, width: int) -> int:
    """Steps near zero as small numbers, 1, -1, 2, -2 -> 1, 0, 3, 2; `step` is not 0 and modulo 2**width."""
    return 2 * ((1 << width) - step) - 2 if step >> (width - 1) else 2 * step - 1


def unzigzag(value: int, width: int) -> int:
    """Inverse of `zigzag`."""
    magnitude = (value >> 1) + 1
    return magnitude if value & 1 else (1 << width) - magnitude


class Writer:
    """Collects (start, freq, bits) symbols in decoding order; `words` encodes them."""

    def __init__(self) -> None:
        self._symbols: list[tuple[int, int, int]] = []

    def number(self, value: int, freq: np.ndarray) -> None:
        """A number by the table `freq`, int[256]."""
        symbol, extra, low = bucket(value)
        self._symbols.append((int(freq[:symbol].sum()), int(freq[symbol]), TABLE_BITS))
        while extra:
            bits = min(extra, 24)
            extra -= bits
            self._symbols.append((low >> extra & (1 << bits) - 1, 1, bits))

    def words(self) -> np.ndarray:
        """The stream, uint32."""
        words: list[int] = []
        x = 1
        for start, freq, bits in reversed(self._symbols):
            if x >> (64 - bits) >= freq:
                words.append(x & 0xFFFFFFFF)
                x >>= 32
            x = (x // freq << bits) + x % freq + start
        state = [x & 0xFFFFFFFF] if x < STATE_MIN else [x >> 32, x & 0xFFFFFFFF]
        return np.array([*reversed([*words, *state])], np.uint32)


class Reader:
    """Reads a stream. Raises ValueError where it is malformed."""

    def __init__(self, words: np.ndarray) -> None:
        if not words.size:
            raise ValueError("no state")
        self._x = words[0].item() | (words[1].item() << 32 if words.size > 1 else 0)
        if self._x < STATE_MIN and words.size > 1:
            raise ValueError("state too small")
        self._words: Iterator[int] = iter(words[2:].tolist())

    def number(self, freq: np.ndarray) -> int:
        """A number by the table `freq`, int[256]."""
        end = np.cumsum(freq)
        symbol = int(np.searchsorted(end, self._x & (1 << TABLE_BITS) - 1, side="right"))
        self._take(int(end[symbol] - freq[symbol]), int(freq[symbol]), TABLE_BITS)
        if symbol < 16:
            return symbol
        extra = symbol // 4 - 2
        value = 4 + symbol % 4
        while extra:
            bits = min(extra, 24)
            extra -= bits
            low = self._x & (1 << bits) - 1
            value = value << bits | low
            self._take(low, 1, bits)
        return value

    def finish(self) -> None:
        """Check that nothing is left."""
        if self._x != 1 or next(self._words, None) is not None:
            raise ValueError("stream does not end where its symbols do")

    def _take(self, start: int, freq: int, bits: int) -> None:
        self._x = freq * (self._x >> bits) + (self._x & (1 << bits) - 1) - start
        if self._x < STATE_MIN and (word := next(self._words, None)) is not None:
            self._x = self._x << 32 | word


def encode_packed(index_K: np.ndarray, step_K: np.ndarray, gap_freq: np.ndarray, step_freq: np.ndarray) -> np.ndarray:
    """Words of one block; indices count from its start."""
    writer, before = Writer(), -1
    for index, step in zip(index_K.tolist(), step_K.tolist(), strict=True):
        writer.number(index - before - 1, gap_freq)
        writer.number(zigzag(step, 8 * step_K.itemsize), step_freq)
        before = index
    return writer.words()


def decode_packed(
    words: np.ndarray, count: int, dtype: np.dtype, gap_freq: np.ndarray, step_freq: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Indices, counted from the block's start, and steps of one block.

    Raises:
        ValueError: malformed.
    """
    reader, at = Reader(words), -1
    index_K, step_K = np.empty(count, np.int64), np.empty(count, dtype)
    for k in range(count):
        at += 1 + reader.number(gap_freq)
        index_K[k] = at
        step_K[k] = unzigzag(reader.number(step_freq), 8 * dtype.itemsize)
    reader.finish()
    return index_K, step_K


def members(field_R: np.ndarray, rows: list[tuple[int, int, int]]) -> list[list[int]]:
    """The elements of a block that are of each class (first and last value of the field, level)."""
    return [np.flatnonzero((field_R >= first) & (field_R <= last)).tolist() for first, last, _ in rows]


def encode_context(
    field_R: np.ndarray, index_K: np.ndarray, step_K: np.ndarray, rows: list[tuple[int, int, int]], freq_TS: np.ndarray
) -> np.ndarray:
    """Words of one block.

    Args:
        field_R: Field of the old value of each element of the block.
        index_K: Indices of the changes, counted from the block's start.
        step_K: Their steps.
        rows: The classes by descending level.
        freq_TS: The table of gaps and that of steps of each class.
    """
    held = members(field_R, rows)
    step = dict(zip(index_K.tolist(), step_K.tolist(), strict=True))
    writer = Writer()
    c = next((c for c, member in enumerate(held) if member), len(held) - 1)
    after = 0
    for to, member in enumerate(held):
        for at, index in enumerate(member):
            if index not in step:
                continue
            gap = at - after
            if to != c:
                between = sum(len(held[d]) * int(RATIO[rows[c][2] - rows[d][2]]) // 256 for d in range(c + 1, to))
                gap = len(held[c]) - after + between + (at + 1) * int(RATIO[rows[c][2] - rows[to][2]]) // 256 - 1
            writer.number(gap, freq_TS[2 * c])
            writer.number(zigzag(step[index], 8 * step_K.itemsize), freq_TS[2 * to + 1])
            c, after = to, at + 1
    return writer.words()


def decode_context(
    words: np.ndarray,
    count: int,
    dtype: np.dtype,
    field_R: np.ndarray,
    rows: list[tuple[int, int, int]],
    freq_TS: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Inverse of `encode_context`: ascending indices, and steps.

    Raises:
        ValueError: malformed.
    """
    held = members(field_R, rows)
    reader, found = Reader(words), {}
    c = next((c for c, member in enumerate(held) if member), len(held) - 1)
    after = 0
    for _ in range(count):
        gap = reader.number(freq_TS[2 * c])
        ends = [(c, after + gap)] if gap < len(held[c]) - after else []
        gap -= len(held[c]) - after
        for d in range(c + 1, len(held)):  # obvious, and slow: every element says which gap leads to it
            ratio = int(RATIO[rows[c][2] - rows[d][2]])
            ends += [(d, x) for x in range(len(held[d])) if (x + 1) * ratio // 256 - 1 == gap]
            gap -= len(held[d]) * ratio // 256
        if len(ends) != 1:
            raise ValueError("a gap that leads to no element")
        ((c, at),) = ends
        after = at + 1
        found[held[c][at]] = unzigzag(reader.number(freq_TS[2 * c + 1]), 8 * dtype.itemsize)
    reader.finish()
    index_K = np.array(sorted(found), np.int64)
    return index_K, np.array([found[index] for index in index_K.tolist()], dtype)
