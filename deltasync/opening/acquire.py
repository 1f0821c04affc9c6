"""Open a channel to write to it: find the end of the log, end it, and begin an epoch that goes on from there.

Crash points, for a log that ends with version v in epoch e:

    after the probe              nothing has changed
    after the seal               the log of e has ended; replicas poll the new epoch, and so does whoever opens next
    after the epoch's document   the same; v + 1 goes into its slot in the new epoch

Head and a listing say where to begin; from there on slots are read by their keys. A slot that cannot be read
ends the log as a version does, and the next one has full weights.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import uuid
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

from deltasync import limits
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
    NotPublishedError,
    ObjectExistsError,
    ObjectMissingError,
    TransientStoreError,
    printable,
)
from deltasync.publish.log import Log
from deltasync.stores.base import Store
from deltasync.stores.leased import LeasedStore
from deltasync.stores.retries import READS, RetryStore, decides, retried

logger = logging.getLogger(__name__)

_UNREAD = sha256_hex(b"")
"""Stands for the digest of a version whose record cannot be read; no reader builds on it."""

_Result = TypeVar("_Result")


class _End(NamedTuple):
    """The newest version, readable or not, None if there is none, and the epoch whose log goes on from it."""

    version: VersionId | None
    epoch: str

    @property
    def next_slot(self) -> Slot:
        return Slot(1 if self.version is None else self.version.version + 1, self.epoch)


def open_channel(
    reader: ChannelReader,
    settings: PublisherSettings,
    resume: bool,
    signer: Signer | None,
    owner: str | None = None,
    leased: Callable[[Store], LeasedStore] | None = None,
) -> Log:
    """Open a channel to write to it. Return its log, which goes on from the newest version; the writer before
    is fenced.

    Where the server does not decide which writer may create an object, `leased`, by default `LeasedStore`, is put
    around the reader's store. Then this waits for the claim to settle; if there is no channel yet, the log does.

    Raises:
        ChannelInUseError: the channel holds a run, and `resume` is False and the owner another one, or the
            run has another dtype; or it holds versions, and none can be read.
        ConfigError: it is signed, and there is no `signer`.
        FencedError: another publisher opens it too.
        StoreError: the store failed, or cannot hold the channel. A seal may be stored; whoever opens next
            goes on from it.
    """
    return _Opener(reader, settings, signer, owner, leased or LeasedStore).open(resume)


class _Opener:
    def __init__(
        self,
        reader: ChannelReader,
        settings: PublisherSettings,
        signer: Signer | None,
        owner: str | None,
        leased: Callable[[Store], LeasedStore],
    ) -> None:
        assert isinstance(reader.store, RetryStore)
        self._reader, self._store = reader, reader.store
        self._settings, self._signer, self._owner, self._leased = settings, signer, owner, leased

    def open(self, resume: bool) -> Log:
        channel = self._retried(self._channel)
        if channel is not None:
            self._check(channel, resume)
        elif self._reader.slots() or self._has_head():
            if self._retried(self._channel) is not None:
                return self.open(resume)  # another publisher has created it meanwhile
            raise ChannelInUseError(
                f"{self._store.url} holds versions, but its {keys.CHANNEL} is missing. Put it back from a "
                "copy of the channel, or use another URL."
            )
        fencing = self._fence(channel)
        if channel is None:
            tip, epoch, run_id = None, keys.new_epoch(1), uuid.uuid4().hex
        else:
            (tip, epoch), run_id = self._seal(channel), channel.run_id
            self._put_opening(run_id, epoch, tip)
        logger.info("opened run=%s epoch=%s after=%s fencing=%s", run_id, epoch, tip, fencing)
        return Log(
            self._reader,
            self._signer,
            epoch=epoch,
            run_id=run_id,
            channel=channel,
            tip=tip,
            fencing=fencing,
            owner=self._owner,
        )

    def _retried(self, action: Callable[[], _Result]) -> _Result:
        return retried(action, READS - 1, passing=(CorruptDataError,))

    def _channel(self) -> Channel | None:
        with contextlib.suppress(NotPublishedError):
            # what is published to another run than the channel's nobody reads
            return self._reader.read_channel_again()
        return None

    def _has_head(self) -> bool:
        with contextlib.suppress(ObjectMissingError):
            self._store.read(keys.HEAD, limits.SMALL_BYTES)
            return True
        return False

    def _check(self, channel: Channel, resume: bool) -> None:
        if not resume and (self._owner is None or channel.owner != self._owner):
            known = "" if self._owner is None else ", which this job has not begun"
            raise ChannelInUseError(
                f"{self._store.url} already holds run {channel.run_id}{known}. Pass resume=True, beside the "
                "URL, to "
                "Publisher or DeltaSyncCallback to continue it, or use another URL."
            )
        if self._settings.dtype not in (AUTO, channel.dtype):
            raise ChannelInUseError(
                f"Run {channel.run_id} is published in {channel.dtype}, not in {self._settings.dtype}. "
                "Continue it in that "
                f'dtype (dtype="{channel.dtype}" of Publisher, served_dtype="{channel.dtype}" of DeltaSyncCallback), or use '
                "another URL."
            )
        require_signer(self._signer, self._reader.signed)

    def _fence(self, channel: Channel | None) -> str:
        """Have the store decide which writer may create an object. Return what channel.json says of that."""
        if channel is None or channel.fencing == "seal":
            if decides(self._store, keys.probe(keys.new_author())):
                return "seal"
            if channel is not None:
                raise ConfigError(
                    f"{self._store.url} was begun where the store decides which publisher may write, and here it "
                    "does not, so nothing may be written. Publish by the URL and through the servers that were "
                    "used before."
                )
        self._store.inner = store = self._leased(self._store.inner)
        if channel is None:
            logger.warning(
                "%s does not decide which of two publishers may write, so this one waits %g s when it opens the "
                "channel and looks for others before each version.",
                *(self._store.url, store.settle_s),
            )
        self._store.ask("create", keys.CHANNEL, store.claim)
        return "lease"

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
        if self._signer is not None:
            data = self._signer.seal(key, data)
        self._store.put(key, data)

    def _seal(self, channel: Channel) -> tuple[VersionId | None, str]:
        """End the log. Return the version it ended with, and the epoch that goes on."""
        end = self._end(channel)
        while True:
            known = (channel.epoch, end.epoch, *self._later(end))
            epoch = keys.new_epoch(1 + max(map(keys.epoch_number, known)))
            # Meanwhile the old writer may go on: then what it stored is the end.
            while (taken := self._put_seal(channel, end, epoch)) is not None:
                if taken.epoch != end.epoch:
                    raise FencedError(
                        f"Another publisher opens {self._store.url} too, as epoch {taken.epoch}. Run one of "
                        "the two."
                    )
                end = taken
            later = [
                slot
                for slot, _ in self._reader.slots_from(end.next_slot.version)
                if slot.epoch == end.epoch and slot > end.next_slot
            ]
            if not later:
                return end.version, epoch
            logger.info(
                "The seal of epoch %s took the place of a forgotten version and does not count.", end.epoch
            )
            if (last := self._at(max(later), end)) is None:
                raise TransientStoreError(f"{max(later).key} is listed, but cannot be read.")
            end = self._followed(last)

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
        try:
            self._store.create(slot.key, data)
            return None
        except ObjectExistsError:
            if (taken := self._at(slot, end)) is None:
                raise TransientStoreError(f"{slot.key} is there, but cannot be read.") from None
            return taken

    def _end(self, channel: Channel) -> _End:
        """Return the end of the log. Head and a listing may lie, lag or be cut, so they only say where to begin."""
        listed, head = self._reader.newest_slots(), self._retried(self._reader.head)
        newest, _ = self._reader.newest_readable(listed)
        hints = [] if head is None else [head.newest.slot]
        hints += [] if newest is None else [Slot(newest.record.version, newest.record.epoch)]
        for slot in sorted(hints, key=lambda slot: slot.newness, reverse=True):
            if isinstance(found := self._read(slot), StoredRecord):
                return self._followed(_after(found))
        end = self._followed(_End(None, channel.epoch))
        if end.version is None and listed:
            raise ChannelInUseError(
                f"{self._store.url} holds records, and none of the newest can be read. Nothing was "
                "written: see `deltasync check`, then `deltasync repair`, or use another URL."
            )
        return end

    def _followed(self, end: _End) -> _End:
        """Read on by keys alone from where a log may end: in its epoch, and in later ones that go on from there."""
        while True:
            if end.next_slot.version > keys.LARGEST_VERSION:
                raise ChannelInUseError(
                    f"{self._store.url} has used its last version number, {keys.LARGEST_VERSION}: use another URL."
                )
            later = self._later(end)
            slots = [end.next_slot, *(Slot(end.next_slot.version, epoch) for epoch in later)]
            following = next((found for slot in slots if (found := self._at(slot, end)) is not None), None)
            if following is None:
                return _in_force(end, later)
            end = following

    def _at(self, slot: Slot, before: _End) -> _End | None:
        """Return where the log ends if this is its last slot, None if it is empty."""
        found = self._read(slot)
        if isinstance(found, StoredRecord):
            return _after(found)
        if found is None:
            return None
        if (following := _in_force(before, self._later(before))) != before:  # it was a seal
            return following
        return _End(VersionId(slot.version, slot.epoch, _UNREAD), slot.epoch)

    def _read(self, slot: Slot) -> StoredRecord | CorruptDataError | None:
        """Return what a slot holds, the error if it cannot be read, None if it is empty.

        One read may be damaged and look well: where no signature covers it, two must agree.
        """
        seen, problem = set[str](), CorruptDataError(f"{slot.key} is read with other bytes each time.")
        for _ in range(2 * READS):
            try:
                found = self._reader.slot(slot)
            except CorruptDataError as error:
                problem = error
                continue
            if found is None or self._reader.trusted is not None or found.sha256 in seen:
                return found
            seen.add(found.sha256)
        return problem

    def _later(self, end: _End) -> dict[str, VersionId | None]:
        """Return later epochs than that of an end, ascending, and what they continue: that end, or nothing yet.

        Writers of before claimed an epoch by a document that continues nothing.
        """
        found = {}
        for epoch in self._reader.epochs():
            if epoch > end.epoch and (opening := self._reader.opening(epoch)) is not None:
                is_ours = opening.run_id == self._reader.channel().run_id
                if is_ours and opening.continues in (None, end.version):
                    found[epoch] = opening.continues
        return found


def _after(stored: StoredRecord) -> _End:
    """Return where a log ends whose last record this is."""
    following = stored.record.next_epoch
    if following is None:
        return _End(stored.version, stored.record.epoch)
    return _End(stored.record.base, following)


def _in_force(end: _End, later: Mapping[str, VersionId | None]) -> _End:
    """Return an end, in the last of these epochs that continues it, if there is one."""
    return _End(
        end.version, max((epoch for epoch, on in later.items() if on == end.version), default=end.epoch)
    )
