"""Which records and folds lead from what a replica has to what it wants.

Versions are nodes, by identity. A record leads from its base to its version, a fold from its base to its version, an anchor
from nothing. What is cheapest is estimated from listings, by numbers; then each object on the way is read, from the end, and
must have the digest by which it was named, until the way meets exactly what the replica has, or nothing.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence

from deltasync.channel import keys
from deltasync.channel.documents import Version
from deltasync.channel.keys import Span
from deltasync.channel.reading import MOST_DAMAGED, ChannelReader, ahead
from deltasync.channel.record import Stored
from deltasync.errors import FormatError, MissingVersionError
from deltasync.stores.base import ObjectInfo
from deltasync.types import weight_bytes

logger = logging.getLogger(__name__)

HOP_BYTES = 1 << 15
"""What a hop costs beside its payload, in bytes that could be fetched meanwhile: a request and a commit."""

_NEAR = 8  # versions; so few records are read without a listing
_AHEAD = 8  # records being read while one is looked at
_HELD_BYTES = 1 << 28  # of records that are read and kept for staging


@dataclasses.dataclass(frozen=True, slots=True)
class Hop:
    """One move that a listing promises.

    Attributes:
        base: Number of the version it starts from, 0 for nothing.
        version: Number of the version it leads to.
        bytes: To download.
        key: Of a fold; None for the version's own record.
    """

    base: int
    version: int
    bytes: int
    key: str | None = None


def cheapest(start: int, target: int, hops: Iterable[Hop]) -> list[Hop] | None:
    """The cheapest sequence of hops between two numbers, None if there is none.

    Args:
        start: Number of the version that there is, 0 for none. Whole weights may be loaded all the same.
        target: Number to reach.
        hops: What there is to choose from.
    """
    # Cheapest way to each version; hops only lead forward, so ascending order settles every base first.
    cost: dict[int, int] = {0: 0, start: 0}
    last: dict[int, Hop] = {}
    for hop in sorted((hop for hop in hops if hop.version <= target), key=lambda hop: (hop.version, hop.base)):
        before = cost.get(hop.base)
        if before is None:
            continue
        total = before + hop.bytes + HOP_BYTES
        if hop.version not in cost or total < cost[hop.version]:
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
    reader: ChannelReader, have: Version | None, target: Version, avoid: Mapping[str, str] | None = None
) -> list[Stored]:
    """Records and folds from one version to another, each read and held to its digest.

    Args:
        reader: The channel.
        have: What the replica has, None for nothing.
        target: Where to.
        avoid: Keys of objects that are missing or damaged, or that do not give what they promise, and why.

    Returns:
        The way, empty if `have` is the target. It starts from full weights (`Stored.use_anchor`) if there is no other.

    Raises:
        MissingVersionError: nothing that can be read leads there.
        StoreError: the store failed.
    """
    if have == target:
        return []
    left_out = avoid or {}
    if have is not None and 0 < target.version - have.version <= _NEAR:
        numbers = range(have.version + 1, target.version + 1)
        try:
            return _read(reader, have, target, [Hop(number - 1, number, 0) for number in numbers], left_out, {}, {})
        except (MissingVersionError, FormatError) as error:
            logger.info("%s Looking for another way.", error)
    return _Search(reader, target, left_out).way(have)


class _Search:
    """The search by listings."""

    def __init__(self, reader: ChannelReader, target: Version, left_out: Mapping[str, str]) -> None:
        self._reader = reader
        self._target = target
        self._left_out = left_out
        self._gone: set[Hop] = set()
        listing = reader.slots()
        self._epochs = {slot.version: slot.epoch for slot, _ in listing.slots if slot.epoch <= target.epoch}
        sizes = {slot.version: info.bytes for slot, info in listing.slots if slot.epoch <= target.epoch}
        folds, full_bytes = reader.folds(), weight_bytes(reader.specs.values())
        self._known = {info.key: info for _, info in [*listing.slots, *folds]}
        self._hops = [*_log_hops(sizes, full_bytes), *_fold_hops(folds, full_bytes)]

    def way(self, have: Version | None) -> list[Stored]:
        """See `find_way`."""
        if have is not None and have.version >= self._target.version:
            _say_forked(have)
            have = None
        start = 0 if have is None else have.version
        problem = ""
        while True:
            hops = [hop for hop in self._hops if hop not in self._gone and hop.key not in self._left_out]
            found = cheapest(start, self._target.version, hops)
            if found is None:
                begin = "nothing" if have is None else f"version {have}"
                told = f"No way leads from {begin} to version {self._target}; the next anchor or fold makes one. {problem}"
                raise MissingVersionError(told.rstrip())
            try:
                return _read(self._reader, have, self._target, found, self._left_out, self._epochs, self._known)
            except _ForkedError:
                assert have is not None
                _say_forked(have)
                have, start = None, 0
            except _UnreadableError as error:
                self._gone.add(error.hop)
                if len(self._gone) > MOST_DAMAGED:
                    raise
                problem = str(error)
                logger.warning("%s Looking for another way.", error)


def _say_forked(have: Version) -> None:
    logger.warning("Version %s is not the channel's version %d any more; starting from full weights.", have, have.version)


class _UnreadableError(MissingVersionError):
    """A hop that a listing promised is none."""

    def __init__(self, message: str, hop: Hop) -> None:
        super().__init__(message)
        self.hop = hop


class _ForkedError(MissingVersionError):
    """What the replica has lies not on the way."""


def _log_hops(sizes: Mapping[int, int], full_bytes: int) -> Iterator[Hop]:
    """The log's own hops. What has no record before it may be full weights, or a fold may lead to where it starts."""
    for version, size in sizes.items():
        if version > 1:
            yield Hop(version - 1, version, size)
        if version - 1 not in sizes:
            yield Hop(0, version, size + full_bytes)


