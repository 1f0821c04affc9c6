"""The command line of a soak."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "examples"))

import tests.soak
from benchmarks.common import document, say
from demo.processes import interrupt_on_sigterm
from tests.soak import run, servers
from tests.soak.settings import Soak

_ALL_MINUTES = 10  # in which every trouble must have come about


def main() -> None:
    """Run one, and print what came of it as a result file; exit code 1 if something is not as it should be."""
    parser = argparse.ArgumentParser(description=tests.soak.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=0.0)
    parser.add_argument("--versions", type=int, default=0)
    parser.add_argument("--rate", type=float, default=2.0, help="versions per second")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--warm-up", type=float, default=600.0, help="seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--vllm", action="store_true", help="real servers")
    parser.add_argument("--chaos", action="store_true", help="kill, replace, restore, fill, move clocks")
    given = parser.parse_args()
    interrupt_on_sigterm()
    with tempfile.TemporaryDirectory(prefix="deltasync-soak-") as folder:
        soak = Soak(
            folder=Path(folder),
            seconds=60 * given.minutes,
            versions=given.versions,
            rate=given.rate,
            replicas=given.replicas,
            warm_up_s=given.warm_up,
            seed=given.seed,
            chaos=given.chaos,
            trouble_s=4.0 if given.chaos else 20.0,
        )
        result = servers.run(soak, say) if given.vllm else run.run(soak, say)
    print(json.dumps(document(result), indent=2))
    found = run.failures(result, given.versions)
    if given.chaos and given.minutes >= _ALL_MINUTES:
        found += [
            f"it never happened in {given.minutes:g} minutes: {name}"
            for name, count in result["troubles"].items()
            if not count
        ]
    flat = "all flat" if result["summary"] else "too short to tell what is flat"
    say("\n".join(found) or f"all bits right, {flat}")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
