"""`context` under tensor parallelism: its size with tiles, and what one of several workers decodes.

    python -m benchmarks.shards [--json]

Matrices come from the simulation of `benchmarks.codec`, 1 % changed, in shapes that suit tiles more and less.
A worker has its rows, or its columns, in memory of its own. Its time goes from the opened payload to the
steps of its elements, includes gathering its old bits, and is the best of several. Every worker's steps are
compared with the published ones. Takes half a minute.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks import common
from benchmarks.codec import simulate
from deltasync import codec
from deltasync.codec import tiles
from deltasync.kernels import native
from deltasync.live import LiveMemory, Segment
from deltasync.tensors import Delta, Layout, Sparse, TensorSpec
from deltasync.tensors.bits import signed_view

SHAPES = ((4096, 4096), (3072, 1024), (2048, 1024), (1024, 1024))
WAYS = (1, 2, 4, 8)
_CHANGED = 0.0107
_FINGERPRINT = 0x0123456789ABCDEF


def measure(shape: tuple[int, int]) -> dict[str, Any]:
    """Measure bits per changed element by codec, with tiles and as a vector without tiles, and the workers'
    times.
    """
    spec = TensorSpec("w", "bfloat16", shape)
    old_N, new_N = simulate.delta(_CHANGED, spec.element_count)
    index_K, step_K = native.diff(old_N, new_N)

    def encoded(name: str, spec: TensorSpec) -> bytes:
        delta = Delta(Layout({"w": spec}), {spec.item_bytes: Sparse(index_K, step_K)})
        return codec.get(name).encode(delta, lambda _: (new_N, 0), {"w": _FINGERPRINT}, 2, 1).to_bytes()

    flat = TensorSpec("w", "bfloat16", (spec.element_count,))
    bodies = {
        "packed": encoded("packed", spec),
        "whole": encoded("context", flat),
        "tiles": encoded("context", spec),
    }
    payload = codec.open_payload(bodies["tiles"])
    cut = tiles.cut(spec.shape, 0, spec.element_count, tiles.TILE, tiles.BLOCK)
    workers = []
    for dim, ways in ((dim, ways) for ways in WAYS for dim in (0, 1) if ways > 1 or dim == 0):
        size = shape[dim] // ways
        part = signed_view(old_N).reshape(shape).narrow(dim, 0, size)
        memory = LiveMemory({"w": spec}, {"w": [Segment(part.clone(), part.stride(), part.storage_offset())]})

        def decode(memory: LiveMemory = memory) -> np.ndarray:
            delta, _ = codec.get("context").decode(payload, Layout({"w": spec}), memory.bits, memory.wanted)
            found = delta.steps[spec.item_bytes]
            at_K = np.searchsorted(index_K, found.at_K)
            assert (index_K[at_K] == found.at_K).all() and (step_K[at_K] == found.data_K).all()
            return found.at_K

        share = decode().size / index_K.size
        workers.append(
            {
                "by": "rows" if dim == 0 else "columns",
                "ways": ways,
                "share": share,
                "s": common.best_s(decode),
            }
        )
    return {
        "shape": shape,
        "ways": () if cut.grid is None else cut.grid.ways,
        "bits": {name: 8 * len(body) / index_K.size for name, body in bodies.items()},
        "workers": workers,
    }


def lines(result: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the result as lines of text."""
    columns = [f"{ways} by {by}" for ways in WAYS[1:] for by in ("rows", "columns")]
    rows = []
    for row in result:
        bits = row["bits"]
        more = f"{bits['tiles']:.2f} ({bits['tiles'] / bits['whole'] - 1:+.1%})"
        times = (f"{1e3 * worker['s']:.1f}" for worker in row["workers"])
        shape, ways = (f"{sides[0]} x {sides[1]}" for sides in (row["shape"], row["ways"]))
        rows.append((shape, ways, f"{bits['packed']:.2f}", f"{bits['whole']:.2f}", more, *times))
    heads = (
        "shape",
        "tiles",
        "`packed`, bits",
        "`context` without tiles",
        "with tiles",
        "one worker, ms",
        *columns,
    )
    yield from common.table(heads, rows)


if __name__ == "__main__":
    common.command(__doc__, lambda: [measure(shape) for shape in SHAPES], lines)
