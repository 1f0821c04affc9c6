"""A replica's knowledge of a channel: the newest version (`Tip`), records that were read ahead or announced
(`Reads`), objects to avoid (`Skips`), and how the newest version is found again (`Search`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from deltasync import limits
from deltasync.channel import keys
from deltasync.channel.documents import Head, VersionId
from deltasync.channel.keys import Slot
from deltasync.channel.reading import ChannelReader
from deltasync.channel.record import StoredRecord
from deltasync.errors import DeltaSyncError, FormatError, MissingVersionError, NotPublishedError, StoreError
from deltasync.stores.base import ObjectInfo
from deltasync.threads import each

logger = logging.getLogger(__name__)

SKIP_S = 60.0
"""Seconds for which a missing or damaged object is avoided."""

_LIST_EVERY = 12  # one of this many refreshes lists, if head does not name the newest version that is known
_CLOCKS_S = 2.0  # most by which our clock may differ from the store's, which may have whole seconds only
_LISTS_S = 600.0  # how long a replica lists where a cache remembers that a record was missing
# how long listings and its key must not show a version that was read: caches may be behind, both at once
_LOST_S = 20.0


@dataclasses.dataclass(slots=True)
class Tip:
    """The newest version that is known. It goes back only where the store was proven to have lost it.

    A version counts once its record was read with the digest that names it, or once a record that builds on
    it was.

    Attributes:
        version: That version; None before the first.
        record: Its record, if it was read.
        next_epoch: The epoch that a seal named as the next one, while no version of it is known.
        damaged: Why a record that is newer cannot be read; None if there is none.
    """

    version: VersionId | None = None
    record: StoredRecord | None = None
    next_epoch: str | None = None
    damaged: FormatError | None = None

    @property
    def number(self) -> int:
        """Its number; 0 before the first."""
        return 0 if self.version is None else self.version.version

    @property
    def epoch(self) -> str | None:
        """The newest epoch that is known: named by a seal, or the version's; None before the first version."""
        return self.next_epoch or (None if self.version is None else self.version.epoch)

    def is_before(self, slot: Slot | None) -> bool:
        """Whether a slot is of a later version."""
        return slot is not None and (self.version is None or slot.newness > self.version.slot.newness)

    def note(self, version: VersionId, read: StoredRecord | None = None) -> None:
        """Note that a version exists: `read` is its record, None if a checked seal or shortcut names it."""
        if self.is_before(version.slot):
            self.version, self.record = version, None
        if read is not None and self.version == version:
            self.record = read
        begun = 0 if self.version is None else keys.epoch_number(self.version.epoch)
        if self.next_epoch is not None and begun >= keys.epoch_number(self.next_epoch):
            self.next_epoch = None

    def go_back(self, version: VersionId | None) -> None:
        """Forget the version: this one is the newest."""
        self.version, self.record = version, None


@dataclasses.dataclass(frozen=True, slots=True)
class Skip:
    """An object to avoid until a time, by `time.monotonic`, and why.

    With `sha256`, the bytes with this digest promise other bits than they give: they are avoided for ever,
    and other bytes at their key are not. `base` is the version that they build on.
    """

    until_s: float
    why: str
    sha256: str | None = None
    base: VersionId | None = None


class Skips:
    """Objects to avoid. A skip ends with its time, or once other bytes are at its key, as after a repair.

    Attributes:
        by_key: The skips, by the objects' keys.
    """

    def __init__(self, reader: ChannelReader, tip: Tip) -> None:
        self.by_key: dict[str, Skip] = {}
        self._reader, self._tip = reader, tip
        self._last = ""  # the key that was blamed last

    def blame(self, chain: Sequence[StoredRecord], key: str | None, why: object) -> bool:
        """Avoid what was wrong with a chain. Returns whether its records are to be taken one by one, to find
        out which of them is wrong.

        `key` is that of the record whose objects were missing or damaged; None if the bits were not the
        promised ones.
        """
        first = chain[0]
        self._last = key or first.key
        # a reference's bits are outside the channel
        if key is not None or (len(chain) == 1 and first.record.reference is not None):
            self.by_key[self._last] = Skip(time.monotonic() + SKIP_S, str(why))
        elif len(chain) > 1:
            return True
        elif self._bytes_at(first.key) == first.sha256:
            self.by_key[first.key] = Skip(math.inf, str(why), first.sha256, first.record.base)
        elif self._tip.version == first.version:
            # a damaged answer was taken for a record: there is no such version
            self._tip.go_back(first.record.base)
        return False

    def forgive(self) -> None:
        """Allow what was blamed last: the bits in memory were at fault."""
        self.by_key.pop(self._last, None)

    def retry(self) -> None:
        """Retry missing and damaged objects at once, but not those with wrong bits."""
        self.by_key = {key: skip for key, skip in self.by_key.items() if skip.sha256 is not None}

    def why(self, key: str) -> str | None:
        """Return why the object at a key is avoided, None if it is not."""
        skip = self.by_key.get(key)
        if skip is None:
            return None
        is_replaced = skip.sha256 is not None and self._bytes_at(key) not in (None, skip.sha256)
        if time.monotonic() < skip.until_s and not is_replaced:
            return skip.why
        del self.by_key[key]
        newest = self._tip.version
        if newest is not None and (newest.key, newest.sha256) == (key, skip.sha256):
            self._tip.go_back(skip.base)
        return None

    def all(self) -> dict[str, str]:
        """Return why each object is avoided, by key."""
        return {key: why for key in [*self.by_key] if (why := self.why(key)) is not None}

    def _bytes_at(self, key: str) -> str | None:
        """Return the digest of the record at a key; None if there is none now, "" if it is no record."""
        try:
            return self._reader.stored(key).sha256
        except FormatError:
            return ""
        except (MissingVersionError, StoreError):
            return None


