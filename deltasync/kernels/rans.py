"""The streams of the entropy coder. `native` writes and reads them, and so does `reference` in plain Python.

The changes of a block are one rANS stream (Duda, "Asymmetric numeral systems", arXiv:1311.2540). To decode a
symbol that owns the slots [start, start + freq) of 2**bits from the state x:

    slot = x mod 2**bits;  x = freq * (x >> bits) + slot - start;  if x < 2**32 and a word is left: x = x << 32 | next word

The words of a stream are the initial state, its low half first (a state below 2**32 is one word), then the
further words in the order of reading. After the last symbol x is 1 and no word is left, which a reader
checks. Encoding does the inverse, from the last symbol to the first.

A number (a gap or a step) is coded as a symbol by a static table of 2**12 slots, which gives its leading
bits, and extra bits, each group of which is a uniform symbol. `docs/format.md`, section 10, is normative.

Shapes: K changed elements, B blocks, C classes, T tables of S symbols: for each class that of gaps, then that
of steps.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
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


LOG_BITS = 10
LOG_ONE_BITS = 16
LOG2 = np.rint(np.log2(1 + np.arange(1 << LOG_BITS) / (1 << LOG_BITS)) * (1 << LOG_ONE_BITS)).astype(np.int64)
"""Logarithms of 1 to 2, in 2**-16; integers, so that a device computes the same costs as the host."""


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
    """The classes of groups of blocks. Those of a group are by descending level, equal ones by ascending
    values.

    Attributes:
        low_L, span_L: Which elements are of each class: those whose field is from `low_L` to `low_L +
            span_L`; uint8.
        level_L: Its level, int64.
        bound_G: Number of each group's first class, and the number of all; int64.
    """

    low_L: np.ndarray
    span_L: np.ndarray
    level_L: np.ndarray
    bound_G: np.ndarray

    @classmethod
    def of(cls, groups: Sequence[np.ndarray]) -> Self:
        """Return the classes of groups: lines of first value, last value and level, [C, 3], the values
        ascending.
        """
        bound_G = np.cumsum([0, *map(len, groups)], dtype=np.int64)
        ordered = [
            np.empty((0, 3), np.int64),
            *(line_C3[np.argsort(-line_C3[:, 2], kind="stable")] for line_C3 in groups),
        ]
        low_L, last_L, level_L = np.concatenate(ordered).T
        return cls(
            low_L.astype(np.uint8), (last_L - low_L).astype(np.uint8), level_L.astype(np.int64), bound_G
        )

    def group(self, number: int) -> Self:
        """Return the classes of one group."""
        here = slice(*self.bound_G[number : number + 2].tolist())
        return type(self)(
            self.low_L[here], self.span_L[here], self.level_L[here], np.array([0, here.stop - here.start])
        )

    @property
    def ratio_CC(self) -> np.ndarray:
        """Ratios of the mean gaps of the classes of a group, int64[C, C], in 256ths; 0 below the diagonal."""
        return ratios(self.level_L)

    def by_value(self, none: int = 0) -> np.ndarray:
        """Return the number in its group of the class of each value of the field, uint8[G, 256]; `none` for
        values of no class.
        """
        found_GE = np.full((self.bound_G.size - 1, 256), none, np.uint8)
        for class_E, (first, end) in zip(found_GE, itertools.pairwise(self.bound_G.tolist()), strict=True):
            for c, (low, span) in enumerate(
                zip(*(each[first:end].tolist() for each in self[:2]), strict=True)
            ):
                class_E[low : low + span + 1] = c
        return found_GE


Costs = tuple[float, float, float]
"""The bits that a class costs beside its changes: its table of gaps; each symbol in its table of steps; and
each element of its group, for the time that another class takes on both sides."""


def ratios(level_C: np.ndarray) -> np.ndarray:
    """Return the ratios of the mean gaps of classes with these descending levels, int64[C, C]; 0 below the
    diagonal.
    """
    more_CC = level_C[:, None] - level_C
    return np.where(more_CC >= 0, RATIO[np.maximum(more_CC, 0)], 0)
