"""Train a tiny model with TRL while a real vLLM server follows its weights, and prove at the end that the
bits are equal.

    make demo
    python examples/demo --out demo-out     # the same, in the environment of make setup

The trainer and the server share a directory and nothing else.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import click

from deltasync.config import CODECS
from deltasync.errors import ConfigError
from deltasync.ops.cli.output import echo, echo_json, field
from deltasync.ops.cli.program import Program

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


@click.command("demo", cls=Program)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("demo-out"),
    help="Directory for the model, the channel, logs, summary.json and run.png. That of an earlier demo is replaced.",
)
@click.option("--steps", type=click.IntRange(min=1), default=40, help="Optimizer steps.")
@click.option("--seed", type=int, default=0, help="Seed of model, prompts and trainer.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=0, show_default="a free one", help="Port of the server."
)
@click.option("--codec", type=click.Choice(CODECS), default="context", help="Encoding of the deltas.")
@click.option(
    "--task",
    default="counting",
    metavar="NAME",
    help="What the model learns: counting or wordle.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON instead of a table.")
@click.argument("vllm_options", nargs=-1, metavar="[-- VLLM_OPTIONS]")
def main(
    out: Path,
    steps: int,
    seed: int,
    port: int,
    codec: str,
    task: str,
    as_json: bool,
    vllm_options: tuple[str, ...],
) -> None:
    """Train a tiny model with TRL while a real vLLM follows it.

    This builds a tiny Qwen3, starts a real vLLM server that knows only the channel's URL, trains with TRL's
    AsyncGRPOTrainer, and proves that the server's live weights are the published ones, bit for bit. Both use
    the GPU if there is one. Options of vLLM follow --.
    """
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigError("The demo needs Linux, as vLLM does.")
    from demo import report
    from demo.processes import interrupt_on_sigterm
    from demo.run import run

    began_s = time.monotonic()

    def say(text: str) -> None:
        echo(f"[{time.monotonic() - began_s:6.1f} s] {text}", err=True)

    interrupt_on_sigterm()
    summary = run(
        out, say, steps=steps, seed=seed, port=port, codec=codec, task=task, vllm_options=vllm_options
    )
    if as_json:
        echo_json(summary, indent=2)
    else:
        rows = report.table(summary)
        for name, value in rows:
            field(name, value, 1 + max(len(name) for name, _ in rows))
    say(f"written: {out / 'summary.json'} and {out / 'run.png'}")
    if not summary["bit_exact"]:
        echo("deltasync: the live weights are NOT the published ones", err=True)
        sys.exit(9)


if __name__ == "__main__":
    main()
