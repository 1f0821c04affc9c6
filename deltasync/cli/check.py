"""`deltasync check`: what a channel promises against what is there."""

from __future__ import annotations

import dataclasses
import sys

import click

from deltasync.cli.keys import trusted_keys
from deltasync.cli.output import echo, echo_json


@click.command("check")
@click.argument("channel")
@click.option("--read-data", is_flag=True, help="Read every file and replay every version, anchor and fold; takes long.")
@trusted_keys
@click.option("--json", "as_json", is_flag=True, help="The report as JSON.")
def command(channel: str, read_data: bool, trusted_keys: str | None, as_json: bool) -> None:
    """Check CHANNEL; report every problem on a line of its own, repair nothing.

    Without --read-data it reads records and folds, and lists parts and anchors. With it, the bits of every version are
    proven in host memory. Exits with the highest exit code of the problems, 0 if there are none. What nothing names is no
    problem.
    """
    from deltasync import housekeeping
    from deltasync.channel.reading import ChannelReader
    from deltasync.cli.progress import count, progress_bars, ranges
    from deltasync.stores import open_store

    reader = ChannelReader(open_store(channel), trusted_keys)
    with progress_bars() as progress:
        report = housekeeping.check(reader, read_data=read_data, progress=progress)
    if as_json:
        document = dataclasses.asdict(dataclasses.replace(report, problems=[]))
        document["problems"] = [
            {"error": type(problem).__name__, "exit_code": problem.exit_code, "message": str(problem)}
            for problem in report.problems
        ]
        echo_json(document, indent=2)
        sys.exit(report.exit_code)
    for problem in report.problems:
        echo(f"{type(problem).__name__}: {problem}")
    holds = ", ".join((count(report.versions, "version"), count(report.anchors, "anchor"), count(report.folds, "fold")))
    echo(f"{reader.store.url}  newest version {report.newest or 'unknown'}")
    echo(f"{'holds':13} {holds}, {report.data_bytes:,} bytes")
    if report.publishing:
        echo(f"{'publishing':13} {count(report.publishing, 'file')} that nothing names yet")
    if report.garbage_objects and not report.problems:
        garbage = f"{count(report.garbage_objects, 'file')}, {report.garbage_bytes:,} bytes"
        echo(f"{'garbage':13} {garbage} that nothing names; `deltasync prune` deletes them")
    if report.proven is None:
        echo(f"{'proven':13} nothing: parts and anchors were listed, not read (--read-data)")
    else:
        echo(f"{'proven':13} the bits of {count(len(report.proven), 'version')}")
    if report.unproven:
        echo(f"{'not proven':13} the bits of {count(len(report.unproven), 'version')}: {ranges(report.unproven)}")
    if report.unreachable:
        echo(f"{'not reachable':13} {ranges(report.unreachable)}; `deltasync repair` tries to change that")
    echo(f"{'problems':13} {len(report.problems) or 'none'}")
    sys.exit(report.exit_code)
