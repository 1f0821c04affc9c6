"""The log of one epoch: make versions visible, and notice that another writer has taken over.

Crash points of `Log.append`, for version v + 1:

    before the put of the record     nothing visible; files that nothing names are garbage for `gc` the put
    got no answer            v or v + 1 is visible; the record stays pending, and its bytes are put again
    after the put                    v + 1 is visible as a whole; head follows, and nobody waits for it
"""

from __future__ import annotations

import dataclasses
import threading
import time
from typing import Any

import msgspec

from deltasync import limits
from deltasync.channel import documents, keys, record
from deltasync.channel.documents import Channel, File, Head, Record, VersionId, sha256_hex
from deltasync.channel.reading import ChannelReader
from deltasync.channel.record import StoredRecord
from deltasync.channel.shortcuts import shortcut
from deltasync.channel.signing import Signer
from deltasync.codec.base import Encoded
from deltasync.errors import (
    ConfigError,
    DeltaSyncError,
    FencedError,
    FormatError,
    MissingVersionError,
    NotPublishedError,
    ObjectExistsError,
    PublishPendingError,
    TransientStoreError,
    get_logger,
)
from deltasync.stores.base import Store
from deltasync.stores.retries import RetryStore
from deltasync.threads import Workers

logger = get_logger(__name__)

_MOST_PUBLISHED = 1 << 16

_LARGE_BYTES = 4 << 20
"""Files from this size on are hashed while they are stored."""


def put_file(store: Store, key: str, data: bytes | memoryview) -> File:
    """Store a file that a record will name. No other content was ever put there.

    Raises:
        StoreError: the file may be stored, or may be later; whoever gives it up takes another key.
    """
    if len(data) < _LARGE_BYTES:
        store.put(key, data)
        return File(key=key, bytes=len(data), sha256=sha256_hex(data))
    digest = Workers(1, "upload").submit(sha256_hex, data)
    store.put(key, data)
    return File(key=key, bytes=len(data), sha256=digest.result())


