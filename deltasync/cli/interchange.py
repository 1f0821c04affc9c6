"""Version directories as an end of `deltasync follow`, `relay` and `export`: `weight_v+URL`."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING

from deltasync.cli.options import DIRECTORIES
from deltasync.cli.output import echo, echo_json
from deltasync.errors import ChannelInUseError, ConfigError, DeltaSyncError, NotPublishedError, PublishError
from deltasync.threads import daemon

if TYPE_CHECKING:
    from deltasync.channel.reading import ChannelReader

_POLL_S = 1.0


def published(source: str, base: str | None) -> str:
    """Publish version directories to a channel in this process, from a thread. Returns its URL once it has a version."""
    from deltasync.interchange import Import
    from deltasync.stores import open_store

    target = f"memory://{uuid.uuid4().hex}"
    directories = Import(open_store(source.removeprefix(DIRECTORIES)), target, base)
    if not directories.step():
        raise NotPublishedError(f"{source} holds no version directory yet.")

    def run() -> None:
        said = ""
        while True:
            time.sleep(_POLL_S)
            said = _tried(directories.step, said)

    daemon("follow", run).start()
    return target


def relay_from(source: str, target: str, base: str | None, *, once: bool, as_json: bool) -> None:
    """Publish version directories to the channel `target`, and every later one."""
    from deltasync.interchange import Import
    from deltasync.stores import open_store

    directories = Import(open_store(source.removeprefix(DIRECTORIES)), open_store(target), base)

    def show(number: int, version: int) -> None:
        if as_json:
            echo_json({"directory": number, "version": version})
        else:
            echo(f"version {version}: directory {number}")

    try:
        _loop(lambda: directories.step(show), once)
    finally:
        directories.close()


def write(
    reader: ChannelReader,
    target: str,
    newest: int | None = None,
    first: int | None = None,
    *,
    as_json: bool,
    once: bool = True,
) -> None:
    """Write versions of a channel as directories; see `interchange.Export.step`."""
    from deltasync.interchange import Export

    directories = Export(reader, target.removeprefix(DIRECTORIES))

    def show(number: int, size: int) -> None:
        if as_json:
            echo_json({"version": number, "bytes": size})
        else:
            echo(f"version {number}: {size:,} bytes")

    _loop(lambda: directories.step(newest, first, show), once)


def _loop(step: Callable[[], int], once: bool) -> None:
    ending, said = (DeltaSyncError,) if once else (ConfigError, ChannelInUseError, PublishError), ""
    said = _tried(step, said, *ending)
    while not once:
        time.sleep(_POLL_S)
        said = _tried(step, said, *ending)


def _tried(step: Callable[[], int], said: str, *ending: type[Exception]) -> str:
    """Try a step. Raise an error of the `ending` kinds; say and return any other, unless `said` is what it says."""
    try:
        step()
    except ending:
        raise
    except DeltaSyncError as error:
        if str(error) != said:
            echo(f"deltasync: {error} Trying again.", err=True)
        return str(error)
    return ""
