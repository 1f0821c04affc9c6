"""The cost of full weights, published and joined late, compared with a copy, the disk and sha256 of the same
bytes.

    python -m benchmarks.join [--gigabytes 0.3] [--folder DIR] [--json]

Weights have the shapes of Qwen3-0.6B, with fewer layers and a smaller vocabulary below 1.19 GB, that model's
size. One process publishes to a directory: an anchor, three versions that change 1 %, and two more, the first
of which is due for an anchor. Another process joins at the fourth version. Both load their kernels before
anything is measured. Memory is how far resident memory rises above what it was before there were any weights.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks import common
from benchmarks.common import status_bytes, table, timed
from benchmarks.models import change, digest, model, warm_up
from deltasync import Publisher, Replica
from deltasync.tensors.bits import bits_of

_DELTAS = 3


def floors(folder: Path, gigabytes: float) -> dict[str, float]:
    """Measure the least that must be done, in seconds: copy the weights (into new memory, and again), write
    and sync as many bytes, sha256 of them in one thread.
    """
    weights = model(gigabytes)
    size = sum(tensor.nbytes for tensor in weights.values())
    copies = {name: torch.empty_like(tensor) for name, tensor in weights.items()}

    def copy() -> None:
        for name, tensor in weights.items():
            copies[name].copy_(tensor)

    def write() -> None:
        with open(folder / "plain", "wb") as file:
            for tensor in weights.values():
                file.write(bits_of(tensor).data)
            file.flush()
            os.fsync(file.fileno())
        (folder / "plain").unlink()

    def sha256() -> None:
        found = hashlib.sha256()
        for tensor in weights.values():
            found.update(bits_of(tensor).data)

    return {
        "weight_bytes": size,
        "new_copy_s": timed(copy)[0],
        "copy_s": common.best_s(copy),
        "disk_s": common.best_s(write),
        "sha256_s": common.best_s(sha256),
    }


def publish(folder: Path, gigabytes: float) -> dict[str, Any]:
    """Measure seconds of an anchor, and of publishing while one is written; memory; the digest of version
    4.
    """
    warm_up()
    peak_bytes = _peak()
    weights = model(gigabytes)
    with Publisher(f"file://{folder}/channel", dtype="keep", anchor_every=1 + _DELTAS) as publisher:
        before = time.perf_counter()
        held_s, receipt = timed(lambda: publisher.publish(weights))
        receipt.wait(600)
        visible_s = time.perf_counter() - before
        first_bytes = peak_bytes()
        seconds_s = []
        for number in range(1, _DELTAS + 3):
            change(weights, 0.01, seed=number)
            seconds, receipt = timed(lambda: publisher.publish(weights))
            receipt.wait(600)
            seconds_s.append(seconds)
            if number == _DELTAS:
                sha256 = digest(weights)
    return {
        "held_s": held_s,
        "visible_s": visible_s,
        "delta_s": statistics.median(seconds_s[1:_DELTAS]),
        "beside_s": seconds_s[-1],
        "first_bytes": first_bytes,
        "peak_bytes": peak_bytes(),
        "sha256": sha256,
    }


def join(folder: Path, gigabytes: float) -> dict[str, Any]:
    """Measure the seconds to join at version 4, and memory."""
    warm_up()
    peak_bytes = _peak()
    replica = Replica(f"file://{folder}/channel")
    join_s, version = timed(lambda: replica.sync(1 + _DELTAS))
    assert version == 1 + _DELTAS
    return {"join_s": join_s, "peak_bytes": peak_bytes(), "sha256": digest(replica.state_dict())}


PARTS: dict[str, Callable[[Path, float], dict[str, Any]]] = {
    "floors": floors,
    "publish": publish,
    "join": join,
}


def measure(gigabytes: float, folder: Path | None) -> dict[str, Any]:
    """Measure seconds and bytes of each part, in a process of its own."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        found = common.in_processes("join", PARTS, Path(name), gigabytes)
    assert found["join"]["sha256"] == found["publish"]["sha256"]
    return found


def _peak() -> Callable[[], int]:
    """Return a function that returns how far resident memory has risen above what it is now, in bytes."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = status_bytes("VmRSS")
    return lambda: status_bytes("VmHWM") - before


def lines(result: dict[str, Any]) -> Iterator[str]:
    """Yield the result as lines of text."""
    floors, publish, join = (result[name] for name in PARTS)
    weights = floors["weight_bytes"]
    peaks = ("publisher", publish["peak_bytes"]), ("late joiner", join["peak_bytes"])

    def row(text: str, seconds: float, floor: str, name: str) -> tuple[str, str, str]:
        return text, f"{seconds:.2f} s", f"{seconds / floors[floor]:.1f} times {name}, {floors[floor]:.2f} s"

    rows = [
        row("first publish: the trainer is held", publish["held_s"], "copy_s", "a copy"),
        row("first publish: until it is visible", publish["visible_s"], "disk_s", "writing to the disk"),
        row("a late joiner, with three deltas", join["join_s"], "sha256_s", "sha256"),
        *(
            (f"{who}: peak memory", f"{peak / 1e9:.2f} GB", f"{peak / weights:.2f} weights")
            for who, peak in peaks
        ),
    ]
    yield from table((f"{weights / 1e9:.2f} GB of full weights, a directory", "", ""), rows, words=3)


if __name__ == "__main__":
    if not common.run_part(PARTS):
        common.command(
            __doc__,
            measure,
            lines,
            common.option("--gigabytes", type=float, default=0.3),
            common.option(
                "--folder",
                type=Path,
                default=None,
                help="directory for the channel; default: a temporary one",
            ),
        )
