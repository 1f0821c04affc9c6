"""Version directories as an end of `deltasync follow`, `relay` and `export`: `weight_v+URL`."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from deltasync.errors import ChannelInUseError, ConfigError, DeltaSyncError, NotPublishedError, PublishError
from deltasync.ops.cli.options import DIRECTORIES
from deltasync.ops.cli.output import echo, echo_json
from deltasync.threads import daemon

if TYPE_CHECKING:
    from deltasync.channel.reading import ChannelReader

_POLL_S = 1.0
_UNFINISHED_POLLS = 3  # that see the same bytes of an unfinished version, before it is said
_ANY = (DeltaSyncError,)
_LASTING = (ConfigError, ChannelInUseError, PublishError)


def published(source: str, base: str | None) -> str:
    """Publish version directories to a channel in this process, from a thread. Returns its URL once it has a
    version.
    """
    from deltasync.interchange import Import
    from deltasync.stores import open_store

    target = f"memory://{uuid.uuid4().hex}"
    directories = Import(open_store(source.removeprefix(DIRECTORIES)), target, base)
    if not [*directories.versions()]:
        assert directories.unfinished is not None
        raise directories.unfinished
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
        ending = _ANY if once else _LASTING
        _loop(directories.versions, show, *ending, once=once, unfinished=lambda: directories.unfinished)
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
    unfinished: Callable[[], NotPublishedError | None] = lambda: None,
) -> None:
    """Show new versions as they appear. Errors of the `ending` kinds are raised, others said once and tried
    again.

    What is `unfinished` then is raised at `once`, and otherwise said if it is so for `_UNFINISHED_POLLS`.
    """
    said, found, polls = "", "", 0
    while True:
        try:
            for number, result in versions():
                show(number, result)
            if (error := unfinished()) is not None and once:
                raise error
            polls = polls + 1 if str(error) == found else 0
            found = str(error)
            if error is None:
                said = ""
            elif polls == _UNFINISHED_POLLS:
                echo(
                    f"deltasync: {error} Waiting for it, or for a later version with full weights.", err=True
                )
        except ending:
            raise
        except DeltaSyncError as error:
            if str(error) != said:
                echo(f"deltasync: {error} Trying again.", err=True)
            said = str(error)
        if once:
            return
        time.sleep(_POLL_S)
