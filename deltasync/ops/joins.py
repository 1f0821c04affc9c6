"""Look whether somebody can still join a channel: its description, the newest version's chain, and that
chain's files.
"""

from __future__ import annotations

from collections.abc import Sequence

from deltasync.channel import keys
from deltasync.channel.documents import Channel, VersionId
from deltasync.channel.plan import find_chain
from deltasync.channel.reading import ChannelReader
from deltasync.channel.record import StoredRecord
from deltasync.errors import MissingVersionError, NotPublishedError
from deltasync.ops.scan import exists
from deltasync.serve import heartbeat

_CURE = (
    "A running publisher puts back what it knows and writes full weights; otherwise restore it from a copy "
    "of the channel. "
    "Look for a rule of the bucket that deletes old objects."
)
_FOLDERS = 16  # of files that are listed one by one
# stored only after channel.json
_AFTER = (keys.HEAD, keys.VERSIONS, keys.ANNOUNCEMENTS, keys.COMPACTIONS, keys.REPLICAS)


def described(reader: ChannelReader) -> Channel:
    """Return channel.json.

    Raises:
        MissingVersionError: it is gone, though other objects of a channel are there.
        NotPublishedError: there is no channel yet.
    """
    try:
        return reader.channel()
    except NotPublishedError:
        left = next((info.key for prefix in _AFTER for info in reader.store.list(prefix)), None)
        if left is None:
            raise
        raise MissingVersionError(
            f"{reader.store.url} lacks its {keys.CHANNEL}, though something was published there ({left} is "
            "left). Nobody "
            f"can join. {_CURE}"
        ) from None


def check_join(reader: ChannelReader) -> VersionId | None:
    """Check that all objects are there that somebody needs to join now. Returns the newest version, None
    before the first.

    The records of one chain are read, up to the `limits` of a chain; their files are only listed.

    Raises:
        MissingVersionError: something is missing; it says which object, and what to do.
        NotPublishedError: there is no channel yet.
    """
    channel = described(reader)
    try:
        return _check(reader, channel.run_id)
    except MissingVersionError as error:
        raise MissingVersionError(f"Nobody can join: {error} {_CURE}") from error


def _check(reader: ChannelReader, run_id: str) -> VersionId | None:
    head, found = reader.head(), reader.newest()  # head first: the record that it names was stored before it
    newest = None if found is None else found.version if found.record.is_version else found.record.base
    named = None if head is None else head.newest
    is_later = named is not None and (newest is None or named.slot.newness > newest.slot.newness)
    if named is not None and is_later and not exists(reader.store, named.key):
        raise MissingVersionError(
            f"{keys.HEAD} names version {named.version}, whose record {named.key} is missing."
        )
    if newest is None:
        served = [beat for beat in heartbeat.read_all(reader.store, run_id) if beat.version is not None]
        if served:
            of, version = served[0].replica_id, served[0].version
            raise MissingVersionError(
                f"Replica {of} names version {version}, and no record is in {reader.store.url}."
            )
        return None
    _check_files(reader, find_chain(reader, None, newest))
    return newest


def _check_files(reader: ChannelReader, chain: Sequence[StoredRecord]) -> None:
    """Check that the files of a chain's records are listed with their sizes. Raises MissingVersionError."""
    sizes: dict[str, int] = {}
    files = [
        file
        for stored in chain
        for file in (stored.record.files if stored.use_anchor else stored.record.payload_files)
    ]
    folders = {"/".join(file.key.split("/")[:2]) + "/" for file in files}
    for prefix in sorted(folders if len(folders) <= _FOLDERS else {keys.ANCHORS, keys.PARTS}):
        sizes |= {info.key: info.bytes for info in reader.store.list(prefix)}
    lost = [file.key for file in files if sizes.get(file.key) != file.bytes]
    if lost:
        count = f"{len(lost)} of {len(files)} files that a late joiner needs are gone, or have another size"
        raise MissingVersionError(f"{count}, such as {lost[0]}.")
