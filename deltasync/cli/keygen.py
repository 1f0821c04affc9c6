"""`deltasync keygen`: a key to sign a channel with."""

from __future__ import annotations

from pathlib import Path

import click

from deltasync.cli.output import echo


@click.command("keygen")
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--name", default=None, help="What people call the key; the file's name by default.")
def command(path: Path, name: str | None) -> None:
    """Make an Ed25519 key: the private one in PATH, for its owner only, the public one in PATH.pub.

    The publisher signs with PATH (DELTASYNC_SIGNING_KEY). Replicas get a file with the line of PATH.pub
    (DELTASYNC_TRUSTED_KEYS), which may hold several; they read it again when it changes.
    """
    from deltasync.channel import signing

    echo(signing.new_key(path, name or path.name).rstrip("\n"))
