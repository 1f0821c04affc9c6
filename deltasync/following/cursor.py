"""A replica's position in a channel, and where it goes next. This touches no weights, and every kind of replica uses it.

poll      read the record after the newest version: in steady state, the only request
refresh   find the newest version by head or by a listing: at first, when lost, and now and then
plan      find the cheapest chain of records to the version that the pin points to (`channel.plan`)

One rule covers whatever fails: its key is skipped for a while, and the next refresh plans around it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from deltasync.channel import keys
from deltasync.channel.documents import Head, VersionId
from deltasync.channel.keys import Slot
from deltasync.channel.plan import find_chain, find_chain_back, is_revert, payload_bytes
from deltasync.channel.reading import ChannelReader
from deltasync.channel.record import StoredRecord
from deltasync.channel.threads import each
from deltasync.errors import (
    CorruptDataError,
    DeltaSyncError,
    FormatError,
    MissingVersionError,
    NotPublishedError,
    StaleChannelError,
    StoreError,
)
from deltasync.following.pin import NEWEST, Pin
from deltasync.following.prefetch import Prefetch
from deltasync.stores.base import ObjectInfo

logger = logging.getLogger(__name__)

REFRESH_S = 5.0
"""Seconds between two refreshes while a replica polls, and after a refresh that failed; doubled while it goes on failing."""

_REFRESH_PUSHED_S = 30.0  # the same while the store announces new records
_SLOWEST_S = 60.0
_LIST_EVERY = 12  # one of this many refreshes lists, if head does not name the newest version that is known
_CLOCKS_S = 2.0  # most by which our clock may differ from the store's, which may have whole seconds only
_LISTS_S = 600.0  # how long a replica lists where something remembers that a record was missing
_SKIP_S = 60.0
_SEALS = 16  # most records and seals that one poll follows
_BATCH = 64  # most records merged into one commit
_BATCH_BYTES = 1 << 28  # most bytes of their payloads; what they decode to is held in memory
_IDENTIFY = 8  # how many of the newest versions and anchors are compared with loaded weights


NOTHING_KNOWN: Mapping[str, ObjectInfo] = MappingProxyType({})


class ChannelCursor:
    """One replica's position in a channel. Not thread-safe.

    `next` raises if the newest version was encoded more than `max_age_s` ago. With `prefetch`, parts are fetched before
    their record exists, into the reader or the node's cache.

    Attributes:
        newest: The newest version whose record was read and checked. It goes back only where the store was proven to have
            lost it.
        failure: Why the channel cannot be followed; `next` raises it until a refresh succeeds. None if it can.
        followed_s: When the channel could last be followed, by `time.monotonic`; None before the first time.
        follows_s: Since when this replica takes what is published, seconds since the epoch; infinite while it is pinned.
    """

    def __init__(self, reader: ChannelReader, max_age_s: float | None = None, prefetch: bool = True) -> None:
        self.reader = reader
        self.newest: VersionId | None = None
        self.failure: DeltaSyncError | None = None
        self.followed_s: float | None = None
        self.follows_s = time.time()
        self._max_age_s = max_age_s
        self._prefetch = Prefetch(reader) if prefetch else None
        self._read_last: StoredRecord | None = None  # the record of the newest version, if it was read
        self._served: tuple[str, int] = "", 0  # `Slot.newness` of the newest version that was served
        self._pin = NEWEST  # the last call's
        self._refresh_due_s = self._retry_due_s = 0.0
        self._head: Head | None = None  # as of the last refresh
        self._refreshes = self._failures = 0
        self._lost = True  # whether a poll is no use before a refresh
        self._moved = self._lags = False  # whether the last call returned records; whether the last two did
        self._rest: list[StoredRecord] = []  # the rest of the last chain
        self._next_epoch: str | None = None  # named by a seal
        self._ahead: dict[str, Any] = {}  # by key: objects that were read at once for one caller; None: missing
        self._damaged: FormatError | None = None  # why a record that is newer than the newest version cannot be read
        self._unproven: VersionId | None = None  # named by head, but not readable
        self._absent: tuple[str, float] | None = None  # the slot whose record was missing, and since when
        self._lists_until_s = 0.0  # until then records are listed, because what answers remembers that they were missing
        self._skipped: dict[str, tuple[float, str]] = {}  # objects that plans avoid: until when, and why
        self._singly_to = 0  # versions up to this one are taken one by one
        self._undoes = True  # whether to go back by undoing; until that fails
        self._blamed = ""  # what was skipped last
        self._checked: tuple[VersionId, str, int] | None = None  # a version that this newer epoch has by this number

    @property
    def epoch(self) -> str | None:
        """The newest epoch that is known: named by a seal, or the newest version's; None before the first version."""
        return self._next_epoch or (None if self.newest is None else self.newest.epoch)

    def next(
        self,
        have: VersionId | None,
        *,
        pin: Pin = NEWEST,
        known: Mapping[str, ObjectInfo] = NOTHING_KNOWN,
        refresh: bool = False,
        ahead: bool = False,
        pushed: bool = False,
    ) -> list[StoredRecord]:
        """Return the records and compactions to take now, in one commit; empty if `have` is where the pin points.

        Args:
            have: The version that the replica holds.
            pin: Which versions it takes.
            known: New records that events announced, by key; these are read without a request for the key.
            refresh: Refresh, even if none is due.
            ahead: Read head and the next two records at once; later calls with `ahead`, but without `refresh`, use them too.
            pushed: The store announces new records, so that refreshes can be rare.

        Raises:
            NotPublishedError: the channel has no version yet, or none that the pin allows.
            MissingVersionError: no chain leads there now; ask again later.
            ChainError, FormatError, StoreError: nothing can be taken now.
        """
        if pin != self._pin:
            self._pin, self._lost, self._undoes = pin, True, True
            self.follows_s = time.time() if pin == NEWEST else math.inf
            self.failure = None
        elif self._rest and self._rest[0].base == have:
            return self._batch(self._rest, have)
        self._rest = []
        now_s, forced = time.monotonic(), refresh or self._lost
        refresh = forced or now_s >= self._refresh_due_s
        if self.failure is not None and not refresh and not known:
            raise self.failure
        try:
            is_outage = isinstance(self.failure, StoreError)
            if self.failure is not None and not (forced or is_outage) and now_s < self._retry_due_s and self._is_head_same():
                raise self.failure
            chain = self._next(have, known, refresh or self.failure is not None, ahead or self._lags, pushed)
        except DeltaSyncError as error:
            self._failed(error, have)
            raise
        self.failure, self.followed_s, self._failures = None, time.monotonic(), 0
        # Several versions at once are cheaper. Events tell by themselves how many there are.
        self._lags = self._moved and len(chain) == 1 and not known
        if self._lags:
            self._refresh_due_s = 0.0
        self._moved = bool(chain)
        return self._batch(chain, have)

    def _is_head_same(self) -> bool:
        """Whether head is as in the last refresh, which failed: a retry would plan on the same objects."""
        return self.reader.head() == self._head

    def _failed(self, error: DeltaSyncError, have: VersionId | None) -> None:
        """Note an error of `next`, unless it only says that a version is not published yet."""
        newest = 0 if self.newest is None else self.newest.version
        awaited = have is None or self._pin.of(newest) == 0 if isinstance(error, NotPublishedError) else False
        if isinstance(error, MissingVersionError):
            awaited = self._pin.version is not None and self._pin.version > newest
        if awaited:
            self.failure, self.followed_s = None, time.monotonic()
            return
        now_s, is_outage = time.monotonic(), isinstance(error, StoreError)
        self._refresh_due_s = 0.0 if is_outage else now_s + REFRESH_S
        if error is not self.failure:  # otherwise nothing was tried
            self._retry_due_s = now_s + min(_SLOWEST_S, REFRESH_S * 2**self._failures)
            self._failures += 1
        self.failure, self._lost = error, is_outage and self._lost

    def _next(
        self, have: VersionId | None, known: Mapping[str, ObjectInfo], refresh: bool, ahead: bool, pushed: bool
    ) -> list[StoredRecord]:
        is_there = have is not None and have.version == self._pin.version
        if not refresh and is_there:
            return []
        if refresh or not ahead:
            self._ahead = {}
        is_exact, ahead = ahead, ahead and have is not None and self.failure is None
        if ahead:
            self._read_ahead(refresh)
        elif refresh:
            lists = self.failure is not None and not isinstance(self.failure, StoreError)
            self._refresh(lists, _REFRESH_PUSHED_S if pushed else REFRESH_S)
        found: list[StoredRecord] = []
        newest = 0 if self.newest is None else self.newest.version
        joins = have is None and 0 < self._pin.of(newest) <= newest
        waits = (self._pin.version or 0) > newest
        try:
            if not is_there and not joins and (not refresh or is_exact or waits or known):
                found = self._poll(known)
            if ahead and refresh:
                self._refresh(False, _REFRESH_PUSHED_S if pushed else REFRESH_S)
        except FormatError as error:
            before = self.newest
            self._refresh(True, REFRESH_S)
            if self.newest == before:
                self._damaged = error
        self._lost = False
        try:
            chain = self._plan(have, found)
        except MissingVersionError:
            if waits and not (is_exact and self._is_listed(self._pin.version or 0)):
                raise
            if not waits:
                self._refresh(True, REFRESH_S)  # what it was planned on may be gone by now
            chain = self._plan(have, [])
        self._check_age()
        if not chain and self._damaged is not None and self._pin.version is None:
            raise self._damaged
        return chain

    def lag_s(self, chain: Sequence[StoredRecord]) -> float | None:
        """Return the seconds since the version that `chain` led to, or its compaction, was encoded, by two machines' clocks.

        Call it when that version is served. None where that is no lag: the version was encoded before this replica followed,
        is older than one that was served, or a pin says when to take it.
        """
        record = chain[-1].record
        # Documents have milliseconds.
        is_news = record.created_s > self.follows_s - 0.001 and record.slot.newness > self._served
        self._served = max(self._served, record.slot.newness)
        return time.time() - record.created_s if is_news else None

    def mark_bad(self, chain: Sequence[StoredRecord], key: str | None = None, why: object = "") -> None:
        """Avoid this chain from now on.

        `key` is that of the record whose objects were missing or damaged; None if the bits were not the promised ones.
        """
        self._lost, self._rest = True, []
        if is_revert(chain):
            self._undoes = False
            return
        if key is not None:
            self._skip(key, str(why))
        elif len(chain) > 1:
            self._singly_to = chain[-1].record.version  # to find out which of them is wrong
        elif self._is_again(chain[0]):
            self._skip(chain[0].key, str(why), math.inf)
        elif self.newest == chain[0].version:  # there is no such version
            self.newest = chain[0].record.base
        self._blamed = key or chain[0].key

    def clear_bad(self) -> None:
        """Allow again what was marked last: an audit found that the bits in memory were at fault."""
        self._skipped.pop(self._blamed, None)
        self._lost = True

    def retry_bad(self) -> None:
        """Try again what was missing or damaged, but not what gave other bits than it promises."""
        self._skipped = {key: entry for key, entry in self._skipped.items() if entry[0] == math.inf}

    def _skip(self, key: str, why: str, for_s: float = _SKIP_S) -> None:
        self._skipped[key] = time.monotonic() + for_s, why

    def _is_again(self, stored: StoredRecord) -> bool:
        """Whether the store gives the same record again. If not, a damaged answer was taken for a record."""
        try:
            return self.reader.stored(stored.key).sha256 == stored.sha256
        except (MissingVersionError, FormatError, StoreError):
            return False

    def locate(self) -> None:
        """Find the newest version, unless it is known.

        Raises:
            NotPublishedError: the channel has no version yet.
        """
        if self.newest is None:
            self._refresh(False, REFRESH_S)
        if self.newest is None:
            raise NotPublishedError(f"{self.reader.store.url} holds no version yet.")
        self._lost = False

    def identify(self, total: int) -> StoredRecord | None:
        """Find the version whose model has this fingerprint, among the newest ones and those with full weights.

        Raises:
            NotPublishedError: the channel has no version yet.
        """
        self.locate()
        newest = self.reader.back_from(self.newest)
        for stored in itertools.chain(itertools.islice(newest, _IDENTIFY), self._from_nothing()):
            if stored.record.fingerprint == f"{total:016x}":
                return self.reader.record(stored.version) if stored.is_shortcut else stored
        return None

    def tied(self) -> dict[str, str]:
        """Return the tensors that the channel's first checkpoint has under another name only."""
        references = (stored.record.reference for stored in self._from_nothing())
        return next((reference.tied for reference in references if reference is not None), {})

    def _from_nothing(self) -> Iterator[StoredRecord]:
        """Yield the newest announced anchors, then the first record."""
        announced = sorted(((span.version, info.key) for span, info in self.reader.announcements()), reverse=True)
        first = [info.key for _, info in self.reader.slots(keys.folder(1))[:1]]
        for key in [*(key for _, key in announced[:_IDENTIFY]), *first]:
            with contextlib.suppress(MissingVersionError, FormatError):
                yield self.reader.stored(key)

    # The newest version: read ahead, poll, refresh

    def _read_ahead(self, with_head: bool) -> None:
        """Read head and the next two records at once, unless the next one was read ahead before."""
        slot = self._next_slot()
        if slot.key in self._ahead:
            return
        slots = [slot] if slot.version == self._pin.version else [slot, Slot(slot.version + 1, slot.epoch)]
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
        """Return what was read ahead at this key, else what `read` does."""
        if key not in self._ahead:
            return read()
        found = self._ahead[key] if self._ahead[key] is None else self._ahead.pop(key)
        if isinstance(found, DeltaSyncError):
            raise found
        return found

    def _poll(self, known: Mapping[str, ObjectInfo]) -> list[StoredRecord]:
        """Read the record after the newest version, and those after it that were read ahead or announced.

        Returns those that are there.

        Raises:
            FormatError: the next record cannot be used.
        """
        found: list[StoredRecord] = []
        for _ in range(_SEALS):
            slot = self._next_slot()
            if found and slot.key not in self._ahead and slot.key not in known:
                break
            if slot.key in self._skipped:
                raise CorruptDataError(self._skipped[slot.key][1])
            ask = functools.partial(self._ask, slot, known)
            stored: StoredRecord | None = self._read(slot.key, ask)
            while stored is None and not found and self._prefetch is not None and self._prefetch.expect(slot):
                stored = ask()
            if stored is not None and slot.version != self._pin.version and stored.record.base != self.newest:
                raise CorruptDataError(f"{slot.key} does not follow version {self.newest}.")
            if stored is None:
                self._absent = slot.key, time.time()
                break
            if stored.record.next_epoch is not None:
                self._next_epoch = stored.record.next_epoch
                continue
            self._note(stored.version, stored)
            found.append(stored)
            if self._prefetch is not None:
                self._prefetch.took(stored)
        return found

    def _is_listed(self, number: int) -> bool:
        """Whether a version is in the log of an epoch that head does not name yet; if so, it is the newest."""
        try:
            stored = self.reader.numbered(number)
        except MissingVersionError:
            return False
        self._note(stored.version, stored)
        return self.newest == stored.version

    def _next_slot(self) -> Slot:
        """Return the slot after the newest version, or that of the later version which a pin waits for."""
        number = 1 if self.newest is None else self.newest.version + 1
        return Slot(max(number, self._pin.version or 0), self.epoch or self.reader.channel().epoch)

    def _ask(self, slot: Slot, known: Mapping[str, ObjectInfo] = NOTHING_KNOWN) -> StoredRecord | None:
        """Return the record in a slot, if there is one."""
        info = known.get(slot.key)
        if info is None and time.monotonic() < self._lists_until_s:
            info = dict(self.reader.slots(keys.folder(slot.version))).get(slot)
            if info is None:
                return None
        return self.reader.slot(slot, info)

    def _refresh(self, lists: bool, due_s: float) -> None:
        """Find the newest version by head, else, or if it `lists`, by a listing; the next refresh is due after `due_s`."""
        now = time.monotonic()
        self._skipped = {key: entry for key, entry in self._skipped.items() if now < entry[0]}
        self._refresh_due_s, self._damaged = now + due_s, None
        self._refreshes += 1
        self.reader.channel()
        head: Head | None = self._read(keys.HEAD, self.reader.head)
        self._head = head
        is_confirmed, is_worth_a_list = self._prove(head)
        if lists or (not is_confirmed and (is_worth_a_list or self._refreshes % _LIST_EVERY == 0)):
            self._list()
        elif head is None:
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
        if named.key in self._skipped:
            return False, newest is None
        try:
            self._note(named, self.reader.record(named))
        except (MissingVersionError, FormatError) as error:
            logger.info("deltasync: head names %s: %s", named, error)
            if not is_new or not self._is_led_to(named):
                return False, is_new or newest is None
            self._note(named)
        return True, False

    def _is_led_to(self, version: VersionId) -> bool:
        """Whether a shortcut leads to a version whose record cannot be read: the shortcut names that record."""
        for span, info in self.reader.shortcuts():
            with contextlib.suppress(MissingVersionError, FormatError):
                if span.version == version.version and self.reader.stored(info.key, known=info).version == version:
                    return True
        return False

    def _list(self) -> None:
        """Find the newest version that can be read by a listing of all records.

        Raises:
            NotPublishedError, RunMismatchError: the channel is gone, or another run's.
            FormatError: there are records, and none can be read.
            MissingVersionError: the store has lost the newest version of a signed channel.
        """
        self.reader.check_run()
        listing = self.reader.slots()
        if self._absent is not None:
            key, since_s = self._absent
            if any(info.key == key and 0 < info.modified_s < since_s - _CLOCKS_S for _, info in listing):
                self._lists_until_s = time.monotonic() + _LISTS_S
        stored, damaged = self.reader.newest_readable(listing)
        if stored is None:
            self._next_epoch = None
            if damaged is not None or self.newest is not None:
                raise damaged or NotPublishedError(f"{self.reader.store.url} holds no version any more.")
            return
        is_version = stored.record.is_version
        found, newest = stored.version if is_version else stored.record.base, self.newest
        if not is_version and (newest is None or stored.record.slot.newness > newest.slot.newness):
            self._next_epoch = stored.record.next_epoch
        if found is None:
            return
        if newest is None or found.slot.newness >= newest.slot.newness:
            self._damaged = damaged
        elif self._is_lost(newest, found):
            self.newest = None
        self._note(found, stored if is_version else None)

    def _is_lost(self, newest: VersionId, found: VersionId) -> bool:
        """Whether the store was restored from a backup without the newest version.

        Raises:
            MissingVersionError: it was, and the channel is signed.
        """
        try:  # by its key, because a listing may be behind; another writer's seal may lie there, too
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

    def _note(self, version: VersionId, read: StoredRecord | None = None) -> None:
        """Note that a version exists: `read` is its record, None if a checked seal names it."""
        if self.newest is None or version.slot.newness > self.newest.slot.newness:
            self.newest, self._read_last = version, None
        if read is not None and self.newest == version:
            self._read_last = read
        if self._next_epoch is not None and self.newest.epoch >= self._next_epoch:
            self._next_epoch = None

    def _check_age(self) -> None:
        """Raise StaleChannelError if the newest version is too old."""
        if self._max_age_s is None or self.newest is None:
            return
        if self._read_last is None:
            self._read_last = self.reader.record(self.newest)
        age_s = time.time() - self._read_last.record.created_s
        if age_s > self._max_age_s:
            raise StaleChannelError(
                f"The newest version, {self.newest.version}, is {age_s:.0f} s old, and {self._max_age_s:g} s are allowed: "
                "nothing newer was published, or somebody keeps it back."
            )

    # The chain to where the pin points

    def _plan(self, have: VersionId | None, found: Sequence[StoredRecord]) -> list[StoredRecord]:
        """Return the chain to where the pin points; `found` are the newest records, if they were polled."""
        newest = self.newest
        number = 0 if newest is None else self._pin.of(newest.version)
        if newest is None or not number:
            where = "" if newest is None else f" for {self._pin}"
            raise NotPublishedError(f"{self.reader.store.url} holds no version yet{where}.")
        if number > newest.version:
            absent = MissingVersionError(f"Version {number} is not published; the newest is version {newest.version}.")
            raise self._damaged or absent
        if have is not None and have.version == number and have.epoch == newest.epoch:
            return []
        if found and found[0].base == have and found[-1].version == newest and number == newest.version:
            return list(found)
        if have is not None and self._checked == (have, newest.epoch, number):
            return []
        target = None if number == newest.version else self.reader.numbered(number)
        wanted = newest if target is None else target.version
        if have == wanted:
            self._checked = have, newest.epoch, number
            return []
        if have is None or have.version < number:
            return self._find_chain(have, wanted)
        if target is not None and self._undoes and have.version > number:
            chain = find_chain_back(self.reader, have, target, self._avoided())
            if chain and len(chain) <= _BATCH and payload_bytes(chain) <= _BATCH_BYTES:
                return chain
        if target is None:
            logger.warning("Version %s is not the channel's any more; starting from full weights.", have)
        return self._find_chain(None, wanted)

    def _find_chain(self, have: VersionId | None, target: VersionId) -> list[StoredRecord]:
        return find_chain(self.reader, have, target, self._avoided(), self._read_last)

    def _avoided(self) -> dict[str, str]:
        return {key: why for key, (_, why) in self._skipped.items()}

    def _batch(self, chain: Sequence[StoredRecord], have: VersionId | None) -> list[StoredRecord]:
        """Return the first records of a chain, those that go into one commit; keep the rest."""
        # A replica without weights takes full weights alone. For others a chain that starts from full weights is one commit,
        # because a replica that serves must not go back to an older version in between. So is a chain back.
        if is_revert(chain):
            return list(chain)
        most = 1 if have is not None and have.version < self._singly_to else _BATCH
        count, batch_bytes = 0, 0
        while count < len(chain):
            batch_bytes += chain[count].record.payload_bytes
            ends = have is None if chain[0].use_anchor else count >= most or batch_bytes > _BATCH_BYTES
            if count and ends:
                break
            count += 1
        self._rest = list(chain[count:])
        return list(chain[:count])
