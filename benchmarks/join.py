"""The cost of full weights, published and joined late, compared with a copy, the disk and sha256 of the same bytes.

    python -m benchmarks.join [--gigabytes 0.3] [--folder DIR] [--json]

Weights have the shapes of Qwen3-0.6B, with fewer layers and a smaller vocabulary below 1.19 GB, that model's size. One
process publishes to a directory: an anchor, three versions that change 1 %, and two more, the first of which is due for an
anchor. Another process joins at the fourth version. Both load their kernels before anything is measured. Memory is how far
resident memory rises above what it was before there were any weights.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks import common
from benchmarks.commit.versions import change
from benchmarks.common import status_bytes, table, timed
from deltasync import Publisher, Replica, open_store
from deltasync.tensors.bits import bits_of

Weights = dict[str, torch.Tensor]

_FULL_BYTES = 1.19e9
_DELTAS = 3


def main() -> None:
    """Run the benchmark by the command line."""
    parser = common.parser(__doc__)
    parser.add_argument("--gigabytes", type=float, default=0.3)
    parser.add_argument("--folder", type=Path, default=None, help="directory for the channel; default: a temporary one")
    parser.add_argument("--part", choices=PARTS, help="used by the benchmark itself")
    given = parser.parse_args()
    if given.part is not None:
        print(json.dumps(PARTS[given.part](given.folder, given.gigabytes)))
        return
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        result = measure(Path(folder), given.gigabytes)
    common.emit(given.json, result, lines(result))


def measure(folder: Path, gigabytes: float) -> dict[str, Any]:
    """Measure seconds and bytes of each part, in a process of its own."""
    found: dict[str, Any] = {}
    for name in PARTS:
        command = [sys.executable, "-m", "benchmarks.join", "--part", name]
        command += ["--folder", str(folder), "--gigabytes", str(gigabytes)]
        output = subprocess.run(command, cwd=common.ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
        found[name] = json.loads(output)
    assert found["join"]["sha256"] == found["publish"]["sha256"]
    return found


def floors(folder: Path, gigabytes: float) -> dict[str, float]:
    """Measure the least that must be done, in seconds: copy the weights (into new memory, and again), write and sync as many
    bytes, sha256 of them in one thread.
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

    def digest() -> None:
        found = hashlib.sha256()
        for tensor in weights.values():
            found.update(bits_of(tensor).data)

    return {
        "weight_bytes": size,
        "new_copy_s": timed(copy)[0],
        "copy_s": common.best_s(copy),
        "disk_s": common.best_s(write),
        "sha256_s": common.best_s(digest),
    }


def publish(folder: Path, gigabytes: float) -> dict[str, Any]:
    """Measure seconds of an anchor, and of publishing while one is written; memory; the digest of version 4."""
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
                sha256 = _digest(weights)
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
    return {"join_s": join_s, "peak_bytes": peak_bytes(), "sha256": _digest(replica.state_dict())}


PARTS: dict[str, Callable[[Path, float], dict[str, Any]]] = {"floors": floors, "publish": publish, "join": join}


def model(gigabytes: float) -> Weights:
    """Return random weights of about this size."""
    share = gigabytes * 1e9 / _FULL_BYTES
    shapes = {"model.embed_tokens.weight": (round(151_936 * share), 1024)}
    for layer in range(max(1, round(28 * share))):
        start = f"model.layers.{layer}"
        for name, shape in (("q", (2048, 1024)), ("k", (1024, 1024)), ("v", (1024, 1024)), ("o", (1024, 2048))):
            shapes[f"{start}.self_attn.{name}_proj.weight"] = shape
        for name, shape in (("gate", (3072, 1024)), ("up", (3072, 1024)), ("down", (1024, 3072))):
            shapes[f"{start}.mlp.{name}_proj.weight"] = shape
    random = torch.Generator().manual_seed(0)
    made = {}
    for name, shape in shapes.items():
        made[name] = torch.empty(shape, dtype=torch.bfloat16).normal_(std=0.02, generator=random)
    return made


def warm_up() -> None:
    """Load the kernels by publishing and following two versions in memory."""
    store, weights = open_store("memory://warm"), model(0.05)
    with Publisher(store, dtype="keep") as publisher:
        publisher.publish(weights).wait(60)
        change(weights, 0.01, seed=1)
        publisher.publish(weights).wait(60)
    Replica(store).sync()
    store.delete(*[info.key for info in store.list("")])


def _peak() -> Callable[[], int]:
    """Return a function that returns how far resident memory has risen above what it is now, in bytes."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = status_bytes("VmRSS")
    return lambda: status_bytes("VmHWM") - before


def _digest(weights: Weights) -> str:
    found = hashlib.sha256()
    for name in sorted(weights):
        found.update(bits_of(weights[name]).data)
    return found.hexdigest()


def lines(result: dict[str, Any]) -> Iterator[str]:
    """Yield the result as lines of text."""
    floors, publish, join = (result[name] for name in PARTS)
    size, copy_s, sha256_s = (floors[name] for name in ("weight_bytes", "copy_s", "sha256_s"))
    slower_s = max(floors["disk_s"], sha256_s)
    rows = (
        (
            "copy of the weights into new memory",
            f"{floors['new_copy_s']:.3f} s",
            f"{floors['new_copy_s'] / copy_s:.1f} copies",
        ),
        ("copy of the weights, in memory", f"{copy_s:.3f} s", ""),
        ("write and sync of as many bytes", f"{floors['disk_s']:.3f} s", ""),
        ("sha256 of them, in one thread", f"{sha256_s:.3f} s", ""),
        ("first anchor: trainer held", f"{publish['held_s']:.3f} s", f"{publish['held_s'] / copy_s:.1f} copies"),
        (
            "first anchor: visible",
            f"{publish['visible_s']:.3f} s",
            f"{publish['visible_s'] / slower_s:.2f} of disk or sha256",
        ),
        ("delta of 1 %: trainer held", f"{publish['delta_s']:.3f} s", f"{publish['delta_s'] / copy_s:.1f} copies"),
        (
            "the same while an anchor is written",
            f"{publish['beside_s']:.3f} s",
            f"{publish['beside_s'] / copy_s:.1f} copies",
        ),
        ("late join: anchor and 3 deltas", f"{join['join_s']:.3f} s", f"{join['join_s'] / sha256_s:.2f} of sha256"),
        *(
            (f"peak memory of {who}", f"{held / 1e9:.2f} GB", f"{held / size:.2f} of the weights")
            for who, held in (
                ("a publisher, model included, first anchor", publish["first_bytes"]),
                ("the same, with deltas and an anchor", publish["peak_bytes"]),
                ("a replica that joins", join["peak_bytes"]),
            )
        ),
    )
    yield from table((f"{size / 1e9:.2f} GB of weights", "", "ratio"), rows)


if __name__ == "__main__":
    common.run(main)
