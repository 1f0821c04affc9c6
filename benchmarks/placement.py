"""What each placement of the shadow takes, by the numbers of the code: the table of docs/operations.md.

python -m benchmarks.placement
"""

from __future__ import annotations

from collections.abc import Iterator

from deltasync.kernels import groups

MODELS = {"0.6B": (596_049_920, 1), "7B": (7_615_616_512, 1), "70B over 8 ranks": (70_553_706_496, 8)}
"""Elements, and ranks that share them: Qwen3-0.6B, Qwen2.5-7B, Llama-3-70B."""

CHANGED_FRACTION = 0.01
ITEM_BYTES = 2  # bfloat16
_ROW_BYTES = 4 * 8


def lines() -> Iterator[str]:
    """The table, in Markdown."""
    columns = (
        "model",
        "placement",
        "host memory",
        "copies on the device",
        "beside them, in a publish",
        "crosses to the host",
    )
    yield _line(*columns)
    yield _line(*("---" for _ in columns))
    for model, (elements, ranks) in MODELS.items():
        held = -(-elements // ranks)
        weights = held * ITEM_BYTES
        copied, beside = _compared_there(held)
        yield _line(model, "`host`", _size(weights), "0", "0", _size(weights))
        pinned = f"{_size(weights)} + {_size(copied)} pinned"
        yield _line(model, "`device`", pinned, _size(weights), _size(beside), _size(copied))


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _compared_there(elements: int) -> tuple[int, int]:
    """Bytes that a publish copies to the host, and that it takes on the device at its peak beside the copies."""
    copied = beside = 0
    for first in range(0, elements, groups.GROUP):
        count = min(groups.GROUP, elements - first)
        blocks = -(-count // groups.BLOCK)
        capacity = groups.capacity(count, blocks, groups.may_come(CHANGED_FRACTION * count), ITEM_BYTES)
        buffer = sum(groups.layout(blocks, capacity, ITEM_BYTES))
        marks_and_counts = blocks * (groups.BLOCK // 8 + 4)
        copied += buffer
        beside = max(beside, marks_and_counts + 2 * buffer + blocks * 4 + _ROW_BYTES)
    return copied, beside


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.2f} GB" if size_bytes >= 1e9 else f"{size_bytes / 1e6:.0f} MB"


if __name__ == "__main__":
    print("\n".join(lines()))
