"""The streams of the entropy coder. `native` writes and reads them, and so does `reference` in plain Python.

The changes of a block are one rANS stream (Duda, "Asymmetric numeral systems", arXiv:1311.2540). To decode a symbol that
owns the slots [start, start + freq) of 2**bits from the state x:

    slot = x mod 2**bits;  x = freq * (x >> bits) + slot - start;  if x < 2**32 and a word is left: x = x << 32 | next word

The words of a stream are the initial state, its low half first (a state below 2**32 is one word), then the further words
in the order of reading. After the last symbol x is 1 and no word is left, which a reader checks. Encoding does the inverse,
from the last symbol to the first.

A number (a gap or a step) is coded as a symbol by a static table of 2**12 slots, which gives its leading bits, and extra
bits, each group of which is a uniform symbol. `docs/format.md`, section 10, is normative.

Shapes: K changed elements, B blocks, C classes, T tables of S symbols: for each class that of gaps, then that of steps.
"""

from __future__ import annotations

from typing import NamedTuple, Self

import numpy as np

STATE_MIN = 1 << 32
TABLE_BITS = 12

LEVELS = 160
"""Largest level of a class. Level q stands for a mean gap of 2**(q / 8) elements."""
RATIO_BITS = 8


def _root(value: int, degree: int) -> int:
    """Return the largest integer whose `degree`-th power is at most `value`."""
    root = 0
    for bit in reversed(range(value.bit_length() // degree + 1)):
        if (root | 1 << bit) ** degree <= value:
            root |= 1 << bit
    return root


# Ratio of two mean gaps whose levels differ by j, in 256ths: floor(256 * 2**(j / 8)).
RATIO = np.array([_root(1 << (8 * RATIO_BITS + j), 8) for j in range(LEVELS + 1)], np.int64)


class Blocks(NamedTuple):
    """Blocks and their changes.

    Attributes:
        base_B: The number of the first element of each block.
        size_BC: Elements of each class in each block, int64. Classes are in the order of descending levels.
        bound_B: Number of the first change of each block, and the number of all changes; shape B + 1.
    """

    base_B: np.ndarray
    size_BC: np.ndarray
    bound_B: np.ndarray

    @classmethod
    def of(cls, element_count: int, block_elements: int, bound_B: np.ndarray, first: int = 0) -> Self:
        """Return blocks of `block_elements` consecutive elements of one class, from block `first` on."""
        base_B = np.arange(first, first + bound_B.size - 1, dtype=np.int64) * block_elements
        return cls(base_B, np.minimum(block_elements, element_count - base_B)[:, None], bound_B)


class Classes(NamedTuple):
    """Which elements are of which class: those whose field is from `low_C` to `low_C + span_C`; uint8."""

    low_C: np.ndarray
    span_C: np.ndarray

    def by_value(self) -> np.ndarray:
        """Return the class of each value of the field, uint8[256]; 0 for values of none."""
        found = np.zeros(256, np.uint8)
        for c, (low, span) in enumerate(zip(self.low_C.tolist(), self.span_C.tolist(), strict=True)):
            found[low : low + span + 1] = c
        return found


Costs = tuple[float, float, float]
"""The bits that a class costs beside its changes: its table of gaps; each symbol in its table of steps; and each element of
its group, for the time that another class takes on both sides."""


def ratios(level_C: np.ndarray) -> np.ndarray:
    """Return the ratios of the mean gaps of classes with these descending levels, int64[C, C]; 0 below the diagonal."""
    more_CC = level_C[:, None] - level_C
    return np.where(more_CC >= 0, RATIO[np.maximum(more_CC, 0)], 0)
