"""Measure and check everything that runs on a GPU, on this machine's GPU, in less than eight minutes.

    python -m benchmarks.gpu [--elements 7600000000] [--changed-percent 1] [--small] [--no-tests] [--json]

Needs Python 3.11 or newer, torch, triton, numpy, safetensors and msgspec; `make gpu-kit` makes a folder to carry to a
machine without a package index. Without a GPU, Triton's interpreter runs it at a small size: the checks are the same, but
times mean nothing. Exits with 1 if a check failed or a bar was missed.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import common

ROOT = Path(__file__).parents[2]
TESTS = {"test_gpu_diff.py": ("-m", "gpu"), "test_segment_kernels.py": ("-k", "gpu_segments or warming")}
TESTS_S = 150


def main() -> None:
    """Run the benchmark by the command line."""
    parser = common.parser(__doc__)
    parser.add_argument(
        "--elements", type=int, default=7_600_000_000, help="size of the single tensor; fewer if memory is short"
    )
    parser.add_argument("--changed-percent", type=float, default=1.0)
    parser.add_argument("--small", action="store_true", help="use small sizes, as without a GPU")
    parser.add_argument("--no-tests", action="store_true", help="skip the tests of the kernels")
    arguments = parser.parse_args()
    if arguments.elements < 1 or not 0 < arguments.changed_percent <= 50:
        parser.error("--elements must be at least 1, and --changed-percent above 0 and at most 50")
    _choose_interpreter()
    from benchmarks.gpu.machine import Machine, has_triton

    if not has_triton():
        sys.exit("No triton found: install the version that this torch requires, then run this again.")
    machine = Machine(arguments.small)
    common.say(machine.device_name)
    sections: dict[str, Callable[[], None]] = (
        {} if arguments.no_tests else {"tests": lambda: _run_tests(machine.interpreted)}
    )
    sections |= _sections(machine, arguments.elements, arguments.changed_percent / 100)
    failures = {}
    start = time.perf_counter()
    for name, section in sections.items():
        try:
            section()
        except Exception as error:  # noqa: BLE001 - the other sections still run; it is reported at the end
            traceback.print_exc()
            failures[name] = f"{type(error).__name__}: {error}"
    result = {
        "device": machine.device_name,
        "cuda": machine.cuda,
        "seconds": time.perf_counter() - start,
        "rows": [dataclasses.asdict(row) for row in machine.rows],
        "bars": [dataclasses.asdict(bar) for bar in machine.bars],
        "failures": failures,
    }
    common.emit(arguments.json, result, _lines(result))
    sys.exit(bool(failures) or any(bar.met is False for bar in machine.bars))


def _choose_interpreter() -> None:
    """Choose Triton's interpreter if there is no GPU. Triton must know before it is imported."""
    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"


def _sections(machine: Any, element_count: int, changed_fraction: float) -> dict[str, Callable[[], None]]:
    """Return the sections to run, by name. One that fails does not stop the others."""
    import torch

    from benchmarks.gpu import rates, special
    from benchmarks.gpu.model import Model, Run, dense, mixture

    found: dict[str, Any] = {"copy": 1.0}
    if machine.small:
        element_count, changed_fraction = 100_000, 0.02
        models = [dense(1, 24, 40, 70, 8), mixture(2, 4, 16, 8, 14)]
    else:
        free_bytes = torch.cuda.mem_get_info(machine.device)[0]
        element_count = min(element_count, free_bytes // 8)
        models = [dense(28, 3584, 18944, 152064, 512), mixture(48, 128, 1024, 384, 387)]

    def of_kernels() -> None:
        found.update(rates.measure(machine, element_count, changed_fraction))
        _empty_cache(machine)

    def of_model(shapes: Any, first: bool) -> None:
        _empty_cache(machine)
        run = Run(machine, Model.build(shapes, machine.device), changed_fraction)
        run.measure(found["copy"], found.get("scatter_s") if first else None)
        run.release_shadow()
        if first:
            special.captured_graph(machine, run)
            special.staging_beside_work(machine, run)
            special.anchor_without_room(machine, run)

    of_models = {f"{len(shapes)} tensors": functools.partial(of_model, shapes, shapes is models[0]) for shapes in models}
    return {"kernels": of_kernels, **of_models}


def _empty_cache(machine: Any) -> None:
    import torch

    if not machine.interpreted:
        torch.cuda.empty_cache()


def _run_tests(interpreted: bool) -> None:
    """Run the tests of the kernels, each file in a process of its own; the default suite has them interpreted."""
    missing = [name for name in ("pytest", "hypothesis") if importlib.util.find_spec(name) is None]
    if interpreted or missing:
        common.say(f"tests skipped: {'the default suite has them' if interpreted else 'no ' + ', '.join(missing)}")
        return
    for name, chosen in TESTS.items():
        command = [sys.executable, "-m", "pytest", "-q", "-W", "default", "-p", "no:cacheprovider"]
        command += [f"tests/property/{name}", *chosen]
        done = subprocess.run(command, cwd=ROOT, timeout=TESTS_S, capture_output=True, text=True, check=False)
        common.say(f"{name}: {done.stdout.rstrip().rpartition(chr(10))[2]}")
        assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


def _lines(result: dict[str, Any]) -> Iterator[str]:
    yield f"{result['device']}, CUDA {result['cuda']}"
    yield from common.table(("", "ms", "GB/s", "launches", "waits", "peak MB", ""), map(_cells, result["rows"]))
    yield ""
    verdicts = {True: "met", False: "MISSED", None: "needs a GPU"}
    bars = [(bar["what"], f"{bar['found']:.2f}", f"{bar['most']:g}", verdicts[bar["met"]]) for bar in result["bars"]]
    yield from common.table(("", "found", "at most", ""), bars)
    for name, error in result["failures"].items():
        yield f"FAILED {name}: {error}"
    yield f"{result['seconds']:.0f} s"


def _cells(row: dict[str, Any]) -> list[str]:
    rate = None if row["rate"] is None else f"{row['rate'] / 1e9:.1f}"
    peak = None if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e6:.1f}"
    counts = ("" if value is None else str(value) for value in (rate, row["launches"], row["waits"], peak))
    return [row["what"], f"{1e3 * row['seconds']:.3f}", *counts, row["note"]]


if __name__ == "__main__":
    common.run(main)
