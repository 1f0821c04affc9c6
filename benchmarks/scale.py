"""The cost of a version by model size: measured up to 3 B elements, computed from there up to 1 T and 256
replicas.

    python -m benchmarks.scale [--billions 0.15 0.6 1.2 3] [--link 10] [--store 400] [--json]

Measures each size with a publisher to a directory and a host replica, in processes of their own, and versions
that change 1 %. Computes, from the times per element at the size nearest to 0.6 B, the seconds until a
version is stored and until all replicas serve it; the ranks of the trainer and the workers of a replica share
the work, each as fast as this machine. The same computation is compared with the other sizes that were
measured. Uses no GPU.
"""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.common import say, table, timed
from benchmarks.models import change, model, warm_up
from deltasync import Publisher, Replica

CHANGED = 0.01
_TIMES = "held_s", "visible_s", "apply_s"
_DELTAS = 4  # counted; one more before them meets new memory and is not counted
_BASE = 0.6e9  # elements of the size that all others are computed from
_ROUND_TRIPS = 2.5
_ROUND_TRIP_S = 0.05


@dataclasses.dataclass(frozen=True)
class Deployment:
    """A model, how many ranks publish it together, and how many workers a replica has."""

    name: str
    elements: float
    ranks: int
    workers: int


DEPLOYMENTS = (
    Deployment("7B", 7.6e9, 8, 1),
    Deployment("30B-A3B", 30.5e9, 16, 2),
    Deployment("235B-A22B", 235e9, 64, 8),
    Deployment("1T", 1e12, 256, 16),
)
REPLICAS = 8, 64, 256


def publish(folder: Path, billions: float) -> dict[str, Any]:
    """Measure the median seconds that `publish` holds the trainer, and until its version is stored."""
    warm_up()
    weights = model(2 * billions)
    held_s, visible_s, sizes = [], [], []
    with Publisher(f"file://{folder}/channel", dtype="keep", anchor_every=1 << 30) as publisher:
        publisher.publish(weights).wait(600)
        for number in range(1, _DELTAS + 2):
            change(weights, CHANGED, seed=number)
            seconds, (held, receipt) = timed(lambda: _published(publisher, weights))
            held_s.append(held)
            visible_s.append(seconds)
            sizes.append((receipt.payload_bytes, receipt.changed, receipt.total))
    payload_bytes, changed, total = sizes[-1]
    return {
        "elements": total,
        "changed": changed,
        "payload_bytes": payload_bytes,
        "held_s": statistics.median(held_s[1:]),
        "visible_s": statistics.median(visible_s[1:]),
    }


def _published(publisher: Publisher, weights: Any) -> tuple[float, Any]:
    held_s, receipt = timed(lambda: publisher.publish(weights))
    receipt.wait(600)
    return held_s, receipt


def follow(folder: Path, billions: float) -> dict[str, Any]:
    """Measure the median seconds to fetch a version, decode it and write it into host memory."""
    warm_up()
    replica = Replica(f"file://{folder}/channel")
    replica.sync(1)
    seconds = [timed(lambda version=version: replica.sync(version))[0] for version in range(2, _DELTAS + 3)]
    assert replica.audit()
    return {"apply_s": statistics.median(seconds[1:])}


PARTS: dict[str, Callable[[Path, float], dict[str, Any]]] = {"publish": publish, "follow": follow}


def run(billions: Sequence[float], link: float, store: float, folder: Path | None) -> dict[str, Any]:
    """Measure each size, its parts in processes of their own, and compute the others."""
    points = []
    for size in billions:
        say(f"{size:g} B elements")
        with tempfile.TemporaryDirectory(dir=folder) as name:
            found = common.in_processes("scale", PARTS, Path(name), size)
        points.append({**found["publish"], **found["follow"]})
    return compute(points, link, store)


