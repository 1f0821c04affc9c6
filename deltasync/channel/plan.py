"""Plan the chain from the version that a replica has to the one it wants.

A chain is a list of records, compactions and announcements. Each leads from its base to its version; anchors
lead from nothing. The cheapest chain is estimated from listings, where versions are numbers. Then its objects
are read from the end back. Each must have the identity that the one after it gives for its base, down to the
version of the replica, or to full weights.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
from collections.abc import Iterable, Mapping, Sequence

from deltasync import limits
from deltasync.channel import keys
from deltasync.channel.documents import VersionId
from deltasync.channel.keys import Slot
from deltasync.channel.reading import ChannelReader
from deltasync.channel.record import StoredRecord
from deltasync.errors import FormatError, MissingVersionError
from deltasync.stores.base import ObjectInfo
from deltasync.tensors import weight_bytes
from deltasync.threads import ahead

logger = logging.getLogger(__name__)

EDGE_BYTES = 1 << 15
"""Cost of an edge apart from its payload: a request and a commit, in bytes that could be fetched in that
time.
"""

_NEAR = 8  # versions; a target this near is read without a listing
_FOLDERS = 16  # of records that are listed one by one


@dataclasses.dataclass(frozen=True, slots=True)
class Edge:
    """One listed object: applies to version `base` (0: no weights), yields `version`. `key` is None for a
    record.
    """

    base: int
    version: int
    bytes: int
    key: str | None = None


def cheapest(start: int, target: int, edges: Iterable[Edge]) -> list[Edge] | None:
    """The cheapest edges from version `start` (0: nothing), or from 0, to `target`; None if no edges lead
    there.
    """
    # Edges only lead forward, so in ascending order the cost of every base is known first.
    cost: dict[int, float] = {0: 0, start: 0}
    last: dict[int, Edge] = {}
    for edge in sorted(
        (edge for edge in edges if edge.version <= target), key=lambda edge: (edge.version, edge.base)
    ):
        total = cost.get(edge.base, math.inf) + edge.bytes + EDGE_BYTES
        if total < cost.get(edge.version, math.inf):
            cost[edge.version], last[edge.version] = total, edge
    if target not in last:
        return [] if target == start else None
    chain: list[Edge] = []
    at = target
    while at in last:
        chain.append(last[at])
        at = last[at].base
    return chain[::-1]


def find_chain(
    reader: ChannelReader,
    have: VersionId | None,
    target: VersionId,
    avoid: Mapping[str, str] | None = None,
    at_hand: StoredRecord | None = None,
) -> list[StoredRecord]:
    """Find the records and compactions from one version to another; each is read, and its digest checked.

    The chain is empty if `have` is `target`. It may start with full weights (`StoredRecord.use_anchor`).

    Args:
        reader: Reads the channel.
        have: The version that the replica has, None for nothing.
        target: The version that it wants.
        avoid: Keys of objects not to use, and why: they are missing or damaged, or gave wrong bits.
        at_hand: A record that was read already.

    Raises:
        MissingVersionError: nothing that can be read leads there.
    """
    if have == target:
        return []
    search = _Search(reader, target, avoid or {}, at_hand)
    if have is not None and 0 < target.version - have.version <= _NEAR:
        numbers = range(have.version + 1, target.version + 1)
        try:
            return search.read(have, [Edge(number - 1, number, 0) for number in numbers])
        except MissingVersionError as error:
            logger.info("%s Looking for another chain.", error)
    return search.by_listings(have)


class _UnreadableError(MissingVersionError):
    """An edge from a listing cannot be used; without one, the version that the replica has is not on the
    chain.
    """

    def __init__(self, message: str, edge: Edge | None = None, *, forks: bool = False) -> None:
        super().__init__(message)
        self.edge, self.forks = edge, forks  # whether it starts from another version of the replica's number


class _Search:
    """The search for a chain to one version; `avoid` is as in `find_chain`."""

    def __init__(
        self,
        reader: ChannelReader,
        target: VersionId,
        avoid: Mapping[str, str],
        at_hand: StoredRecord | None = None,
    ) -> None:
        self._reader = reader
        self._target = target
        self._avoid = avoid
        self._at_hand = at_hand
        self._epochs: dict[int, str] = {}  # of each listed version
        self._known: dict[str, ObjectInfo] = {}

    def by_listings(self, have: VersionId | None) -> list[StoredRecord]:
        """The cheapest chain of those that are listed and can be read."""
        target = self._target
        forked = have is not None and have.version >= target.version
        edges, is_all = self.listed(None if forked else have)
        problem, may_be_forked = "", False
        for _ in range(limits.DAMAGED_RECORDS + 1):
            if forked:
                assert have is not None
                message = "Version %s is not the channel's version %d any more; starting from full weights."
                logger.warning(message, have, have.version)
                have, forked = None, False
            found = cheapest(0 if have is None else have.version, target.version, edges)
            if found is None and not is_all:
                edges, is_all = self.listed(have, of_all=True)
                continue
            if found is None and have is not None and may_be_forked:
                edges, forked, may_be_forked = self.listed(have, of_all=True)[0], True, False
                continue
            if found is None:
                begin = "nothing" if have is None else f"version {have}"
                message = (
                    f"Cannot reach version {target} from {begin}: objects are missing, damaged or not listed."
                )
                raise MissingVersionError(
                    f"{message} Replicas continue at the next anchor or compaction. {problem}".rstrip()
                )
            try:
                return self.read(have, found)
            except _UnreadableError as error:
                if error.edge is None:
                    forked = True
                    continue
                edges.remove(error.edge)
                may_be_forked |= error.forks
                is_known = str(error) in (problem, *self._avoid.values())  # then it was logged already
                problem = str(error)
                logger.log(
                    logging.DEBUG if is_known else logging.WARNING, "%s Looking for another chain.", error
                )
        raise MissingVersionError(problem)

    def listed(self, have: VersionId | None, *, of_all: bool = False) -> tuple[list[Edge], bool]:
        """Return the edges by listings, and whether they are of all records, not only of those since a start.

        A record that a compaction starts from, or with none before it, may be full weights; or a compaction may lead
        to its base.
        """
        full_bytes = weight_bytes(self._reader.specs.values())
        shortcuts = self._reader.shortcuts()
        base, oldest = (1, 1) if of_all else self._start(have, [span for span, _ in shortcuts])
        slots = {
            slot.version: (slot, info)
            for slot, info in self._records_since(base, oldest)
            if slot.epoch <= self._target.epoch
        }
        compacted = {span.version for span, _ in shortcuts if span.base}
        edges = []
        for version, (slot, info) in slots.items():
            self._epochs[version], self._known[info.key] = slot.epoch, info
            if version > 1:
                edges.append(Edge(version - 1, version, info.bytes))
            if version == base or (version - 1 not in slots and (oldest == 1 or version > oldest)):
                # Full weights; or, if a compaction leads to it, most likely a delta whose base was forgotten.
                edges.append(Edge(0, version, info.bytes + full_bytes * (2 if version in compacted else 1)))
        for span, info in shortcuts:
            self._known[info.key] = info
            if info.key not in self._avoid:
                edges.append(
                    Edge(
                        span.base or 0, span.version, info.bytes + (0 if span.base else full_bytes), info.key
                    )
                )
        return edges, oldest == 1

    def _start(self, have: VersionId | None, shortcuts: Iterable[Slot]) -> tuple[int, int]:
        """Return the record of full weights that chains start from, 0 for none, and the first number of the folder
        from which on all records are listed.

        Chains start from the version that the replica has, or else from the base of the shortcut that leads to the
        newest version. Both are 1 if there is neither, or if too many folders follow.
        """
        target = self._target.version
        least = target - _FOLDERS * keys.FOLDER  # for the first number
        spans = [span for span in shortcuts if span.version <= target]
        base, last = 1, 0
        if have is not None and have.version - have.version % keys.FOLDER > least:
            base, last = 0, have.version
        elif spans:
            newest = max(spans, key=lambda span: (span.version, not span.base))
            is_announced = any(span.version == newest.base for span in spans if not span.base)
            base, last = 0 if is_announced else newest.base or 0, newest.version
        oldest = last - last % keys.FOLDER
        return (base, oldest) if oldest > max(0, least) else (1, 1)

    def _records_since(self, base: int, oldest: int) -> list[tuple[Slot, ObjectInfo]]:
        """List the records of the folder of a version, if it is not 0, and those from the first number of a folder
        up to the target; all records from 1 on.
        """
        if oldest == 1:
            return self._reader.slots()
        firsts = [base or oldest, *range(oldest, self._target.version + 1, keys.FOLDER)]
        names = dict.fromkeys(keys.folder(first) for first in firsts)
        return [listed for name in names for listed in self._reader.slots(name)]

    def read(self, have: VersionId | None, edges: Sequence[Edge]) -> list[StoredRecord]:
        """Read the objects of these edges, the last first. Raises _UnreadableError."""
        target, back = self._target, list(reversed(edges))
        guesses = [
            edge.key or keys.slot(edge.version, self._epochs.get(edge.version, target.epoch)) for edge in back
        ]
        chain: list[StoredRecord] = []
        at: VersionId | None = target
        held_bytes = 0
        with contextlib.closing(ahead(self._try_to_read, guesses, limits.RECORDS_AHEAD)) as reads:
            for edge, guess, read in zip(back, guesses, reads, strict=True):
                assert at is not None
                key = edge.key or at.key
                found = read if key == guess else self._try_to_read(key)
                if not isinstance(found, str):
                    found = self._checked(found, key, at, is_end=not chain)
                if isinstance(found, str):
                    # The compaction after it may name a base that does not exist.
                    raise _UnreadableError(
                        found, back[len(chain) - 1] if chain and chain[-1].is_shortcut else edge
                    )
                held_bytes += found.size
                chain.append(
                    found if held_bytes <= limits.CHAIN_BYTES else dataclasses.replace(found, data=None)
                )
                at = found.record.base
                if found.use_anchor or at == have:
                    return chain[::-1]
                if have is not None and at is not None and at.version == have.version:
                    if found.is_compaction:
                        text = f"{key} starts from another version {at.version} than {have}."
                        raise _UnreadableError(text, edge, forks=True)
                    raise _UnreadableError(f"{have} is not on the chain to {target}.")
        assert at is not None
        message = (
            f"Version {back[-1].version} builds on version {at.version}, whose record {at.key} is missing or "
            "forgotten."
        )
        raise _UnreadableError(message, back[-1])

    def _checked(self, found: StoredRecord, key: str, at: VersionId, is_end: bool) -> StoredRecord | str:
        """The object if it leads to version `at`, or else why it cannot be used."""
        if found.version != at or found.record.kind == "seal":
            return f"{key} does not lead to version {at}."
        if is_end and found.is_shortcut:  # nothing else compares its fingerprint with that of the record
            other = self._try_to_read(at.key)
            known = other.record if isinstance(other, StoredRecord) and other.version == at else found.record
            if known.fingerprint != found.record.fingerprint:
                return f"{key} promises other bits than the record of version {at}."
        return found

    def _try_to_read(self, key: str) -> StoredRecord | str:
        """The object, or why it cannot be used."""
        if key in self._avoid:
            return self._avoid[key] or f"{key} is left out."
        if self._at_hand is not None and self._at_hand.key == key:
            return self._at_hand
        try:
            return self._reader.stored(key, known=self._known.get(key))
        except (MissingVersionError, FormatError) as error:
            return str(error)
