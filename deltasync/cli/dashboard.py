"""`deltasync dashboard`: a page about a channel, live on this machine or as one file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from deltasync.cli.options import channel_command, interval
from deltasync.cli.output import echo, with_bars

if TYPE_CHECKING:
    from deltasync.channel.reading import ChannelReader


@channel_command("dashboard")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Write the page to this file, and exit.")
@click.option("--port", type=click.IntRange(0, 65535), default=8765, show_default=True, help="On 127.0.0.1; 0 for any.")
@interval
@click.option("--last", type=click.IntRange(min=1), default=500, show_default=True, help="Versions to show, the newest.")
@click.option(
    "--heat", type=click.IntRange(min=0), default=200, show_default=True, help="Versions to show per-layer changes for."
)
def command(reader: ChannelReader, out: Path | None, port: int, interval_s: float, last: int, heat: int) -> None:
    """Show CHANNEL as a page: versions, payload, changed fraction of each layer, replicas and their lag, cost.

    Reads documents, heartbeats and the headers of deltas; writes nothing to the channel. Ends with Ctrl-C.
    """
    from deltasync.dashboard import Observer, PageServer, page

    observer = Observer(reader.store, last=last, heat=heat, trusted_keys=reader.trusted)
    if out is not None:
        reader.channel()  # a page of nothing is a mistake in the URL
        with_bars(observer.look)
        with_bars(observer.read_headers, heat)
        out.write_bytes(page(observer.snapshot()))
        return
    with PageServer(observer, port, interval_s) as server:
        echo(server.url)
        server.run()
