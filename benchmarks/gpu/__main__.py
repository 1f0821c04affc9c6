"""Measure and check everything that runs on a GPU, on this machine's GPU, in less than 150 seconds.

    python -m benchmarks.gpu [--parts kernels,dense,anchor,mixture,detect,tests] [--limit-s 150] [--no-counts] [--json]

`--parts kernels,dense,anchor,mixture --no-counts` is stage, commit, rollback, audit and full weights of 7.6 G
elements in 339 and 18,819 tensors. Each part prints its rows as soon as it ends; one that would begin after
`--limit-s` is left out.

Needs Python 3.11 or newer, torch, triton, numpy, safetensors, msgspec and zstandard; `make gpu-kit` makes a
folder to carry to a machine without a package index. The models need 60 GB of GPU memory and `anchor` 40 GB
on the host; `--small` needs little. Without a GPU, Triton's interpreter runs it at a small size: the checks
are the same, but times mean nothing. Exits with 1 if a check failed or a bar was missed.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import importlib.util
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import common

ROOT = Path(__file__).parents[2]
TESTS = {
    "test_segment_kernels.py": ("-k", "gpu_segments or warming"),
    "test_gpu_diff.py": ("-m", "gpu"),
    "test_device_codec.py": ("-k", "not publisher"),
}
TESTS_S = 150
PARTS = ("kernels", "dense", "anchor", "mixture", "detect", "tests")


def main() -> None:
    """Run the benchmark by the command line."""
    parser = common.parser(__doc__)
    parser.add_argument(
        "--elements",
        type=int,
        default=7_600_000_000,
        help="size of the single tensor; fewer if memory is short",
    )
    parser.add_argument("--changed-percent", type=float, default=1.0)
    parser.add_argument("--small", action="store_true", help="use small sizes, as without a GPU")
    parser.add_argument("--parts", default=",".join(PARTS), help="what to measure, in this order")
    parser.add_argument("--limit-s", type=float, default=1e9, help="begin no part after so many seconds")
    parser.add_argument(
        "--no-counts", action="store_true", help="do not run each step again under PyTorch's profiler"
    )
    arguments = parser.parse_args()
    parts = arguments.parts.split(",")
    if not {*parts} <= {*PARTS}:
        parser.error(f"--parts takes {', '.join(PARTS)}")
    if arguments.elements < 1 or not 0 < arguments.changed_percent <= 50:
        parser.error("--elements must be at least 1, and --changed-percent above 0 and at most 50")
    _choose_interpreter()
    from benchmarks.gpu.machine import Machine, has_triton

    if not has_triton():
        sys.exit("No triton found: install the version that this torch requires, then run this again.")
    machine = Machine(arguments.small, counts=not arguments.no_counts)
    common.say(machine.device_name)
    sections = _sections(machine, arguments.elements, arguments.changed_percent / 100)
    failures, shown, start = dict[str, str](), 0, time.perf_counter()
    for name in parts:
        if time.perf_counter() - start > arguments.limit_s:
            failures[name] = "left out, because time was up"
            continue
        began = time.perf_counter()
        try:
            sections[name]()
        except Exception as error:  # noqa: BLE001 - the other sections still run; it is reported at the end
            traceback.print_exc()
            failures[name] = f"{type(error).__name__}: {error}"
        for row in machine.rows[shown:]:
            common.say("  ".join(filter(None, _cells(dataclasses.asdict(row)))))
        shown = len(machine.rows)
        common.say(f"{name}: {time.perf_counter() - began:.1f} s")
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

    def kernels() -> None:
        found.update(rates.measure(machine, element_count, changed_fraction))

    def model(shapes: Any, scatters: bool, then: Sequence[Callable[[Any, Any], None]] = ()) -> None:
        run = Run(machine, Model.build(shapes, machine.device), changed_fraction)
        run.measure(found.get("scatter_s") if scatters else None)
        for check in then:
            check(machine, run)

    def anchor() -> None:
        run = Run(machine, Model.build(models[0], machine.device), changed_fraction)
        run.memory.warm_up()
        run.memory.audit()
        special.anchor(machine, run)

    def detected() -> None:
        from benchmarks.gpu import detect

        for shapes in models:
            detect.measure(machine, Model.build(shapes, machine.device), changed_fraction, found["copy"])
            _empty_cache(machine)

    checks = special.captured_graph, special.staging_beside_work
    of = {
        "kernels": kernels,
        "dense": functools.partial(model, models[0], True, checks),
        "anchor": anchor,
        "mixture": functools.partial(model, models[1], False),
        "detect": detected,
        "tests": lambda: _run_tests(machine.interpreted),
    }

    def freed(section: Callable[[], None]) -> None:
        _empty_cache(machine)
        section()
        gc.collect()

    return {name: functools.partial(freed, section) for name, section in of.items()}


def _empty_cache(machine: Any) -> None:
    import torch

    if not machine.interpreted:
        torch.cuda.empty_cache()


def _run_tests(interpreted: bool) -> None:
    """Run the tests of the kernels, each file in a process of its own; the default suite has them
    interpreted.
    """
    missing = [name for name in ("pytest", "hypothesis") if importlib.util.find_spec(name) is None]
    if interpreted or missing:
        common.say(
            f"tests skipped: {'the default suite has them' if interpreted else 'no ' + ', '.join(missing)}"
        )
        return
    for name, chosen in TESTS.items():
        # Without conftest.py, whose fixtures need what only the default suite has.
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-W",
            "default",
            "-p",
            "no:cacheprovider",
            "--noconftest",
        ]
        command += ["-p", "tests.profiles", f"tests/property/{name}", *chosen]
        done = subprocess.run(command, cwd=ROOT, timeout=TESTS_S, capture_output=True, text=True, check=False)
        common.say(f"{name}: {done.stdout.rstrip().rpartition(chr(10))[2]}")
        assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


def _lines(result: dict[str, Any]) -> Iterator[str]:
    yield f"{result['device']}, CUDA {result['cuda']}"
    yield from common.table(
        ("", "ms", "GB/s", "launches", "waits", "peak MB", ""), map(_cells, result["rows"])
    )
    yield ""
    verdicts = {True: "met", False: "MISSED", None: "needs a GPU"}
    bars = [
        (bar["what"], f"{bar['found']:.2f}", f"{bar['most']:g}", verdicts[bar["met"]])
        for bar in result["bars"]
    ]
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
