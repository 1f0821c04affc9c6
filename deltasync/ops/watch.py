"""Watch, while a channel is written, whether a late joiner could start: what it reads first is still there.

A bucket may have a rule that deletes old objects, somebody may have emptied it, or a run may have saved into
the directory of the checkpoint that it started from.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Sequence
from typing import Self

from deltasync import limits
from deltasync.channel import keys
from deltasync.channel.documents import File
from deltasync.channel.plan import find_chain
from deltasync.channel.reading import ChannelReader
from deltasync.channel.record import StoredRecord
from deltasync.errors import (
    FormatError,
    MissingVersionError,
    NotPublishedError,
    ObjectExistsError,
    StoreError,
    TransientStoreError,
    get_logger,
)
from deltasync.opening import checkpoint
from deltasync.ops.scan import exists
from deltasync.publish.log import Log
from deltasync.stores import Store
from deltasync.stores.retries import holds, retried

logger = get_logger(__name__)

_LOOK_S, _LOOK_VERSIONS = 60.0, 16
"""From one look to the next, whichever is over first."""


@dataclasses.dataclass(frozen=True, slots=True)
class JoinPoint:
    """The objects that a late joiner reads before the deltas.

    Attributes:
        base: The newest full weights that are stored, without bytes.
        compaction: Key of the newest compaction from them, None if there is none.
        version: Where that ends, or the version of the full weights.
        stamp: Of the checkpoint that these refer to (`checkpoint.stamp`); empty if it was away.
    """

    base: StoredRecord
    compaction: str | None
    version: int
    stamp: object

    @classmethod
    def of(cls, chain: Sequence[StoredRecord]) -> Self:
        """Return the start of a chain."""
        last = max((stored for stored in chain if stored.is_compaction), key=_version, default=None)
        return cls(
            dataclasses.replace(chain[0], data=None),
            None if last is None else last.key,
            _version(chain[0] if last is None else last),
            _stamp(chain[0]),
        )

    @property
    def overwritten(self) -> bool:
        """Whether the checkpoint is not what it was. One that was away may come back."""
        return bool(self.stamp) and _stamp(self.base) != self.stamp

    def looked(self) -> Self:
        """Return this with the stamp of a checkpoint that was away and has come back."""
        stamp = self.stamp or _stamp(self.base)
        return self if stamp == self.stamp else dataclasses.replace(self, stamp=stamp)

    def compacted(self, version: int, key: str | None = None) -> Self:
        """Return this with a compaction to a version, whose key is None if it could not be stored."""
        return dataclasses.replace(self, version=version, compaction=key or self.compaction)


class JoinWatch:
    """Watches what a late joiner needs, by a few small requests at a time.

    Attributes:
        lost: Whether the store, or the checkpoint that the channel refers to, has lost some of it.
    """

    def __init__(self, reader: ChannelReader, log: Log) -> None:
        self.lost = False
        self._reader, self._log = reader, log
        self._looked, self._looked_s = 0, time.monotonic()  # the version and the time at the last look
        self._looks = self._losses = 0
        self._lost_from = 0  # the version from which something may be lost again
        self._is_over = False  # whether `look_at_end` has looked

    def is_due(self, version: int) -> bool:
        """Whether to `look` now that a version is visible. If so, the next look is due later."""
        waited_s = time.monotonic() - self._looked_s
        if version < self._looked + _LOOK_VERSIONS and waited_s < _LOOK_S and not self._log.head.doubted:
            return False
        self._looked, self._looked_s, self._log.head.doubted = version, time.monotonic(), False
        return True

    def look(self, point: JoinPoint | None) -> JoinPoint | None:
        """Return where a late joiner starts, and note if it cannot. A known file that is gone is put back.

        Raises:
            FencedError: another publisher has begun a run here.
            StoreError: the store did not answer.
        """
        url, restored = self._reader.store.url, restore_channel(self._log)
        if restored is not None:
            logger.error(
                "%s: %s. Nobody could join without it: look for a rule that deletes old objects.",
                *(url, restored),
            )
        self._looks += 1
        newest = 0 if self._log.tip is None else self._log.tip.version
        if point is None or self.lost or newest < self._lost_from:
            return point
        point = point.looked()
        key, problem = self._problem(point)
        if key is None:
            return point
        if (other := self._other_start(point, key, problem)) is not None:
            return other
        self.lost, self._losses = True, self._losses + 1
        # a store that goes on losing them gets fewer
        self._lost_from = newest + _LOOK_VERSIONS * 2**self._losses
        logger.error(
            "%s: %s. Nobody can join the channel now; the next version brings full weights for late joiners. "
            "Look for a "
            "rule that deletes old objects, or for a run that saves into the directory of its first "
            "checkpoint.",
            *(url, problem),
        )
        return point

    def look_at_end(self, point: JoinPoint | None) -> None:
        """Say, once, if the checkpoint that the channel refers to was overwritten since the last look. Asks
        no store.
        """
        if self._is_over or self.lost or point is None:
            return
        record = point.base.record
        if record.reference is not None:
            self._is_over = True
            if point.overwritten:
                logger.error(
                    "%s, which version %d of %s refers to, was overwritten during the run. Nobody can join "
                    "the channel now. Put the checkpoint back, or publish once more with resume=True, which "
                    "then stores full weights.",
                    *(record.reference, record.version, self._reader.store.url),
                )

    def _problem(self, point: JoinPoint) -> tuple[str | None, str]:
        """Return the key of an object that a late joiner needs and that is not as it was, and what is wrong
        with it.

        Of weight files and of records after the newest compaction, each look sees one.
        """
        reader, base = self._reader, point.base
        record = base.record
        try:
            if retried(lambda: reader.stored(base.key), 2, passing=(FormatError,)).sha256 != base.sha256:
                return base.key, f"{base.key} was overwritten"
        except MissingVersionError:
            return base.key, f"{base.key} is gone"
        except FormatError as error:
            return base.key, str(error).rstrip(".")
        if point.overwritten:
            return base.key, f"{record.reference}, which version {record.version} refers to, was overwritten"
        for file in record.payload_files[self._looks % max(len(record.payload_files), 1) :][:1]:
            if not _is_whole(reader, file):
                return base.key, f"{file.key} is gone, or has another size"
        needed = [] if point.compaction is None else [point.compaction]
        needed += [
            keys.slot(number, self._log.epoch)
            for number in list(self._log.published)
            if number > point.version
        ]
        key = needed[self._looks % len(needed)] if needed else None
        return (None, "") if key is None or exists(reader.store, key) else (key, f"{key} is gone")

    def _other_start(self, point: JoinPoint, key: str, problem: str) -> JoinPoint | None:
        """Return where a late joiner starts without an object, as where a tool stored an anchor and forgot
        what was before; None if it cannot.
        """
        if self._log.tip is None:
            return None
        try:
            chain = find_chain(self._reader, None, self._log.tip, {key: f"{problem}."})
        except (MissingVersionError, FormatError):
            return None
        if not all(_is_whole(self._reader, file) for file in chain[0].record.payload_files):
            return None
        return point if chain[0].key == point.base.key else JoinPoint.of(chain[:1])


def restore_channel(log: Log) -> str | None:
    """Put channel.json back if it is gone or was overwritten: without it nobody can join. Return what had
    happened.

    Raises:
        FencedError: another publisher has begun a run here.
    """
    store, data = log.store, log.channel_data
    if data is None or _begins_with(store, data[: limits.SMALL_BYTES]):
        return None
    there = holds(store, keys.CHANNEL, data)
    if there:
        return None
    if there is False and _is_other_run(log):
        raise log.fence("Another publisher has begun a run in this place")
    if there is None:
        with contextlib.suppress(ObjectExistsError):
            store.create(keys.CHANNEL, data)
    else:
        store.put(keys.CHANNEL, data)
    return f"{keys.CHANNEL} was {'gone' if there is None else 'overwritten'} and is put back"


def _begins_with(store: Store, first: bytes) -> bool:
    try:
        return store.read_range(keys.CHANNEL, 0, len(first)) == first
    except TransientStoreError:
        raise
    except StoreError:  # it is gone or shorter
        return False


def _is_other_run(log: Log) -> bool:
    """Whether channel.json is of a run that was begun after this publisher opened the channel."""
    try:
        found = ChannelReader(log.reader.store, log.reader.trusted).channel()
    except (FormatError, NotPublishedError):
        return False
    return found.run_id != log.run_id


def _is_whole(reader: ChannelReader, file: File) -> bool:
    return any((info.key, info.bytes) == (file.key, file.bytes) for info in reader.store.list(file.key))


def _stamp(stored: StoredRecord) -> tuple[tuple[str, int, int, int], ...] | None:
    reference = stored.record.reference
    return None if reference is None else checkpoint.stamp(reference)


def _version(stored: StoredRecord) -> int:
    return stored.record.version
