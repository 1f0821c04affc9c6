"""`deltasync sync` and `deltasync pin`: choose the version that one server serves."""

from __future__ import annotations

import click

from deltasync.cli.output import echo, echo_json, reported, with_bars

_SERVER = click.argument("server", metavar="SERVER")
_TIMEOUT = click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(0, 3600, min_open=True),
    default=60.0,
    help="Seconds to wait for the server.",
)
_JSON = click.option("--json", "as_json", is_flag=True, help="Print the server's answer as JSON: `version` and `waited_s`.")


@click.command("sync")
@_SERVER
@click.option("--version", type=click.IntRange(min=1), help="Wait for this version or a later one. Default: the newest.")
@_TIMEOUT
@_JSON
def sync(server: str, version: int | None, timeout_s: float, as_json: bool) -> None:
    """Make the vLLM server at the URL SERVER poll its channel now, and wait until it serves the newest version.

    DELTASYNC_HTTP_TOKEN is sent to the server if it is set.
    """
    _post(server, "sync", {} if version is None else {"version": version}, timeout_s, as_json)


@click.command("pin")
@_SERVER
@click.argument("pin", metavar="WHERE", default="newest")
@_TIMEOUT
@_JSON
def pin(server: str, pin: str, timeout_s: float, as_json: bool) -> None:
    """Pin the vLLM server at the URL SERVER to the version WHERE, older or newer than the one it serves.

    WHERE may also be `newest` (the default), to unpin it. A server reads its initial WHERE from DELTASYNC_PIN. Trainers do
    not wait for a pinned server. DELTASYNC_HTTP_TOKEN is sent to the server if it is set.
    """
    _post(server, "pin", {"pin": pin}, timeout_s, as_json)


def _post(server: str, route: str, body: dict[str, object], timeout_s: float, as_json: bool) -> None:
    from deltasync.channel import heartbeat

    with reported(f"{route} of {server}", f"It ends after {timeout_s:g} s; GET {server}/deltasync/status says why."):
        answer = with_bars(heartbeat.post, server, route, body, timeout_s)
    if as_json:
        echo_json(answer)
    else:
        echo(f"{server} serves version {answer['version']}")