def _fold_hops(folds: Iterable[tuple[Span, ObjectInfo]], full_bytes: int) -> Iterator[Hop]:
    for span, info in folds:
        yield Hop(span.base, span.version, info.bytes + (0 if span.base else full_bytes), info.key)


def _read(
    reader: ChannelReader,
    have: Version | None,
    target: Version,
    hops: Sequence[Hop],
    left_out: Mapping[str, str],
    epochs: Mapping[int, str],
    known: Mapping[str, ObjectInfo],
) -> list[Stored]:
    """Read the objects of these hops from the end.

    Raises:
        _UnreadableError: one is missing, damaged, or does not connect.
        _ForkedError: what the replica has is not on the way.
    """
    back = list(reversed(hops))
    guesses = [hop.key or keys.slot(hop.version, epochs.get(hop.version, target.epoch)) for hop in back]
    way: list[Stored] = []
    at: Version | None = target
    held_bytes = 0
    reads = ahead(lambda key: _attempt(reader, key, left_out, known), guesses, _AHEAD)
    try:
        for hop, guess, read in zip(back, guesses, reads, strict=True):
            assert at is not None
            key = hop.key or at.key
            found = read if key == guess else _attempt(reader, key, left_out, known)
            if not isinstance(found, str) and (found.version != at or found.record.kind == "seal"):
                found = f"{key} does not lead to version {at}."
            if not way and not isinstance(found, str) and found.is_fold and not _is_borne_out(reader, found, left_out):
                found = f"{key} promises other bits than the record of version {at}."
            if isinstance(found, str):
                # A fold may name a base that there is not.
                raise _UnreadableError(found, back[len(way) - 1] if way and way[-1].is_fold else hop)
            held_bytes += found.size
            way.append(found if held_bytes <= _HELD_BYTES else dataclasses.replace(found, data=None))
            if found.use_anchor:
                return way[::-1]
            at = found.record.base
            if have is not None and at is not None and at.version == have.version:
                if at != have and found.is_fold:
                    raise _UnreadableError(f"{key} starts from another version {at.version} than there is.", hop)
                if at != have:
                    raise _ForkedError(f"{have} is not on the way to {target}.")
                return way[::-1]
    finally:
        reads.close()
    raise _UnreadableError(f"The record of version {back[-1].version} is not full weights.", back[-1])


def _is_borne_out(reader: ChannelReader, fold: Stored, left_out: Mapping[str, str]) -> bool:
    """Whether a fold promises the bits of the record that it leads to, where that can be read: nobody else tells of them."""
    found = _attempt(reader, fold.version.key, left_out, {})
    return isinstance(found, str) or found.version != fold.version or found.record.fingerprint == fold.record.fingerprint


def _attempt(reader: ChannelReader, key: str, left_out: Mapping[str, str], known: Mapping[str, ObjectInfo]) -> Stored | str:
    """The object, or why there is none."""
    if key in left_out:
        return left_out[key] or f"{key} is left out."
    try:
        return reader.stored(key, known=known.get(key))
    except (MissingVersionError, FormatError) as error:
        return str(error)
