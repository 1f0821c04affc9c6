"""A replica's position in a channel, and where it goes next. This touches no weights, and every kind of
replica uses it.

poll      read the record after the newest version: in steady state, the only request
refresh   find the newest version by head or by a listing: at first, when lost, and now and then (`Search`)
plan      find the cheapest chain of records to the version that the pin points to (`channel.plan`)

One rule covers whatever fails: it is skipped (`Skips`), and the next refresh plans around it.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Sequence

from deltasync import limits
from deltasync.channel.documents import VersionId
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
from deltasync.following.search import Reads, Search, Skips, Tip
from deltasync.stores.base import ObjectInfo

logger = logging.getLogger(__name__)

REFRESH_S = 5.0
"""Seconds between two refreshes while a replica polls, and after a refresh that failed; doubled while it goes
on failing.
"""

_REFRESH_PUSHED_S = 30.0  # as `REFRESH_S`, while the store announces new records
_SLOWEST_S = 60.0
_SEALS = 16  # most records and seals that one poll follows


class Cursor:
    """One replica's position in a channel. Not thread-safe, but for `announce`.

    With `prefetch`, parts are fetched before their record exists, into the reader or the node's cache. `next`
    raises if the newest version was encoded more than `max_age_s` ago.

    Attributes:
        tip: The newest version.
        skips: The objects to avoid.
        failure: Why the channel cannot be followed; `next` raises it until a refresh succeeds. None if it
            can.
        took_announced: Whether the last call returned the newest record that the store announced, and no
            later one is known.
    """

    def __init__(self, reader: ChannelReader, max_age_s: float | None = None, prefetch: bool = True) -> None:
        self.reader = reader
        self.tip = Tip()
        self.skips = Skips(reader, self.tip)
        self.failure: DeltaSyncError | None = None
        self.took_announced = False
        self._reads = Reads(reader)
        self._search = Search(reader, self.tip, self.skips, self._reads)
        self._max_age_s = max_age_s
        self._prefetch = Prefetch(reader) if prefetch else None
        self._pin: Pin = None  # the last call's
        self._failures, self._retry_due_s = 0, 0.0
        self._lost = True  # whether a poll is no use before a refresh
        self._pace = 0  # 0 if the last call returned nothing, 2 if the last two returned one record each
        self._rest: list[StoredRecord] = []  # the rest of the last chain
        self._singly_to = 0  # versions up to this one are taken one by one

    @property
    def newest(self) -> VersionId | None:
        """The newest version that is known."""
        return self.tip.version

    def announce(self, info: ObjectInfo) -> None:
        """Have `next` read a record that the store announced, without a request for its key. From any
        thread.
        """
        self._reads.announce(info)

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
        self._reads.begin()
        self.took_announced = False
        if pin != self._pin:
            self._pin, self._lost, self.failure = pin, True, None
        elif self._rest and self._rest[0].base == have:
            return self._batch(self._rest, have)
        self._rest = []
        forced = refresh or self._lost
        refresh = forced or time.monotonic() >= self._search.due_s
        if self.failure is not None and not refresh and not self._reads.known:
            raise self.failure
        try:
            if not forced:
                self._fail_again()
            chain = self._next(have, refresh or self.failure is not None, ahead or self._pace == 2, pushed)
        except DeltaSyncError as error:
            self._failed(error, have)
            raise
        self.failure, self._failures = None, 0
        # Several versions at once are cheaper. Events say how many there are.
        is_single = len(chain) == 1 and not self._reads.known
        self._pace = 0 if not chain else 2 if self._pace and is_single else 1
        if self._pace == 2:
            self._search.due_s = 0.0
        return self._batch(chain, have)

    def _fail_again(self) -> None:
        """Raise `failure` while a retry is not due and would plan on the same objects."""
        if self.failure is None or isinstance(self.failure, StoreError):
            return
        if time.monotonic() < self._retry_due_s and self.reader.head() == self._search.head:
            raise self.failure

    def _failed(self, error: DeltaSyncError, have: VersionId | None) -> None:
        """Note an error of `next`, unless it only says that a version is not published yet."""
        awaited = isinstance(error, NotPublishedError) and have is None
        if isinstance(error, MissingVersionError):
            awaited = self._pin is not None and self._pin > self.tip.number
        if awaited:
            self.failure = None
            return
        now_s, is_outage = time.monotonic(), isinstance(error, StoreError)
        self._search.due_s = 0.0 if is_outage else now_s + REFRESH_S
        if error is not self.failure:  # otherwise nothing was tried
            self._retry_due_s = now_s + min(_SLOWEST_S, REFRESH_S * 2**self._failures)
            self._failures += 1
        self.failure, self._lost = error, is_outage and self._lost

    def _next(self, have: VersionId | None, refresh: bool, ahead: bool, pushed: bool) -> list[StoredRecord]:
        tip, search, wanted = self.tip, self._search, self._pin or 0
        due_s = _REFRESH_PUSHED_S if pushed else REFRESH_S
        is_there = have is not None and have.version == self._pin
        if not refresh and is_there:
            return []
        if refresh or not ahead:
            self._reads.ahead = {}
        at_once = ahead and have is not None and self.failure is None
        if at_once:
            slot = self._next_slot(wanted)
            second = [] if slot.version == wanted else [Slot(slot.version + 1, slot.epoch)]
            self._reads.read_ahead([slot, *second], refresh)
        elif refresh:
            lists = self.failure is not None and not isinstance(self.failure, StoreError)
            search.refresh(due_s, lists=lists)
        found: list[StoredRecord] = []
        joins, waits = have is None and 0 < (wanted or tip.number) <= tip.number, wanted > tip.number
        try:
            if not is_there and not joins and (not refresh or ahead or waits or self._reads.known):
                found = self._poll(wanted)
            if at_once and refresh:
                search.refresh(due_s)
        except FormatError as error:
            before = tip.version
            search.refresh(REFRESH_S, lists=True)
            if tip.version == before:
                tip.damaged = error
        self._lost = False
        try:
            chain = self._plan(have, found)
        except MissingVersionError:
            if waits and not (ahead and self._is_listed(wanted)):
                raise
            if not waits:
                search.refresh(REFRESH_S, lists=True)  # objects of the plan may be gone by now
            chain = self._plan(have, [])
        if self._max_age_s is not None and tip.version is not None:
            self._check_age(tip.version, self._max_age_s)
        if not chain and tip.damaged is not None and self._pin is None:
            raise tip.damaged
        return chain

    def _check_age(self, newest: VersionId, most_s: float) -> None:
        if self.tip.record is None:
            self.tip.record = self.reader.record(newest)
        age_s = time.time() - self.tip.record.record.created_s
        if age_s > most_s:
            raise ChainError(
                f"The newest version, {newest.version}, is {age_s:.0f} s old, and {most_s:g} s are allowed: "
                "nothing newer was published, or somebody keeps it back."
            )

    def mark_bad(self, chain: Sequence[StoredRecord], key: str | None = None, why: object = "") -> None:
        """Avoid this chain from now on.

        `key` is that of the record whose objects were missing or damaged; None if the bits were not the
        promised ones.
        """
        self._lost, self._rest = True, []
        if self.skips.blame(chain, key, why):
            self._singly_to = chain[-1].record.version

    def clear_bad(self) -> None:
        """Allow the objects that were marked last: an audit found that the bits in memory were at fault."""
        self.skips.forgive()
        self._lost = True

    # The chain to where the pin points

    def _plan(self, have: VersionId | None, found: Sequence[StoredRecord]) -> list[StoredRecord]:
        """Return the chain to where the pin points; `found` are the newest records, if they were polled."""
        newest = self._there()
        number = self._pin or newest.version
        if number > newest.version:
            absent = MissingVersionError(
                f"Version {number} is not published; the newest is version {newest.version}."
            )
            raise self.tip.damaged or absent
        if have is not None and have.version == number and have.epoch == newest.epoch:
            return []
        if found and found[0].base == have and found[-1].version == newest and number == newest.version:
            return list(found)
        wanted = newest if number == newest.version else self.reader.numbered(number).version
        if have == wanted:
            return []
        if have is not None and have.version >= number:
            if wanted == newest:
                logger.warning("Version %s is not the channel's any more; starting from full weights.", have)
            have = None
        return find_chain(self.reader, have, wanted, self.skips.all(), self.tip.record)

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
            is_newest = batch[-1].key in self._reads.known and batch[-1].version == self.tip.version
            self.took_announced = not self._reads.keep(self.tip) and is_newest
        return batch

    # Poll

    def _poll(self, wanted: int) -> list[StoredRecord]:
        """Read the record after the newest version, and those after it that were read ahead or announced.

        `wanted` is the number of a later version that a pin waits for, instead of the next one; 0 for the
        next one.

        Raises:
            FormatError: the next record cannot be used.
        """
        found: list[StoredRecord] = []
        reads, prefetch = self._reads, self._prefetch
        for _ in range(_SEALS):
            slot = self._next_slot(wanted)
            key = slot.key
            if found and key not in reads.ahead and key not in reads.known:
                break
            if (why := self.skips.why(key)) is not None:
                raise CorruptDataError(why)
            stored: StoredRecord | None = reads.take(key, functools.partial(reads.ask, slot))
            while stored is None and not found and prefetch is not None and prefetch.expect(slot):
                stored = reads.ask(slot)
            if stored is None:
                reads.lacks(key)
                break
            if slot.version != wanted and stored.record.base != self.tip.version:
                raise CorruptDataError(f"{key} does not follow version {self.tip.version}.")
            if stored.record.next_epoch is not None:
                self.tip.next_epoch = stored.record.next_epoch
                continue
            self.tip.note(stored.version, stored)
            found.append(stored)
            if prefetch is not None:
                prefetch.took(stored)
        return found

    def _is_listed(self, number: int) -> bool:
        """Whether a version is in the log of an epoch that head does not name yet; if so, it is the
        newest.
        """
        try:
            stored = self.reader.numbered(number)
        except MissingVersionError:
            return False
        self.tip.note(stored.version, stored)
        return self.tip.version == stored.version

    def _next_slot(self, wanted: int) -> Slot:
        """Return the slot after the newest version, or that of the later version which a pin waits for."""
        return Slot(max(self.tip.number + 1, wanted), self.tip.epoch or self.reader.channel().epoch)

    def locate(self) -> VersionId:
        """Find the newest version, unless it is known, and return it.

        Raises:
            NotPublishedError: the channel has no version yet.
        """
        if self.tip.version is None:
            self._search.refresh(REFRESH_S)
        self._lost, newest = False, self._there()
        return newest

    def _there(self) -> VersionId:
        if self.tip.version is None:
            raise NotPublishedError(f"{self.reader.store.url} holds no version yet.")
        return self.tip.version
