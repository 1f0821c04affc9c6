"""The entropy coder in plain Python, one obvious line after the other: what `deltasync.kernels.coder` must equal."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from deltasync.kernels.rans import SEGMENT_BITS, SEGMENTS, STATE_MIN, TABLE_BITS, TIME_BITS, TIME_END, TIME_START


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


def time_slot(time: int) -> int:
    """Slots of the time distribution below `time`, 0 <= time <= TIME_END."""
    segment = time >> SEGMENT_BITS
    if segment == SEGMENTS:
        return int(TIME_START[segment])
    inside = time & (1 << SEGMENT_BITS) - 1
    return int(TIME_START[segment]) + (inside * int(TIME_START[segment + 1] - TIME_START[segment]) >> SEGMENT_BITS)


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

    def moment(self, time: int, hazard: int) -> None:
        """A change in an element of this hazard, `time` after the last one."""
        while time >= TIME_END:
            start = time_slot(TIME_END)
            self._symbols.append((start, (1 << TIME_BITS) - start, TIME_BITS))
            time -= TIME_END
        start = time_slot(time)
        self._symbols.append((start, time_slot(min(time + hazard, TIME_END)) - start, TIME_BITS))

    def words(self) -> np.ndarray:
        """The stream, uint32."""
        words: list[int] = []
        x = STATE_MIN
        for start, freq, bits in reversed(self._symbols):
            if x >> (64 - bits) >= freq:
                words.append(x & 0xFFFFFFFF)
                x >>= 32
            x = (x // freq << bits) + x % freq + start
        return np.array([*reversed([*words, x >> 32, x & 0xFFFFFFFF])], np.uint32)


class Reader:
    """Reads a stream. Raises ValueError where it is malformed."""

    def __init__(self, words: np.ndarray) -> None:
        self._words: Iterator[int] = iter(words.tolist())
        self._x = self._next() | self._next() << 32
        if self._x < STATE_MIN:
            raise ValueError("state too small")

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

    def moment(self, hazard_R: np.ndarray) -> int:
        """Which of the elements since the last change, of these hazards, is the next to change."""
        origin = 0
        while (slot := self._x & (1 << TIME_BITS) - 1) >= time_slot(TIME_END):
            start = time_slot(TIME_END)
            self._take(start, (1 << TIME_BITS) - start, TIME_BITS)
            origin += TIME_END
        begin = -origin
        for index, hazard in enumerate(hazard_R.tolist()):
            if begin + hazard > 0 and time_slot(min(begin + hazard, TIME_END)) > slot:
                if begin < 0:
                    raise ValueError("change in an element that the time has passed")
                start = time_slot(begin)
                self._take(start, time_slot(min(begin + hazard, TIME_END)) - start, TIME_BITS)
                return index
            begin += hazard
        raise ValueError("change behind the last element")

    def finish(self) -> None:
        """Check that nothing is left."""
        if self._x != STATE_MIN or next(self._words, None) is not None:
            raise ValueError("stream does not end where its symbols do")

    def _take(self, start: int, freq: int, bits: int) -> None:
        self._x = freq * (self._x >> bits) + (self._x & (1 << bits) - 1) - start
        if self._x < STATE_MIN:
            self._x = self._x << 32 | self._next()

    def _next(self) -> int:
        word = next(self._words, None)
        if word is None:
            raise ValueError("stream too short")
        return word


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


def encode_context(
    class_R: np.ndarray, index_K: np.ndarray, step_K: np.ndarray, hazard_C: np.ndarray, freq_C: np.ndarray
) -> np.ndarray:
    """Words of one block.

    Args:
        class_R: Class of the old value of each element of the block.
        index_K: Indices of the changes, counted from the block's start.
        step_K: Their steps.
        hazard_C: Hazard of each class in this block.
        freq_C: Step table of each class, shape [C, 256].
    """
    writer, after = Writer(), 0
    for index, step in zip(index_K.tolist(), step_K.tolist(), strict=True):
        writer.moment(int(hazard_C[class_R[after:index]].sum()), int(hazard_C[class_R[index]]))
        writer.number(zigzag(step, 8 * step_K.itemsize), freq_C[class_R[index]])
        after = index + 1
    return writer.words()


def decode_context(
    words: np.ndarray, count: int, dtype: np.dtype, class_R: np.ndarray, hazard_C: np.ndarray, freq_C: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Inverse of `encode_context`.

    Raises:
        ValueError: malformed.
    """
    reader, after = Reader(words), 0
    index_K, step_K = np.empty(count, np.int64), np.empty(count, dtype)
    for k in range(count):
        index = after + reader.moment(hazard_C[class_R[after:]])
        index_K[k] = index
        step_K[k] = unzigzag(reader.number(freq_C[class_R[index]]), 8 * dtype.itemsize)
        after = index + 1
    reader.finish()
    return index_K, step_K
