"""A replica's position in a channel, and where it goes next. This touches no weights, and every kind of
replica uses it.

poll      read the record after the newest version: in steady state, the only request
refresh   find the newest version by head or by a listing: at first, when lost, and now and then
plan      find the cheapest chain of records to the version that the pin points to (`channel.plan`)

One rule covers whatever fails: it is skipped (`Skip`), and the next refresh plans around it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from deltasync import limits
from deltasync.channel import keys
from deltasync.channel.documents import Head, VersionId
from deltasync.channel.keys import Slot
from deltasync.channel.plan import find_chain
from deltasync.channel.reading import ChannelReader
from deltasync.channel.record import StoredRecord
from deltasync.config import Pin
from deltasync.errors import (
    ChainError,
    CorruptDataError,
    DeltaSyncError,
    FormatError,
    MissingVersionError,
    NotPublishedError,
    StoreError,
)
from deltasync.following.poll import Prefetch
from deltasync.stores.base import ObjectInfo
from deltasync.threads import each

logger = logging.getLogger(__name__)

REFRESH_S = 5.0
"""Seconds between two refreshes while a replica polls, and after a refresh that failed; doubled while it goes
on failing.
"""

SKIP_S = 60.0
"""Seconds for which a missing or damaged object is avoided."""

_REFRESH_PUSHED_S = 30.0  # as `REFRESH_S`, while the store announces new records
_SLOWEST_S = 60.0
_LIST_EVERY = 12  # one of this many refreshes lists, if head does not name the newest version that is known
_CLOCKS_S = 2.0  # most by which our clock may differ from the store's, which may have whole seconds only
_LISTS_S = 600.0  # how long a replica lists where a cache remembers that a record was missing
# how long listings and its key must not show a version that was read: caches may be behind, both at once
_LOST_S = 20.0
_SEALS = 16  # most records and seals that one poll follows


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


class Cursor:
    """One replica's position in a channel. Not thread-safe, but for `announce`.

    A version counts once its record was read with the digest that names it, or once a record that builds on
    it was. With `prefetch`, parts are fetched before their record exists, into the reader or the node's
    cache. `next` raises if the newest version was encoded more than `max_age_s` ago.

    Attributes:
        newest: The newest version. It goes back only where the store was proven to have lost it.
        next_epoch: The epoch that a seal named as the next one, while no version of it is known.
        damaged: Why a record that is newer than the newest version cannot be read; None if there is none.
        skips: The objects to avoid, by key.
        failure: Why the channel cannot be followed; `next` raises it until a refresh succeeds. None if it
            can.
        follows_s: Since when this replica takes each new version, seconds since the epoch; infinite while it
            is pinned.
        took_announced: Whether the last call returned the newest record that the store announced, and no
            later one is known.
    """

    def __init__(self, reader: ChannelReader, max_age_s: float | None = None, prefetch: bool = True) -> None:
        self.reader = reader
        self.newest: VersionId | None = None
        self.next_epoch: str | None = None
        self.damaged: FormatError | None = None
        self.skips: dict[str, Skip] = {}
        self.failure: DeltaSyncError | None = None
        self.follows_s = time.time()
        self.took_announced = False
        self._max_age_s = max_age_s
        self._prefetch = Prefetch(reader) if prefetch else None
        self._record: StoredRecord | None = None  # of the newest version, if it was read
        self._head: Head | None = None  # as of the last refresh
        self._announced: dict[str, ObjectInfo] = {}  # records that the store announced, by key
        self._known: dict[str, ObjectInfo] = {}  # those that this call of `next` reads
        # by key: objects that were read at once for one caller; None: missing
        self._ahead: dict[str, Any] = {}
        self._unproven: VersionId | None = None  # named by head, but not readable
        # a version that the store seems to have lost, and since when
        self._lacking: tuple[VersionId, float] | None = None
        self._absent: tuple[str, float] | None = None  # the slot whose record was missing, and since when
        # until then records are listed, because a cache remembers that they were missing
        self._lists_until_s = 0.0
        self._served: tuple[str, int] = "", 0  # `Slot.newness` of the newest version that was served
        self._pin: Pin = None  # the last call's
        self._refresh_due_s = self._retry_due_s = 0.0
        self._refreshes = self._failures = 0
        self._lost = True  # whether a poll is no use before a refresh
        self._moved = self._lags = False  # whether the last call returned records; whether the last two did
        self._rest: list[StoredRecord] = []  # the rest of the last chain
        self._singly_to = 0  # versions up to this one are taken one by one
        self._blamed = ""  # the key that was skipped last
        # a version that this newer epoch has by this number
        self._checked: tuple[VersionId, str, int] | None = None

    @property
    def epoch(self) -> str | None:
        """The newest epoch that is known: named by a seal, or the newest version's; None before the first
        version.
        """
        return self.next_epoch or (None if self.newest is None else self.newest.epoch)

    def announce(self, info: ObjectInfo) -> None:
        """Have `next` read a record that the store announced, without a request for its key. From any
        thread.
        """
        if len(self._announced) >= limits.ANNOUNCED_RECORDS:
            self._announced = {}
        self._announced[info.key] = info

    def next(
        self,
        have: VersionId | None,
        *,
        pin: Pin = None,
        refresh: bool = False,
        ahead: bool = False,
        pushed: bool = False,
    ) -> list[StoredRecord]:
        """Return the records and compactions to take now, in one commit; empty if `have` is where the pin
        points.

        Args:
            have: The version that the replica holds.
            pin: The version to stay at; None to take every new one.
            refresh: Refresh, even if none is due.
            ahead: Read head and the next two records at once; later calls with `ahead`, but without
                `refresh`, use them too.
            pushed: The store announces new records, so that refreshes can be rare.

        Raises:
            NotPublishedError: the channel has no version yet.
            MissingVersionError: no chain leads there now; ask again later.
            ChainError, FormatError, StoreError: nothing can be taken now.
        """
        self._known, self._announced, self.took_announced = self._announced, {}, False
        if pin != self._pin:
            self._pin, self._lost = pin, True
            self.follows_s = time.time() if pin is None else math.inf
            self.failure = None
        elif self._rest and self._rest[0].base == have:
            return self._batch(self._rest, have)
        self._rest = []
        now_s, forced = time.monotonic(), refresh or self._lost
        refresh = forced or now_s >= self._refresh_due_s
        if self.failure is not None and not refresh and not self._known:
            raise self.failure
        try:
            may_wait = not forced and now_s < self._retry_due_s and not isinstance(self.failure, StoreError)
            if self.failure is not None and may_wait and self.reader.head() == self._head:
                raise self.failure  # a retry would plan on the same objects
            chain = self._next(have, refresh or self.failure is not None, ahead or self._lags, pushed)
        except DeltaSyncError as error:
            self._failed(error, have)
            raise
        self.failure, self._failures = None, 0
        # Several versions at once are cheaper. Events say how many there are.
        self._lags = self._moved and len(chain) == 1 and not self._known
        if self._lags:
            self._refresh_due_s = 0.0
        self._moved = bool(chain)
        return self._batch(chain, have)

    def _failed(self, error: DeltaSyncError, have: VersionId | None) -> None:
        """Note an error of `next`, unless it only says that a version is not published yet."""
        newest = 0 if self.newest is None else self.newest.version
        awaited = isinstance(error, NotPublishedError) and have is None
        if isinstance(error, MissingVersionError):
            awaited = self._pin is not None and self._pin > newest
        if awaited:
            self.failure = None
            return
        now_s, is_outage = time.monotonic(), isinstance(error, StoreError)
        self._refresh_due_s = 0.0 if is_outage else now_s + REFRESH_S
        if error is not self.failure:  # otherwise nothing was tried
            self._retry_due_s = now_s + min(_SLOWEST_S, REFRESH_S * 2**self._failures)
            self._failures += 1
        self.failure, self._lost = error, is_outage and self._lost

    def _next(self, have: VersionId | None, refresh: bool, ahead: bool, pushed: bool) -> list[StoredRecord]:
        wanted, due_s = self._pin or 0, _REFRESH_PUSHED_S if pushed else REFRESH_S
        is_there = have is not None and have.version == self._pin
        if not refresh and is_there:
            return []
        if refresh or not ahead:
            self._ahead = {}
        at_once = ahead and have is not None and self.failure is None
        if at_once:
            self._read_ahead(wanted, refresh)
        elif refresh:
            self._refresh(self.failure is not None and not isinstance(self.failure, StoreError), due_s)
        found: list[StoredRecord] = []
        newest = 0 if self.newest is None else self.newest.version
        joins, waits = have is None and 0 < (wanted or newest) <= newest, wanted > newest
        try:
            if not is_there and not joins and (not refresh or ahead or waits or self._known):
                found = self._poll(wanted)
            if at_once and refresh:
                self._refresh(False, due_s)
        except FormatError as error:
            before = self.newest
            self._refresh(True, REFRESH_S)
            if self.newest == before:
                self.damaged = error
        self._lost = False
        try:
            chain = self._plan(have, found)
        except MissingVersionError:
            if waits and not (ahead and self._is_listed(wanted)):
                raise
            if not waits:
                self._refresh(True, REFRESH_S)  # objects of the plan may be gone by now
            chain = self._plan(have, [])
        if self._max_age_s is not None and self.newest is not None:
            self._check_age(self.newest, self._max_age_s)
        if not chain and self.damaged is not None and self._pin is None:
            raise self.damaged
        return chain

    def _check_age(self, newest: VersionId, most_s: float) -> None:
        if self._record is None:
            self._record = self.reader.record(newest)
        age_s = time.time() - self._record.record.created_s
        if age_s > most_s:
            raise ChainError(
                f"The newest version, {newest.version}, is {age_s:.0f} s old, and {most_s:g} s are allowed: "
                "nothing newer was published, or somebody keeps it back."
            )

    def lag_s(self, chain: Sequence[StoredRecord]) -> float | None:
        """Return the seconds since the version that `chain` led to, or its compaction, was encoded, by two
        machines' clocks.

        Call it when that version is served. None where that is no lag: the version was encoded before this
        replica followed, is older than one that was served, or a pin says when to take it.
        """
        record = chain[-1].record
        # Documents have milliseconds.
        is_news = record.created_s > self.follows_s - 0.001 and record.slot.newness > self._served
        self._served = max(self._served, record.slot.newness)
        return time.time() - record.created_s if is_news else None

    # Skips

    def mark_bad(self, chain: Sequence[StoredRecord], key: str | None = None, why: object = "") -> None:
        """Avoid this chain from now on.

        `key` is that of the record whose objects were missing or damaged; None if the bits were not the
        promised ones.
        """
        self._lost, self._rest, first = True, [], chain[0]
        self._blamed = key or first.key
        # whose bits are outside the channel
        if key is not None or (len(chain) == 1 and first.record.reference is not None):
            self.skips[self._blamed] = Skip(time.monotonic() + SKIP_S, str(why))
        elif len(chain) > 1:
            self._singly_to = chain[-1].record.version  # to find out which of them is wrong
        elif self._bytes_at(first.key) == first.sha256:
            self.skips[first.key] = Skip(math.inf, str(why), first.sha256, first.record.base)
        elif self.newest == first.version:
            # a damaged answer was taken for a record: there is no such version
            self.newest, self._record = first.record.base, None

    def clear_bad(self) -> None:
        """Allow the objects that were marked last: an audit found that the bits in memory were at fault."""
        self.skips.pop(self._blamed, None)
        self._lost = True

    def retry_bad(self) -> None:
        """Retry missing and damaged objects at once, but not those with wrong bits."""
        self.skips = {key: skip for key, skip in self.skips.items() if skip.sha256 is not None}

    def _bytes_at(self, key: str) -> str | None:
        """Return the digest of the record at a key; None if there is none now, "" if it is no record."""
        try:
            return self.reader.stored(key).sha256
        except FormatError:
            return ""
        except (MissingVersionError, StoreError):
            return None

    def _why_skipped(self, key: str) -> str | None:
        """Return why the object at a key is avoided, None if it is not. A skip ends with its time, or with
        its bytes.
        """
        skip = self.skips.get(key)
        if skip is None:
            return None
        # as after a repair
        is_replaced = skip.sha256 is not None and self._bytes_at(key) not in (None, skip.sha256)
        if time.monotonic() < skip.until_s and not is_replaced:
            return skip.why
        del self.skips[key]
        if self.newest is not None and (self.newest.key, self.newest.sha256) == (key, skip.sha256):
            self.newest, self._record = skip.base, None
        return None

    # The chain to where the pin points

    def _plan(self, have: VersionId | None, found: Sequence[StoredRecord]) -> list[StoredRecord]:
        """Return the chain to where the pin points; `found` are the newest records, if they were polled."""
        newest = self._there()
        number = self._pin or newest.version
        if number > newest.version:
            absent = MissingVersionError(
                f"Version {number} is not published; the newest is version {newest.version}."
            )
            raise self.damaged or absent
        if have is not None and have.version == number and have.epoch == newest.epoch:
            return []
        if found and found[0].base == have and found[-1].version == newest and number == newest.version:
            return list(found)
        if have is not None and self._checked == (have, newest.epoch, number):
            return []
        wanted = newest if number == newest.version else self.reader.numbered(number).version
        if have == wanted:
            self._checked = have, newest.epoch, number
            return []
        if have is not None and have.version >= number:
            if wanted == newest:
                logger.warning("Version %s is not the channel's any more; starting from full weights.", have)
            have = None
        avoided = {key: why for key in list(self.skips) if (why := self._why_skipped(key)) is not None}
        return find_chain(self.reader, have, wanted, avoided, self._record)

    def _batch(self, chain: Sequence[StoredRecord], have: VersionId | None) -> list[StoredRecord]:
        """Return the first records of a chain, those that go into one commit; keep the rest."""
        # A replica without weights takes full weights alone. For others a chain that starts from full weights
        # is one commit, because a replica that serves must not go back to an older version in between.
        most = 1 if have is not None and have.version < self._singly_to else limits.BATCH_RECORDS
        count, batch_bytes = 0, 0
        while count < len(chain):
            batch_bytes += chain[count].record.payload_bytes
            ends = have is None if chain[0].use_anchor else count >= most or batch_bytes > limits.BATCH_BYTES
            if count and ends:
                break
            count += 1
        self._rest, batch = list(chain[count:]), list(chain[:count])
        if batch:  # otherwise a pin leaves alone what was announced
            later = {key: info for key, info in self._known.items() if self._is_later(keys.slot_of(key))}
            self.took_announced = (
                not later and batch[-1].key in self._known and batch[-1].version == self.newest
            )
            self._announced = later | self._announced
        return batch

    def _is_later(self, slot: Slot | None) -> bool:
        return slot is not None and (self.newest is None or slot.newness > self.newest.slot.newness)

    # Poll

    def _poll(self, wanted: int) -> list[StoredRecord]:
        """Read the record after the newest version, and those after it that were read ahead or announced.

        `wanted` is the number of a later version that a pin waits for, instead of the next one; 0 for the
        next one.

        Raises:
            FormatError: the next record cannot be used.
        """
        found: list[StoredRecord] = []
        for _ in range(_SEALS):
            slot = self._next_slot(wanted)
            if found and slot.key not in self._ahead and slot.key not in self._known:
                break
            if (why := self._why_skipped(slot.key)) is not None:
                raise CorruptDataError(why)
            stored: StoredRecord | None = self._read(slot.key, functools.partial(self._ask, slot))
            while stored is None and not found and self._prefetch is not None and self._prefetch.expect(slot):
                stored = self._ask(slot)
            if stored is not None and slot.version != wanted and stored.record.base != self.newest:
                raise CorruptDataError(f"{slot.key} does not follow version {self.newest}.")
            if stored is None:
                self._absent = slot.key, time.time()
                break
            if stored.record.next_epoch is not None:
                self.next_epoch = stored.record.next_epoch
                continue
            self._note(stored.version, stored)
            found.append(stored)
            if self._prefetch is not None:
                self._prefetch.took(stored)
        return found

    def _read_ahead(self, wanted: int, with_head: bool) -> None:
        """Read head and the next two records at once, unless the next one was read ahead before; `wanted` as
        in `_poll`.
        """
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

    def _is_listed(self, number: int) -> bool:
        """Whether a version is in the log of an epoch that head does not name yet; if so, it is the
        newest.
        """
        try:
            stored = self.reader.numbered(number)
        except MissingVersionError:
            return False
        self._note(stored.version, stored)
        return self.newest == stored.version

    def _next_slot(self, wanted: int) -> Slot:
        """Return the slot after the newest version, or that of the later version which a pin waits for."""
        number = 1 if self.newest is None else self.newest.version + 1
        return Slot(max(number, wanted), self.epoch or self.reader.channel().epoch)

    def _ask(self, slot: Slot) -> StoredRecord | None:
        """Return the record in a slot, if there is one."""
        info = self._known.get(slot.key)
        if info is None and time.monotonic() < self._lists_until_s:
            info = dict(self.reader.slots(keys.folder(slot.version))).get(slot)
            if info is None:
                return None
        return self.reader.slot(slot, info)

    # Refresh

    def locate(self) -> VersionId:
        """Find the newest version, unless it is known, and return it.

        Raises:
            NotPublishedError: the channel has no version yet.
        """
        if self.newest is None:
            self._refresh(False, REFRESH_S)
        self._lost, newest = False, self._there()
        return newest

    def _there(self) -> VersionId:
        if self.newest is None:
            raise NotPublishedError(f"{self.reader.store.url} holds no version yet.")
        return self.newest

    def _note(self, version: VersionId, read: StoredRecord | None = None) -> None:
        """Note that a version exists: `read` is its record, None if a checked seal or shortcut names it."""
        if self._is_later(version.slot):
            self.newest, self._record = version, None
        if read is not None and self.newest == version:
            self._record = read
        begun = 0 if self.newest is None else keys.epoch_number(self.newest.epoch)
        if self.next_epoch is not None and begun >= keys.epoch_number(self.next_epoch):
            self.next_epoch = None

    def _refresh(self, lists: bool, due_s: float) -> None:
        """Find the newest version by head, else, or if it `lists`, by a listing; expired skips go. The next
        is due then.

        Raises:
            NotPublishedError, RunMismatchError: the channel is gone, or another run's.
            FormatError: there are records, and none can be read.
            MissingVersionError: the store has lost the newest version of a signed channel.
        """
        now_s = time.monotonic()
        self._refresh_due_s = now_s + due_s
        for key, skip in list(self.skips.items()):
            if now_s >= skip.until_s or (self.newest is not None and key == self.newest.key):
                self._why_skipped(key)
        self.damaged = None
        self._refreshes += 1
        self.reader.channel()
        self._head = self._read(keys.HEAD, self.reader.head)
        is_confirmed, is_worth_a_list = self._prove(self._head)
        lists = lists or self._lacking is not None
        if lists or (not is_confirmed and (is_worth_a_list or self._refreshes % _LIST_EVERY == 0)):
            self._list()
        elif self._head is None:
            self.reader.check_run()

    def _prove(self, head: Head | None) -> tuple[bool, bool]:
        """Read the record that head names, if it is newer than the newest version.

        Returns whether head names the newest version, and whether a listing may find a newer one.
        """
        named, newest = None if head is None else head.newest, self.newest
        if named is None or not self._is_later(named.slot):
            goes_back = named is not None and newest is not None and named.epoch != newest.epoch
            return named is not None and named == newest, newest is None or goes_back
        is_new, self._unproven = named != self._unproven, named
        if self._why_skipped(named.key) is not None:
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
        """Whether a shortcut leads to a version whose record cannot be read: the shortcut names that
        record.
        """
        for span, info in self.reader.shortcuts():
            with contextlib.suppress(MissingVersionError, FormatError):
                if (
                    span.version == version.version
                    and self.reader.stored(info.key, known=info).version == version
                ):
                    return True
        return False

    def _list(self) -> None:
        """Find the newest version that can be read by a listing of all records. Raises as `_refresh`."""
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
        if not is_version and self._is_later(stored.record.slot):
            self.next_epoch = stored.record.next_epoch
        if found is None:
            return
        if newest is None or found.slot.newness >= newest.slot.newness:
            self.damaged, self._lacking = damaged, None
        elif self._is_lost(newest, found):
            self.newest = self._lacking = None
        self._note(found, stored if is_version else None)

    def _is_hidden(self, listing: Sequence[tuple[Slot, ObjectInfo]]) -> bool:
        """Whether a record was there already when a request for it said that it is missing."""
        if self._absent is None:
            return False
        key, since_s = self._absent
        return any(info.key == key and 0 < info.modified_s < since_s - _CLOCKS_S for _, info in listing)

    def _is_lost(self, newest: VersionId, found: VersionId) -> bool:
        """Whether the store was restored from a backup without the newest version, and has lacked it for a
        while.

        Raises:
            MissingVersionError: it was, and the channel is signed.
        """
        try:  # by its key, because a listing may be behind; another writer's seal may be there, too
            there = self.reader.slot(newest.slot)
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
        if self.reader.trusted is not None:
            raise MissingVersionError(f"{sentence} If it was restored from a backup, restart this replica.")
        logger.warning("%s Starting from full weights.", sentence)
        return True


_COMPARED = 8  # of the newest versions, and of the newest anchors, that are compared with loaded weights


def identify(reader: ChannelReader, newest: VersionId, total: int) -> StoredRecord | None:
    """Find the version whose model has the fingerprint `total`, among the newest versions and those with full
    weights.
    """
    for stored in itertools.chain(
        itertools.islice(reader.back_from(newest), _COMPARED), _with_full_weights(reader)
    ):
        if stored.record.fingerprint == f"{total:016x}":
            return reader.record(stored.version) if stored.is_shortcut else stored
    return None


def tied(reader: ChannelReader) -> dict[str, str]:
    """Return the tensors that the channel's first checkpoint has under another name only."""
    references = (stored.record.reference for stored in _with_full_weights(reader))
    return next((reference.tied for reference in references if reference is not None), {})


def _with_full_weights(reader: ChannelReader) -> Iterator[StoredRecord]:
    """Yield the newest announced anchors, then the first record."""
    announced = sorted(((span.version, info.key) for span, info in reader.announcements()), reverse=True)
    first = [info.key for _, info in reader.slots(keys.folder(1))[:1]]
    for key in [*(key for _, key in announced[:_COMPARED]), *first]:
        with contextlib.suppress(MissingVersionError, FormatError):
            yield reader.stored(key)
