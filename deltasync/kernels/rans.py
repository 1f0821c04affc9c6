"""The streams of the entropy coder. `coder` writes and reads them, and so does `tests/coder_reference.py` in plain Python.

The changes of a block are one rANS stream (Duda, "Asymmetric numeral systems", arXiv:1311.2540). Its state x has 64 bits, is
at least 2**32 between symbols, and is renormalised by 32-bit words. To decode a symbol that owns the slots
[start, start + freq) of 2**bits:

    slot = x mod 2**bits;  x = freq * (x >> bits) + slot - start;  if x < 2**32: x = x << 32 | next word

The words of a stream are the initial state, low half first, then the further words in the order of reading. After the last
symbol x is 2**32 and no word is left, which a reader checks. Encoding does the inverse, from the last symbol to the first.

A number (a gap or a step) is coded as a symbol by a static table of 2**12 slots, which gives its leading bits, and extra
bits, each group of which is a uniform symbol. `docs/format.md`, section 10, is normative.

Shapes: N elements of a tensor, K changed ones, B blocks, C classes, T tables of S symbols.
"""

from __future__ import annotations

from typing import NamedTuple, Self

import numpy as np

STATE_MIN = 1 << 32
TABLE_BITS = 12

# Hazards. The hazard of an element that changes with probability p is -log2(1 - p), in units of 2**-20. Time is the sum of
# hazards since the last change. Nothing has changed up to time t with probability 2**-(t / 2**20), whatever the classes of
# the elements in between.
TIME_BITS = 28  # slots of the time distribution
SEGMENT_BITS = 16  # it is linear over segments of 2**16 units, a sixteenth of a halving
SEGMENTS = 64  # four halvings; before a later change the symbol "nothing yet" is coded, and time continues from there
TIME_END = SEGMENTS << SEGMENT_BITS
LEVELS = 176  # hazard level q stands for floor(2**(q / 8)) units


def _root(value: int, degree: int) -> int:
    """Return the largest integer whose `degree`-th power is at most `value`."""
    root = 0
    for bit in reversed(range(value.bit_length() // degree + 1)):
        if (root | 1 << bit) ** degree <= value:
            root |= 1 << bit
    return root


# Slots below the start of each segment; the last entry is where "nothing yet" begins.
TIME_START = np.array(
    [(1 << TIME_BITS) - (_root(1 << (16 * TIME_BITS - j % 16), 16) >> (j // 16)) for j in range(SEGMENTS + 1)], np.int64
)
HAZARD = np.array([_root(1 << level, 8) for level in range(LEVELS + 1)], np.int64)


def hazards(level_C: np.ndarray, level_B: np.ndarray) -> np.ndarray:
    """Return the units of time H(c) of each class in each block, int64[B, C]."""
    return HAZARD[(level_C[None, :] + level_B[:, None].astype(np.int64)).clip(0, LEVELS)]


class Blocks(NamedTuple):
    """The blocks of a tensor.

    Attributes:
        base_B, end_B: First element of each block, and one past its last.
        bound_B: Number of the first change of each block, and the number of all changes; shape B + 1.
        width, stride: The elements of a block are runs of `width`, one every `stride` elements; by default they are one run.
    """

    base_B: np.ndarray
    end_B: np.ndarray
    bound_B: np.ndarray
    width: int = 1 << 62
    stride: int = 1 << 62

    @property
    def size_B(self) -> np.ndarray:
        """Number of elements of each block."""
        run_B, rest_B = np.divmod(self.end_B - self.base_B - 1, self.stride)
        return run_B * self.width + rest_B + 1

    @classmethod
    def of(cls, element_count: int, block_elements: int, bound_B: np.ndarray, first: int = 0) -> Self:
        """Return blocks of `block_elements` consecutive elements, from block `first` on, as many as `bound_B` is for."""
        base_B = np.arange(first, first + bound_B.size - 1, dtype=np.int64) * block_elements
        return cls(base_B, np.minimum(base_B + block_elements, element_count), bound_B)


class Tables(NamedTuple):
    """Symbol tables for numbers.

    Attributes:
        freq_TS: Slots of each symbol, uint32[T, 256]; each row sums to 2**12.
        start_TS: Slots below each symbol, uint32.
        inverse_TS: 2**64 / freq rounded down, uint64; 2**64 - 1 for a symbol of one slot or none.
        symbol_TL: The symbol of each slot, uint8.
    """

    freq_TS: np.ndarray
    start_TS: np.ndarray
    inverse_TS: np.ndarray
    symbol_TL: np.ndarray

    @classmethod
    def of(cls, freq_TS: np.ndarray) -> Self:
        """Return the tables with these frequencies."""
        symbols = np.arange(freq_TS.shape[1], dtype=np.uint8)
        start_TS = np.cumsum(freq_TS, axis=1, dtype=np.uint32) - freq_TS
        inverse_TS = np.uint64(2**64 - 1) // np.maximum(freq_TS, 1).astype(np.uint64)
        # This divided 2**64 - 1, not 2**64; the results differ where freq is a power of two.
        inverse_TS += (freq_TS > 1) & (freq_TS & (freq_TS - np.uint32(1)) == 0)
        return cls(freq_TS, start_TS, inverse_TS, np.stack([np.repeat(symbols, freq_S) for freq_S in freq_TS]))


class Classes(NamedTuple):
    """The class of a bit pattern is (bits >> shift) & mask; both have the dtype of the bit patterns."""

    shift: np.generic
    mask: np.generic


class Context(NamedTuple):
    """What the coder needs for `context`.

    Attributes:
        bits_N: The tensor's old bits for decoding, its new bits for encoding.
        classes: How the class of an element follows from its bits.
        level_C: Level of each class, int64.
        level_B: Level of each block, int32, which is added.
        table_C: Step table of each class, int64.
        rate: For encoding: changes to expect in a unit of time.
    """

    bits_N: np.ndarray
    classes: Classes
    level_C: np.ndarray
    level_B: np.ndarray
    table_C: np.ndarray
    rate: float = 0.0
