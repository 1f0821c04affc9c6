"""A replica's position in a channel, and where it goes next. This touches no weights, and every kind of replica uses it.

poll      read the record after the newest version: in steady state, the only request
refresh   find the newest version by head or by a listing: at first, when lost, and now and then
plan      find the cheapest chain of records to the version that the pin points to (`channel.plan`)

One rule covers whatever fails: it is skipped (`tip.Skip`), and the next refresh plans around it.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence

from deltasync import limits
from deltasync.channel import keys
from deltasync.channel.documents import VersionId
from deltasync.channel.plan import find_chain
from deltasync.channel.reading import ChannelReader
from deltasync.channel.record import StoredRecord
from deltasync.errors import (
    DeltaSyncError,
    FormatError,
    MissingVersionError,
    NotPublishedError,
    StoreError,
)
from deltasync.following.pin import Pin
from deltasync.following.tip import NOTHING_KNOWN, SKIP_S, Skip, Tip
from deltasync.stores.base import ObjectInfo

logger = logging.getLogger(__name__)

REFRESH_S = 5.0
"""Seconds between two refreshes while a replica polls, and after a refresh that failed; doubled while it goes on failing."""

_REFRESH_PUSHED_S = 30.0  # the same while the store announces new records
_SLOWEST_S = 60.0


class ChannelCursor(Tip):
    """One replica's position in a channel. Not thread-safe.

    `next` raises if the newest version was encoded more than `max_age_s` ago.

    Attributes:
        failure: Why the channel cannot be followed; `next` raises it until a refresh succeeds. None if it can.
        follows_s: Since when this replica takes each new version, seconds since the epoch; infinite while it is pinned.
    """

    def __init__(self, reader: ChannelReader, max_age_s: float | None = None, prefetch: bool = True) -> None:
        super().__init__(reader, prefetch)
        self.failure: DeltaSyncError | None = None
        self.follows_s = time.time()
        self._max_age_s = max_age_s
        self._served: tuple[str, int] = "", 0  # `Slot.newness` of the newest version that was served
        self._pin: Pin = None  # the last call's
        self._refresh_due_s = self._retry_due_s = 0.0
        self._failures = 0
        self._lost = True  # whether a poll is no use before a refresh
        self._moved = self._lags = False  # whether the last call returned records; whether the last two did
        self._rest: list[StoredRecord] = []  # the rest of the last chain
        self._singly_to = 0  # versions up to this one are taken one by one
        self._blamed = ""  # the key that was skipped last
        self._checked: tuple[VersionId, str, int] | None = None  # a version that this newer epoch has by this number

    @property
    def skipped(self) -> dict[str, str]:
        """The keys of objects that plans avoid, each with the reason."""
        return {key: skip.why for key, skip in self.skips.items()}

    def next(
        self,
        have: VersionId | None,
        *,
        pin: Pin = None,
        known: Mapping[str, ObjectInfo] = NOTHING_KNOWN,
        refresh: bool = False,
        ahead: bool = False,
        pushed: bool = False,
    ) -> list[StoredRecord]:
        """Return the records and compactions to take now, in one commit; empty if `have` is where the pin points.

        Args:
            have: The version that the replica holds.
            pin: The version to stay at; None to take every new one.
            known: New records that events announced, by key; these are read without a request for the key.
            refresh: Refresh, even if none is due.
            ahead: Read head and the next two records at once; later calls with `ahead`, but without `refresh`, use them too.
            pushed: The store announces new records, so that refreshes can be rare.

        Raises:
            NotPublishedError: the channel has no version yet.
            MissingVersionError: no chain leads there now; ask again later.
            ChainError, FormatError, StoreError: nothing can be taken now.
        """
        if pin != self._pin:
            self._pin, self._lost = pin, True
            self.follows_s = time.time() if pin is None else math.inf
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
        self.failure, self._failures = None, 0
        # Several versions at once are cheaper. Events say how many there are.
        self._lags = self._moved and len(chain) == 1 and not known
        if self._lags:
            self._refresh_due_s = 0.0
        self._moved = bool(chain)
        return self._batch(chain, have)

    def _is_head_same(self) -> bool:
        """Whether head is as in the last refresh, which failed: a retry would plan on the same objects."""
        return self.reader.head() == self.head

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

    def _next(
        self, have: VersionId | None, known: Mapping[str, ObjectInfo], refresh: bool, ahead: bool, pushed: bool
    ) -> list[StoredRecord]:
        is_there = have is not None and have.version == self._pin
        if not refresh and is_there:
            return []
        if refresh or not ahead:
            self._ahead = {}
        is_exact, ahead = ahead, ahead and have is not None and self.failure is None
        if ahead:
            self.read_ahead(self._pin or 0, refresh)
        elif refresh:
            lists = self.failure is not None and not isinstance(self.failure, StoreError)
            self._refresh(lists, _REFRESH_PUSHED_S if pushed else REFRESH_S)
        found: list[StoredRecord] = []
        newest = 0 if self.newest is None else self.newest.version
        joins = have is None and 0 < (self._pin or newest) <= newest
        waits = (self._pin or 0) > newest
        try:
            if not is_there and not joins and (not refresh or is_exact or waits or known):
                found = self.poll(self._pin or 0, known)
            if ahead and refresh:
                self._refresh(False, _REFRESH_PUSHED_S if pushed else REFRESH_S)
        except FormatError as error:
            before = self.newest
            self._refresh(True, REFRESH_S)
            if self.newest == before:
                self.damaged = error
        self._lost = False
        try:
            chain = self._plan(have, found)
        except MissingVersionError:
            if waits and not (is_exact and self.is_listed(self._pin or 0)):
                raise
            if not waits:
                self._refresh(True, REFRESH_S)  # objects of the plan may be gone by now
            chain = self._plan(have, [])
        if self._max_age_s is not None:
            self.check_age(self._max_age_s)
        if not chain and self.damaged is not None and self._pin is None:
            raise self.damaged
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
        if key is not None:
            self.skips[key] = Skip(time.monotonic() + SKIP_S, str(why))
        elif len(chain) > 1:
            self._singly_to = chain[-1].record.version  # to find out which of them is wrong
        elif chain[0].record.reference is not None:  # the wrong bits are outside the channel
            self.skips[chain[0].key] = Skip(time.monotonic() + SKIP_S, str(why))
        elif self._is_again(chain[0]):
            self.skips[chain[0].key] = Skip(math.inf, str(why), chain[0].sha256, chain[0].record.base)
        elif self.newest == chain[0].version:  # there is no such version
            self.retract(chain[0].record.base)
        self._blamed = key or chain[0].key

    def clear_bad(self) -> None:
        """Allow the objects that were marked last: an audit found that the bits in memory were at fault."""
        self.skips.pop(self._blamed, None)
        self._lost = True

    def retry_bad(self) -> None:
        """Retry missing and damaged objects at once, but not those with wrong bits."""
        self.skips = {key: skip for key, skip in self.skips.items() if skip.sha256 is not None}

    def _is_again(self, stored: StoredRecord) -> bool:
        """Whether the store gives the same record again. If not, a damaged answer was taken for a record."""
        try:
            return self.reader.stored(stored.key).sha256 == stored.sha256
        except (MissingVersionError, FormatError, StoreError):
            return False

    def locate(self) -> VersionId:
        """Find the newest version, unless it is known, and return it.

        Raises:
            NotPublishedError: the channel has no version yet.
        """
        if self.newest is None:
            self._refresh(False, REFRESH_S)
        if self.newest is None:
            raise NotPublishedError(f"{self.reader.store.url} holds no version yet.")
        self._lost = False
        return self.newest

    def _refresh(self, lists: bool, due_s: float) -> None:
        """Find the newest version; the next refresh is due after `due_s`."""
        self._refresh_due_s = time.monotonic() + due_s
        self.find_newest(lists)

    # The chain to where the pin points

    def _plan(self, have: VersionId | None, found: Sequence[StoredRecord]) -> list[StoredRecord]:
        """Return the chain to where the pin points; `found` are the newest records, if they were polled."""
        newest = self.newest
        if newest is None:
            raise NotPublishedError(f"{self.reader.store.url} holds no version yet.")
        number = self._pin or newest.version
        if number > newest.version:
            absent = MissingVersionError(f"Version {number} is not published; the newest is version {newest.version}.")
            raise self.damaged or absent
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
        if target is None:
            logger.warning("Version %s is not the channel's any more; starting from full weights.", have)
        return self._find_chain(None, wanted)

    def _find_chain(self, have: VersionId | None, target: VersionId) -> list[StoredRecord]:
        return find_chain(self.reader, have, target, self._avoided(), self.record)

    def _avoided(self) -> dict[str, str]:
        """Return what plans avoid, after a look whether the store still has the bytes with wrong bits."""
        found = {key: self.why_skipped(key) for key in list(self.skips)}
        return {key: why for key, why in found.items() if why is not None}

    def _batch(self, chain: Sequence[StoredRecord], have: VersionId | None) -> list[StoredRecord]:
        """Return the first records of a chain, those that go into one commit; keep the rest."""
        # A replica without weights takes full weights alone. For others a chain that starts from full weights is one commit,
        # because a replica that serves must not go back to an older version in between.
        most = 1 if have is not None and have.version < self._singly_to else limits.BATCH_RECORDS
        count, batch_bytes = 0, 0
        while count < len(chain):
            batch_bytes += chain[count].record.payload_bytes
            ends = have is None if chain[0].use_anchor else count >= most or batch_bytes > limits.BATCH_BYTES
            if count and ends:
                break
            count += 1
        self._rest = list(chain[count:])
        return list(chain[:count])


_COMPARED = 8  # of the newest versions, and of the newest anchors, that are compared with loaded weights


def identify(reader: ChannelReader, newest: VersionId, total: int) -> StoredRecord | None:
    """Find the version whose model has the fingerprint `total`, among the newest versions and those with full weights."""
    for stored in itertools.chain(itertools.islice(reader.back_from(newest), _COMPARED), _with_full_weights(reader)):
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
