"""Version directories as an end of `deltasync follow`, `relay` and `export`: `weight_v+URL`."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from deltasync.cli.options import DIRECTORIES
from deltasync.cli.output import echo, echo_json
from deltasync.errors import ChannelInUseError, ConfigError, DeltaSyncError, NotPublishedError, PublishError
from deltasync.threads import daemon

if TYPE_CHECKING:
    from deltasync.channel.reading import ChannelReader

_POLL_S = 1.0
_ANY = (DeltaSyncError,)
_LASTING = (ConfigError, ChannelInUseError, PublishError)


def published(source: str, base: str | None) -> str:
    """Publish version directories to a channel in this process, from a thread. Returns its URL once it has a version."""
    from deltasync.interchange import Import
    from deltasync.stores import open_store

    target = f"memory://{uuid.uuid4().hex}"
    directories = Import(open_store(source.removeprefix(DIRECTORIES)), target, base)
    if not [*directories.versions()]:
        raise NotPublishedError(f"{source} holds no version directory yet.")
    daemon("follow", lambda: _loop(directories.versions, lambda number, version: None)).start()
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
        _loop(directories.versions, show, *(_ANY if once else _LASTING), once=once)
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
    """Write versions of a channel as directories; see `interchange.Export.versions`."""
    from deltasync.interchange import Export

    directories = Export(reader, target.removeprefix(DIRECTORIES))

    def show(number: int, size: int) -> None:
        if as_json:
            echo_json({"version": number, "bytes": size})
        else:
            echo(f"version {number}: {size:,} bytes")

    _loop(lambda: directories.versions(newest, first), show, *(_ANY if once else _LASTING), once=once)


def _loop(
    versions: Callable[[], Iterable[tuple[int, int]]],
    show: Callable[[int, int], None],
    *ending: type[Exception],
    once: bool = False,
) -> None:
    """Show new versions as they appear. Errors of the `ending` kinds are raised, others said once and tried again."""
    said = ""
    while True:
        try:
            for number, result in versions():
                show(number, result)
            said = ""
        except ending:
            raise
        except DeltaSyncError as error:
            if str(error) != said:
                echo(f"deltasync: {error} Trying again.", err=True)
            said = str(error)
        if once:
            return
        time.sleep(_POLL_S)
