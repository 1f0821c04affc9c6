from __future__ import annotations

import inspect
import re

from deltasync import errors
from deltasync.ending import Terminated
from deltasync.errors import DeltaSyncError
from deltasync.trainer import ranks

_LINE = re.compile(r"^(?P<lead>[ │├└─]*)(?P<name>[A-Z]\w+)(?: \((?P<also>\w+)\))? +(?P<code>\d+) ")


def _drawn() -> dict[str, tuple[str | None, str | None, int]]:
    """Name -> (parent, second base, exit code), as the docstring draws it."""
    assert errors.__doc__ is not None
    found: dict[str, tuple[str | None, str | None, int]] = {}
    path: list[tuple[int, str]] = []
    for line in errors.__doc__.splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        depth = len(match["lead"])
        path = [(at, name) for at, name in path if at < depth]
        found[match["name"]] = (path[-1][1] if path else None, match["also"], int(match["code"]))
        path.append((depth, match["name"]))
    return found


def _defined() -> dict[str, tuple[str | None, str | None, int]]:
    found: dict[str, tuple[str | None, str | None, int]] = {}
    for name, kind in inspect.getmembers(errors, inspect.isclass):
        if kind.__module__ != errors.__name__ or name.startswith("_"):
            continue
        parent, *others = [base.__name__ for base in kind.__bases__]
        is_root = kind is DeltaSyncError
        found[name] = (None if is_root else parent, others[0] if others else None, kind.exit_code)
    return found


def test_the_tree_in_the_docstring_is_the_tree_of_classes() -> None:
    assert _drawn() == _defined()


def test_there_is_one_root() -> None:
    assert all(issubclass(getattr(errors, name), DeltaSyncError) for name in _defined())


def test_every_error_says_what_it_means() -> None:
    assert all(getattr(errors, name).__doc__ for name in _defined())


def test_no_exit_code_is_a_shells() -> None:
    assert all(code == 1 or 3 <= code < 64 for _, _, code in _defined().values())


def test_other_ranks_learn_what_ended_one() -> None:
    assert ranks.described(KeyboardInterrupt()) == ("KeyboardInterrupt", "it was ended by KeyboardInterrupt")
    assert ranks.described(Terminated(143)) == ("Terminated", "it was ended by Terminated")
    assert ranks.described(ValueError()) == ("ValueError", "ValueError")
    assert ranks.described(ValueError("no")) == ("ValueError", "no")
