"""How much `gpu_diff` compares at once, and the memory that this takes. Needs no triton."""

from __future__ import annotations

BLOCK = 4096
"""Elements that one program compares: enough loads in flight to stream, and a multiple of the 32 marks of a word."""

GROUP = 1 << 28
"""Most elements that the same few launches compare."""

BUFFER_BYTES = 64 << 20
"""Largest buffer for the changes of a group, a power of two. There are two, on the device and in pinned memory."""

SPARE = 1.25
"""Factor on the expected number of changes, for the room of a buffer."""

LEAST = 4096
"""Changes that a buffer has room for in addition."""

_ALIGNED_BYTES = 16


def layout(blocks: int, capacity: int, width: int) -> tuple[int, int, int]:
    """Return the bytes of a buffer's three parts: where the changes of each block end, indices, steps.

    Args:
        blocks: Number of blocks in the group.
        capacity: Number of changes that fit.
        width: Bytes of an element.
    """
    ends, index, step = (
        -(-size // _ALIGNED_BYTES) * _ALIGNED_BYTES for size in (4 * blocks, 4 * capacity, width * capacity)
    )
    return ends, index, step


def capacity(elements: int, blocks: int, wanted: int, width: int) -> int:
    """Return how many changes the buffer of a group gets room for: `wanted`, if they fit.

    Args:
        elements: Number of elements in the group.
        blocks: Number of blocks in the group.
        wanted: Number of changes to make room for.
        width: Bytes of an element.
    """
    ends, _, _ = layout(blocks, 0, width)
    return max(1, min(wanted, elements, (BUFFER_BYTES - ends) // (4 + width)))


def may_come(expected: float) -> int:
    """Return how many changes to make room for if `expected` are expected."""
    return int(SPARE * expected) + LEAST
