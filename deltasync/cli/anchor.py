"""`deltasync anchor`: ask a running publisher for full weights."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from deltasync.cli.options import channel_command, seconds
from deltasync.cli.output import echo, echo_json

if TYPE_CHECKING:
    from deltasync.channel.reading import ChannelReader

_POLL_S = 2.0


@channel_command("the version and its key as JSON")
@click.option(
    "--timeout", "timeout_s", callback=seconds, metavar="DURATION", default="10m", help="How long to wait. 0: only ask."
)
def anchor(reader: ChannelReader, timeout_s: float, as_json: bool) -> None:
    """Ask the publisher of CHANNEL for an anchor (full weights of its next version) and wait for it.

    While it publishes, the publisher checks for requests about every 15 s and stores the anchor in the background. If no
    publisher runs, the next one answers. To replace a damaged anchor, `deltasync repair` needs no publisher.
    """
    from deltasync.channel import requests
    from deltasync.errors import NotPublishedError, PublishTimeoutError

    newest = reader.newest_version()
    if newest is None:
        raise NotPublishedError(f"{reader.store.url} holds no version yet; the first one will have full weights.")
    asked = newest.version
    requests.ask(reader.store, asked)
    until_s = time.monotonic() + timeout_s
    while (found := _after(reader, asked)) is None and time.monotonic() < until_s:
        time.sleep(_POLL_S)
    if found is None and timeout_s > 0:
        raise PublishTimeoutError(
            f"No publisher has stored an anchor after version {asked} within {timeout_s:g} s. The request remains; the next "
            "published version will answer it."
        )
    if as_json:
        version, key = (None, None) if found is None else found
        echo_json({"asked": asked, "version": version, "key": key})
    elif found is None:
        echo(f"asked for an anchor after version {asked}")
    else:
        echo(f"version {found[0]} has an anchor: {found[1]}")


def _after(reader: ChannelReader, version: int) -> tuple[int, str] | None:
    """Return the newest version after this one that has an anchor, and the key of its record or announcement."""
    found = [(span.version, info.key) for span, info in reader.announcements() if span.version > version]
    newest = reader.newest()
    if newest is not None and newest.use_anchor and newest.record.version > version:
        found.append((newest.record.version, newest.key))
    return max(found, default=None)
