"""`deltasync dashboard`: a page about a channel, live on this machine or as one file."""

from __future__ import annotations

from pathlib import Path

import click

from deltasync.cli.keys import trusted_keys
from deltasync.cli.output import echo


@click.command("dashboard")
@click.argument("channel")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Write the page to this file, and exit.")
@click.option("--port", type=click.IntRange(0, 65535), default=8765, show_default=True, help="On 127.0.0.1; 0 for any.")
@click.option(
    "--interval", "interval_s", type=click.FloatRange(min=0.1), default=2.0, show_default=True, help="Seconds between looks."
)
@click.option("--last", type=click.IntRange(min=1), default=500, show_default=True, help="Show the newest so many versions.")
@click.option(
    "--heat", type=click.IntRange(min=0), default=200, show_default=True, help="Of so many, how much each layer changed."
)
@trusted_keys
def command(
    channel: str, out: Path | None, port: int, interval_s: float, last: int, heat: int, trusted_keys: str | None
) -> None:
    """Show CHANNEL as a page: versions, payload, changed fraction of each layer, replicas and their lag, cost.

    Reads documents, heartbeats and the headers of deltas; writes nothing to the channel. Ends with Ctrl-C.
    """
    from deltasync.cli.progress import progress_bars
    from deltasync.dashboard import Observer, PageServer, page
    from deltasync.stores import open_store

    observer = Observer(open_store(channel), last=last, heat=heat, trusted_keys=trusted_keys)
    if out is not None:
        with progress_bars() as progress:
            observer.look(progress)
            observer.read_headers(heat, progress)
        out.write_bytes(page(observer.snapshot()))
        return
    with PageServer(observer, port, interval_s) as server:
        echo(server.url)
        server.run()
