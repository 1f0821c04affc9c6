"""`deltasync sync` and `deltasync pin`: tell one server which version to serve."""

from __future__ import annotations

import click

from deltasync.cli.output import echo, echo_json, with_bars

_SERVER = click.argument("server", metavar="SERVER")
_TIMEOUT = click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(0, 3600, min_open=True),
    default=60.0,
    show_default=True,
    help="Seconds that the server may take.",
)
_JSON = click.option("--json", "as_json", is_flag=True, help="What the server answers: `version` and `waited_s`.")


@click.command("sync")
@_SERVER
@click.option("--version", type=click.IntRange(min=1), help="Wait for this version or a later one; the newest by default.")
@_TIMEOUT
@_JSON
def sync(server: str, version: int | None, timeout_s: float, as_json: bool) -> None:
    """Have the vLLM server at the URL SERVER look at its channel now, and wait until it serves the newest version.

    DELTASYNC_HTTP_TOKEN is sent along if it is set.
    """
    _tell(server, "sync", {} if version is None else {"version": version}, timeout_s, as_json)


@click.command("pin")
@_SERVER
@click.argument("pin", metavar="WHERE", default="newest")
@_TIMEOUT
@_JSON
def pin(server: str, pin: str, timeout_s: float, as_json: bool) -> None:
    """Keep the vLLM server at the URL SERVER at the version WHERE, older or newer than the one it serves.

    WHERE may also be `every 10` for multiples of ten, `2 behind` to stay two versions behind the newest, or `newest`, the
    default, to go on with the channel. A server that starts reads it from DELTASYNC_PIN. Trainers do not wait for a server
    that is pinned. DELTASYNC_HTTP_TOKEN is sent along if it is set.
    """
    _tell(server, "pin", {"pin": pin}, timeout_s, as_json)


def _tell(server: str, route: str, body: dict[str, object], timeout_s: float, as_json: bool) -> None:
    from deltasync.channel import heartbeat

    found = with_bars(lambda progress: heartbeat.tell(server, route, body, timeout_s))
    if as_json:
        echo_json(found)
    else:
        echo(f"{server} serves version {found['version']}")
