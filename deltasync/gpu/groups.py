"""How much `gpu_diff` compares at once, and the memory that this takes. Needs no triton."""

from __future__ import annotations

GROUP_BLOCKS = 1 << 16
"""Most blocks that one launch compares. Their slots are in memory at once."""

SLOT = 128
"""Changes of a block that its slot has room for, 3 % of its elements. A block with more is read a second
time.
"""

COPIED = 1 << 22
"""Most elements of a tensor in another order, dtype or place that are copied at once, to be compared."""

COPIES_BYTES = 64 << 20
"""Most bytes of such copies that are in memory at once."""

FIRST_GUESS = 1 / 64
"""Fraction of the elements that is expected to change, before anything is known. If more change, all is
compared again.
"""

SPARE = 1.125
"""Factor on the number of changes of the last version, for the room of the next one's."""

LEAST = 1 << 16
"""Changes that there is room for in addition."""


def room(expected: int, elements: int) -> int:
    """Return how many changes to make room for if `expected` are expected of so many elements."""
    return min(int(SPARE * expected) + LEAST, elements)


def beside_bytes(blocks: int, width: int) -> int:
    """Return the bytes on a device that comparing takes, beside the changes themselves.

    Slots of one group; a row's number, first position, count, bound, two sums of each block; sums of one kind
    once more.
    """
    return min(blocks, GROUP_BLOCKS) * SLOT * (2 + width) + blocks * (4 + 8 + 4 + 8 + 8 + 4 + 8)
