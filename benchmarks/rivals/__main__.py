"""Other systems' own code, from the package index, on a step of each run of a folder
(`benchmarks/corpus/runs.py`).

    make rivals CORPUS=FOLDER      # installs the packages beside .venv, then runs
    python -m benchmarks.rivals FOLDER [--base CHECKPOINT] [--json]

For the middle step of each run: bits per changed element, seconds to compare and encode, seconds at the
replica and its extra memory, wrong elements in the result. Then, on the first two layers, one bit of the
payload is flipped at 16 places, one at a time. Each system runs in a process of its own. Full snapshots of
the same step go through Xet's client.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks import common
from benchmarks.corpus import runs
from benchmarks.corpus.changes import layer
from benchmarks.rivals import report, xet
from benchmarks.rivals.systems import SYSTEMS, WEIGHTS, Arc3, Holder, System, Weights
from deltasync.tensors.bits import tensor_of

FLIPS = 16
_FLIPPED_BIT = 0x10
_FLIPPED_LAYERS = ("0", "1")


def measure(folder: Path, base: Path | None) -> dict[str, Any]:
    """Measure every system on the middle step of every run."""
    found = []
    for run in runs.find(folder):
        with tempfile.TemporaryDirectory() as place:
            label, changed, elements = _prepare(run, base or folder / runs.BASE, Path(place))
            systems = common.in_processes("rivals", SYSTEMS, Path(place), 0)
            snapshots = xet.measure(
                Path(place, "old", WEIGHTS), Path(place, "new", WEIGHTS), changed / elements
            )
        rows = [{"name": name, **systems[name]} for name in SYSTEMS]
        for row in rows:
            row["bits_per_changed"] = 8 * row["payload_bytes"] / changed
        counts = {"changed": changed, "elements": elements}
        rate = run.facts.get("learning_rate")
        found.append(
            {
                "name": run.name,
                "learning_rate": rate,
                "step": label,
                **counts,
                "systems": rows,
                "xet": snapshots,
            }
        )
    return {"flips": FLIPS, "runs": found}


def _prepare(run: runs.Run, base: Path, place: Path) -> tuple[int | None, int, int]:
    """Write the weights around the middle step as checkpoints. Return the step, its changed elements, and all
    of them.
    """
    specs = run.specs()
    states = list(_middle(run, base))
    for name, state in zip(("old", "new"), states, strict=True):
        weights = {
            spec: tensor_of(bits, specs[spec]) for spec, bits in runs.by_tensor(specs, state.bits_N).items()
        }
        few = {spec: tensor for spec, tensor in weights.items() if layer(spec) in _FLIPPED_LAYERS}
        for path, tensors in ((place / name, weights), (place / "few" / name, few)):
            path.mkdir(parents=True)
            save_file(tensors, path / WEIGHTS, metadata={"format": "pt"})
            shutil.copy(base / "config.json", path)
    old, new = states
    return new.step, int((old.bits_N != new.bits_N).sum()), old.bits_N.size


def _middle(run: runs.Run, base: Path) -> Any:
    before = run.length() // 2
    for number, state in enumerate(run.states(base)):
        if number in (before, before + 1):
            yield state
        if number > before:
            return


def _measure_system(kind: type[System], place: Path) -> dict[str, Any]:
    """Measure one system on the whole model, then with flipped bits on a few layers."""
    system = kind(place / "work", _weights(place, "old"), _weights(place, "new"))
    _link(place / "old", place / "work" / "old")
    with contextlib.redirect_stdout(io.StringIO()):  # some print
        encode_s, payload = common.timed(system.trainer())
        holder = system.replica()
        times_s: list[float] = []
        peak = common.peak_extra_bytes(lambda: times_s.append(_apply_s(holder, payload)))
        found = {
            "package": kind.package,
            "version": _version(kind.package),
            "needs": kind.needs,
            "payload_bytes": len(payload),
            "encode_s": encode_s,
            "apply_s": times_s[0],
            "apply_peak_extra_bytes": peak,
            "wrong_elements": _wrong(holder.weights(), system.new),
        }
        few = place / "few"
        found["flipped"] = _flips(kind, few)
        if issubclass(kind, Arc3):
            found["runs_code_of_payloads"] = kind(
                few / "work", _weights(few, "old"), _weights(few, "new")
            ).runs_code()
    return found


def _apply_s(holder: Holder, payload: bytes) -> float:
    return common.timed(lambda: holder.apply(payload))[0]


def _flips(kind: type[System], place: Path) -> dict[str, int]:
    """Return what replicas do with a payload in which one bit is flipped: how often they refuse it, or hold
    what.
    """
    system = kind(place / "work", _weights(place, "old"), _weights(place, "new"))
    _link(place / "old", place / "work" / "old")
    payload = system.trainer()()
    clean = system.replica()
    clean.apply(payload)
    usual = _wrong(clean.weights(), system.new)  # of a system that is not exact anyway
    found = {"refused": 0, "refused_with_changed_weights": 0, "right": 0, "wrong": 0}
    for number in range(FLIPS):
        at = (2 * number + 1) * len(payload) // (2 * FLIPS)
        damaged = payload[:at] + bytes([payload[at] ^ _FLIPPED_BIT]) + payload[at + 1 :]
        holder = system.replica()
        try:
            holder.apply(damaged)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # noqa: BLE001 - a panic of Rust is none of Exception
            found["refused_with_changed_weights" if _changed(holder, system.old) else "refused"] += 1
            continue
        found["right" if _wrong(holder.weights(), system.new) == usual else "wrong"] += 1
    return found


def _changed(holder: Holder, old: Weights) -> bool:
    """Return whether a replica that refused a payload holds other weights than before; not if it cannot be
    asked.
    """
    try:
        return _wrong(holder.weights(), old) > 0
    except BaseException:  # noqa: BLE001 - it made nothing of the payload
        return False


def _wrong(found: Weights, wanted: Weights) -> int:
    """Return the number of elements whose bits differ."""
    return sum(
        int((found[name].view(torch.int16) != tensor.view(torch.int16)).sum())
        for name, tensor in wanted.items()
    )


def _weights(place: Path, name: str) -> Weights:
    return load_file(place / name / WEIGHTS)


def _link(source: Path, target: Path) -> None:
    target.parent.mkdir(exist_ok=True)
    target.unlink(missing_ok=True)
    target.symlink_to(source)


def _version(package: str) -> str | None:
    for name in (package, f"{package}-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


PARTS = {name: lambda place, _, kind=kind: _measure_system(kind, place) for name, kind in SYSTEMS.items()}

if __name__ == "__main__" and not common.run_part(PARTS):
    common.command(
        __doc__,
        measure,
        report.lines,
        common.option("folder", type=Path, help="the folder of the runs"),
        common.option(
            "--base", type=Path, help="the checkpoint that the runs start from; FOLDER/base by default"
        ),
    )