class Log:
    """Puts records, files, compactions and head as `docs/format.md` says. One thread appends; other methods
    may run in several.

    Args:
        epoch: This writer's epoch, which is part of all keys.
        run_id: The run.
        channel: The channel's description, None for a new one.
        tip: The newest version that is stored.
        fencing: The field of a new channel that describes its store.
        owner: The owner that a new channel names, None for none.

    Attributes:
        store: The channel's store.
        stored_s: When it last took a file or a record, by `time.monotonic`.
        epoch: This writer's epoch, which is part of all keys.
        channel: The channel's description; None until it is stored.
        tip: The newest version that is stored, None before the first.
        pending: A record that was put and not answered yet; its number is taken.
        published: Digests of the records that this log stored, by number; the newest 65,536.
        head: Follows behind `tip`.
    """

    def __init__(
        self,
        reader: ChannelReader,
        signer: Signer | None,
        *,
        epoch: str,
        run_id: str,
        channel: Channel | None,
        tip: VersionId | None = None,
        fencing: str = "seal",
        owner: str | None = None,
    ) -> None:
        assert isinstance(reader.store, RetryStore)
        self.channel, self.epoch, self.run_id, self.tip = channel, epoch, run_id, tip
        self.pending: StoredRecord | None = None
        self.published: dict[int, str] = {}
        self.store, self.stored_s = reader.store, time.monotonic()
        self.head = HeadWriter(self)
        self.reader, self._signer = reader, signer
        self._new: dict[str, Any] = {
            "run_id": run_id,
            "epoch": epoch,
            "fencing": fencing,
            "owner": owner or msgspec.UNSET,
        }
        # channel.json as it is, or will be
        self._described = None if channel is None else (channel, reader.channel_data)
        self._fenced: FencedError | None = None
        self._attempts: dict[int, int] = {}

    @property
    def next_version(self) -> int:
        """Number of the next record to append: after the pending one, if there is one."""
        newest = self.tip if self.pending is None else self.pending.version
        return 1 if newest is None else newest.version + 1

    @property
    def channel_data(self) -> bytes | None:
        """The bytes of channel.json; None until it is stored."""
        return None if self.channel is None or self._described is None else self._described[1]

    def attempt(self, version: int) -> int:
        """Return the number of attempts at a version that were given up; part of the names of its folders
        (`keys`).
        """
        return self._attempts.get(version, 0)

    def give_up(self, version: int) -> None:
        """Give up the files of a version. Files that are put for it from now on have other keys."""
        self._attempts[version] = self.attempt(version) + 1

    def put_file(self, folder: str, name: str, data: bytes | memoryview) -> File:
        """Store a part, or a file of an anchor, in a folder of this epoch and the current `attempt`. After
        return: durable.

        Raises:
            FencedError: another publisher has opened the channel.
            StoreError: it may be stored, or may be later. A caller that does not put the same bytes again
                calls `give_up`.
        """
        self._check()
        file = put_file(self.store, f"{folder}/{name}", data)
        self.stored_s = time.monotonic()
        return file

    def describe(self, channel: Channel) -> Channel:
        """Say what a new channel is. The first `append` creates it.

        Returns:
            The document, always that of the first call, with `run_id`, `epoch`, `fencing` and `owner` filled in.

        Raises:
            ConfigError: its table is too large.
        """
        if self._described is None:
            data = documents.encode(dataclasses.replace(channel, **self._new))
            if self._signer is not None:
                data = self._signer.seal(keys.CHANNEL, data)
            if len(data) > limits.CHANNEL_BYTES:
                raise ConfigError(
                    f"The table of {len(channel.tensors)} tensors has more bytes than channel.json may have."
                )
            self._described = documents.decode(data, Channel, keys.CHANNEL), data
        return self._described[0]

    def append(self, document: Record, payload: Encoded | None) -> StoredRecord:
        """Make a version visible, after the pending one if there is one. After return: visible as a whole,
        and the tip.

        Args:
            document: The version; its run, number, epoch and base are filled in. All files that it names are
                stored.
            payload: The payload of `next_version` that goes into the record; the caller has proved it.

        Raises:
            FencedError: another publisher has opened the channel. Every later call raises it too.
            PublishPendingError: no answer. If `pending` is this version, its bytes are put again by the next
                call.
            StoreError: the store refused. If `pending` is this version, it was sent and keeps its number.
            ConfigError, CorruptDataError: it is too large, or readers could not read it; nothing was sent.
        """
        self.settle()
        self._store_channel()
        version = self.next_version
        assert payload is None or payload.metadata["version"] == str(version)
        filled = dataclasses.replace(
            document, run_id=self.run_id, version=version, epoch=self.epoch, base=self.tip
        )
        self.pending = stored = self._encoded(filled, keys.slot(version, self.epoch), payload)
        self.settle()
        return stored

    def settle(self) -> None:
        """Put the pending record, if there is one, until it is answered.

        Raises:
            FencedError, PublishPendingError, StoreError: as `append`.
        """
        self._check()
        if (stored := self.pending) is None:
            return
        assert stored.data is not None
        self._create(stored.key, stored.data, f"version {stored.record.version}")
        self.stored_s = time.monotonic()
        self.tip, self.pending = stored.version, None
        self.published[self.tip.version] = self.tip.sha256
        self.published.pop(self.tip.version - _MOST_PUBLISHED, None)
        self.head.follow()

    def shortcut(
        self, version: VersionId, fingerprint: str, payload: Encoded | None, **fields: Any
    ) -> StoredRecord:
        """Store a compaction to a stored version of any epoch, or announce its anchor, whose files are
        stored.

        `fields` are those of its record that differ: `base` and `delta`, or `anchor`. Raises as `append`.
        """
        self._check()
        stored = self._encoded(*shortcut(self.run_id, version, self.epoch, fingerprint, **fields), payload)
        assert stored.data is not None
        self.store.put(stored.key, stored.data)
        return dataclasses.replace(stored, data=None)

    @property
    def busy(self) -> bool:
        """Whether head is being moved."""
        return self.head.workers.busy

    def close(self) -> None:
        """Bring head up to date. A pending record stays pending: see `settle`."""
        if self._fenced is None:
            self.head.follow()
        self.head.workers.close()

    def _check(self) -> None:
        if self._fenced is not None:
            raise FencedError(str(self._fenced))

    def fence(self, what: str) -> FencedError:
        """Stop this writer. Return the error that each later call raises."""
        self._fenced = FencedError(
            f"{what} ({self.store.url}). This publisher must stop; only one may write to a channel."
        )
        return self._fenced

    def _encoded(self, document: Record, key: str, payload: Encoded | None) -> StoredRecord:
        assert self._described is not None
        return record.encode_checked(
            document, key, payload, self._signer, self._described[0], self.reader.trusted
        )

    def _store_channel(self) -> None:
        if self.channel is None:
            assert self._described is not None
            channel, data = self._described
            self._create(keys.CHANNEL, data, keys.CHANNEL)
            self.channel = channel

    def _create(self, key: str, data: bytes, what: str) -> None:
        """Create an object that only one writer may, until the store answers."""
        try:
            self.store.create(key, data)
        except FencedError as error:
            self._fenced = error
            raise
        except ObjectExistsError:
            raise self.fence(f"Another publisher opened the channel in the place of {what}") from None
        except TransientStoreError as error:
            raise PublishPendingError(
                f"The store has not said whether it has {what}; the next publish puts the same bytes again. "
                f"{error}"
            ) from error


