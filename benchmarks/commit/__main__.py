"""The cost of a commit in a real vLLM: time compared with vLLM's own sparse path, pause of generation,
throughput, memory.

    python -m benchmarks.commit [--size 0.6b] [--commits 8] [--device cuda] [--quantization] [--json]

Builds a model of random weights, publishes its versions to a temporary folder and starts vLLM three times.
This takes less than three minutes on two cores, most of them for the starts and the versions; each of
`--commits` adds five seconds. With `--quantization` it measures pauses alone, of three servers of 80 M parameters:
weights in place, online FP8 and packed experts. Nothing else should run on the machine.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks import common
from benchmarks.commit import measure, report
from benchmarks.commit.versions import SIZES
from demo.processes import interrupt_on_sigterm


def main(words: Sequence[str] | None = None) -> None:
    """Run the benchmark by the command line."""
    parser = common.parser(__doc__)
    parser.add_argument(
        "--size",
        choices=SIZES,
        default="0.6b",
        help="model of the shape of Qwen3-0.6B (8 GB of memory, 5 GB of disk), or the demo's",
    )
    parser.add_argument("--changed", type=float, default=0.01, help="changed fraction of each version")
    parser.add_argument("--commits", type=int, default=8, help="pauses to measure")
    parser.add_argument(
        "--window", type=float, default=5.0, help="seconds of each window in which throughput is measured"
    )
    parser.add_argument("--pairs", type=int, default=2, help="windows with versions, and as many without")
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="where vLLM runs; on a GPU only pauses and throughput of a server are measured",
    )
    parser.add_argument(
        "--quantization", action="store_true", help="pauses by how vLLM holds the weights, and nothing else"
    )
    parser.add_argument("options", nargs="*", metavar="-- OPTIONS", help="options for vLLM's servers")
    given = parser.parse_args(words)
    if not 1e-4 <= given.changed <= 0.1 or min(given.commits, given.window, given.pairs) < 1:
        parser.error(
            "--changed must be between 0.0001 and 0.1, and --commits, --window and --pairs at least 1"
        )
    interrupt_on_sigterm()
    if given.quantization:
        layouts = measure.layouts(given.changed, given.commits, given.device, given.options)
        common.emit(given.json, layouts, report.layout_lines(layouts))
        return
    result = measure.run(
        given.size, given.changed, given.commits, given.window, given.pairs, given.device, given.options
    )
    common.emit(given.json, result, report.lines(result))


if __name__ == "__main__":
    common.run(main)
