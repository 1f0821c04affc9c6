"""Seeds of the simulator, in processes of their own: each begins with the order of sets and with modules as they are."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import pytest

from tests.simulator.mutants import MUTANTS, QUICK, planted

WORLDS = ";;job;rot;expire;restore;swallow;forged;;signed,damaged;relay,damaged;hub,rival;s3,rival;forgets,keeper;follower0"
"""Which seeds have in turn; an empty one is left to chance."""


def run(module: str, *arguments: str) -> list[str]:
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    assert lines, done.stderr[-3000:]
    return lines


def failures(lines: Sequence[str]) -> list[str]:
    return [line for line in lines if not line.endswith("  ok")]


@pytest.mark.parametrize("first", (0, 20))
def test_nothing_that_must_hold_is_violated(first: int) -> None:
    lines = run("tests.simulator", "--world", WORLDS, "--seed", f"{first}", "--seeds", "20", "--steps", "80")
    assert failures(lines) == []
    assert len(lines) == 20


def test_a_seed_gives_the_same_trace() -> None:
    assert failures(run("tests.simulator", "--seed", "7", "--seeds", "4", "--steps", "40", "--twice")) == []
    assert run("tests.simulator", "--seed", "8", "--trace") == run("tests.simulator", "--seed", "8", "--trace")


@pytest.mark.parametrize("first", range(0, len(QUICK), 10))
def test_planted_faults_are_found(first: int) -> None:
    lines = run("tests.simulator.mutants", *QUICK[first : first + 10])
    assert [line for line in lines[:-1] if not line.startswith("killed")] == []


@pytest.mark.parametrize("name", MUTANTS)
def test_planted_faults_are_of_the_product_as_it_is(name: str) -> None:
    planted(name)
