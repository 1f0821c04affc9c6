"""`python -m wordle`: the server as a process."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import click

from deltasync.errors import ConfigError, DeltaSyncError
from wordle.game import WORD_LISTS
from wordle.protocol import TOKEN_VARIABLE
from wordle.server import ServerSettings, WordleServer


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--host", default="127.0.0.1", help="Address to listen on; 0.0.0.0 for all.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8000, help="0 for a free one, which is printed."
)
@click.option("--words", type=click.Choice(WORD_LISTS), default="reduced", help="The word list.")
@click.option("--sessions", type=click.IntRange(min=1), default=1000, help="Most games at a time.")
@click.option(
    "--idle",
    "idle_s",
    type=click.FloatRange(min=0.1),
    default=600.0,
    help="Seconds until a game is given up.",
)
@click.option(
    "--token-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help=f"What requests must present as a bearer token; else that of {TOKEN_VARIABLE}; else the server is open.",
)
@click.option(
    "--tls-cert", type=click.Path(exists=True, path_type=Path), help="Certificate chain, PEM: HTTPS only."
)
@click.option(
    "--tls-key", type=click.Path(exists=True, path_type=Path), help="Its key, PEM, if in another file."
)
@click.option("--token", envvar=TOKEN_VARIABLE, hidden=True)
def main(token: str | None, token_file: Path | None, **settings: object) -> None:
    """Serve Wordle to players over HTTP and WebSockets, in the conventions of OpenEnv. Ends with Ctrl-C or
    SIGTERM.
    """
    try:
        if token_file is not None:
            token = token_file.read_text(encoding="utf-8").strip()
        if token is not None and not token.strip():
            raise ConfigError("The token is empty.")
        asyncio.run(_serve(ServerSettings(token=token, **settings)))  # type: ignore[arg-type]
    except DeltaSyncError as error:
        click.echo(f"wordle: {error}", err=True)
        sys.exit(error.exit_code)


async def _serve(settings: ServerSettings) -> None:
    stop = asyncio.Event()
    for ending in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(ending, stop.set)
    async with WordleServer(settings) as server:
        click.echo(server.url)
        await stop.wait()


if __name__ == "__main__":
    main()