class Reads:
    """Records that were read ahead or announced, for one caller.

    Attributes:
        known: Entries of records that the store announced, which this call of `Cursor.next` reads, by key.
        ahead: Objects that were read at once, by key; None: missing.
    """

    def __init__(self, reader: ChannelReader) -> None:
        self.known: dict[str, ObjectInfo] = {}
        self.ahead: dict[str, Any] = {}
        self._reader = reader
        self._announced: dict[str, ObjectInfo] = {}
        self._absent: tuple[str, float] | None = None  # the slot whose record was missing, and since when
        # until then records are listed, because a cache remembers that they were missing
        self._lists_until_s = 0.0

    def announce(self, info: ObjectInfo) -> None:
        """Note a record that the store announced. From any thread."""
        if len(self._announced) >= limits.ANNOUNCED_RECORDS:
            self._announced = {}
        self._announced[info.key] = info

    def begin(self) -> None:
        """Read what was announced until now."""
        self.known, self._announced = self._announced, {}

    def keep(self, tip: Tip) -> bool:
        """Keep what was announced of versions after the tip for the next call; return whether there is any."""
        later = {key: info for key, info in self.known.items() if tip.is_before(keys.slot_of(key))}
        self._announced = later | self._announced
        return bool(later)

    def read_ahead(self, slots: Sequence[Slot], with_head: bool) -> None:
        """Read the records of slots, and head, at once, unless the first was read ahead before."""
        if slots[0].key in self.ahead:
            return
        reads: dict[str, Callable[[], Any]] = {slot.key: functools.partial(self.ask, slot) for slot in slots}
        if with_head:
            reads[keys.HEAD] = self._reader.head

        def read(key: str) -> Any:
            try:
                return reads[key]()
            except DeltaSyncError as error:
                return error

        found = dict(zip(reads, each([*reads], read, None), strict=True))
        for slot in slots[1:]:  # nobody needs it yet
            if isinstance(found[slot.key], StoreError):
                del found[slot.key]
        self.ahead |= found

    def take(self, key: str, read: Callable[[], Any]) -> Any:
        """Return the object that was read ahead at this key, else the result of `read`."""
        if key not in self.ahead:
            return read()
        found = self.ahead[key] if self.ahead[key] is None else self.ahead.pop(key)
        if isinstance(found, DeltaSyncError):
            raise found
        return found

    def ask(self, slot: Slot) -> StoredRecord | None:
        """Return the record in a slot, if there is one."""
        info = self.known.get(slot.key)
        if info is None and time.monotonic() < self._lists_until_s:
            info = dict(self._reader.slots(keys.folder(slot.version))).get(slot)
            if info is None:
                return None
        return self._reader.slot(slot, info)

    def lacks(self, key: str) -> None:
        """Note that a record was missing."""
        self._absent = key, time.time()

    def compare(self, listing: Sequence[tuple[Slot, ObjectInfo]]) -> None:
        """List from now on if a record was there already when a request for it said that it is missing."""
        key, since_s = self._absent or ("", 0.0)
        if any(info.key == key and 0 < info.modified_s < since_s - _CLOCKS_S for _, info in listing):
            self._lists_until_s = time.monotonic() + _LISTS_S


