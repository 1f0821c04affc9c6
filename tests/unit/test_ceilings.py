"""The house does not grow: what a feature adds, another one leaves (`tests/ceilings.toml`)."""

from __future__ import annotations

import subprocess
import tomllib

import pytest

from tests.ceilings import FILE, ceilings, measured
from tests.unit.test_imports import ROOT


def test_nothing_is_above_its_ceiling() -> None:
    allowed, found = ceilings(), measured()
    above = [
        f"{table}.{name} is {count}, at most {allowed[table].get(name, 0)}"
        for table, counts in found.items()
        for name, count in counts.items()
        if count > allowed[table].get(name, 0)
    ]
    assert not above, "Take something out, or say in tests/ceilings.toml what left for it."


def test_a_ceiling_is_not_left_high() -> None:
    """What was taken out cannot come back unseen: `python -m tests.ceilings` lowers."""
    found = measured()
    high = [
        f"{table}.{name} is {found[table].get(name, 0)}, allowed {count}"
        for table, counts in ceilings().items()
        for name, count in counts.items()
        if count > 1.03 * found[table].get(name, 0) + (300 if table == "tokens" else 1)
    ]
    assert not high


def test_a_ceiling_was_raised_only_with_what_left_for_it() -> None:
    git = ("git", "-C", str(ROOT))
    path = FILE.relative_to(ROOT).as_posix()
    log = subprocess.run(
        [*git, "log", "-2", "--format=%H", "--", path], capture_output=True, text=True, check=False
    )
    before = [
        shown
        for commit in log.stdout.split()
        if not (
            shown := subprocess.run(
                [*git, "show", f"{commit}:{path}"], capture_output=True, text=True, check=False
            )
        ).returncode
    ]
    if not before:
        pytest.skip("no history of the ceilings here")
    now = tomllib.loads(FILE.read_text())
    for shown in before:
        old = tomllib.loads(shown.stdout)
        reasons = [reason for reason in now.get("raised", []) if reason not in old.get("raised", [])]
        by = {reason["what"]: reason["by"] for reason in reasons if reason["left"].strip()}
        raised = {
            f"{table}.{name}": count - old[table].get(name, 0)
            for table, counts in now.items()
            if table != "raised"
            for name, count in counts.items()
            if table in old and count > old[table].get(name, 0)
        }
        assert all(by.get(what, 0) >= more for what, more in raised.items()), raised
