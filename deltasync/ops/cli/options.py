"""Shared arguments and options of commands: a channel and its keys, `--json`, durations."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import click

from deltasync.ops.cli.output import ReportedStore

_FILE = click.Path(dir_okay=False)
TRUSTED_KEYS = click.Option(
    ["--trusted-keys"],
    type=_FILE,
    metavar="FILE",
    help="Accept only objects signed with a public key in FILE. Default: DELTASYNC_TRUSTED_KEYS, or accept everything.",
)
_SIGNING_KEY = click.Option(
    ["--signing-key"],
    type=_FILE,
    metavar="FILE",
    help="Private key to sign with, for a signed channel. Default: DELTASYNC_SIGNING_KEY.",
)
DIRECTORIES = "weight_v+"
_BASE = click.Option(
    ["--base"],
    metavar="CHECKPOINT",
    help=f"What the deltas of {DIRECTORIES}URL begin with: a directory or a model on the Hub. Default: a full version.",
)
_UNIT_S = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


def channel_command(
    json_help: str | None = None,
    *,
    signs: bool = False,
    metavar: str = "CHANNEL",
    server: Callable[..., None] | None = None,
    directories: bool = False,
) -> Callable[[Callable[..., None]], click.Command]:
    """Make a command from a function. The function's first argument is a `ChannelReader` of the channel.

    Args:
        json_help: Description of the `--json` output; the function gets the flag as `as_json`. None for no
            such option.
        signs: Whether the command writes to the channel. The function then gets a `signer`, which is None
            without a key.
        metavar: Name of the channel argument in the help.
        server: Function that is called instead, with the URL and the same options, if the argument is a
            server's http URL.
        directories: Whether the channel may be a place of version directories (`weight_v+URL`). The function
            then gets this text in place of a reader, and a `base`.
    """

    def decorate(function: Callable[..., None]) -> click.Command:
        @functools.wraps(function)
        def run(channel: str, trusted_keys: str | None, **options: Any) -> None:
            from deltasync.channel.reading import ChannelReader
            from deltasync.channel.signing import Trusted, signer_of
            from deltasync.config import PublisherSettings
            from deltasync.stores import open_store

            if server is not None and channel.startswith(("http://", "https://")):
                return server(channel, **options)
            trusted: str | Trusted | None = trusted_keys
            if signs:
                settings = PublisherSettings.from_env(
                    signing_key=options.pop("signing_key"), trusted_keys=trusted_keys
                )
                signer = options["signer"] = None if settings.signing_key is None else signer_of(settings)
                trusted = trusted_keys if signer is None else signer.trusted
            if directories and channel.startswith(DIRECTORIES):
                return function(channel, **options)
            elif options.get("base") is not None:
                raise click.UsageError(f"--base is for {metavar}s that begin with {DIRECTORIES}.")
            else:
                return function(ChannelReader(ReportedStore(open_store(channel)), trusted), **options)

        command = click.command()(run)
        command.params.insert(0, click.Argument(["channel"], metavar=metavar))
        command.params += [*([_SIGNING_KEY] if signs else []), TRUSTED_KEYS]
        if directories:
            command.params.append(_BASE)
        if json_help is not None:
            command.params.append(
                click.Option(["--json", "as_json"], is_flag=True, help=f"Print {json_help}.")
            )
        return command

    return decorate


def seconds(ctx: click.Context, param: click.Parameter, value: str) -> float:
    """Return the seconds of a duration such as `90s`, `30m`, `1h` or `7d`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", value)
    if match is None:
        raise click.BadParameter(f"{value!r} is not a duration such as 90s, 30m, 1h or 7d.")
    return float(match[1]) * _UNIT_S[match[2]]


def version_number(ctx: click.Context, param: click.Parameter, value: str) -> int | None:
    """Return the number of a version, None for `latest`."""
    if value == "latest":
        return None
    if not (value.isascii() and value.isdecimal()) or not int(value):
        raise click.BadParameter(
            f"{value!r} is neither a version nor `latest`; a version is a number from 1 on."
        )
    return int(value)


COUNT = click.IntRange(min=1)

interval = click.option(
    "--interval", "interval_s", type=click.FloatRange(min=0.1), default=2.0, help="Seconds between two reads."
)
timeout = click.option(
    "--timeout", "timeout_s", type=float, help="Exit after this many seconds without a new version."
)
