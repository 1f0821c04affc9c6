"""Decide where a replica goes next. This touches no weights, and every kind of replica uses it.

poll     ask for the slot after the version at hand: in steady state, the only request
look     read head, or list, to find the newest version: at first, when lost, and now and then
plan     find the cheapest way there (`channel.plan`)
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import time
from collections.abc import Iterator, Sequence

from deltasync.channel import keys
from deltasync.channel.documents import Version
from deltasync.channel.keys import Slot
from deltasync.channel.plan import find_way, find_way_back, goes_back, payload_bytes
from deltasync.channel.reading import ChannelReader
from deltasync.channel.record import Stored
from deltasync.errors import FormatError, MissingVersionError, NotPublishedError, StaleChannelError, StoreError
from deltasync.follow.pin import NEWEST, Pin
from deltasync.follow.prefetch import Prefetch
from deltasync.stores.base import ObjectInfo

logger = logging.getLogger(__name__)

LOOK_S = 5.0
"""Seconds between two looks while replicas poll, and between two searches for a way after one found none."""

_LOOK_LIVE_S = 30.0  # the same while the store tells of new records
_LIST_EVERY = 12  # one of this many looks lists
_CLOCKS_S = 2.0  # most by which our clock may differ from the store's, which may have whole seconds only
_AVOID_S = 60.0
_SEALS = 16  # most that one poll follows
_BATCH = 64  # most hops merged into one commit
_BATCH_BYTES = 1 << 28  # most bytes of their payloads; what they decode to is held in memory
_IDENTIFY = 8  # how many of the newest versions and anchors are compared with loaded weights


class Course:
    """One replica's way through a channel. Not thread-safe.

    `next` raises if the newest version was encoded more than `max_age_s` ago. With `prefetch`, parts are fetched before
    their record exists, into the reader or the node's cache.

    Attributes:
        newest: The newest known version.
        problem: What is wrong with the next version; None if nothing is.
        stuck: Why the last search found no way; `next` raises it until a look is due. None if it found one.
        looked_s: When the store last answered, by `time.monotonic`; None before the first time.
        follows_s: Since when this replica takes what is published, seconds since the epoch; infinite while it is pinned.
    """

    def __init__(self, reader: ChannelReader, max_age_s: float | None = None, prefetch: bool = True) -> None:
        self.reader = reader
        self.newest: Version | None = None
        self.problem: str | None = None
        self.looked_s: float | None = None
        self.follows_s = time.time()
        self.stuck: MissingVersionError | FormatError | None = None
        self._max_age_s = max_age_s
        self._prefetch = Prefetch(reader) if prefetch else None
        self._newest_created_s: float | None = None
        self._served: tuple[str, int] = "", 0  # `Slot.newness` of the newest version that was served
        self._look_due_s = 0.0
        self._looks = 0
        self._lost = True  # whether the next slot is not worth asking for before a look has found a way
        self._moved = False  # whether the last call found something to take
        self._pin = NEWEST  # the last call's
        self._rest: list[Stored] = []  # the rest of the last way
        self._next_epoch: str | None = None  # named by a seal
        self._absent: tuple[str, float] | None = None  # the slot whose record was missing, and when
        self._lists_instead = False  # because requests for new records are answered from some cache
        self._left_out: dict[str, tuple[float, str]] = {}  # objects that plans avoid: until when, and why
        self._singly_to = 0  # versions up to this one are taken one by one
        self._undoes = True  # whether to go back by undoing; until that fails
        self._blamed = ""  # what was refused last

    def next(
        self,
        have: Version | None,
        *,
        pin: Pin = NEWEST,
        known: ObjectInfo | None = None,
        now: bool = False,
        told: bool = False,
    ) -> list[Stored]:
        """Return the records and folds to take now, in one commit; empty if nothing is newer than `have`.

        `known` is what an event told of a new record. `now` looks even if no look is due. `told` says that the store tells
        of new records, so that looks can be rare.

        Raises:
            NotPublishedError: the channel has no version yet, or none that the pin allows.
            MissingVersionError: no way leads there now; ask again later.
            ChainError, FormatError, StoreError: nothing can be taken now.
        """
        if pin != self._pin:
            self._pin, self._lost, self._look_due_s, self._undoes = pin, True, 0.0, True
            self.follows_s = time.time() if pin == NEWEST else math.inf
        elif self._rest and self._rest[0].base == have:
            return self._batch(self._rest, have)
        self._rest = []
        due = now or time.monotonic() >= self._look_due_s
        if self.stuck is not None and not due and known is None:
            raise self.stuck
        self.stuck = None
        looks = due or self._lost
        look_s = _LOOK_LIVE_S if told else LOOK_S
        try:
            if pin != NEWEST:
                return self._batch(self._to_pin(have, pin, look_s if due else None), have)
            way = self._look(have, look_s) if looks else []
            if not way and not self._lost:
                way = self._poll(have, known)
        except (MissingVersionError, FormatError) as error:
            self.stuck = error
            raise
        except StoreError:
            if looks:
                self._look_due_s = 0.0  # it did not succeed
            raise
        if not way and have is None:
            raise NotPublishedError(f"{self.reader.store.url} holds no version yet.")
        if self._moved and len(way) == 1:
            self._look_due_s = 0.0  # it lags behind: several versions at once are cheaper
        self._moved = bool(way)
        return self._batch(way, have)

    def lag_s(self, way: Sequence[Stored]) -> float | None:
        """Return the seconds since the version that `way` led to, or its fold, was encoded, by two machines' clocks.

        Call it when that version is served. None where that is no lag: the version was encoded before this replica followed,
        is older than one that was served, or a pin says when to take it.
        """
        record = way[-1].record
        # Documents have milliseconds.
        is_news = record.created_s > self.follows_s - 0.001 and record.slot.newness > self._served
        self._served = max(self._served, record.slot.newness)
        return time.time() - record.created_s if is_news else None

    def forgive(self) -> None:
        """Try again what was missing or damaged, but not what gave other bits than it promises."""
        self._left_out = {key: out for key, out in self._left_out.items() if out[0] == math.inf}

    def refused(self, way: Sequence[Stored], failed: str | None = None, why: object = "") -> None:
        """Take another way than this one from now on.

        `failed` is the key of the record whose objects were missing or damaged; None if the bits were not the promised ones.
        """
        self._lost, self._rest = True, []
        self._look_due_s = 0.0
        if goes_back(way):
            self._undoes = False
            return
        if failed is not None:
            self._left_out[failed] = time.monotonic() + _AVOID_S, str(why)
        elif len(way) > 1:
            self._singly_to = way[-1].record.version  # to find out which of them is wrong
        elif self._is_again(way[0]):
            self._left_out[way[0].key] = math.inf, str(why)
        self._blamed = failed or way[0].key

    def _is_again(self, stored: Stored) -> bool:
        """Whether the store gives the same record again. If not, a damaged answer was taken for a record."""
        try:
            return self.reader.stored(stored.key).sha256 == stored.sha256
        except (MissingVersionError, FormatError, StoreError):
            return False

    def acquit(self) -> None:
        """Allow again what was refused last: an audit found that the bits in memory were at fault."""
        self._left_out.pop(self._blamed, None)

    def identify(self, total: int) -> Stored | None:
        """Find the version whose model has this fingerprint, among the newest ones and those with full weights."""
        newest = self.reader.back_from(self._find_newest(listed=False))
        for stored in itertools.chain(itertools.islice(newest, _IDENTIFY), self._from_nothing()):
            if stored.record.fingerprint == f"{total:016x}":
                return self.reader.record(stored.version) if stored.is_fold else stored
        return None

    def tied(self) -> dict[str, str]:
        """Return the tensors that the channel's first checkpoint has under another name only."""
        references = (stored.record.reference for stored in self._from_nothing())
        return next((reference.tied for reference in references if reference is not None), {})

    def _from_nothing(self) -> Iterator[Stored]:
        """Yield the newest folds from nothing, then the first record."""
        announced = sorted(((span.version, info.key) for span, info in self.reader.folds() if span.base == 0), reverse=True)
        first = [info.key for _, info in self.reader.slots(keys.folder(1))[:1]]
        for key in [*(key for _, key in announced[:_IDENTIFY]), *first]:
            with contextlib.suppress(MissingVersionError, FormatError):
                yield self.reader.stored(key)

    def _poll(self, have: Version | None, known: ObjectInfo | None) -> list[Stored]:
        """Ask for the next record, or for the first."""
        number = 1 if have is None else have.version + 1
        epoch = self._next_epoch or (self.reader.channel().epoch if have is None else have.epoch)
        for _ in range(_SEALS):
            slot = Slot(number, epoch)
            if slot.key in self._left_out:
                return []  # the next look may find a way around it
            try:
                stored = self._slot(slot, known)
                while stored is None and self._prefetch is not None and self._prefetch.look(slot):
                    stored = self._slot(slot, known)
            except FormatError as error:
                self.problem = str(error)
                self._left_out[slot.key] = time.monotonic() + _AVOID_S, str(error)
                break
            self.looked_s = time.monotonic()
            if stored is None:
                self._absent = slot.key, time.time()
                self._check_age()
                return []
            if stored.record.base != have:
                self.problem = f"{slot.key} does not follow version {have}."
                break
            if stored.record.next_epoch is None:
                self._note(stored.version, stored)
                if self._prefetch is not None:
                    self._prefetch.took(stored)
                return [stored]
            epoch = self._next_epoch = stored.record.next_epoch
        logger.warning("%s Looking for another way.", self.problem)
        self._lost = True
        return self._look(have, LOOK_S)

    def _slot(self, slot: Slot, known: ObjectInfo | None) -> Stored | None:
        """Return the record in a slot, if there is one."""
        info = known if known is not None and known.key == slot.key else None
        if info is None and self._lists_instead:
            info = dict(self.reader.slots(keys.folder(slot.version))).get(slot)
            if info is None:
                return None
        return self.reader.slot(slot, info)

    def _look(self, have: Version | None, due_s: float) -> list[Stored]:
        """Find a way to the newest version; look again after `due_s`. Raises MissingVersionError if there is no way."""
        listed = self._begin_look(due_s)
        if not listed:
            newest = self._find_newest(listed=False)
            if newest is None or have is None or newest.slot.newness > have.slot.newness or not self._lost:
                with contextlib.suppress(MissingVersionError, FormatError):  # head may be wrong
                    return self._way(have, newest)
        newest = self._find_newest(listed=True)
        if newest is not None and have is not None and self._is_lost(have, newest):
            have = self.newest = None
        try:
            return self._way(have, newest)
        except (MissingVersionError, FormatError):
            self._lost = True
            self.forgive()  # what the store answered once may have been wrong
            raise

    def _begin_look(self, due_s: float) -> bool:
        """Note that a look begins and that the next one is due after `due_s`; return whether this one should list."""
        now = time.monotonic()
        self._left_out = {key: out for key, out in self._left_out.items() if now < out[0]}
        self._look_due_s = now + due_s
        self._looks += 1
        return self._looks % _LIST_EVERY == 0

    def _is_lost(self, have: Version, newest: Version) -> bool:
        """Whether the store was restored from a backup without version `have`, which then has no successor in it."""
        if newest == have or newest.slot.newness > have.slot.newness:
            return False
        try:  # by its key, because a listing may be behind; another writer's seal may lie there, too
            found = self.reader.slot(have.slot)
        except FormatError:
            return False
        if found is not None and found.sha256 == have.sha256:
            return False
        self.problem = f"Version {have} is not in the store any more, which holds {newest} as the newest."
        if self.reader.trusted is not None:  # otherwise whoever can restore signed records could take a replica back
            logger.warning("%s If it was restored from a backup, restart this replica.", self.problem)
            return False
        logger.warning("%s Starting from full weights.", self.problem)
        return True

    def _way(self, have: Version | None, newest: Version | None) -> list[Stored]:
        """Return the way to the newest version; raise if there is none, or if that version is too old."""
        way: list[Stored] = []
        if newest is None:
            self._lost = False
            return way
        if have is None or newest.slot.newness > have.slot.newness:
            way = self._find_way(have, newest)
            self._next_epoch = None
        if way:
            self._note(way[-1].version, way[-1])
            self.problem = None
        elif newest == have:
            self._note(newest)
        self._lost = False
        self._check_age()
        return way

    def _find_way(self, have: Version | None, target: Version) -> list[Stored]:
        return find_way(self.reader, have, target, self._avoided())

    def _avoided(self) -> dict[str, str]:
        return {key: why for key, (_, why) in self._left_out.items()}

    def _find_newest(self, listed: bool) -> Version | None:
        """Return the newest version, by head or by a listing; None if there is none."""
        head = None if listed else self.reader.head()
        if head is not None:
            self.looked_s = time.monotonic()
            return head.newest
        self.reader.check_run()
        listing = self.reader.slots()
        if self._absent is not None:  # a cache between here and the store may remember that there was nothing
            key, since_s = self._absent
            before_s = since_s - _CLOCKS_S
            self._lists_instead = any(info.key == key and 0 < info.modified_s < before_s for _, info in listing)
        stored = self.reader.newest(listing)
        self.looked_s = time.monotonic()
        if stored is None:
            self._next_epoch = None
            return None
        if stored.record.is_version:
            self._note(stored.version, stored)
            return stored.version
        self._next_epoch = stored.record.next_epoch
        if stored.record.base is not None:
            self._note(stored.record.base)
        return stored.record.base

    def _to_pin(self, have: Version | None, pin: Pin, due_s: float | None) -> list[Stored]:
        """Return the way to where a pin points; raise if that is not there. `due_s` is None where no look is due."""
        listed = due_s is not None and self._begin_look(due_s)
        if due_s is None and have is not None and have.version == pin.version:
            return []
        newest = self._find_newest(listed)
        if not listed and due_s is not None and (newest is None or pin.of(newest.version) > newest.version):
            newest = self._find_newest(listed=True)
        number = 0 if newest is None else pin.of(newest.version)
        if newest is None or not number:
            self._look_due_s = 0.0
            raise NotPublishedError(
                f"{self.reader.store.url} holds no version yet{'' if newest is None else f' for {pin}'}."
            )
        if number > newest.version:
            self._look_due_s = 0.0
            raise MissingVersionError(f"Version {number} is not published; the newest is version {newest.version}.")
        self._note(newest)
        self._check_age()
        if due_s is None and have is not None and have.version == number:
            return []
        if number == newest.version:
            is_older = have is not None and have.version >= number and have != newest
            return self._find_way(None if is_older else have, newest)
        target = self.reader.numbered(number)
        if have is None or have.version < number or have == target.version:
            return self._find_way(have, target.version)
        way = find_way_back(self.reader, have, target, self._avoided()) if self._undoes else []
        if way and len(way) <= _BATCH and payload_bytes(way) <= _BATCH_BYTES:
            return way
        return self._find_way(None, target.version)

    def _batch(self, way: Sequence[Stored], have: Version | None) -> list[Stored]:
        """Return the first hops of a way, those that go into one commit; keep the rest."""
        # A replica without weights takes full weights alone. For others a way that starts from full weights is one commit,
        # because a replica that serves must not go back to an older version in between. So is a way back.
        if goes_back(way):
            return list(way)
        most = 1 if have is not None and have.version < self._singly_to else _BATCH
        count, batch_bytes = 0, 0
        while count < len(way):
            batch_bytes += way[count].record.payload_bytes
            ends = have is None if way[0].use_anchor else count >= most or batch_bytes > _BATCH_BYTES
            if count and ends:
                break
            count += 1
        self._rest = list(way[count:])
        return list(way[:count])

    def _note(self, version: Version, read: Stored | None = None) -> None:
        """Note that a version exists: `read` is its record, None if only its name was read."""
        if self.newest is None or version.slot.newness > self.newest.slot.newness:
            self.newest, self._newest_created_s = version, None
        if read is not None and self.newest == version:
            self._newest_created_s = read.record.created_s

    def _check_age(self) -> None:
        """Raise StaleChannelError if the newest version is too old."""
        if self._max_age_s is None or self.newest is None:
            return
        if self._newest_created_s is None:
            self._newest_created_s = self.reader.record(self.newest).record.created_s
        age_s = time.time() - self._newest_created_s
        if age_s > self._max_age_s:
            raise StaleChannelError(
                f"The newest version, {self.newest.version}, is {age_s:.0f} s old, and {self._max_age_s:g} s are allowed: "
                "nothing newer was published, or somebody keeps it back."
            )
