"""How much is compared at once on a GPU, and the memory that it takes: the numbers of `gpu_diff`, which need no triton."""

from __future__ import annotations

BLOCK = 4096
"""Elements per program that compares: enough loads in flight for streaming, a multiple of the 32 marks of a word."""

GROUP = 1 << 28
"""Elements that are compared together, by the same few launches."""

BUFFER_BYTES = 48 << 20
"""Largest buffer for what changed in a group. There are two."""

SPARE = 1.25
"""More changes than expected that still fit."""

LEAST = 4096
"""Changes that always fit."""

_ALIGNED_BYTES = 16


def layout(blocks: int, capacity: int, width: int) -> tuple[int, int, int]:
    """Bytes of a buffer: where the changes of each block end, their indices, their steps.

    Args:
        blocks: Blocks of the group.
        capacity: Changes that fit.
        width: Bytes of an element.
    """
    ends, index, step = (
        -(-size // _ALIGNED_BYTES) * _ALIGNED_BYTES for size in (4 * blocks, 4 * capacity, width * capacity)
    )
    return ends, index, step


def capacity(elements: int, blocks: int, wanted: int, width: int) -> int:
    """How many changes of a group its buffer has room for."""
    ends, _, _ = layout(blocks, 0, width)
    return max(1, min(wanted, elements, (BUFFER_BYTES - ends) // (4 + width)))


def may_come(expected: float) -> int:
    """Changes to make room for where so many are expected."""
    return int(SPARE * expected) + LEAST
