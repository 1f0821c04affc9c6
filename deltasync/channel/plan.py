"""Plan the way from the version that a replica has to the one it wants.

A way is a list of records, folds and announcements. Each leads from its base to its version; anchors lead from nothing. The
cheapest way is estimated from listings, where versions are numbers. Then its objects are read from the end back. Each must
have the identity by which the one after it names its base, down to the identity that the replica has, or to full weights.

A way back has the records to undo, newest first, and then the record of the older version that is wanted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
from collections.abc import Iterable, Mapping, Sequence

from deltasync.channel import keys
from deltasync.channel.documents import Version
from deltasync.channel.reading import MOST_DAMAGED, ChannelReader
from deltasync.channel.record import Stored
from deltasync.channel.threads import ahead
from deltasync.errors import FormatError, MissingVersionError
from deltasync.stores.base import ObjectInfo
from deltasync.tensors import weight_bytes

logger = logging.getLogger(__name__)

HOP_BYTES = 1 << 15
"""Cost of a hop beside its payload, a request and a commit, in bytes that could be fetched in that time."""

_UNDONE = "packed"  # the codec that can be undone: it decodes without the old values
_NEAR = 8  # versions; a target this near is read without a listing
_AHEAD = 8  # records that are read while one is checked
_HELD_BYTES = 1 << 28  # most bytes of records that are kept for staging


@dataclasses.dataclass(frozen=True, slots=True)
class Hop:
    """A record, or an object beside the log, by its listing.

    It leads from number to number; `base` is 0 for nothing, `key` None for a version's record.
    """

    base: int
    version: int
    bytes: int
    key: str | None = None


def cheapest(start: int, target: int, hops: Iterable[Hop]) -> list[Hop] | None:
    """The cheapest sequence of hops from version `start` (0: nothing) to `target`, None if there is none.

    It may also begin at 0, because full weights can be loaded at any time.
    """
    # Hops only lead forward, so in ascending order the cost of every base is known first.
    cost: dict[int, float] = {0: 0, start: 0}
    last: dict[int, Hop] = {}
    for hop in sorted((hop for hop in hops if hop.version <= target), key=lambda hop: (hop.version, hop.base)):
        total = cost.get(hop.base, math.inf) + hop.bytes + HOP_BYTES
        if total < cost.get(hop.version, math.inf):
            cost[hop.version], last[hop.version] = total, hop
    if target not in last:
        return [] if target == start else None
    way: list[Hop] = []
    at = target
    while at in last:
        way.append(last[at])
        at = last[at].base
    return way[::-1]


def find_way(
    reader: ChannelReader,
    have: Version | None,
    target: Version,
    avoid: Mapping[str, str] | None = None,
    at_hand: Stored | None = None,
) -> list[Stored]:
    """Find the records and folds from one version to another; each is read, and its digest checked.

    Args:
        reader: Reads the channel.
        have: The version that the replica has, None for nothing.
        target: The version that it wants.
        avoid: Keys of objects not to use, because they are missing or damaged, or gave wrong bits, and the reason.
        at_hand: A record that was read already.

    Returns:
        The way, empty if `have` is `target`. It may start with full weights (`Stored.use_anchor`).

    Raises:
        MissingVersionError: nothing that can be read leads there.
        StoreError: the store failed.
    """
    if have == target:
        return []
    search = _Search(reader, target, avoid or {}, at_hand)
    if have is not None and 0 < target.version - have.version <= _NEAR:
        numbers = range(have.version + 1, target.version + 1)
        try:
            return search.read(have, [Hop(number - 1, number, 0) for number in numbers])
        except MissingVersionError as error:
            logger.info("%s Looking for another way.", error)
    return search.by_listings(have)


def find_way_back(
    reader: ChannelReader, have: Version, target: Stored, avoid: Mapping[str, str] | None = None
) -> list[Stored]:
    """Find the records and folds to undo, newest first, then `target`, the record of an older version.

    The result is empty if full weights are cheaper, or the only way. `avoid` is as in `find_way`.

    Raises:
        StoreError: the store failed.
    """
    search = _Search(reader, have, avoid or {})
    start = target.record.version
    if have.version - start <= _NEAR:
        hops: list[Hop] | None = [Hop(number - 1, number, 0) for number in range(start + 1, have.version + 1)]
    else:
        hops = cheapest(start, have.version, [hop for hop in search.listed() if hop.base])
    full_bytes = weight_bytes(reader.specs.values())
    if not hops or sum(hop.bytes for hop in hops) >= full_bytes:
        return []
    try:
        way = [*reversed(search.read(target.version, hops)), target]
    except MissingVersionError as error:
        logger.info("%s Going back to version %s by full weights.", error, target.version)
        return []
    deltas = [stored.record.delta for stored in way[:-1]]
    is_undone = all(delta is not None and delta.codec == _UNDONE for delta in deltas)
    return way if is_undone and payload_bytes(way) < full_bytes else []


def goes_back(way: Sequence[Stored]) -> bool:
    """Whether a way leads back, as those of `find_way_back`."""
    return len(way) > 1 and way[0].record.version > way[-1].record.version


def payload_bytes(way: Sequence[Stored]) -> int:
    """Bytes to download for a way: `Record.payload_bytes` of all but the record where a way back ends."""
    return sum(stored.record.payload_bytes for stored in (way[:-1] if goes_back(way) else way))


class _UnreadableError(MissingVersionError):
    """A hop from a listing cannot be used."""

    def __init__(self, message: str, hop: Hop) -> None:
        super().__init__(message)
        self.hop = hop


class _ForkedError(MissingVersionError):
    """The version that the replica has is not on the way."""


class _Search:
    """The search for a way to one version; `avoid` is as in `find_way`."""

    def __init__(
        self, reader: ChannelReader, target: Version, avoid: Mapping[str, str], at_hand: Stored | None = None
    ) -> None:
        self._reader = reader
        self._target = target
        self._avoid = avoid
        self._at_hand = at_hand
        self._epochs: dict[int, str] = {}  # of each listed version
        self._known: dict[str, ObjectInfo] = {}

    def by_listings(self, have: Version | None) -> list[Stored]:
        """The cheapest way of those that are listed and can be read."""
        target = self._target
        hops, problem = self.listed(), ""
        if have is not None and have.version >= target.version:
            _log_fork(have)
            have = None
        for _ in range(MOST_DAMAGED + 1):
            found = cheapest(0 if have is None else have.version, target.version, hops)
            if found is None:
                begin = "nothing" if have is None else f"version {have}"
                message = f"No way leads from {begin} to version {target}; the next anchor or fold makes one. {problem}"
                raise MissingVersionError(message.rstrip())
            try:
                return self.read(have, found)
            except _ForkedError:
                assert have is not None
                _log_fork(have)
                have = None
            except _UnreadableError as error:
                hops.remove(error.hop)
                problem = str(error)
                logger.warning("%s Looking for another way.", error)
        raise MissingVersionError(problem)

    def listed(self) -> list[Hop]:
        """All hops by listings. A record with none before it may be full weights, or a fold may lead to its base."""
        full_bytes = weight_bytes(self._reader.specs.values())
        slots = {slot.version: (slot, info) for slot, info in self._reader.slots() if slot.epoch <= self._target.epoch}
        beside = self._reader.beside()
        folded = {span.version for span, _ in beside if span.base}
        hops = []
        for version, (slot, info) in slots.items():
            self._epochs[version], self._known[info.key] = slot.epoch, info
            if version > 1:
                hops.append(Hop(version - 1, version, info.bytes))
            if version - 1 not in slots:  # where a fold leads to it, it most likely is a delta whose base was forgotten
                hops.append(Hop(0, version, info.bytes + full_bytes * (2 if version in folded else 1)))
        for span, info in beside:
            self._known[info.key] = info
            if info.key not in self._avoid:
                hops.append(Hop(span.base, span.version, info.bytes + (0 if span.base else full_bytes), info.key))
        return hops

    def read(self, have: Version | None, hops: Sequence[Hop]) -> list[Stored]:
        """Read the objects of these hops, the last first. Raises _UnreadableError or _ForkedError."""
        target, back = self._target, list(reversed(hops))
        guesses = [hop.key or keys.slot(hop.version, self._epochs.get(hop.version, target.epoch)) for hop in back]
        way: list[Stored] = []
        at: Version | None = target
        held_bytes = 0
        with contextlib.closing(ahead(self._try_to_read, guesses, _AHEAD)) as reads:
            for hop, guess, read in zip(back, guesses, reads, strict=True):
                assert at is not None
                key = hop.key or at.key
                found = read if key == guess else self._try_to_read(key)
                if not isinstance(found, str) and (found.version != at or found.record.kind == "seal"):
                    found = f"{key} does not lead to version {at}."
                if not way and not isinstance(found, str) and found.is_beside and not self._has_fingerprint_of_record(found):
                    found = f"{key} promises other bits than the record of version {at}."
                if isinstance(found, str):
                    # The fold after it may name a base that does not exist.
                    raise _UnreadableError(found, back[len(way) - 1] if way and way[-1].is_beside else hop)
                held_bytes += found.size
                way.append(found if held_bytes <= _HELD_BYTES else dataclasses.replace(found, data=None))
                at = found.record.base
                if found.use_anchor or at == have:
                    return way[::-1]
                if have is not None and at is not None and at.version == have.version:
                    if found.is_fold:
                        raise _UnreadableError(f"{key} starts from another version {at.version} than {have}.", hop)
                    raise _ForkedError(f"{have} is not on the way to {target}.")
        raise _UnreadableError(f"The record of version {back[-1].version} is not full weights.", back[-1])

    def _has_fingerprint_of_record(self, beside: Stored) -> bool:
        """Whether an object beside the log has the fingerprint of the record that it leads to, if that can be read.

        Nothing else checks it.
        """
        found = self._try_to_read(beside.version.key)
        other = not isinstance(found, str) and found.version == beside.version and found
        return not other or other.record.fingerprint == beside.record.fingerprint

    def _try_to_read(self, key: str) -> Stored | str:
        """The object, or why it cannot be used."""
        if key in self._avoid:
            return self._avoid[key] or f"{key} is left out."
        if self._at_hand is not None and self._at_hand.key == key:
            return self._at_hand
        try:
            return self._reader.stored(key, known=self._known.get(key))
        except (MissingVersionError, FormatError) as error:
            return str(error)


def _log_fork(have: Version) -> None:
    logger.warning("Version %s is not the channel's version %d any more; starting from full weights.", have, have.version)
