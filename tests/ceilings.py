"""python -m tests.ceilings: lower the ceilings of tests/ceilings.toml to what is there. It never raises
one.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import json
import re
import tomllib
from pathlib import Path

from deltasync import config, threads
from deltasync.ops.cli import main
from tests import version_path
from tests.unit.test_imports import PACKAGES, ROOMS, ROOT

FILE = Path(__file__).with_suffix(".toml")
LARGE = 20
"""Attributes that a class may have without a ceiling of its own."""

Counts = dict[str, dict[str, int]]


@functools.cache
def measured() -> Counts:
    """Return what is there: tokens and classes of rooms, attributes of large classes, names, and the way of a
    version.
    """
    sources = {room: sorted((ROOT / "deltasync" / room).rglob("*.py")) for room in ROOMS}
    sources["root"] = sorted((ROOT / "deltasync").glob("*.py"))
    sources |= {
        package: sorted((ROOT / package).rglob("*.py")) for package in PACKAGES if package != "deltasync"
    }
    trees = {room: [ast.parse(path.read_text()) for path in paths] for room, paths in sources.items()}
    sizes = {
        room: sum(version_path.tokens(path.read_text()) for path in paths) for room, paths in sources.items()
    }
    sizes["tests"] = sum(version_path.tokens(path.read_text()) for path in (ROOT / "tests").rglob("*.py"))
    sizes["native"] = len(
        re.findall(r"\w+|[^\w\s]", _without_comments((ROOT / "deltasync" / "_native.c").read_text()))
    )
    kept = {
        room: [node for tree in found for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        for room, found in trees.items()
    }
    classes = {room: len(nodes) for room, nodes in kept.items()}
    attributes = {f"{room}.{node.name}": _attributes(node) for room, nodes in kept.items() for node in nodes}
    large = {name: count for name, count in attributes.items() if count > LARGE}
    kinds = [
        kind for kind in vars(config).values() if isinstance(kind, type) and dataclasses.is_dataclass(kind)
    ]
    settings = {
        field.name
        for kind in kinds
        if kind.__name__.endswith("Settings")
        for field in dataclasses.fields(kind)
    }
    settings |= {field.name for field in dataclasses.fields(config.Retention)}
    names = {
        "settings": len(settings),
        "commands": len(main.list_commands(None)),
        "threads": len(threads.NAMES),
    }  # type: ignore[arg-type]
    walked = set.union(*version_path.walked())
    way = version_path.figures(walked)
    path = {"files": way["files"], "tokens": way["tokens"]} | version_path.nine(walked)
    return {"tokens": sizes, "classes": classes, "attributes": large, "names": names, "path": path}


def _without_comments(text: str) -> str:
    return re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.DOTALL)


def _attributes(node: ast.ClassDef) -> int:
    """Count the names that a class's body declares, and that its methods set on `self`."""
    declared = {
        each.target.id
        for each in node.body
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }
    targets = (
        each for each in ast.walk(node) if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store)
    )
    return len(
        declared
        | {each.attr for each in targets if isinstance(each.value, ast.Name) and each.value.id == "self"}
    )


def ceilings() -> Counts:
    """Return what tests/ceilings.toml allows."""
    return {table: counts for table, counts in tomllib.loads(FILE.read_text()).items() if table != "raised"}


def lower() -> None:
    """Write the lower one of each ceiling and what is there. What has no ceiling yet gets one."""
    head, _, rest = FILE.read_text().partition("\n[tokens]\n")
    tables, allowed = [], ceilings()
    for table, counts in measured().items():
        rows = (
            f"{json.dumps(name) if '.' in name else name} = "
            f"{min(count, allowed.get(table, {}).get(name, count))}\n"
            for name, count in counts.items()
        )
        tables.append(f"\n[{table}]\n" + "".join(rows))
    _, mark, raised = rest.partition("\n[[raised]]\n")
    FILE.write_text(head + "".join(tables) + mark + raised)


if __name__ == "__main__":
    lower()
