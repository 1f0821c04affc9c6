"""Seeds of the simulator, in processes of their own: each begins with the order of sets and with modules as they are."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import pytest

from tests.simulator.mutants import MUTANTS, planted

QUICK = (
    "a create that finds our bytes is taken for another's",
    "a log is not sealed",
    "a lost version is built on",
    "a pin is not kept",
    "the shadow does not move",
)
"""Planted faults that a few seeds find."""


def run(*arguments: str) -> tuple[int, list[str]]:
    command = [sys.executable, "-m", "tests.simulator", "--steps", "100", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr, done.stderr[-3000:]
    return done.returncode, done.stdout.splitlines()


def failures(lines: Sequence[str]) -> list[str]:
    return [line for line in lines if not line.endswith("  ok")]


@pytest.mark.parametrize("first", range(0, 120, 30))
def test_nothing_that_must_hold_is_violated(first: int) -> None:
    code, lines = run("--seed", f"{first}", "--seeds", "30")
    assert failures(lines) == []
    assert (code, len(lines)) == (0, 30)


def test_a_seed_gives_the_same_trace() -> None:
    assert run("--seed", "7", "--seeds", "5") == run("--seed", "7", "--seeds", "5")
    assert run("--seed", "8", "--trace") == run("--seed", "8", "--trace")


@pytest.mark.parametrize("name", QUICK)
def test_planted_faults_are_found(name: str) -> None:
    code, lines = run("--mutant", name, "--seeds", "60", "--first")
    assert code == 1 and failures(lines)


@pytest.mark.parametrize("name", MUTANTS)
def test_planted_faults_are_of_the_product_as_it_is(name: str) -> None:
    planted(MUTANTS[name])
