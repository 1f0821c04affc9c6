"""Size and throughput of our codecs and of other systems' encodings on the same deltas, compared with the
entropy bounds.

    python -m benchmarks.codec [--data finetune] [--changed 0.01] [--plot codec.png] [--json]

Bits per changed element are exact. Speeds are GB/s of old and new weights that are compared and encoded, and
changed elements per second that are decoded and written into host memory; each is the best of several
repeats.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks import common
from benchmarks.codec import data, measure, report

FRACTIONS = (0.005, 0.0107, 0.02, 0.05)


def main(words: Sequence[str] | None = None) -> None:
    """Run the benchmark by the command line."""
    parser = common.parser(__doc__)
    parser.add_argument(
        "--data",
        choices=("simulation", "masters", "replaced", "demo", "finetune", "real", "all"),
        default="simulation",
        help="simulated deltas, simulated steps and compactions of three kinds of masters (takes some minutes), a simulated "
        "matrix replaced by another, the deltas of a demo's channel, those of a fine-tuning run made here "
        "(takes a minute), "
        "these two (real), or all of these",
    )
    parser.add_argument(
        "--changed",
        type=float,
        action="append",
        help="changed fraction of the simulation; may be given several times",
    )
    parser.add_argument("--elements", type=int, default=1 << 24, help="size of the simulation")
    parser.add_argument(
        "--channel",
        help="URL of the channel that --data demo reads, such as file:///path/to/demo-out/channel",
    )
    parser.add_argument("--plot", type=Path, help="also plot the sizes to this file (PNG, SVG)")
    given = parser.parse_args(words)
    if given.data == "demo" and given.channel is None:
        parser.error("--data demo needs --channel")
    if given.elements < 1000 or not all(1e-5 <= fraction <= 0.5 for fraction in given.changed or ()):
        parser.error("--elements must be at least 1000, and --changed between 0.00001 and 0.5")
    result = measure.run(samples(given.data, given.changed or FRACTIONS, given.elements, given.channel))
    common.emit(given.json, result, report.lines(result))
    if given.plot is not None:
        report.plot(result, given.plot)


def samples(
    source: str, fractions: Sequence[float], elements: int, channel: str | None
) -> Iterator[data.Sample]:
    """Yield the deltas of a source."""
    if source in ("simulation", "all"):
        yield from (data.simulation(fraction, elements) for fraction in fractions)
    if source in ("masters", "all"):
        yield from data.masters(elements)
    if source in ("replaced", "all"):
        yield data.replaced(elements)
    if source in ("demo", "real", "all"):
        if channel is None:
            common.say("no --channel given, so the demo's deltas are skipped")
        else:
            yield data.demo(channel)
    if source in ("finetune", "real", "all"):
        yield from data.finetune()


if __name__ == "__main__":
    common.run(main)
