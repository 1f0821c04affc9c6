"""The result of `benchmarks.rivals` as tables."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.common import table
from benchmarks.corpus.report import name


def lines(result: dict[str, Any]) -> Iterator[str]:
    """Yield both tables."""
    yield from costs(result)
    yield ""
    yield from damage(result)
    yield ""
    yield from snapshots(result)


def costs(result: dict[str, Any]) -> Iterator[str]:
    """Yield bits of every run, and times and memory of the last one."""
    runs = result["runs"]
    rows = []
    for at, system in sorted(enumerate(runs[-1]["systems"]), key=lambda each: each[1]["bits_per_changed"]):
        bits = (f"{run['systems'][at]['bits_per_changed']:.2f}" for run in runs)
        peak, wrong = system["apply_peak_extra_bytes"], system["wrong_elements"]
        rows.append(
            (
                _label(system),
                *bits,
                f"{system['encode_s']:.2f}",
                f"{system['apply_s']:.2f}",
                "" if peak is None else f"{peak / 1e6:.0f}",
                "yes" if not wrong else f"no: {wrong / runs[-1]['elements']:.2%} differ",
                system["needs"],
            )
        )
    heads = [f"bits, {name(run)}" for run in runs]
    columns = ("system", *heads, "compare + encode, s", "at the replica, s", "its extra memory, MB", "exact")
    yield from table((*columns, "the replica needs"), rows)


def damage(result: dict[str, Any]) -> Iterator[str]:
    """Yield what replicas do with one flipped bit."""
    rows = []
    for at, system in enumerate(result["runs"][-1]["systems"]):
        counts = [sum(run["systems"][at]["flipped"][what] for run in result["runs"]) for what in _OUTCOMES]
        rows.append((_label(system), *counts))
    yield from table(("system", *_OUTCOMES.values()), rows)


_OUTCOMES = {
    "refused": "refused, old weights intact",
    "refused_with_changed_weights": "refused, old weights overwritten",
    "right": "right weights",
    "wrong": "wrong weights, not noticed",
}


def snapshots(result: dict[str, Any]) -> Iterator[str]:
    """Yield what Xet uploads of full snapshots."""
    rows = [
        (
            name(run),
            f"{run['changed'] / run['elements']:.2%}",
            f"{run['xet']['known_chunks']} of {run['xet']['chunks']:,}",
            f"{run['xet']['expected_known_share']:.1e}",
            f"{run['xet']['uploaded_bytes'] / 1e6:.0f} of {run['xet']['file_bytes'] / 1e6:.0f} MB",
            f"{8 * run['xet']['uploaded_bytes'] / run['changed']:.0f}",
        )
        for run in result["runs"]
    ]
    columns = ("learning rate", "changed", "chunks known", "(1 - p)^32768", "uploaded", "bits per change")
    yield from table(columns, rows)


def _label(system: dict[str, Any]) -> str:
    ours = system["package"] == "deltasync"
    return (
        f"**{system['name']}**" if ours else f"{system['name']} (`{system['package']}` {system['version']})"
    )
