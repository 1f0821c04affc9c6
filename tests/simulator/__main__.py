"""python -m tests.simulator --seed N [--seeds COUNT] [--steps M] [--trace] [--twice]: run seeds, and say what
does not hold.

The same seed gives the same trace, to the byte. Exits with 1 if a seed fails.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import os
import sys
import time
from collections.abc import Sequence


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=1, help="how many")
    parser.add_argument("--steps", type=int, default=60, help="steps of all processes together")
    parser.add_argument("--seconds", type=float, default=0.0, help="stop after so long; 0 for no limit")
    parser.add_argument("--trace", action="store_true", help="print each line of the trace")
    parser.add_argument("--twice", action="store_true", help="run each seed twice, and compare the traces")
    parser.add_argument(
        "--world",
        default="",
        help="what it must have, with commas between: a store, a harm, actors; or several such, with semicolons: in turn",
    )
    parser.add_argument("--mutant", help="plant a fault first (tests.simulator.mutants)")
    given = parser.parse_args()
    with_fixed_hashes("tests.simulator")
    prepare()
    if given.mutant:
        from tests.simulator.mutants import plant

        plant(given.mutant)
    worlds = [[word for word in world.split(",") if word] for world in given.world.split(";")]
    began_s, failed = time.monotonic(), 0
    for seed in range(given.seed, given.seed + given.seeds):
        wanted = worlds[seed % len(worlds)]
        if given.seeds == 1 and not given.twice:
            line, problem = _run(seed, given.steps, given.trace, wanted)
            print(line)
            sys.exit(problem is not None)
        line, problem = _apart(seed, given.steps, wanted)
        if given.twice and _apart(seed, given.steps, wanted)[0] != line:
            problem = "another trace the second time"
        print(line, *([problem] if given.twice and problem else []), flush=True)
        failed += problem is not None
        if given.seconds and time.monotonic() - began_s > given.seconds:
            break
    sys.exit(failed > 0)


def with_fixed_hashes(module: str) -> None:
    """Start again with the order of sets fixed, unless it is."""
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.execve(
            sys.executable,
            [sys.executable, "-m", module, *sys.argv[1:]],
            {**os.environ, "PYTHONHASHSEED": "0"},
        )


def prepare() -> None:
    """Import the product."""
    from tests.simulator.shown import load_product

    load_product()
    importlib.import_module("tests.simulator.world")


def run_apart(seed: int, steps: int, wanted: Sequence[str] = ()) -> str | None:
    """Run a seed in a process of its own, because what one leaves behind would change the next one. Return
    what failed.
    """
    return _apart(seed, steps, wanted)[1]


def _apart(seed: int, steps: int, wanted: Sequence[str]) -> tuple[str, str | None]:
    receiver, sender = os.pipe()
    child = os.fork()
    if not child:
        faulthandler.dump_traceback_later(300, exit=True)  # of a thread that never comes to a seam
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[os.getpid() % len(cores)]})  # threads take turns: on one core, at once
        line, problem = _run(seed, steps, False, wanted)
        os.write(sender, f"{line}\n{problem or ''}".encode())
        os._exit(0)
    os.close(sender)
    with os.fdopen(receiver) as file:
        line, _, problem = file.read().partition("\n")
    os.waitpid(child, 0)
    return (line, problem or None) if line else (f"seed {seed} died", "the process died")


def _run(seed: int, steps: int, trace: bool, wanted: Sequence[str]) -> tuple[str, str | None]:
    """Return the line that tells of a seed, and what does not hold."""
    from tests.simulator.world import simulate

    outcome = simulate(seed, steps, trace, wanted)
    for line in outcome.trace or ():
        print(line)
    counts = " ".join(f"{name}={count}" for name, count in outcome.counts.items() if count)
    line = f"seed {seed} {','.join(wanted)} {outcome.digest[:16]} {counts}  {outcome.problem or 'ok'}"
    return line.replace("\n", " "), outcome.problem


if __name__ == "__main__":
    main()
