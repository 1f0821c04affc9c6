"""Planted faults of the product that the simulator must find: python -m tests.simulator.mutants [NAME ...] [--seconds S].

Each is a text of a module and another one in its place, planted as the module is imported. A mutant is killed if a seed
fails. One that survives shows an invariant that is missing.
"""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.machinery
import importlib.util
import os
import subprocess
import sys
import time
from types import ModuleType
from typing import NamedTuple

SECONDS = 60.0  # of one mutant


class Mutant(NamedTuple):
    """A planted fault: `old` occurs once in the module, and becomes `new`."""

    module: str
    old: str
    new: str


MUTANTS: dict[str, Mutant] = {}


class Planter(importlib.abc.MetaPathFinder):
    """Plants a mutant as its module is imported."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant

    def find_spec(self, name: str, path: object, target: ModuleType | None = None) -> importlib.machinery.ModuleSpec | None:
        if name != self._mutant.module:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)  # type: ignore[arg-type]
        assert spec is not None and spec.origin is not None
        mutant = self._mutant

        class Loader(importlib.machinery.SourceFileLoader):
            def get_code(self, fullname: str) -> object:
                return compile(planted(mutant), self.path, "exec", dont_inherit=True)

        return importlib.util.spec_from_file_location(name, spec.origin, loader=Loader(name, spec.origin))


def planted(mutant: Mutant) -> str:
    """Return the source of a module with the fault."""
    spec = importlib.util.find_spec(mutant.module)
    assert spec is not None and spec.origin is not None
    with open(spec.origin, encoding="utf-8") as file:
        source = file.read()
    if source.count(mutant.old) != 1:
        raise AssertionError(f"{mutant.module} has {mutant.old!r} {source.count(mutant.old)} times")
    return source.replace(mutant.old, mutant.new)


def plant(name: str) -> None:
    """Plant a mutant in this process, which has not imported the product yet."""
    sys.meta_path.insert(0, Planter(MUTANTS[name]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutants to plant; all by default")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of each mutant")
    given = parser.parse_args()
    survived = []
    for name in given.names or MUTANTS:
        began_s = time.monotonic()
        command = [sys.executable, "-m", "tests.simulator", "--mutant", name, "--seeds", "100000", "--first"]
        command += ["--seconds", str(given.seconds), "--steps", "100"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
        last = (done.stdout.strip() or done.stderr.strip()).splitlines()[-1:]
        said = last[0].rpartition("  ")[2][:120] if last else "nothing"
        print(
            f"{'killed  ' if done.returncode == 1 else 'SURVIVED'} {time.monotonic() - began_s:6.1f} s  {name}: {said}",
            flush=True,
        )
        if done.returncode != 1:
            survived.append(name)
    sys.exit(bool(survived))


if __name__ == "__main__":
    main()