def compute(points: Sequence[dict[str, Any]], link: float, store: float) -> dict[str, Any]:
    """Compute the cost of `DEPLOYMENTS` from one measured size, and the error for the other sizes.

    `link` is in Gbit/s of each rank, and of each worker of a replica, `store` of the store to all replicas
    together.
    """
    base = min(points, key=lambda point: abs(point["elements"] - _BASE))
    checks = [
        {
            "elements": point["elements"],
            **{
                name: (base[name] * point["elements"] / base["elements"]) / point[name] - 1 for name in _TIMES
            },
        }
        for point in points
    ]
    rows = [
        {"model": deployment.name, "replicas": replicas, **_served(deployment, replicas, base, link, store)}
        for deployment in DEPLOYMENTS
        for replicas in REPLICAS
    ]
    return {
        "points": list(points),
        "base": base["elements"],
        "errors": checks,
        "link": link,
        "store": store,
        "rows": rows,
    }


def _served(
    deployment: Deployment, replicas: int, base: dict[str, Any], link: float, store: float
) -> dict[str, Any]:
    share = deployment.elements / base["elements"]
    payload_bytes, weight_bytes = base["payload_bytes"] * share, 2 * deployment.elements
    trips_s = _ROUND_TRIPS * _ROUND_TRIP_S

    def moved_s(size: float) -> float:
        up_s = 8 * size / (deployment.ranks * link * 1e9)
        return up_s + 8 * size * max(1 / (deployment.workers * link * 1e9), replicas / (store * 1e9))

    encoded_s, applied_s = (
        base["visible_s"] * share / deployment.ranks,
        base["apply_s"] * share / deployment.workers,
    )
    return {
        "ranks": deployment.ranks,
        "workers": deployment.workers,
        "payload_bytes": payload_bytes,
        "held_s": base["held_s"] * share / deployment.ranks,
        "served_s": encoded_s + trips_s + moved_s(payload_bytes) + applied_s,
        "full_s": trips_s + moved_s(weight_bytes),
    }


def lines(result: dict[str, Any]) -> Iterator[str]:
    """Yield the result as lines of text."""
    yield from measured(result)
    yield ""
    yield from computed(result)


def measured(result: dict[str, Any]) -> Iterator[str]:
    """Yield the table of measured sizes."""
    rows = []
    for point, error in zip(result["points"], result["errors"], strict=True):
        each = (
            f"{point[name]:.3f} s, {1e9 * point[name] / point['elements']:.2f} ns each" for name in _TIMES
        )
        size, payload = f"{point['elements'] / 1e9:.2f} B", f"{point['payload_bytes'] / 1e6:.1f} MB"
        rows.append((size, payload, *each, ", ".join(f"{error[name]:+.0%}" for name in _TIMES)))
    base = f"computed from {result['base'] / 1e9:.1f} B: held, stored, applied"
    yield from table(("elements", "payload", "trainer held", "stored", "applied", base), rows)


def computed(result: dict[str, Any]) -> Iterator[str]:
    """Yield the table of computed deployments."""
    named = "model", "ranks", "workers", "replicas"
    rows = []
    for row in result["rows"]:
        seconds = f"{row['held_s']:.1f} s", f"{row['served_s']:.0f} s", f"{row['full_s']:,.0f} s"
        rows.append((*(row[name] for name in named), f"{row['payload_bytes'] / 1e9:.2f} GB", *seconds))
    yield from table((*named, "payload", "trainer held", "served by all", "full weights, links alone"), rows)


if __name__ == "__main__":
    if not common.run_part(PARTS):
        common.command(
            __doc__,
            run,
            lines,
            common.option(
                "--billions", type=float, nargs="+", default=[0.15, 0.6, 1.2, 3.0], help="elements to measure"
            ),
            common.option("--link", type=float, default=10.0, help="Gbit/s of each rank, and of each worker"),
            common.option(
                "--store", type=float, default=400.0, help="Gbit/s of the store to all replicas together"
            ),
            common.option(
                "--folder", type=Path, default=None, help="directory for channels; default: a temporary one"
            ),
        )
