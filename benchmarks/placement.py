"""The memory that each place of the shadow takes, by the code's constants: the table of
docs/operations/sizing.md.

python -m benchmarks.placement [--json]
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks import common
from deltasync.gpu import groups
from deltasync.gpu.delta import BLOCK
from deltasync.publish import detect

MODELS = {"0.6B": (596_049_920, 1), "7B": (7_615_616_512, 1), "70B over 8 ranks": (70_553_706_496, 8)}
"""Elements, and ranks that share them: Qwen3-0.6B, Qwen2.5-7B, Llama-3-70B."""

CHANGED_FRACTION = 0.01
ITEM_BYTES = 2  # bfloat16


def measure() -> list[dict[str, Any]]:
    """Return the bytes that each place takes on a rank for each of `MODELS`."""
    rows = []
    for model, (elements, ranks) in MODELS.items():
        held = -(-elements // ranks)
        weights, pinned = held * ITEM_BYTES, 2 * detect.PIECE_BYTES
        beside = groups.beside_bytes(-(-held // BLOCK), ITEM_BYTES)
        changes = groups.room(int(CHANGED_FRACTION * held), held) * (4 + ITEM_BYTES)
        on_host = {
            "host_bytes": weights + pinned,
            "device_bytes": 0,
            "beside_bytes": 0,
            "crossing_bytes": weights,
        }
        on_device = {
            "host_bytes": 0,
            "device_bytes": weights,
            "beside_bytes": beside + changes,
            "crossing_bytes": 0,
        }
        rows += [
            {"model": model, "place": place} | of for place, of in (("host", on_host), ("device", on_device))
        ]
    return rows


def lines(result: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the table of docs/operations/sizing.md."""
    columns = ("host", "device", "beside", "crossing")
    rows = (
        (row["model"], f"`{row['place']}`", *(_size(row[f"{name}_bytes"]) for name in columns))
        for row in result
    )
    head = (
        "model",
        "shadow",
        "host memory",
        "device memory",
        "more, in a publish",
        "weights that cross",
    )
    yield from common.table(head, rows)


def _size(size_bytes: int) -> str:
    if not size_bytes:
        return "0"
    return f"{size_bytes / 1e9:.2f} GB" if size_bytes >= 1e9 else f"{size_bytes / 1e6:.0f} MB"


if __name__ == "__main__":
    common.command(__doc__, measure, lines)
