"""python -m tests.ceilings: lower the ceilings of tests/ceilings.toml to what is there. It never raises one."""

from __future__ import annotations

import ast
import dataclasses
import tomllib
from pathlib import Path

from deltasync import config, threads
from deltasync.cli import main
from tests.unit.test_imports import PACKAGES, ROOMS, ROOT

FILE = Path(__file__).with_suffix(".toml")

Counts = dict[str, dict[str, int]]


def measured() -> Counts:
    """Return what is there: lines and classes of each room, and numbers of settings, commands and threads' names."""
    sources = {room: sorted((ROOT / "deltasync" / room).rglob("*.py")) for room in ROOMS}
    sources["root"] = sorted((ROOT / "deltasync").glob("*.py"))
    sources |= {package: sorted((ROOT / package).rglob("*.py")) for package in PACKAGES if package != "deltasync"}
    texts = {room: "".join(path.read_text() for path in paths) for room, paths in sources.items()}
    lines = {room: text.count("\n") for room, text in texts.items()}
    lines["native"] = (ROOT / "deltasync" / "_native.c").read_text().count("\n")
    lines["tests"] = sum(path.read_text().count("\n") for path in (ROOT / "tests").rglob("*.py"))
    classes = {
        room: sum(isinstance(node, ast.ClassDef) for path in paths for node in ast.walk(ast.parse(path.read_text())))
        for room, paths in sources.items()
    }
    kinds = [kind for kind in vars(config).values() if isinstance(kind, type) and dataclasses.is_dataclass(kind)]
    settings = {field.name for kind in kinds if kind.__name__.endswith("Settings") for field in dataclasses.fields(kind)}
    settings |= {field.name for field in dataclasses.fields(config.Retention)}
    names = {"settings": len(settings), "commands": len(main.list_commands(None)), "threads": len(threads.NAMES)}  # type: ignore[arg-type]
    return {"lines": lines, "classes": classes, "names": names}


def ceilings() -> Counts:
    """Return what tests/ceilings.toml allows."""
    return {table: counts for table, counts in tomllib.loads(FILE.read_text()).items() if table != "raised"}


def lower() -> None:
    """Write the lower one of each ceiling and what is there. What has no ceiling yet gets one."""
    head, _, rest = FILE.read_text().partition("\n[lines]\n")
    tables, allowed = [], ceilings()
    for table, counts in measured().items():
        rows = (f"{name} = {min(count, allowed.get(table, {}).get(name, count))}\n" for name, count in counts.items())
        tables.append(f"\n[{table}]\n" + "".join(rows))
    _, mark, raised = rest.partition("\n[[raised]]\n")
    FILE.write_text(head + "".join(tables) + mark + raised)


if __name__ == "__main__":
    lower()
