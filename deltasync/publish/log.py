"""The log of one epoch: make versions visible, and notice that another writer has taken over.

Crash points of `Log.append`, for version v + 1:

    before the put of the record     nothing visible; files that nothing names are garbage for `gc` the put
    got no answer            v or v + 1 is visible; the record stays pending, and its bytes are put again
    after the put                    v + 1 is visible as a whole; head follows, and nobody waits for it
"""

from __future__ import annotations

import contextlib
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
    StoreError,
    TransientStoreError,
    get_logger,
)
from deltasync.stores.base import REQUEST_S, Store
from deltasync.stores.retries import RetryStore, holds
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


def boot_s() -> float:
    """Return seconds by a clock that counts suspension too; by the wall clock where there is none."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.time()


@dataclasses.dataclass(frozen=True, slots=True)
class Lease:
    """How one writer takes over from another on a store that cannot decide which of them may write.

    A request is assumed to take effect within `settle_s - recheck_s` after it was sent, or never.

    Attributes:
        settle_s: How long a new writer waits for requests of the one before; `ConfigError` if that is too
            short.
        recheck_s: How long a writer may rely on its last look at the epochs.
        request_s: After how long the store gives up the request that follows a look.
    """

    settle_s: float = 30.0
    recheck_s: float = 5.0
    request_s: float = REQUEST_S

    def __post_init__(self) -> None:
        if self.settle_s <= self.recheck_s + self.request_s:
            raise ConfigError(
                f"settle_s must be more than {self.recheck_s + self.request_s:g} s, and is {self.settle_s:g} "
                "s."
            )

    def wait(self, claimed_s: float) -> None:
        """Wait until a claim made at `claimed_s`, by `boot_s`, has settled."""
        left_s = min(claimed_s + self.settle_s - boot_s(), self.settle_s)
        if left_s > 0:
            logger.info("waiting %.1f s for requests of other publishers", left_s)
            time.sleep(left_s)


class Log:
    """Puts records, files, compactions and head as `docs/format.md` says. One thread appends; other methods
    may run in several.

    Args:
        lease: How this writer takes over, and notices that another one does; None where the store decides.
        claimed_s: When the epoch was claimed, by `boot_s`.
        owner: The owner that a new channel names, None for none.

    Attributes:
        store: The channel's store.
        stored_s: When it last took a file or a record, by `time.monotonic`.
        epoch: This writer's epoch, which is part of all keys.
        fencing: As in channel.json.
        channel: The channel's description; None until it is stored.
        tip: The newest version that is stored, None before the first.
        pending: A record that was put and not answered yet; its number is taken.
        published: Digests of the records that this log stored, by number; the newest 65,536.
        stop: Set it to end every wait between two attempts; what is under way fails then.
        doubted: Whether head went, so that other objects may have gone too.
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
        lease: Lease | None = None,
        claimed_s: float = 0.0,
        owner: str | None = None,
    ) -> None:
        self.channel = channel
        self.epoch = epoch
        self.fencing = "seal" if lease is None else "lease"
        self.run_id = run_id
        self.tip = tip
        self.pending: StoredRecord | None = None
        self.published: dict[int, str] = {}
        self.doubted = False
        assert isinstance(reader.store, RetryStore)
        self._reader, self.store = reader, reader.store
        self.stop = self.store.stop
        self.stored_s = time.monotonic()
        self._signer = signer
        self._lease, self._owner = lease, owner
        self._claimed_s = claimed_s
        self._new_channel: tuple[Channel, bytes] | None = None
        self._channel_data = None if channel is None else reader.channel_data
        self._fenced: FencedError | None = None
        self._foreign = set[str]()  # epochs that nobody opened
        self._attempts: dict[int, int] = {}
        self._lock = threading.Lock()
        self._head_waits = self._had_head = False
        self._head = Workers(1, "upload", idle_s=1.0)

    @property
    def next_version(self) -> int:
        """Number of the next record to append: after the pending one, if there is one."""
        newest = self.tip if self.pending is None else self.pending.version
        return 1 if newest is None else newest.version + 1

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

    def create_channel(self, channel: Channel) -> Channel:
        """Create the channel; with a lease, the first `append` does it. If that gets no answer, the next call
        repeats it.

        Returns:
            The stored document, always that of the first call, with `run_id`, `epoch`, `fencing` and `owner`
            filled in.

        Raises:
            FencedError: another publisher created it.
            PublishPendingError: no answer.
            ConfigError, StoreError: it was refused.
        """
        self._check()
        if self._new_channel is None:
            owner = msgspec.UNSET if self._owner is None else self._owner
            filled = dataclasses.replace(
                channel, run_id=self.run_id, epoch=self.epoch, fencing=self.fencing, owner=owner
            )
            data = documents.encode(filled)
            if self._signer is not None:
                data = self._signer.seal(keys.CHANNEL, data)
            if len(data) > limits.CHANNEL_BYTES:
                raise ConfigError(
                    f"The table of {len(channel.tensors)} tensors has more bytes than channel.json may have."
                )
            self._new_channel = documents.decode(data, Channel, keys.CHANNEL), data
        if self._lease is None:
            self._store_channel()
        return self._new_channel[0]

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
        self._put(stored.key, stored.data, f"version {stored.record.version}")
        self.stored_s = time.monotonic()
        self.tip, self.pending = stored.version, None
        self.published[self.tip.version] = self.tip.sha256
        self.published.pop(self.tip.version - _MOST_PUBLISHED, None)
        self._follow_with_head()

    def shortcut(
        self, version: VersionId, fingerprint: str, payload: Encoded | None, **fields: Any
    ) -> StoredRecord:
        """Store a compaction to a stored version of any epoch, or announce its anchor, whose files are
        stored.

        `fields` are those of its record that differ: `base` and `delta`, or `anchor`. Raises as `append`.
        """
        self._check()
        stored = self._encoded(
            *record.shortcut(self.run_id, version, self.epoch, fingerprint, **fields), payload
        )
        assert stored.data is not None
        self.store.put(stored.key, stored.data)
        return dataclasses.replace(stored, data=None)

    @property
    def busy(self) -> bool:
        """Whether head is being moved."""
        return self._head.busy

    def close(self) -> None:
        """Bring head up to date. A pending record stays pending: see `settle`."""
        if self._fenced is None:
            self._follow_with_head()
        self._head.close()

    def _check(self) -> None:
        if self._fenced is not None:
            raise FencedError(str(self._fenced))

    def _fence(self, what: str) -> FencedError:
        self._fenced = FencedError(
            f"{what} ({self.store.url}). This publisher must stop; only one may write to a channel."
        )
        return self._fenced

    def _encoded(self, document: Record, key: str, payload: Encoded | None) -> StoredRecord:
        channel = self.channel
        if channel is None:
            assert self._new_channel is not None
            channel, _ = self._new_channel
        return record.encode_checked(document, key, payload, self._signer, channel, self._reader.trusted)

    def _store_channel(self) -> None:
        if self.channel is not None:
            return
        assert self._new_channel is not None
        channel, data = self._new_channel
        self._put(keys.CHANNEL, data, keys.CHANNEL)
        self.channel, self._channel_data = channel, data

    def _put(self, key: str, data: bytes, what: str) -> None:
        """Put an object that only one writer may put, until the store answers."""
        try:
            if self._lease is None:
                self.store.create(key, data)
            else:
                self._lease.wait(self._claimed_s)
                self._put_guarded(key, data)
        except ObjectExistsError:
            raise self._fence(f"Another publisher opened the channel in the place of {what}") from None
        except TransientStoreError as error:
            raise PublishPendingError(
                f"The store has not said whether it has {what}; the next publish puts the same bytes again. "
                f"{error}"
            ) from error

    def _put_guarded(self, key: str, data: bytes) -> None:
        """Put an object after a look at the epochs, which is made while its bytes are uploaded."""
        looks, looked_s = [Workers(1, "fetch").submit(self._read_epochs)], 0.0

        def guard() -> None:
            nonlocal looked_s
            if key == keys.CHANNEL:
                self._check_channel()
            # a repetition looks again
            looked_s = self._check_lease(looks.pop().result() if looks else self._read_epochs())

        self.store.put(key, data, guard=guard)
        self._check_in_time(key, looked_s)

    def _check_in_time(self, key: str, looked_s: float) -> None:
        """Look again after a put that took longer than a look is good for, as where this process or its host
        stood still.

        Another publisher may have opened the channel before the request took effect. Then nothing builds on
        the object.
        """
        assert self._lease is not None
        if 0 <= boot_s() - looked_s <= self._lease.recheck_s:
            return
        try:
            self._read_epochs()
        except FencedError as error:
            logger.error("%s was stored too late and is not part of the channel: %s", key, error)
            raise

    def _read_epochs(self) -> float:
        """Raise if this epoch is not the newest; return when this look began, by `boot_s`."""
        began_s = boot_s()
        for newest in self._reader.epochs():
            if newest > self.epoch and self._is_opening(newest):
                raise self._fence(
                    f"Another publisher opened the channel as epoch {newest}, after {self.epoch}"
                )
        return began_s

    def _is_opening(self, epoch: str) -> bool:
        """Whether a publisher has opened an epoch: anybody who may write could have stored its document."""
        if self._reader.is_opening(epoch, keys.epoch_number(self.epoch)):
            return True
        if epoch not in self._foreign:
            self._foreign.add(epoch)
            logger.warning(
                "%s in %s is no opening of this run and does not count; delete it.", epoch, self.store.url
            )
        return False

    def _check_lease(self, began_s: float) -> float:
        """Raise if another epoch may have begun since a look; if that is too old, look again first. Return
        when it began.
        """
        assert self._lease is not None
        if not 0 <= boot_s() - began_s <= self._lease.recheck_s:
            began_s = self._read_epochs()
        age_s = boot_s() - began_s
        if not 0 <= age_s <= self._lease.recheck_s:
            raise TransientStoreError(
                f"The lease check took {age_s:.1f} s (limit {self._lease.recheck_s:g} s); nothing was sent."
            )
        return began_s

    def _is_after(self, epoch: str) -> bool:
        """Whether an epoch that head names was opened after this one.

        Two epochs have one number where the store was restored from a backup: the one whose opening is there
        came later. Where claims decide, the greater name does.
        """
        number, own = keys.epoch_number(epoch), keys.epoch_number(self.epoch)
        if (
            number != own
            or epoch == self.epoch
            or (self.channel is not None and self.channel.epoch == self.epoch)
        ):
            return number > own
        if self._lease is not None and epoch > self.epoch:
            return True
        return keys.epoch_document(self.epoch) not in [
            info.key for info in self.store.list(keys.epoch_document(self.epoch))
        ]

    def _is_there(self, version: VersionId) -> bool:
        """Whether a version that head names exists: a damaged byte of head must stop nobody."""
        try:
            self._reader.record(version)
        except (MissingVersionError, FormatError):
            return False
        return True

    def _check_channel(self) -> None:
        """Raise if another publisher has created the channel."""
        assert self._new_channel is not None
        if holds(self.store, keys.CHANNEL, self._new_channel[1]) is False:
            raise self._fence("Another publisher created the channel")

    def check_channel(self) -> str | None:
        """Put channel.json back if it is gone or was overwritten: without it nobody can join. Return what had
        happened.

        Raises:
            FencedError: another publisher has begun a run here.
        """
        data = self._channel_data
        if data is None or self._begins_with(data[: limits.SMALL_BYTES]):
            return None
        there = holds(self.store, keys.CHANNEL, data)
        if there:
            return None
        if there is False and self._is_other_run():
            raise self._fence("Another publisher has begun a run in this place")
        if there is None and self._lease is None:
            with contextlib.suppress(ObjectExistsError):
                self.store.create(keys.CHANNEL, data)
        else:
            self.store.put(keys.CHANNEL, data)
        return f"{keys.CHANNEL} was {'gone' if there is None else 'overwritten'} and is put back"

    def _begins_with(self, first: bytes) -> bool:
        try:
            return self.store.read_range(keys.CHANNEL, 0, len(first)) == first
        except TransientStoreError:
            raise
        except StoreError:  # it is gone or shorter
            return False

    def _is_other_run(self) -> bool:
        """Whether channel.json is of a run that was begun after this publisher opened the channel."""
        try:
            found = ChannelReader(self._reader.store, self._reader.trusted).channel()
        except (FormatError, NotPublishedError):
            return False
        return found.run_id != self.run_id and (self._lease is None or found.epoch > self.epoch)

    def _follow_with_head(self) -> None:
        with self._lock:
            if self._head_waits or not self.published:
                return
            self._head_waits = True
        self._head.submit(self._move_head)

    def _move_head(self) -> None:
        """Let head name the newest version. A failure is logged; the next version moves head again."""
        with self._lock:
            self._head_waits = False
            tip = self.tip
        assert tip is not None
        try:
            before = None
            try:
                before = self._reader.head()
                self.doubted |= before is None and self._had_head
            except NotPublishedError:  # channel.json is gone
                self.doubted = True
            if before is not None and self._is_after(before.epoch) and self._is_there(before.newest):
                raise self._fence(
                    f"head names epoch {before.epoch}, after {self.epoch}: another publisher opened the "
                    "channel"
                )
            head = Head(run_id=self.run_id, version=tip.version, epoch=tip.epoch, sha256=tip.sha256)
            if head != before:
                self.store.put(keys.HEAD, documents.encode(head))
            self._had_head = True
        except FencedError as error:
            logger.error("%s", error)
        except DeltaSyncError as error:
            logger.warning("head is behind version %d: %s", tip.version, error)
        except Exception:  # the thread goes on; nothing needs head
            logger.exception("head is behind version %d", tip.version)
