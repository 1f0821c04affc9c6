"""`deltasync doctor`: test whether this machine can use a channel, and how fast."""

from __future__ import annotations

import dataclasses
import re
import sys
from typing import TYPE_CHECKING

import click

from deltasync.cli.options import channel_command
from deltasync.cli.output import cell, echo_json, with_bars

if TYPE_CHECKING:
    from deltasync.channel.reading import ChannelReader
    from deltasync.maintenance.doctor import Finding

_SCALE = {"M": 1e6, "B": 1e9, "T": 1e12}
_STYLE = {"ok": "green", "warning": "yellow", "failure": "red"}


def _parameters(ctx: click.Context, param: click.Parameter, value: str) -> float:
    """Return the number of parameters of a size such as `600M`, `8B` or `1T`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([MBT])", value)
    if match is None or not float(match[1]):
        raise click.BadParameter(f"{value!r} is not the size of a model, such as 600M, 8B or 1T.")
    return float(match[1]) * _SCALE[match[2]]


@channel_command("the findings as JSON")
@click.option(
    "--model", callback=_parameters, metavar="SIZE", default="8B", help="Size of the model, to estimate transfer times."
)
def doctor(reader: ChannelReader, model: float, as_json: bool) -> None:
    """Test whether a trainer and a replica on this machine can use CHANNEL, and how fast.

    Lists, writes (8 MiB, deleted again) and reads objects, creates the same object twice, measures times and compares
    clocks. Checks the channel, its replicas, and the installed vLLM, TRL and PyTorch. CHANNEL need not exist yet. Exits with
    1 if a line says failure.
    """
    from rich.console import Console
    from rich.table import Table

    findings = with_bars(_findings, reader, model)
    if as_json:
        echo_json([dataclasses.asdict(finding) for finding in findings], indent=2)
    else:
        table = Table(box=None, show_header=False, pad_edge=False)
        for finding in findings:
            text = f"{finding.found} {finding.advice}".strip()
            table.add_row(cell(finding.state, _STYLE[finding.state]), cell(finding.check), cell(text))
        Console(soft_wrap=not sys.stdout.isatty()).print(table)
    sys.exit(any(finding.state == "failure" for finding in findings))


def _findings(reader: ChannelReader, model: float) -> list[Finding]:
    from deltasync.maintenance import progressed
    from deltasync.maintenance.doctor import examine

    findings: list[Finding] = []
    for finding in examine(reader, parameters=model):
        findings.append(finding)
        progressed(finding.check, 1, 1)
    return findings
