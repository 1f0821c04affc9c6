"""The newest version of a channel. It is found by polling, by head or by a listing, and proven by its record."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from deltasync.channel import keys
from deltasync.channel.documents import Head, VersionId
from deltasync.channel.keys import Slot
from deltasync.channel.reading import ChannelReader
from deltasync.channel.record import StoredRecord
from deltasync.errors import (
    CorruptDataError,
    DeltaSyncError,
    FormatError,
    MissingVersionError,
    NotPublishedError,
    StaleChannelError,
    StoreError,
)
from deltasync.following.poll import Prefetch
from deltasync.stores.base import ObjectInfo
from deltasync.threads import each

logger = logging.getLogger(__name__)

NOTHING_KNOWN: Mapping[str, ObjectInfo] = MappingProxyType({})

_LIST_EVERY = 12  # one of this many refreshes lists, if head does not name the newest version that is known
_CLOCKS_S = 2.0  # most by which our clock may differ from the store's, which may have whole seconds only
_LISTS_S = 600.0  # how long a replica lists where a cache remembers that a record was missing
_SEALS = 16  # most records and seals that one poll follows


SKIP_S = 60.0
"""Seconds for which a missing or damaged object is avoided."""


@dataclasses.dataclass(frozen=True, slots=True)
class Skip:
    """An object to avoid until a time, by `time.monotonic`, and why.

    With `sha256`, the bytes with this digest promise other bits than they give: they are avoided for ever, and other bytes
    at their key are not. `base` is the version that they build on.
    """

    until_s: float
    why: str
    sha256: str | None = None
    base: VersionId | None = None


class Tip:
    """The newest version of a channel, as far as it was proven. Not thread-safe.

    A version counts once its record was read with the digest that names it, or once a record that builds on it was. With
    `prefetch`, parts are fetched before their record exists, into the reader or the node's cache.

    Attributes:
        newest: The newest version. It goes back only where the store was proven to have lost it.
        record: Its record, if that was read.
        next_epoch: The epoch that a seal named as the next one, while no version of it is known.
        damaged: Why a record that is newer than the newest version cannot be read; None if there is none.
        head: Head as of the last refresh.
        skips: The objects to avoid, by key.
    """

    def __init__(self, reader: ChannelReader, prefetch: bool = True) -> None:
        self.reader = reader
        self._prefetch = Prefetch(reader) if prefetch else None
        self.newest: VersionId | None = None
        self.record: StoredRecord | None = None
        self.next_epoch: str | None = None
        self.damaged: FormatError | None = None
        self.head: Head | None = None
        self.skips: dict[str, Skip] = {}
        self._refreshes = 0
        self._ahead: dict[str, Any] = {}  # by key: objects that were read at once for one caller; None: missing
        self._unproven: VersionId | None = None  # named by head, but not readable
        self._absent: tuple[str, float] | None = None  # the slot whose record was missing, and since when
        self._lists_until_s = 0.0  # until then records are listed, because a cache remembers that they were missing

    @property
    def epoch(self) -> str | None:
        """The newest epoch that is known: named by a seal, or the newest version's; None before the first version."""
        return self.next_epoch or (None if self.newest is None else self.newest.epoch)

    def note(self, version: VersionId, read: StoredRecord | None = None) -> None:
        """Note that a version exists: `read` is its record, None if a checked seal or shortcut names it."""
        if self.newest is None or version.slot.newness > self.newest.slot.newness:
            self.newest, self.record = version, None
        if read is not None and self.newest == version:
            self.record = read
        if self.next_epoch is not None and self.newest.epoch >= self.next_epoch:
            self.next_epoch = None

    def retract(self, base: VersionId | None) -> None:
        """Go back to `base`: the newest version was read from a damaged answer, and does not exist."""
        self.newest, self.record = base, None

    def why_skipped(self, key: str) -> str | None:
        """Return why the object at a key is avoided, None if it is not. A skip ends with its time, or with its bytes."""
        skip = self.skips.get(key)
        if skip is None or (time.monotonic() < skip.until_s and not self._is_replaced(key, skip)):
            return None if skip is None else skip.why
        del self.skips[key]
        if self.newest is not None and (self.newest.key, self.newest.sha256) == (key, skip.sha256):
            self.retract(skip.base)
        return None

    def _is_replaced(self, key: str, skip: Skip) -> bool:
        """Whether the store has other bytes than those that are avoided, as after a repair."""
        if skip.sha256 is None:
            return False
        try:
            return self.reader.stored(key).sha256 != skip.sha256
        except FormatError:
            return True
        except (MissingVersionError, StoreError):
            return False

    def check_age(self, most_s: float) -> None:
        """Raise StaleChannelError if the newest version was encoded more than `most_s` ago."""
        if self.newest is None:
            return
        if self.record is None:
            self.record = self.reader.record(self.newest)
        age_s = time.time() - self.record.record.created_s
        if age_s > most_s:
            raise StaleChannelError(
                f"The newest version, {self.newest.version}, is {age_s:.0f} s old, and {most_s:g} s are allowed: "
                "nothing newer was published, or somebody keeps it back."
            )

    # Read ahead

    def read_ahead(self, wanted: int, with_head: bool) -> None:
        """Read head and the next two records at once, unless the next one was read ahead before; `wanted` as in `poll`."""
        slot = self._next_slot(wanted)
        if slot.key in self._ahead:
            return
        slots = [slot] if slot.version == wanted else [slot, Slot(slot.version + 1, slot.epoch)]
        reads: dict[str, Callable[[], Any]] = {one.key: functools.partial(self._ask, one) for one in slots}
        if with_head:
            reads[keys.HEAD] = self.reader.head

        def read(key: str) -> Any:
            try:
                return reads[key]()
            except DeltaSyncError as error:
                return error

        found = dict(zip(reads, each(list(reads), read, None), strict=True))
        for other in slots[1:]:  # nobody needs it yet
            if isinstance(found[other.key], StoreError):
                del found[other.key]
        self._ahead |= found

    def _read(self, key: str, read: Callable[[], Any]) -> Any:
        """Return the object that was read ahead at this key, else the result of `read`."""
        if key not in self._ahead:
            return read()
        found = self._ahead[key] if self._ahead[key] is None else self._ahead.pop(key)
        if isinstance(found, DeltaSyncError):
            raise found
        return found

    # Poll

    def poll(self, wanted: int, known: Mapping[str, ObjectInfo]) -> list[StoredRecord]:
        """Read the record after the newest version, and those after it that were read ahead or announced.

        Args:
            wanted: The number of a later version that a pin waits for, instead of the next one; 0 for the next one.
            known: New records that events announced, by key.

        Returns:
            The records that are there.

        Raises:
            FormatError: the next record cannot be used.
        """
        found: list[StoredRecord] = []
        for _ in range(_SEALS):
            slot = self._next_slot(wanted)
            if found and slot.key not in self._ahead and slot.key not in known:
                break
            if (why := self.why_skipped(slot.key)) is not None:
                raise CorruptDataError(why)
            ask = functools.partial(self._ask, slot, known)
            stored: StoredRecord | None = self._read(slot.key, ask)
            while stored is None and not found and self._prefetch is not None and self._prefetch.expect(slot):
                stored = ask()
            if stored is not None and slot.version != wanted and stored.record.base != self.newest:
                raise CorruptDataError(f"{slot.key} does not follow version {self.newest}.")
            if stored is None:
                self._absent = slot.key, time.time()
                break
            if stored.record.next_epoch is not None:
                self.next_epoch = stored.record.next_epoch
                continue
            self.note(stored.version, stored)
            found.append(stored)
            if self._prefetch is not None:
                self._prefetch.took(stored)
        return found

    def is_listed(self, number: int) -> bool:
        """Whether a version is in the log of an epoch that head does not name yet; if so, it is the newest."""
        try:
            stored = self.reader.numbered(number)
        except MissingVersionError:
            return False
        self.note(stored.version, stored)
        return self.newest == stored.version

    def _next_slot(self, wanted: int) -> Slot:
        """Return the slot after the newest version, or that of the later version which a pin waits for."""
        number = 1 if self.newest is None else self.newest.version + 1
        return Slot(max(number, wanted), self.epoch or self.reader.channel().epoch)

    def _ask(self, slot: Slot, known: Mapping[str, ObjectInfo] = NOTHING_KNOWN) -> StoredRecord | None:
        """Return the record in a slot, if there is one."""
        info = known.get(slot.key)
        if info is None and time.monotonic() < self._lists_until_s:
            info = dict(self.reader.slots(keys.folder(slot.version))).get(slot)
            if info is None:
                return None
        return self.reader.slot(slot, info)

    # Find

    def find_newest(self, lists: bool) -> None:
        """Find the newest version by head, else, or if it `lists`, by a listing; expired skips go.

        Raises:
            NotPublishedError, RunMismatchError: the channel is gone, or another run's.
            FormatError: there are records, and none can be read.
            MissingVersionError: the store has lost the newest version of a signed channel.
        """
        now_s = time.monotonic()
        for key, skip in list(self.skips.items()):
            if now_s >= skip.until_s or (self.newest is not None and key == self.newest.key):
                self.why_skipped(key)
        self.damaged = None
        self._refreshes += 1
        self.reader.channel()
        self.head = self._read(keys.HEAD, self.reader.head)
        is_confirmed, is_worth_a_list = self._prove(self.head)
        if lists or (not is_confirmed and (is_worth_a_list or self._refreshes % _LIST_EVERY == 0)):
            self._list()
        elif self.head is None:
            self.reader.check_run()

    def _prove(self, head: Head | None) -> tuple[bool, bool]:
        """Read the record that head names, if it is newer than the newest version.

        Returns whether head names the newest version, and whether a listing may find a newer one.
        """
        named = None if head is None else head.newest
        newest = self.newest
        if named is None or named == newest or (newest is not None and named.slot.newness <= newest.slot.newness):
            return named is not None and named == newest, newest is None
        is_new, self._unproven = named != self._unproven, named
        if self.why_skipped(named.key) is not None:
            return False, newest is None
        try:
            self.note(named, self.reader.record(named))
        except (MissingVersionError, FormatError) as error:
            logger.info("deltasync: head names %s: %s", named, error)
            if not is_new or not self._is_led_to(named):
                return False, is_new or newest is None
            self.note(named)
        return True, False

    def _is_led_to(self, version: VersionId) -> bool:
        """Whether a shortcut leads to a version whose record cannot be read: the shortcut names that record."""
        for span, info in self.reader.shortcuts():
            with contextlib.suppress(MissingVersionError, FormatError):
                if span.version == version.version and self.reader.stored(info.key, known=info).version == version:
                    return True
        return False

    def _list(self) -> None:
        """Find the newest version that can be read by a listing of all records. Raises as `refresh`."""
        self.reader.check_run()
        listing = self.reader.slots()
        if self._is_hidden(listing):
            self._lists_until_s = time.monotonic() + _LISTS_S
        stored, damaged = self.reader.newest_readable(listing)
        if stored is None:
            self.next_epoch = None
            if damaged is not None or self.newest is not None:
                raise damaged or NotPublishedError(f"{self.reader.store.url} holds no version any more.")
            return
        is_version = stored.record.is_version
        found, newest = stored.version if is_version else stored.record.base, self.newest
        if not is_version and (newest is None or stored.record.slot.newness > newest.slot.newness):
            self.next_epoch = stored.record.next_epoch
        if found is None:
            return
        if newest is None or found.slot.newness >= newest.slot.newness:
            self.damaged = damaged
        elif self._is_lost(newest, found):
            self.newest = None
        self.note(found, stored if is_version else None)

    def _is_hidden(self, listing: Sequence[tuple[Slot, ObjectInfo]]) -> bool:
        """Whether a record was there already when a request for it said that it is missing."""
        if self._absent is None:
            return False
        key, since_s = self._absent
        return any(info.key == key and 0 < info.modified_s < since_s - _CLOCKS_S for _, info in listing)

    def _is_lost(self, newest: VersionId, found: VersionId) -> bool:
        """Whether the store was restored from a backup without the newest version.

        Raises:
            MissingVersionError: it was, and the channel is signed.
        """
        try:  # by its key, because a listing may be behind; another writer's seal may be there, too
            there = self.reader.slot(newest.slot)
        except FormatError:
            return False
        if there is not None and there.sha256 == newest.sha256:
            return False
        sentence = f"Version {newest} is not in the store any more, which holds {found} as the newest."
        if self.reader.trusted is not None:  # otherwise whoever can restore signed records could take a replica back
            raise MissingVersionError(f"{sentence} If it was restored from a backup, restart this replica.")
        logger.warning("%s Starting from full weights.", sentence)
        return True
