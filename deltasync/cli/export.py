"""`deltasync export`: one version as a checkpoint directory."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import click

from deltasync.cli.keys import trusted_keys
from deltasync.cli.output import echo, echo_json


def number_or_latest(ctx: click.Context, param: click.Parameter, value: str) -> int | None:
    """The version, None for `latest`."""
    if value == "latest":
        return None
    if not value.isdecimal() or int(value) < 1:
        raise click.BadParameter(f"{value!r} is neither a version nor `latest`.")
    return int(value)


@click.command("export")
@click.argument("channel")
@click.argument("version", callback=number_or_latest)
@click.argument("directory", type=click.Path(path_type=Path))
@trusted_keys
@click.option("--json", "as_json", is_flag=True, help="Version and files as JSON.")
def command(channel: str, version: int | None, directory: Path, trusted_keys: str | None, as_json: bool) -> None:
    """Write VERSION (a number, or `latest`) of CHANNEL to DIRECTORY, as a checkpoint that transformers and vLLM load.

    DIRECTORY must be missing or empty. Every bit is checked. Config and tokenizer come from the channel, if its publisher
    had any.
    """
    from deltasync import housekeeping
    from deltasync.channel.reading import ChannelReader
    from deltasync.cli.progress import count, progress_bars
    from deltasync.stores import open_store

    with progress_bars() as progress:
        reader = ChannelReader(open_store(channel), trusted_keys)
        exported = housekeeping.export(reader, version, directory, progress=progress)
    files = {path.relative_to(directory).as_posix(): path.stat().st_size for path in directory.rglob("*") if path.is_file()}
    if as_json:
        echo_json({**dataclasses.asdict(exported), "files": dict(sorted(files.items()))})
        return
    echo(f"version {exported} in {directory}: {count(len(files), 'file')}, {sum(files.values()):,} bytes")
    if "config.json" not in files:
        echo(
            "deltasync: the channel holds no config.json; copy the model's config and tokenizer there to load it.", err=True
        )
