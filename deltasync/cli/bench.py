"""`deltasync bench`: speed and size on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from deltasync.cli.output import echo, echo_json

if TYPE_CHECKING:
    from deltasync.bench.data import Sample


@click.group("bench")
def command() -> None:
    """Measure speed and size on this machine."""


@command.command("codec")
@click.option(
    "--data",
    "source",
    type=click.Choice(["simulation", "replaced", "demo", "finetune", "all"]),
    default="simulation",
    show_default=True,
    help="Simulated deltas, a simulated matrix replaced by another, the deltas of a demo's channel, those of a fine-tuning "
    "run that is made here (a minute), or all.",
)
@click.option(
    "--changed",
    "fractions",
    multiple=True,
    type=click.FloatRange(1e-5, 0.5),
    default=(0.005, 0.0107, 0.02, 0.05),
    show_default=True,
    help="Changed fraction of the simulation; may be given several times.",
)
@click.option(
    "--elements", type=click.IntRange(min=1000), default=1 << 24, show_default=True, help="Size of the simulation."
)
@click.option("--channel", help="URL of the channel that --data demo reads, such as file:///path/to/demo-out/channel.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.option("--plot", "plot_file", type=click.Path(path_type=Path, dir_okay=False), help="Also draw the sizes (PNG, SVG).")
def codec_command(
    source: str, fractions: tuple[float, ...], elements: int, channel: str | None, as_json: bool, plot_file: Path | None
) -> None:
    """Size and throughput of our codecs and of other systems' encodings, on the same deltas, beside the entropy bounds.

    Bits per changed element are exact. Speeds are the best of several repeats: GB/s of old and new weights scanned by
    comparing and encoding, and changed elements per second decoded and written into host memory.
    """
    from deltasync.bench import codec, data, report

    if source == "demo" and channel is None:
        raise click.UsageError("--data demo needs --channel.")

    def say(text: str) -> None:
        echo(text, err=True)

    def samples() -> Iterator[Sample]:
        if source in ("simulation", "all"):
            yield from (data.simulation(fraction, elements) for fraction in fractions)
        if source in ("replaced", "all"):
            yield data.replaced(elements)
        if source in ("demo", "all"):
            if channel is None:
                say("no --channel given, so the demo's deltas are left out")
            else:
                yield data.demo(channel)
        if source in ("finetune", "all"):
            yield from data.finetune(say)

    result = codec.run(samples(), say)
    if as_json:
        echo_json(result, indent=2)
    else:
        for line in report.table(result):
            echo(line)
    if plot_file is not None:
        report.plot(result, plot_file)
        say(f"written: {plot_file}")


@command.command("store")
@click.argument("url")
@click.option(
    "--bytes",
    "payload_bytes",
    type=click.IntRange(min=1000),
    default=32 << 20,
    show_default=True,
    help="Size of the large objects and of the delta.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def store_command(url: str, payload_bytes: int, as_json: bool) -> None:
    """Rates and latencies of the store at URL, beside those of its own client, and what a version costs.

    Writes about twelve large objects below URL, into a folder of its own, and removes them.
    """
    from deltasync.bench import store

    result = store.run(url, payload_bytes, lambda text: echo(text, err=True))
    if as_json:
        echo_json(result, indent=2)
    else:
        for line in store.table(result):
            echo(line)


@command.command("commit")
@click.option(
    "--size",
    type=click.Choice(["0.6b", "tiny"]),
    default="0.6b",
    show_default=True,
    help="Model that commits are measured on: of the shape of Qwen3-0.6B (8 GB of memory, 5 GB of disk), or the demo's.",
)
@click.option(
    "--changed",
    "changed_fraction",
    type=click.FloatRange(1e-4, 0.1),
    default=0.01,
    show_default=True,
    help="Changed fraction of each version.",
)
@click.option("--commits", type=click.IntRange(min=1), default=50, show_default=True, help="Pauses to measure.")
@click.option(
    "--window",
    "window_s",
    type=click.FloatRange(min=1.0),
    default=15.0,
    show_default=True,
    help="Seconds of one window of the throughput.",
)
@click.option("--pairs", type=click.IntRange(min=1), default=4, show_default=True, help="Windows with and without versions.")
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    default="cpu",
    show_default=True,
    help="Where vLLM runs. On a GPU only its server is measured: pauses and throughput.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def commit_command(
    size: str, changed_fraction: float, commits: int, window_s: float, pairs: int, device: str, as_json: bool
) -> None:
    """What a commit costs in a real vLLM: beside its own sparse path, as a pause of generation, in throughput, in memory.

    Builds a model of random weights, publishes its versions to a temporary folder and starts vLLM several times; some
    minutes. Nothing else should run on the machine.
    """
    from deltasync.bench import commit
    from deltasync.demo.processes import interrupt_on_sigterm

    interrupt_on_sigterm()
    settings = commit.CommitSettings(
        size=size, changed_fraction=changed_fraction, commits=commits, window_s=window_s, pairs=pairs, device=device
    )
    result = commit.run(settings, lambda text: echo(text, err=True))
    if as_json:
        echo_json(result, indent=2)
    else:
        from deltasync.bench import commit_report

        commit_report.show(result)
