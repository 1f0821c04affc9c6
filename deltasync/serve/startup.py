"""The environment of a server, checked before its engine loads anything. No request is made."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from deltasync import config
from deltasync.channel.failover import open_failover
from deltasync.config import ReplicaSettings
from deltasync.errors import ConfigError, redacted

CHANNEL = "DELTASYNC_CHANNEL"


def is_to_follow(environ: Mapping[str, str] | None = None, *, alone: bool = True) -> bool:
    """Whether an engine is to follow a channel, by its environment, whose variables are then all valid.

    Args:
        environ: Variables to look at instead.
        alone: Whether the engine's process runs nothing that could publish, as a server's.

    Raises:
        ConfigError: a variable is misspelt or has no valid value, or the channel's is empty, as where a
            secret is missing.
    """
    given = config.environment() if environ is None else environ
    settings = ReplicaSettings.from_env(given)
    typed = given.get(CHANNEL)
    if typed is not None and not typed.strip():
        raise ConfigError(
            f"{CHANNEL}={typed!r} names no channel, as where a secret is missing: set it to the channel's "
            "URL, or unset it "
            "for a server that does not follow."
        )
    if settings.channel is None:
        return False
    check_channel(settings.channel, CHANNEL, alone=alone)
    return True


def check_channel(url: str, named_by: str, *, alone: bool = True) -> None:
    """Raise ConfigError if this URL is no channel that such a process can follow. It names the variable or
    option.
    """
    try:
        opened = open_failover(url).url
    except ConfigError as error:
        raise ConfigError(f"{named_by}={redacted(url)!r}: {error}") from None
    if alone and opened.startswith("memory://"):
        raise ConfigError(
            f"{named_by}={url!r}: a memory:// channel exists in one process only. A server needs one that it "
            "can reach, "
            "such as file:///path."
        )


def runs_extension(arguments: Sequence[str], extension: str) -> bool:
    """Whether a command line asks for a worker that follows, and not for one that a trainer pushes to."""
    return any(extension in each for each in arguments) and not any(
        "weight-transfer" in each for each in arguments
    )


def is_command(package: str) -> bool:
    """Whether this process is a command of a package, such as `vllm serve` or `python -m vllm...`, and no
    other program.
    """
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    is_module = spec is not None and spec.name.partition(".")[0] == package
    return is_module or Path(sys.argv[0]).name == package


def leave(error: ConfigError) -> NoReturn:
    """End the process with one sentence, as its last line."""
    sys.exit(f"deltasync: {error}")
