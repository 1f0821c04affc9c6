"""The demo, and the machine that it ran on.

    python -m benchmarks.demo [--out demo-out] [--json]

See `python examples/demo --help`; needs vLLM, TRL and matplotlib.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import common
from deltasync.config import CODECS
from demo import report
from demo.processes import interrupt_on_sigterm
from demo.run import run


def lines(result: dict[str, Any]) -> Iterator[str]:
    """Yield the result as lines of text."""
    yield from common.table(("", ""), report.table(result), words=2)


def main() -> None:
    """Run the demo by the command line."""
    parser = common.parser(__doc__)
    parser.add_argument(
        "--out", type=Path, default=Path("demo-out"), help="directory; an earlier demo's is replaced"
    )
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps")
    parser.add_argument("--codec", choices=CODECS, default="context", help="encoding of the deltas")
    parser.add_argument("--task", default="counting", help="what the model learns")
    given = parser.parse_args()
    interrupt_on_sigterm()
    result = run(given.out, common.say, steps=given.steps, seed=0, port=0, codec=given.codec, task=given.task)
    common.emit(given.json, result, lines(result))


if __name__ == "__main__":
    common.run(main)
