"""Where a replica goes next: polls, looks, and plans. It touches no weights, and is shared by every kind of replica.

poll     ask for the slot after the version that there is: one request, in steady state all there is
look     read head, or list, to find the newest version: at first, when lost, and now and then
plan     the cheapest way there (`channel.plan`)
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
from deltasync.replicas.pin import NEWEST, Pin
from deltasync.replicas.prefetch import Prefetch
from deltasync.stores.base import ObjectInfo

logger = logging.getLogger(__name__)

LOOK_S = 5.0
"""Between two looks, while replicas poll; and between two tries to find a way where there was none."""

_LOOK_LIVE_S = 30.0
_LIST_EVERY = 12  # looks
_CLOCKS_S = 2.0  # by which our clock and the store's, which may tell whole seconds, are taken to differ
_AVOID_S = 60.0
_SEALS = 16  # followed in one poll
_BATCH = 64  # hops that are merged into one commit
_BATCH_BYTES = 1 << 28  # of their payloads; what they decode to is held in memory
_IDENTIFY = 8  # newest versions, and anchors, that the loaded weights may be


class Course:
    """One replica's way through a channel. Not thread-safe.

    It refuses to go on while the newest version was encoded longer than `max_age_s` ago. With `prefetch` it fetches parts
    before their record exists; whoever stages gets them from the reader, or from the node's cache.

    Attributes:
        newest: The newest version that is known.
        problem: What is wrong with the next version, None if nothing is.
        stuck: Why no way led on the last time, which `next` raises until a look is due; None if one did.
        looked_s: When the store last answered, by `time.monotonic`; None before the first time.
        follows_s: Since when this replica can take what is published, seconds since the epoch; infinite while it is pinned.
    """

    def __init__(self, reader: ChannelReader, max_age_s: float | None = None, prefetch: bool = True) -> None:
        self.reader = reader
        self.newest: Version | None = None
        self.problem: str | None = None
        self.looked_s: float | None = None
        self.follows_s = time.time()
        self._served: tuple[str, int] = "", 0  # the newest version that was, as `Slot.newness`
        self._max_age_s = max_age_s
        self._newest_created_s: float | None = None
        self._next_epoch: str | None = None  # that a seal named
        self._look_due_s = 0.0
        self._looks = 0
        self._lost = True
        self.stuck: MissingVersionError | FormatError | None = None
        self._absent: tuple[str, float] | None = None  # the slot that a request said is missing, and when
        self._lists_instead = False
        self._rest: list[Stored] = []
        self._pin = NEWEST  # of the last call
        self._found_at_once = 0
        self._left_out: dict[str, tuple[float, str]] = {}  # objects that plans avoid: until when, and why
        self._singly_to = 0
        self._undoes = True  # to go back, until it fails
        self._blamed: str | None = None  # what was refused last
        self._prefetch = Prefetch(reader) if prefetch else None

    def next(
        self,
        have: Version | None,
        *,
        pin: Pin = NEWEST,
        known: ObjectInfo | None = None,
        now: bool = False,
        told: bool = False,
    ) -> list[Stored]:
        """What to take now, from `have` on: records and folds that are worth one commit; nothing if there is nothing newer.

        `known` is what an event told of a new record. With `now` it looks although no look is due; where the store has
        `told` of new records, looks can be rare.

        Raises:
            NotPublishedError: the channel has no version yet, or none that the pin allows.
            MissingVersionError: no way leads there now; ask again later.
            ChainError, FormatError, StoreError: nothing to take now.
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
                self._look_due_s = 0.0  # that was none
            raise
        if not way and have is None:
            raise NotPublishedError(f"{self.reader.store.url} holds no version yet.")
        self._found_at_once = self._found_at_once + 1 if way else 0
        if self._found_at_once > 1 and len(way) == 1:
            self._look_due_s = 0.0  # it lags behind: several versions at once are cheaper
        return self._batch(way, have)

    def lag_s(self, way: Sequence[Stored]) -> float | None:
        """Seconds from encoding what is served from now on, or making its fold, until now, by two machines' clocks.

        None where that is no lag: to catch up with what was encoded before this replica followed, to go back, and for a pin.
        """
        last = way[-1]
        # Documents tell milliseconds.
        is_news = last.record.created_s > self.follows_s - 0.001 and last.record.slot.newness > self._served
        self._served = max(self._served, last.record.slot.newness)
        return time.time() - last.record.created_s if is_news else None

    def forgive(self) -> None:
        """Try again what was missing or damaged, but not what does not give the bits that it promises."""
        self._left_out = {key: out for key, out in self._left_out.items() if out[0] == math.inf}

    def refused(self, way: Sequence[Stored], failed: str | None = None, why: object = "") -> None:
        """Take another way from now on than this one.

        `failed` is the key of the record whose objects were missing or damaged; None where the bits were not as promised.
        """
        self._lost, self._rest = True, []
        self._look_due_s = 0.0
        if goes_back(way):
            self._undoes = False
            return
        if failed is not None:
            self._left_out[failed] = time.monotonic() + _AVOID_S, str(why)
        elif len(way) > 1:
            self._singly_to = way[-1].record.version  # to find out which of them it is
        elif self._is_again(way[0]):
            self._left_out[way[0].key] = math.inf, str(why)
        self._blamed = failed or way[0].key

    def _is_again(self, stored: Stored) -> bool:
        """Whether the store gives the same record again. If not, an answer was damaged where nothing unsigned tells."""
        try:
            return self.reader.stored(stored.key).sha256 == stored.sha256
        except (MissingVersionError, FormatError, StoreError):
            return False

    def acquit(self) -> None:
        """What was refused last is not to blame: an audit found that the bits it met were of no version."""
        if self._blamed is not None:
            self._left_out.pop(self._blamed, None)

    def identify(self, total: int) -> Stored | None:
        """The version whose model has this fingerprint, of the newest and those that servers load from nothing, if any."""
        newest = self.reader.back_from(self._find_newest(listed=False))
        for stored in itertools.chain(itertools.islice(newest, _IDENTIFY), self._from_nothing()):
            if stored.record.fingerprint == f"{total:016x}":
                return self.reader.record(stored.version) if stored.is_fold else stored
        return None

    def tied(self) -> dict[str, str]:
        """Tensors that the checkpoint which the channel starts from holds under another name only."""
        references = (stored.record.reference for stored in self._from_nothing())
        return next((reference.tied for reference in references if reference is not None), {})

    def _from_nothing(self) -> Iterator[Stored]:
        """The newest folds from nothing, then the first record."""
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
        """The record in a slot, by as few requests as it takes."""
        told = None if known is None or known.key != slot.key else known
        if told is None and self._lists_instead:
            told = dict(self.reader.slots(keys.folder(slot.version))).get(slot)
            return None if told is None else self.reader.slot(slot, told)
        return self.reader.slot(slot, told)

    def _look(self, have: Version | None, due_s: float) -> list[Stored]:
        """Find the newest version, and a way there; look again after `due_s`. Raises MissingVersionError for no way."""
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
        """Note a look, the next of which is due after `due_s`; whether this one should list."""
        now = time.monotonic()
        self._left_out = {key: out for key, out in self._left_out.items() if now < out[0]}
        self._look_due_s = now + due_s
        self._looks += 1
        return self._looks % _LIST_EVERY == 0

    def _is_lost(self, have: Version, newest: Version) -> bool:
        """Whether the store went back to before a version, by a backup: nothing in it can come after that version then."""
        if newest == have or newest.slot.newness > have.slot.newness:
            return False
        try:  # by its key: a listing may be behind. What is there may also be a seal that the next writer put
            found = self.reader.slot(have.slot)
        except FormatError:
            return False
        if found is not None and found.sha256 == have.sha256:
            return False
        self.problem = f"Version {have} is not in the store any more, which holds {newest} as the newest."
        if self.reader.trusted is not None:  # who can put back what was signed must not bring a replica back
            logger.warning("%s If it was restored from a backup, restart this replica.", self.problem)
            return False
        logger.warning("%s Starting from full weights.", self.problem)
        return True

    def _way(self, have: Version | None, newest: Version | None) -> list[Stored]:
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
        """By head, or by a listing; None if there is none."""
        head = None if listed else self.reader.head()
        if head is not None:
            self.looked_s = time.monotonic()
            return head.newest
        self.reader.check_run()
        listing = self.reader.slots()
        if self._absent is not None:  # something between here and the store may remember that there was nothing
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
        """The way to where a pin points now, in each look held to what the channel has; `due_s` is None between looks."""
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
        """The first hops of a way that are worth one commit; the rest is remembered."""
        # Full weights are taken alone by who has none. Otherwise what starts from them is one commit to its end, because a
        # replica that serves must not go back to an older version in between. So is a way back.
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
        """There is this version, whose record was `read`, or is named by what was."""
        if self.newest is None or version.slot.newness > self.newest.slot.newness:
            self.newest, self._newest_created_s = version, None
        if read is not None and self.newest == version:
            self._newest_created_s = read.record.created_s

    def _check_age(self) -> None:
        """Raises StaleChannelError if the newest version is too old."""
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