class Search:
    """Finds the newest version by head, else by a listing.

    Attributes:
        due_s: When the next refresh is due, by `time.monotonic`.
        head: Head as of the last refresh.
    """

    def __init__(self, reader: ChannelReader, tip: Tip, skips: Skips, reads: Reads) -> None:
        self.due_s = 0.0
        self.head: Head | None = None
        self._reader, self._tip, self._skips, self._reads = reader, tip, skips, reads
        self._count = 0  # of refreshes
        self._unproven: VersionId | None = None  # named by head, but not readable
        # a version that the store seems to have lost, and since when
        self._lacking: tuple[VersionId, float] | None = None

    def refresh(self, due_s: float, *, lists: bool = False) -> None:
        """Find the newest version by head, else, or if it `lists`, by a listing; expired skips go. The next
        is due after `due_s`.

        Raises:
            NotPublishedError, RunMismatchError: the channel is gone, or another run's.
            FormatError: there are records, and none can be read.
            MissingVersionError: the store has lost the newest version of a signed channel.
        """
        now_s, tip = time.monotonic(), self._tip
        self.due_s, tip.damaged = now_s + due_s, None
        for key, skip in [*self._skips.by_key.items()]:
            if now_s >= skip.until_s or (tip.version is not None and key == tip.version.key):
                self._skips.why(key)
        self._count += 1
        self._reader.channel()
        self.head = self._reads.take(keys.HEAD, self._reader.head)
        is_confirmed, is_worth_a_list = self._prove(self.head)
        is_worth_a_list = is_worth_a_list or self._count % _LIST_EVERY == 0
        if lists or self._lacking is not None or (is_worth_a_list and not is_confirmed):
            self._list()
        elif self.head is None:
            self._reader.check_run()

    def _prove(self, head: Head | None) -> tuple[bool, bool]:
        """Read the record that head names, if it is newer than the newest version.

        Returns whether head names the newest version, and whether a listing may find a newer one.
        """
        named, newest = None if head is None else head.newest, self._tip.version
        if named is None or not self._tip.is_before(named.slot):
            goes_back = named is not None and newest is not None and named.epoch != newest.epoch
            return named is not None and named == newest, newest is None or goes_back
        is_new, self._unproven = named != self._unproven, named
        if self._skips.why(named.key) is not None:
            return False, newest is None
        try:
            self._tip.note(named, self._reader.record(named))
        except (MissingVersionError, FormatError) as error:
            logger.info("deltasync: head names %s: %s", named, error)
            if not is_new or not self._is_led_to(named):
                return False, is_new or newest is None
            self._tip.note(named)
        return True, False

    def _is_led_to(self, version: VersionId) -> bool:
        """Whether a shortcut leads to a version whose record cannot be read: the shortcut names that
        record.
        """
        for span, info in self._reader.shortcuts():
            with contextlib.suppress(MissingVersionError, FormatError):
                if (
                    span.version == version.version
                    and self._reader.stored(info.key, known=info).version == version
                ):
                    return True
        return False

    def _list(self) -> None:
        """Find the newest version that can be read by a listing of the newest records. Raises as `refresh`."""
        reader, tip = self._reader, self._tip
        if self._count > 1:  # at first channel.json was just read
            reader.check_run()
        listing = reader.newest_slots()
        self._reads.compare(listing)
        stored, damaged = reader.newest_readable(listing)
        if stored is None:
            tip.next_epoch = None
            if damaged is not None or tip.version is not None:
                raise damaged or NotPublishedError(f"{reader.store.url} holds no version any more.")
            return
        is_version = stored.record.is_version
        found, newest = stored.version if is_version else stored.record.base, tip.version
        if not is_version and tip.is_before(stored.record.slot):
            tip.next_epoch = stored.record.next_epoch
        if found is None:
            return
        if newest is None or found.slot.newness >= newest.slot.newness:
            tip.damaged, self._lacking = damaged, None
        elif self._is_lost(newest, found):
            self._lacking = None
            tip.go_back(None)
        tip.note(found, stored if is_version else None)

    def _is_lost(self, newest: VersionId, found: VersionId) -> bool:
        """Whether the store was restored from a backup without the newest version, and has lacked it for a
        while.

        Raises:
            MissingVersionError: it was, and the channel is signed.
        """
        try:  # by its key, because a listing may be behind; another writer's seal may be there, too
            there = self._reader.slot(newest.slot)
            is_there = there is not None and there.sha256 == newest.sha256
        except FormatError:
            is_there = True
        if is_there:
            self._lacking = None
            return False
        if self._lacking is None or self._lacking[0] != newest:
            self._lacking = newest, time.monotonic()
        # Of two epochs of one number each was opened where the other was not: the store went back in between.
        is_proven = found.epoch != newest.epoch and keys.epoch_number(found.epoch) == keys.epoch_number(
            newest.epoch
        )
        if not is_proven and time.monotonic() - self._lacking[1] < _LOST_S:
            return False
        sentence = f"Version {newest} is not in the store any more, which holds {found} as the newest."
        # otherwise whoever can restore signed records could take a replica back
        if self._reader.trusted is not None:
            raise MissingVersionError(f"{sentence} If it was restored from a backup, restart this replica.")
        logger.warning("%s Starting from full weights.", sentence)
        return True
