"""Open a channel to write to it: find the end of the log, end it, and begin an epoch that goes on from there.

Crash points where the store decides which writer wins (`seal`), for a log that ends with version v in epoch e:

    after the probe              nothing has changed
    after the seal               the log of e has ended; replicas poll the new epoch, and so does whoever opens next
    after the epoch's document   the same; v + 1 goes into its slot in the new epoch

Where it does not (`lease`), the old writer stops once the new epoch's document, the claim, is there.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import uuid
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from deltasync.channel import documents, keys, record
from deltasync.channel.documents import Channel, EpochDocument, Record, VersionId, sha256_hex
from deltasync.channel.keys import Slot
from deltasync.channel.reading import ChannelReader
from deltasync.channel.record import StoredRecord
from deltasync.channel.signing import Signer, require_signer
from deltasync.config import AUTO, PublisherSettings
from deltasync.errors import (
    ChannelInUseError,
    ConfigError,
    CorruptDataError,
    FencedError,
    MissingVersionError,
    NotPublishedError,
    ObjectMissingError,
    TransientStoreError,
    printable,
)
from deltasync.publish import writes
from deltasync.publish.log import Lease, Log, boot_s
from deltasync.stores.base import ObjectInfo
from deltasync.stores.probe import decides

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")


class _End(NamedTuple):
    """The newest version, readable or not, None if there is none, and the epoch whose log goes on from it."""

    version: VersionId | None
    epoch: str

    @property
    def next_slot(self) -> Slot:
        return Slot(1 if self.version is None else self.version.version + 1, self.epoch)


class _Listed(NamedTuple):
    """All slots, the epochs that have a document, and those that channel.json and head.json name."""

    slots: list[tuple[Slot, ObjectInfo]]
    documents: list[str]
    known: list[str]

    @property
    def epochs(self) -> set[str]:
        return {*(slot.epoch for slot, _ in self.slots), *self.documents}

    def log(self, epoch: str) -> list[tuple[Slot, ObjectInfo]]:
        return [(slot, info) for slot, info in self.slots if slot.epoch == epoch]

    def next_epoch(self, *others: str) -> str:
        return keys.new_epoch(1 + max(map(keys.epoch_number, {*self.epochs, *self.known, *others}), default=0))


def open_channel(
    reader: ChannelReader, settings: PublisherSettings, resume: bool, signer: Signer | None, lease: Lease | None = None
) -> Log:
    """Open a channel to write to it. Return its log, which goes on from the newest version; the writer before is fenced.

    Where the store does not decide, this waits for the `lease` to settle, by default as the settings say; if there is no
    channel yet, the log does.

    Raises:
        ChannelInUseError: the channel holds a run, and `resume` is False or the run has another dtype.
        ConfigError: it is signed, and there is no `signer`; or `settle_s` is too small.
        FencedError: another publisher opens it too.
        StoreError: the store failed, or cannot hold the channel. A seal may be stored; whoever opens next goes on from it.
    """
    return _Opener(reader, settings, signer, Lease(settings.settle_s) if lease is None else lease).open(resume)


class _Opener:
    def __init__(self, reader: ChannelReader, settings: PublisherSettings, signer: Signer | None, lease: Lease) -> None:
        self._reader, self._store = reader, reader.store
        self._settings = settings
        self._signer = signer
        self._lease = lease

    def open(self, resume: bool) -> Log:
        channel = self._retried(self._channel)
        if channel is not None:
            self._check(channel, resume)
        listed = self._list(channel)
        if channel is None and (listed.slots or self._retried(self._has_head)):
            if self._retried(self._channel) is not None:
                return self.open(resume)  # another publisher has created it meanwhile
            raise ChannelInUseError(
                f"{self._store.url} holds versions, but its {keys.CHANNEL} is missing. Put it back from a copy of the "
                "channel, or use another URL."
            )
        seals = self._seals(channel, listed)
        run_id = uuid.uuid4().hex if channel is None else channel.run_id
        epoch, tip, claimed_s = listed.next_epoch(), None, 0.0
        if not seals:
            self._put_opening(run_id, epoch, None)
            claimed_s = boot_s()
            if channel is not None:
                self._lease.wait(claimed_s)
                tip = self._end(channel, self._list(channel), below=epoch).version
        elif channel is not None:
            tip, epoch = self._seal(channel, listed)
            self._put_opening(run_id, epoch, tip)
        logger.info("opened run=%s epoch=%s after=%s fencing=%s", run_id, epoch, tip, "seal" if seals else "lease")
        return Log(
            self._reader,
            self._settings,
            self._signer,
            epoch=epoch,
            run_id=run_id,
            channel=channel,
            tip=tip,
            lease=None if seals else self._lease,
            claimed_s=claimed_s,
        )

    def _retried(self, action: Callable[[], _Result]) -> _Result:
        return writes.reread(self._settings, action)

    def _channel(self) -> Channel | None:
        with contextlib.suppress(NotPublishedError):
            return self._reader.channel()
        return None

    def _list(self, channel: Channel | None) -> _Listed:
        head = None if channel is None else self._retried(self._reader.head)
        known = [] if channel is None else [channel.epoch, *([] if head is None else [head.epoch])]
        return self._retried(lambda: _Listed(self._reader.slots(), self._reader.epochs(), known))

    def _has_head(self) -> bool:
        with contextlib.suppress(ObjectMissingError):
            self._store.read(keys.HEAD, documents.SMALL_BYTES)
            return True
        return False

    def _check(self, channel: Channel, resume: bool) -> None:
        if not resume:
            raise ChannelInUseError(
                f"{self._store.url} already holds run {channel.run_id}. Pass resume=True to continue it, or use another URL."
            )
        if self._settings.dtype not in (AUTO, channel.dtype):
            raise ChannelInUseError(
                f"Run {channel.run_id} is published in {channel.dtype}, not in {self._settings.dtype}. Continue it with "
                f'dtype="{channel.dtype}", or use another URL.'
            )
        require_signer(self._signer, self._reader.signed)

    def _seals(self, channel: Channel | None, listed: _Listed) -> bool:
        """Whether the store decides which writer wins."""
        if channel is not None and channel.fencing == "lease":
            return False
        key = keys.probe(listed.next_epoch())
        if self._retried(lambda: decides(self._store, key)):
            return True
        if channel is not None:
            raise ConfigError(
                f"{self._store.url} was begun where the store decides which publisher may write, and here it does not, so "
                "nothing may be written. Publish by the URL and through the servers that were used before."
            )
        logger.warning(
            "%s does not decide which of two publishers may write, so this one waits %g s when it opens the channel and "
            "looks for others before each version.",
            *(self._store.url, self._lease.settle_s),
        )
        return False

    def _put_opening(self, run_id: str, epoch: str, continues: VersionId | None) -> None:
        document = EpochDocument(
            run_id=run_id,
            epoch=epoch,
            continues=continues,
            writer=printable(f"{socket.gethostname()} {os.getpid()}")[:200],
            created_at=documents.now(),
        )
        key, data = keys.epoch_document(epoch), documents.encode(document)
        documents.decode(data, EpochDocument, key)
        self._retried(lambda: self._store.put(key, data))

    def _seal(self, channel: Channel, listed: _Listed) -> tuple[VersionId | None, str]:
        """End the log. Return the version it ended with, and the epoch that goes on."""
        while True:
            end = self._end(channel, listed)
            epoch = listed.next_epoch(end.epoch)
            # Meanwhile the old writer may go on: then what it stored is the end.
            while (taken := self._put_seal(channel, end, epoch)) is not None:
                if taken.epoch != end.epoch:
                    raise FencedError(
                        f"Another publisher opens {self._store.url} too, as epoch {taken.epoch}. Run one of the two."
                    )
                end = taken
            listed = self._list(channel)
            if not any(slot > end.next_slot for slot, _ in listed.log(end.epoch)):
                return end.version, epoch
            logger.info("The seal of epoch %s took the place of a forgotten version and does not count.", end.epoch)

    def _put_seal(self, channel: Channel, end: _End, epoch: str) -> _End | None:
        """Put a seal after the end. Return None, or where the log ends if its slot holds something else."""
        slot = end.next_slot
        seal = Record(
            run_id=channel.run_id,
            kind="seal",
            version=slot.version,
            epoch=slot.epoch,
            base=end.version,
            created_at=documents.now(),
            next_epoch=epoch,
        )
        data = record.encode(seal, slot.key, None, self._signer).data
        assert data is not None
        record.decode(data, slot.key, self._reader.trusted)
        created = self._retried(lambda: writes.create(self._store, slot.key, data))
        return None if created else self._read(slot)

    def _end(self, channel: Channel, listed: _Listed, below: str | None = None) -> _End:
        """Return the end of the log, of all epochs or of those before `below`. A listing may lie, lag or be cut."""
        end, known = self._listed_end(channel, listed, below), self._retried(self._known)
        newness = ("", 0) if end.version is None else end.version.slot.newness
        if known is not None and known.slot.newness > newness and (below is None or known.epoch < below):
            logger.warning("A listing of %s does not show version %s, which head names.", self._store.url, known)
            end = self._read(known.slot)
        epochs = [epoch for epoch in sorted({*listed.epochs, *listed.known}) if below is None or epoch < below]
        while True:  # read on by keys alone, also where a later epoch has a document whose records were not listed
            number = end.next_slot.version
            slots = [end.next_slot, *(Slot(number, epoch) for epoch in epochs if epoch > end.epoch)]
            following = next(filter(self._is_taken, slots), None)
            if following is None:
                return end
            end = self._read(following)

    def _known(self) -> VersionId | None:
        """Return the version that head names, if it is there."""
        head = self._reader.head()
        try:
            return None if head is None else self._reader.record(head.newest).version
        except (MissingVersionError, CorruptDataError):
            return None

    def _is_taken(self, slot: Slot) -> bool:
        try:
            return self._retried(lambda: self._reader.slot(slot)) is not None
        except CorruptDataError:
            return True

    def _listed_end(self, channel: Channel, listed: _Listed, below: str | None) -> _End:
        for epoch in sorted({*listed.epochs, channel.epoch}, reverse=True):
            if below is not None and epoch >= below:
                continue
            if log := listed.log(epoch):
                return self._read(*log[-1])
            opening = self._retried(lambda epoch=epoch: self._reader.opening(epoch))  # type: ignore[misc]
            if opening is not None and opening.run_id == channel.run_id and opening.continues is not None:
                return _End(opening.continues, epoch)
        return _End(None, channel.epoch)

    def _read(self, slot: Slot, known: ObjectInfo | None = None) -> _End:
        """Return the end of the log whose last slot this is."""

        def read() -> StoredRecord:
            stored = self._reader.slot(slot, known)
            if stored is None:
                raise TransientStoreError(f"{slot.key} is there, but cannot be read.")
            return stored

        try:
            last = self._retried(read)
        except CorruptDataError:
            version = VersionId(slot.version, slot.epoch, self._retried(lambda: self._digest(slot)))
            logger.warning("Version %s cannot be read. The next version has full weights.", version)
            return _End(version, slot.epoch)
        following = last.record.next_epoch
        return _End(last.version, slot.epoch) if following is None else _End(last.record.base, following)

    def _digest(self, slot: Slot) -> str:
        """Return the digest of a record that cannot be read; if it is too large, the digest of its beginning."""
        most = self._reader.bounds.most_bytes(slot.key)
        try:
            return sha256_hex(self._store.read(slot.key, most))
        except CorruptDataError:
            return sha256_hex(self._store.read_range(slot.key, 0, most))
