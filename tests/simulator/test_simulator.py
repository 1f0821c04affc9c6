"""Seeds of the simulator, in processes of their own: each begins with the order of sets and with modules as
they are.
"""

from __future__ import annotations

import subprocess
import sys
import types
from collections.abc import Sequence

import pytest

from deltasync.serve import heartbeat
from tests.simulator.mutants import MUTANTS, QUICK, planted
from tests.simulator.scheduler import Scheduler, Stuck
from tests.simulator.shown import kept_by, shown

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
    assert run("tests.simulator", "--seed", "8", "--trace") == run(
        "tests.simulator", "--seed", "8", "--trace"
    )


_KEEPS = """
import dataclasses, functools, secrets, threading, time
now = time.monotonic
def wait(clock=time.time): pass
@dataclasses.dataclass
class Beat:
    sleep = functools.partial(time.sleep, 1)
    time_s: float = dataclasses.field(default_factory=time.time)
    ended: object = dataclasses.field(default_factory=threading.Event)
    right: float = dataclasses.field(default_factory=lambda: time.time())
"""


def test_a_real_clock_that_a_module_keeps_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("deltasync.planted")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(_KEEPS, vars(module))
    assert len(kept_by(module)) == 5, kept_by(module)


@pytest.mark.parametrize(
    "call", ("time.time()", "os.urandom(4)", "uuid.uuid4()", "secrets.token_hex(4)", "time.sleep(0)")
)
def test_a_real_clock_that_the_product_calls_is_a_violation(call: str) -> None:
    scheduler, text = Scheduler(0), f"import os, secrets, time, uuid\n{call}"
    with scheduler.installed(shown(scheduler)):
        exec(text, {"__name__": "a_library"})
        assert not scheduler.failed
        exec(text, {"__name__": "deltasync.planted"})
    assert [type(error) for _, error in scheduler.failed] == [Stuck]


def test_what_is_not_simulated_is_not_there() -> None:
    scheduler = Scheduler(0)
    with (
        scheduler.installed(shown(scheduler)),
        pytest.raises(Stuck, match=r"time\.process_time, which is not simulated"),
    ):
        heartbeat.time.process_time()


@pytest.mark.parametrize("first", range(0, len(QUICK), 10))
def test_planted_faults_are_found(first: int) -> None:
    lines = run("tests.simulator.mutants", *QUICK[first : first + 10])
    assert [line for line in lines[:-1] if not line.startswith("killed")] == []


@pytest.mark.parametrize("name", MUTANTS)
def test_planted_faults_are_of_the_product_as_it_is(name: str) -> None:
    planted(name)