class HeadWriter:
    """Keeps head.json behind a log: nobody waits for it, and nothing needs it.

    Attributes:
        doubted: Whether head went, so that other objects may have gone too.
        workers: The thread that writes it.
    """

    def __init__(self, log: Log) -> None:
        self._log, self._lock = log, threading.Lock()
        self._waits = self._was_there = self.doubted = False
        self.workers = Workers(1, "upload", idle_s=1.0)

    def follow(self) -> None:
        """Let head name the newest version that the log stored, soon."""
        with self._lock:
            if self._waits or not self._log.published:
                return
            self._waits = True
        self.workers.submit(self._move)

    def _move(self) -> None:
        """Let head name the newest version. A failure is logged; the next version moves head again."""
        log = self._log
        with self._lock:
            self._waits = False
            tip = log.tip
        assert tip is not None
        try:
            before = None
            try:
                before = log.reader.head()
                self.doubted |= before is None and self._was_there
            except NotPublishedError:  # channel.json is gone
                self.doubted = True
            if before is not None and self._is_after(before.epoch) and self._is_there(before.newest):
                raise log.fence(
                    f"head names epoch {before.epoch}, after {log.epoch}: another publisher opened the channel"
                )
            head = Head(run_id=log.run_id, version=tip.version, epoch=tip.epoch, sha256=tip.sha256)
            if head != before:
                log.store.put(keys.HEAD, documents.encode(head))
            self._was_there = True
        except FencedError as error:
            logger.error("%s", error)
        except DeltaSyncError as error:
            logger.warning("head is behind version %d: %s", tip.version, error)
        except Exception:  # the thread goes on; nothing needs head
            logger.exception("head is behind version %d", tip.version)

    def _is_after(self, epoch: str) -> bool:
        """Whether an epoch that head names was opened after the log's.

        Two epochs have one number where the store was restored from a backup: the one whose opening is there
        came later.
        """
        log = self._log
        number, own = keys.epoch_number(epoch), keys.epoch_number(log.epoch)
        if (
            number != own
            or epoch == log.epoch
            or (log.channel is not None and log.channel.epoch == log.epoch)
        ):
            return number > own
        opening = keys.epoch_document(log.epoch)
        return opening not in [info.key for info in log.store.list(opening)]

    def _is_there(self, version: VersionId) -> bool:
        """Whether a version that head names exists: a damaged byte of head must stop nobody."""
        try:
            self._log.reader.record(version)
        except (MissingVersionError, FormatError):
            return False
        return True
