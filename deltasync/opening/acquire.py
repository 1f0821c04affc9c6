"""Open a channel to write to it: find the end of the log, end it, and begin an epoch that goes on from there.

Crash points where the store decides which writer wins (`seal`), for a log that ends with version v in epoch
e:

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
from collections.abc import Callable, Iterable, Iterator, Sequence
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
    FormatError,
    MissingVersionError,
    NotPublishedError,
    ObjectExistsError,
    ObjectMissingError,
    TransientStoreError,
    printable,
)
from deltasync.publish.log import Lease, Log, boot_s
from deltasync.stores.base import ObjectInfo
from deltasync.stores.retries import READS, decides, retried

logger = logging.getLogger(__name__)

_MOST_FOREIGN = 1024
"""Most objects newer than the newest record that are read, and passed over, before an opening is given up."""

_Result = TypeVar("_Result")


class _End(NamedTuple):
    """The newest version, readable or not, None if there is none, and the epoch whose log goes on from it."""

    version: VersionId | None
    epoch: str

    @property
    def next_slot(self) -> Slot:
        return Slot(1 if self.version is None else self.version.version + 1, self.epoch)


class _Listed(NamedTuple):
    """All slots, and the epochs that have a document. Anybody who may write can add to both."""

    slots: list[tuple[Slot, ObjectInfo]]
    documents: list[str]


def _next_epoch(epochs: Iterable[str]) -> str:
    return keys.new_epoch(1 + max(map(keys.epoch_number, epochs), default=0))


def open_channel(
    reader: ChannelReader,
    settings: PublisherSettings,
    resume: bool,
    signer: Signer | None,
    lease: Lease | None = None,
    owner: str | None = None,
) -> Log:
    """Open a channel to write to it. Return its log, which goes on from the newest version; the writer before
    is fenced.

    Where the store does not decide, this waits for the `lease` to settle; if there is no
    channel yet, the log does.

    Raises:
        ChannelInUseError: the channel holds a run, and `resume` is False and the owner another one, or the
            run has another dtype.
        ConfigError: it is signed, and there is no `signer`.
        FencedError: another publisher opens it too.
        StoreError: the store failed, or cannot hold the channel. A seal may be stored; whoever opens next
            goes on from it.
    """
    return _Opener(reader, settings, signer, Lease() if lease is None else lease, owner).open(resume)


class _Opener:
    def __init__(
        self,
        reader: ChannelReader,
        settings: PublisherSettings,
        signer: Signer | None,
        lease: Lease,
        owner: str | None,
    ) -> None:
        self._reader, self._store = reader, reader.store
        self._settings = settings
        self._signer = signer
        self._lease, self._owner = lease, owner
        # why objects that are listed do not count, by key; empty once that was said
        self._foreign: dict[str, str] = {}

    def open(self, resume: bool) -> Log:
        channel = self._retried(self._channel)
        if channel is not None:
            self._check(channel, resume)
        listed = self._list()
        if channel is None and (listed.slots or self._has_head()):
            if self._retried(self._channel) is not None:
                return self.open(resume)  # another publisher has created it meanwhile
            raise ChannelInUseError(
                f"{self._store.url} holds versions, but its {keys.CHANNEL} is missing. Put it back from a "
                "copy of the "
                "channel, or use another URL."
            )
        end = None if channel is None else self._end(channel, listed)
        epochs = self._epochs(channel, listed, end)
        self._warn_of_foreign()
        seals = self._seals(channel, epochs)
        run_id = uuid.uuid4().hex if channel is None else channel.run_id
        epoch, tip, claimed_s = _next_epoch(epochs), None, 0.0
        if not seals:
            self._put_opening(run_id, epoch, None)
            claimed_s = boot_s()
            if channel is not None:
                self._lease.wait(claimed_s)
                tip = self._end(channel, self._list(), below=epoch).version
                self._warn_of_foreign()
        elif channel is not None and end is not None:
            tip, epoch = self._seal(channel, end, epochs)
            self._put_opening(run_id, epoch, tip)
        logger.info(
            "opened run=%s epoch=%s after=%s fencing=%s", run_id, epoch, tip, "seal" if seals else "lease"
        )
        return Log(
            self._reader,
            self._signer,
            epoch=epoch,
            run_id=run_id,
            channel=channel,
            tip=tip,
            lease=None if seals else self._lease,
            claimed_s=claimed_s,
            owner=self._owner,
        )

    def _retried(self, action: Callable[[], _Result], level: int = logging.WARNING) -> _Result:
        return retried(action, READS - 1, passing=(CorruptDataError,), level=level)

    def _channel(self) -> Channel | None:
        with contextlib.suppress(NotPublishedError):
            # what is published to another run than the channel's nobody reads
            return self._reader.read_channel_again()
        return None

    def _list(self) -> _Listed:
        slots, found = self._reader.slots(), self._reader.epochs()
        return _Listed([(slot, info) for slot, info in slots if info.key not in self._foreign], found)

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

    def _seals(self, channel: Channel | None, epochs: Iterable[str]) -> bool:
        """Whether the store decides which writer wins."""
        if channel is not None and channel.fencing == "lease":
            return False
        key = keys.probe(_next_epoch(epochs))
        if decides(self._store, key):
            return True
        if channel is not None:
            raise ConfigError(
                f"{self._store.url} was begun where the store decides which publisher may write, and here it "
                "does not, so "
                "nothing may be written. Publish by the URL and through the servers that were used before."
            )
        logger.warning(
            "%s does not decide which of two publishers may write, so this one waits %g s when it opens the "
            "channel and "
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
        if self._signer is not None:
            data = self._signer.seal(key, data)
        self._store.put(key, data)

    def _seal(self, channel: Channel, end: _End, epochs: set[str]) -> tuple[VersionId | None, str]:
        """End the log. Return the version it ended with, and the epoch that goes on."""
        while True:
            epoch = _next_epoch({*epochs, end.epoch})
            # Meanwhile the old writer may go on: then what it stored is the end.
            while (taken := self._put_seal(channel, end, epoch)) is not None:
                if taken.epoch != end.epoch:
                    raise FencedError(
                        f"Another publisher opens {self._store.url} too, as epoch {taken.epoch}. Run one of "
                        "the two."
                    )
                end = taken
            listed = self._list()
            later = [
                (slot, info)
                for slot, info in listed.slots
                if slot.epoch == end.epoch and slot > end.next_slot
            ]
            if not any(isinstance(self._found(slot, info), _End) for slot, info in later):
                return end.version, epoch
            logger.info(
                "The seal of epoch %s took the place of a forgotten version and does not count.", end.epoch
            )
            end = self._end(channel, listed)
            epochs = self._epochs(channel, listed, end)

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
            pass
        taken = self._found(slot)
        if taken is None:
            raise TransientStoreError(f"{slot.key} is there, but cannot be read.")
        if isinstance(taken, CorruptDataError):
            taken = self._damaged(slot, taken)
            # if it is None: no writer can store anything there, so it ends the log as a seal does
            self._warn_of_foreign()
        return None if taken is None else self._as_stored(taken)

    def _end(self, channel: Channel, listed: _Listed, below: str | None = None) -> _End:
        """Return the end of the log, of all epochs or of those before `below`. A listing may lie, lag or be
        cut.
        """
        end, known = self._listed_end(channel, listed, below), self._retried(self._known)
        newness = ("", 0) if end.version is None else end.version.slot.newness
        if known is not None and known.slot.newness > newness and (below is None or known.epoch < below):
            logger.warning(
                "A listing of %s does not show version %s, which head names.", self._store.url, known
            )
            end = _End(known, known.epoch)
        epochs = sorted(
            epoch for epoch in self._epochs(channel, listed, end) if below is None or epoch < below
        )
        # read on by keys alone, also where a later epoch has a document whose records were not listed
        while True:
            number = end.next_slot.version
            if number > keys.LARGEST_VERSION:
                raise ChannelInUseError(
                    f"{self._store.url} has used its last version number, {number - 1}: use another URL."
                )
            slots = [end.next_slot, *(Slot(number, epoch) for epoch in epochs if epoch > end.epoch)]
            following = next((found for slot in slots if (found := self._taken(slot)) is not None), None)
            if following is None:
                return self._as_stored(end)
            end = following

    def _as_stored(self, end: _End) -> _End:
        """Return the end with the digest that its record has in two reads: a seal, an opening or one read may
        be wrong.
        """
        version = end.version
        if version is None or (self._reader.trusted is not None and version.epoch == end.epoch):
            return end
        seen = {version.sha256}
        for _ in range(READS):
            found = self._found(version.slot)
            if not isinstance(found, _End) or found.version is None or found.version.slot != version.slot:
                return end
            if found.version.sha256 in seen:
                return _End(found.version, end.epoch)
            seen.add(found.version.sha256)
        return end

    def _known(self) -> VersionId | None:
        """Return the version that head names, if it is there."""
        head = self._reader.head()
        try:
            return None if head is None else self._reader.record(head.newest).version
        except (MissingVersionError, CorruptDataError):
            return None

    def _epochs(self, channel: Channel | None, listed: _Listed, end: _End | None) -> set[str]:
        """Return the epochs that count: of the log, of head, and those that were opened after it."""
        found = set() if channel is None or end is None else {channel.epoch, end.epoch}
        if channel is not None and (known := self._retried(self._known)) is not None:
            found.add(known.epoch)
        newest = max(map(keys.epoch_number, found), default=0)
        for epoch in listed.documents:
            number = keys.epoch_number(epoch)
            # The log takes it for an opening beside or after this one, so it counts here too.
            if number <= newest or self._retried(lambda: self._reader.is_opening(epoch, newest + 1)):  # noqa: B023
                found.add(epoch)
                newest = max(newest, number)
            else:
                self._foreign.setdefault(keys.epoch_document(epoch), "it is no opening of this run")
        return found

    def _warn_of_foreign(self) -> None:
        """Name what was found in the channel and does not count, once."""
        new = {key: why for key, why in self._foreign.items() if why}
        if new:
            key, why = next(iter(new.items()))
            more = f", and {len(new) - 1:,} more" if len(new) > 1 else ""
            logger.warning(
                "%s holds %s%s, which no publisher of this run has stored: %s. Nothing builds on it; delete "
                "it.",
                *(self._store.url, key, more, why.rstrip(".")),
            )
            self._foreign |= dict.fromkeys(new, "")

    def _listed_end(self, channel: Channel, listed: _Listed, below: str | None) -> _End:
        """Return the end of the log as far as it was listed: the newest record that is this run's, readable
        or not.
        """
        end, damaged = _End(None, channel.epoch), list[tuple[Slot, CorruptDataError]]()
        for slot, info in sorted(listed.slots, key=lambda pair: pair[0].newness, reverse=True):
            if below is not None and slot.epoch >= below:
                continue
            found = self._found(slot, info)
            if found is None:
                raise TransientStoreError(f"{slot.key} is listed, but cannot be read.")
            if isinstance(found, _End):
                end = found
                break
            damaged.append((slot, found))
            if len(damaged) > _MOST_FOREIGN:
                raise ChannelInUseError(
                    f"{self._store.url} has more than {_MOST_FOREIGN:,} newer objects under {keys.VERSIONS} "
                    "that are no "
                    f"records of this run, such as {slot.key}: {found} Nothing was written. Delete them."
                )
        if damaged:
            end = self._pass_damaged(end, damaged[::-1])
        begun = {slot.epoch for slot, _ in listed.slots}
        for epoch in sorted(self._epochs(channel, listed, end) - begun, reverse=True):
            if epoch < end.epoch or (below is not None and epoch >= below):
                continue
            opening = self._retried(lambda: self._reader.opening(epoch))  # noqa: B023
            if opening is None or opening.run_id != channel.run_id or (on := opening.continues) is None:
                continue
            if on == end.version or any(slot == on.slot for slot, _ in listed.slots):
                return _End(on, epoch)
        return end

    def _pass_damaged(self, end: _End, damaged: Sequence[tuple[Slot, CorruptDataError]]) -> _End:
        """Return the end where these newer records, ascending, cannot be read.

        Versions that shortcuts lead to exist. In a signed channel a damaged record counts if its signature
        holds; in others if it follows a version that exists, so that one object of a great number decides
        nothing.
        """
        newest = max(
            (found.version for found in self._shortcuts()),
            key=lambda version: version.slot.newness,
            default=None,
        )
        if newest is not None and (end.version is None or newest.slot.newness > end.version.slot.newness):
            end = _End(newest, newest.epoch)
        head = self._retried(self._reader.head)
        exist = {
            0 if end.version is None else end.version.version,
            *(() if head is None else (head.version,)),
        }
        if end.version is None and head is None:
            exist.add(damaged[0][0].version)
        for slot, error in damaged:
            follows = not exist.isdisjoint((slot.version, slot.version - 1))
            found = self._damaged(slot, error) if follows or self._reader.trusted is not None else None
            if found is None:
                self._foreign.setdefault(slot.key, str(error))
            else:
                exist.add(slot.version)
                end = found
        return end

    def _shortcuts(self) -> Iterator[StoredRecord]:
        listed = sorted(self._retried(self._reader.shortcuts), key=lambda pair: pair[0].version, reverse=True)
        for _, info in listed[: limits.DAMAGED_RECORDS]:
            with contextlib.suppress(FormatError, MissingVersionError):
                yield self._reader.stored(info.key, known=info)

    def _taken(self, slot: Slot) -> _End | None:
        """Return where the log ends if this is its last slot; None if nothing of this run is there."""
        found = self._found(slot)
        return self._damaged(slot, found) if isinstance(found, CorruptDataError) else found

    def _found(self, slot: Slot, known: ObjectInfo | None = None) -> _End | CorruptDataError | None:
        """Return where the log ends if this is its last slot; None if it is empty, or why it cannot be
        read.
        """
        try:
            last = self._retried(lambda: self._reader.slot(slot, known), logging.DEBUG)
        except CorruptDataError as error:
            return error
        if last is None:
            return None
        following = last.record.next_epoch
        return _End(last.version, slot.epoch) if following is None else _End(last.record.base, following)

    def _damaged(self, slot: Slot, error: CorruptDataError) -> _End | None:
        """Return where the log ends if this is its last slot, which cannot be read; None if it is not this
        run's.
        """
        if self._reader.trusted is not None:
            try:
                found = self._retried(lambda: self._document(slot), logging.DEBUG)
            except (FormatError, ObjectMissingError):
                self._foreign.setdefault(slot.key, str(error))
                return None
            if found.next_epoch is not None:
                return _End(found.base, found.next_epoch)
        return _End(
            VersionId(slot.version, slot.epoch, self._retried(lambda: self._digest(slot))), slot.epoch
        )

    def _document(self, slot: Slot) -> Record:
        """Return the document of a record whose body is damaged, if a trusted key has signed it."""
        data = self._store.read(slot.key, self._reader.channel().most_bytes(slot.key))
        return record.decode_document(data, len(data), slot.key, self._reader.trusted)

    def _digest(self, slot: Slot) -> str:
        """Return the digest of a record that cannot be read; if it is too large, the digest of its
        beginning.
        """
        most = self._reader.channel().most_bytes(slot.key)
        try:
            return sha256_hex(self._store.read(slot.key, most))
        except CorruptDataError:
            return sha256_hex(self._store.read_range(slot.key, 0, most))
