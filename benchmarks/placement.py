"""The memory that each placement of the shadow takes, by the code's constants: the table of docs/operations/sizing.md.

python -m benchmarks.placement [--json]
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks import common
from deltasync.kernels import groups
from deltasync.publish import device_copies

MODELS = {"0.6B": (596_049_920, 1), "7B": (7_615_616_512, 1), "70B over 8 ranks": (70_553_706_496, 8)}
"""Elements, and ranks that share them: Qwen3-0.6B, Qwen2.5-7B, Llama-3-70B."""

CHANGED_FRACTION = 0.01
ITEM_BYTES = 2  # bfloat16
_ROW_BYTES = 4 * 8


def measure() -> list[dict[str, Any]]:
    """Return the bytes that each placement takes on a rank for each of `MODELS`."""
    rows = []
    for model, (elements, ranks) in MODELS.items():
        held = -(-elements // ranks)
        weights = held * ITEM_BYTES
        copied, beside, pinned = _compared_there(held)
        pieces = 2 * device_copies.PIECE_BYTES
        on_host = {"pinned_bytes": pieces, "copy_bytes": 0, "beside_bytes": 0, "crossing_bytes": weights}
        on_device = {
            "pinned_bytes": pieces + pinned,
            "copy_bytes": weights,
            "beside_bytes": beside,
            "crossing_bytes": copied,
        }
        for placement, found in (("host", on_host), ("device", on_device)):
            rows.append({"model": model, "placement": placement, "host_bytes": weights, **found})
    return rows


def lines(result: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the table of docs/operations/sizing.md."""
    rows = []
    for row in result:
        pinned = f" + {_size(row['pinned_bytes'])} pinned"
        sizes = (_size(row[f"{name}_bytes"]) for name in ("copy", "beside", "crossing"))
        rows.append((row["model"], f"`{row['placement']}`", _size(row["host_bytes"]) + pinned, *sizes))
    columns = ("placement", "host memory", "copies on the device", "more, in a publish", "crosses to the host")
    yield from common.table(("model", *columns), rows)


def _compared_there(elements: int) -> tuple[int, int, int]:
    """Return the bytes that a publish copies to the host, its peak on the device besides the copies, and pinned memory."""
    copied = beside = pinned = 0
    for first in range(0, elements, groups.GROUP):
        count = min(groups.GROUP, elements - first)
        blocks = -(-count // groups.BLOCK)
        capacity = groups.capacity(count, blocks, groups.may_come(CHANGED_FRACTION * count), ITEM_BYTES)
        buffer = sum(groups.layout(blocks, capacity, ITEM_BYTES))
        marks_and_counts = blocks * (groups.BLOCK // 8 + 4)
        copied += buffer
        beside = max(beside, marks_and_counts + 2 * buffer + blocks * 4 + _ROW_BYTES)
        pinned = max(pinned, 2 << (buffer - 1).bit_length())
    return copied, beside, pinned


def _size(size_bytes: int) -> str:
    if not size_bytes:
        return "0"
    return f"{size_bytes / 1e9:.2f} GB" if size_bytes >= 1e9 else f"{size_bytes / 1e6:.0f} MB"


if __name__ == "__main__":
    common.command(__doc__, measure, lines)
