"""python -m tests.simulator --seed N [--seeds COUNT] [--steps M] [--trace]: run seeds, and say what does not hold.

The same seed gives the same trace, to the byte. Exits with 1 if a seed fails.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import os
import sys
import time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=1, help="how many")
    parser.add_argument("--steps", type=int, default=60, help="steps of all processes together")
    parser.add_argument("--seconds", type=float, default=0.0, help="stop after so long; 0 for no limit")
    parser.add_argument("--trace", action="store_true", help="print each line of the trace")
    parser.add_argument("--mutant", help="plant a fault first (tests.simulator.mutants)")
    parser.add_argument("--first", action="store_true", help="stop at the first seed that fails")
    given = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets
        os.execve(
            sys.executable, [sys.executable, "-m", "tests.simulator", *sys.argv[1:]], {**os.environ, "PYTHONHASHSEED": "0"}
        )
    if given.mutant:
        from tests.simulator.mutants import plant

        plant(given.mutant)
    from tests.simulator.scheduler import load_product

    load_product()
    importlib.import_module("tests.simulator.world")
    began_s, failed = time.monotonic(), 0
    for seed in range(given.seed, given.seed + given.seeds):
        if given.seeds == 1:
            sys.exit(_run(seed, given.steps, given.trace))
        child = os.fork()  # what one seed leaves in the process would change the next one
        if not child:
            faulthandler.dump_traceback_later(120, exit=True)  # of a thread that never comes to a seam
            os._exit(_run(seed, given.steps, given.trace))
        failed += os.waitpid(child, 0)[1] != 0
        if failed and given.first:
            break
        if given.seconds and time.monotonic() - began_s > given.seconds:
            break
    sys.exit(failed > 0)


def _run(seed: int, steps: int, trace: bool) -> int:
    from tests.simulator.world import simulate

    outcome = simulate(seed, steps, trace)
    for line in outcome.trace or ():
        print(line)
    counts = " ".join(f"{name}={count}" for name, count in outcome.counts.items())
    print(f"seed {seed} {outcome.digest[:16]} {counts}  {outcome.problem or 'ok'}", flush=True)
    return int(outcome.problem is not None)


if __name__ == "__main__":
    main()
