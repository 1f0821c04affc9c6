"""Maintenance of a channel while it is written: anchors beside the log, compactions, garbage collection.

It happens in a thread that neither training nor uploads wait for, and no version depends on it. A failure is logged, and
tried again with a later version.

A late joiner takes the newest full weights (an anchor, or the reference), the newest compaction from them, and the deltas
since. `Chain` estimates that and says when to shorten it.
"""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

import numpy as np

from deltasync import maintenance
from deltasync.channel import anchors, checkpoint, keys
from deltasync.channel.documents import Anchor, Delta, File
from deltasync.channel.plan import find_chain
from deltasync.channel.reading import ChannelReader
from deltasync.channel.record import StoredRecord
from deltasync.config import Retention
from deltasync.errors import ChainError, CorruptDataError, DeltaSyncError, FormatError, MissingVersionError, get_logger
from deltasync.maintenance import KeepPolicy, exists
from deltasync.publish import compaction
from deltasync.publish.budget import Budget
from deltasync.publish.collect import Weights
from deltasync.publish.compaction import STORED_AT_ONCE
from deltasync.publish.log import Log
from deltasync.publish.shadow import Shadow
from deltasync.ranks.peers import Signals
from deltasync.stores.retries import retried
from deltasync.tensors import fingerprint
from deltasync.threads import Workers

logger = get_logger(__name__)

_LEAST_BETWEEN = 16
"""Versions from one garbage collection to the next, which reads all records."""

_LOOK_S, _LOOK_VERSIONS = 60.0, 16
"""From one look whether a late joiner could start to the next, whichever is over first."""

_MOST_BESIDE_BYTES = 1 << 27
"""A larger weight file is stored before the next one is made."""


class Maintenance:
    """Looks after one channel as `retention` says. `model_files`, by name, are stored beside the weights of an anchor.

    `signals` lead to the other ranks of a sharded trainer: each makes its parts of a compaction, and all collect an anchor
    as they publish.

    Attributes:
        chain: The objects that a late joiner fetches.
        storing: Whether an anchor or a compaction is being stored.
        failed: Whether the last anchor could not be stored, or the one that a compaction needs cannot be read.
        lost: Whether the store, or the checkpoint that the channel refers to, has lost what a late joiner starts from.
        affords: Whether the budget pays for an anchor that the ranks have to collect with the next version.
    """

    def __init__(
        self,
        reader: ChannelReader,
        log: Log,
        retention: Retention,
        model_files: Mapping[str, bytes],
        chain: Chain,
        anchor_every: int | None,
        signals: Signals | None,
    ) -> None:
        self.reader = reader
        self.retention = retention
        self.chain = chain
        self.storing = self.failed = self.lost = self.affords = False
        self._looked_s = time.monotonic()
        self._looked = self._looks = 0  # the version at the last look, and the number of looks
        self._losses = self._lost_from = 0  # how often something was lost, and the version from which it may be again
        self._anchor_every, self._signals = anchor_every, signals
        self._log = log
        self._model_files = model_files
        self._collected = 0
        self._workers = Workers(1, "maintenance")

    def is_due(self, version: int) -> bool:
        """Whether an anchor is to be stored beside a version, whatever it costs."""
        chain, every = self.chain, self._anchor_every
        if self.storing:
            return False
        since = version - chain.base_version
        due = self.failed or self.lost or (every is not None and since >= every)
        return due or self.affords

    def wanted(self, version: int, shadow: Shadow) -> str | None:
        """Return what to store beside a version, whose bits the shadow holds, if it has no anchor yet.

        That is a `compaction`, an `anchor`, or None. Ranks have to collect an anchor, with the next version.
        """
        every = self.retention.compact_every
        if self.storing:
            return None
        self.affords, found = False, None
        if self.is_due(version):
            found = "anchor"
        elif every:
            found = "compaction" if self.chain.can_compact and self.chain.follows(version, every) else None
        else:
            found = self.chain.is_due(version, shadow, compactions=every is None)
            self.affords = found == "anchor"
        return None if found == "anchor" and self._signals is not None else found

    def store(self, weights: Weights, version: int) -> Anchor:
        """Store the files of an anchor, two at a time, while the next one is made.

        Raises:
            CorruptDataError: the weights in memory are damaged.
            FencedError, StoreError, OSError: as `Log.put_file`, or the local disk failed.
        """
        log, stored = self._log, list[Future[File]]()
        folder = keys.anchor_folder(version, log.epoch, log.attempt(version))
        model_files = [log.put_file(folder, name, data) for name, data in self._model_files.items()]
        workers = Workers(STORED_AT_ONCE, "upload")
        for name, data in weights.files:
            if len(stored) >= STORED_AT_ONCE:
                stored[-STORED_AT_ONCE].result()  # so that no more are in memory
            stored.append(workers.submit(log.put_file, folder, name, data))
            if len(data) > _MOST_BESIDE_BYTES:
                stored[-1].result()
            del data  # before the next one is made
        files = [future.result() for future in stored]
        if files[-1].key.endswith(anchors.INDEX):
            model_files.append(files.pop())
        return Anchor(directory=folder, files=files, model_files=model_files)

    def announce(self, stored: StoredRecord, weights: Weights, sample: Sample) -> None:
        """Store the weights of a version, which `sample` is of, as an anchor and announce it. Returns at once."""
        self.storing, paid, self.affords = True, self.affords, False
        self._workers.submit(self._announce, stored, weights, sample, self.chain.bytes, paid)

    def compact(self, stored: StoredRecord, folder: str, target: compaction.Target, serial: int) -> None:
        """Store a compaction from the chain's base to a version, with parts in a folder; returns at once.

        `serial` is of the job, of which the other ranks make their parts.
        """
        self.storing = True
        self._workers.submit(self._compact, stored, folder, target, serial)

    def published(self, version: int) -> None:
        """Look after the channel now that a version is visible: collect garbage if that is due."""
        passed = version >= self._looked + _LOOK_VERSIONS or time.monotonic() - self._looked_s >= _LOOK_S
        if (passed or self._log.doubted) and not self._workers.busy:
            self._looked, self._looked_s, self._log.doubted = version, time.monotonic(), False
            self._workers.submit(self._guarded, self._look)
        keep_last = self.retention.keep_last
        due = max(_LEAST_BETWEEN, (keep_last or 0) // 2)
        if keep_last is not None and version >= self._collected + due:
            self._collected = version
            self._workers.submit(self._guarded, self._collect_garbage)

    @property
    def busy(self) -> bool:
        """Whether anything is under way."""
        return self._workers.busy

    def close(self) -> None:
        """Finish what is under way."""
        self._workers.close()

    def _announce(
        self,
        stored: StoredRecord,
        weights: Weights,
        sample: Sample,
        before_bytes: int,
        paid: bool,
    ) -> None:
        version, digest = stored.version, str(stored.record.fingerprint)

        def announce() -> None:
            announced = self._log.announce(version, digest, self.store(weights, version.version))
            self.chain.begin(announced, sample, self.chain.bytes - before_bytes, paid=paid)

        self.failed = not self._guarded(announce)
        weights.close()
        if self.failed:
            self._log.give_up(version.version)
        else:
            self.lost = False
        self.storing = False

    def _compact(self, stored: StoredRecord, folder: str, target: compaction.Target, serial: int) -> None:
        chain, base = self.chain, self.chain.base
        assert base is not None
        compacted: StoredRecord | None = None

        def store() -> None:
            nonlocal compacted
            self._look()
            if self.lost:
                return
            try:
                compacted = self._store_compaction(base, stored, folder, target, serial)
            except (FormatError, ChainError) as error:
                chain.can_compact = False
                self.failed = True  # the next version gets an anchor
                logger.warning("The full weights of version %d cannot be read: %s", base.record.version, error)

        self._guarded(store)
        target.snapshot.close()
        chain.is_compacted(stored.record.version, compacted)
        self.storing = False

    def _store_compaction(
        self, base: StoredRecord, stored: StoredRecord, folder: str, target: compaction.Target, serial: int
    ) -> StoredRecord:
        """Store the parts of all ranks; then the compaction."""
        log, signals = self._log, self._signals

        def put(name: str, data: bytes) -> File:
            return log.put_file(folder, name, data)

        own, inline = compaction.store_parts(self.reader, base, target, put, inline=signals is None)
        ranks = [own] if signals is None else [own, *signals.compacted(serial, compaction.Parts)]
        if fingerprint.to_hex(sum(parts.before for parts in ranks)) != base.record.fingerprint:
            raise CorruptDataError("the ranks have read other bits than it has.")
        files = [file for parts in ranks for file in parts.files]
        delta = Delta(codec=compaction.CODEC, changed=sum(parts.changed for parts in ranks), parts=files)
        return log.compaction(stored.version, str(stored.record.fingerprint), inline, base=base.version, delta=delta)

    def _look(self) -> None:
        """See by a few small requests whether a late joiner could start. Put back what is known, or order full weights.

        A bucket may have a rule that deletes old objects, somebody may have emptied it, or a run may have saved into the
        directory of the checkpoint that it started from.
        """
        url, restored, base = self.reader.store.url, self._log.check_channel(), self.chain.base
        if restored is not None:
            logger.error("%s: %s. Nobody could join without it: look for a rule that deletes old objects.", url, restored)
        self._looks += 1
        newest = 0 if self._log.tip is None else self._log.tip.version
        if base is None or self.lost or newest < self._lost_from:
            return
        key, problem = self._problem(base)
        if key is None or self._starts_elsewhere(base, key, problem):
            return
        self.lost, self._losses = True, self._losses + 1
        self._lost_from = newest + _LOOK_VERSIONS * 2**self._losses  # a store that goes on losing them gets fewer
        logger.error(
            "%s: %s. Nobody can join the channel now; the next version brings full weights for late joiners. Look for a "
            "rule that deletes old objects, or for a run that saves into the directory of its first checkpoint.",
            *(url, problem),
        )

    def _problem(self, base: StoredRecord) -> tuple[str | None, str]:
        """Return the key of an object that a late joiner needs and that is not as it was, and what is wrong with it.

        Of weight files and of records after the newest compaction, each look sees one.
        """
        reader, record = self.reader, base.record
        try:
            if retried(lambda: reader.stored(base.key), 2, passing=(FormatError,)).sha256 != base.sha256:
                return base.key, f"{base.key} was overwritten"
        except MissingVersionError:
            return base.key, f"{base.key} is gone"
        except FormatError as error:
            return base.key, str(error).rstrip(".")
        if record.reference is not None and checkpoint.stamp(record.reference) != self.chain.stamp:
            return base.key, f"{record.reference}, which version {record.version} refers to, was overwritten"
        for file in record.payload_files[self._looks % max(len(record.payload_files), 1) :][:1]:
            if not _is_whole(reader, file):
                return base.key, f"{file.key} is gone, or has another size"
        last = self.chain.last_compaction
        later = [keys.slot(number, self._log.epoch) for number in list(self._log.published) if number > self.chain.compacted]
        needed = ([] if last is None else [last]) + later
        key = needed[self._looks % len(needed)] if needed else None
        if key is not None and not exists(reader.store, key):
            return key, f"{key} is gone"
        return None, ""

    def _starts_elsewhere(self, base: StoredRecord, key: str, problem: str) -> bool:
        """Whether a late joiner has another chain, as where a tool stored an anchor and forgot what was before."""
        if self._log.tip is None:
            return False
        try:
            chain = find_chain(self.reader, None, self._log.tip, {key: f"{problem}."})
        except (MissingVersionError, FormatError):
            return False
        if not all(_is_whole(self.reader, file) for file in chain[0].record.payload_files):
            return False
        if chain[0].key != base.key:
            self.chain.begin(dataclasses.replace(chain[0], data=None), None, sum(map(_bytes_of, chain[1:])))
        return True

    def _collect_garbage(self) -> None:
        grace_s = self.retention.grace_s
        keep = KeepPolicy(last=self.retention.keep_last)
        maintenance.gc(self.reader, keep, grace_s=grace_s)

    @staticmethod
    def _guarded(action: Callable[[], object]) -> bool:
        try:
            action()
        except DeltaSyncError as error:
            logger.warning("Channel maintenance failed, and will be tried again: %s", error)
        except Exception:  # the thread goes on; training is not to end for this
            logger.exception("Channel maintenance failed unexpectedly.")
        else:
            return True
        return False


SAMPLED = 1 << 18
"""Elements by which the size of a compaction is estimated."""

_WINDOWS = 64


class Sample:
    """Some of a model's elements as they were, to estimate how large a delta from then to now would be.

    They are of the ranges that a shadow holds; those of other ranks are assumed to change as much.
    """

    def __init__(self, shadow: Shadow) -> None:
        self._element_count = shadow.layout.element_count
        held_count = sum(stop - start for start, stop in shadow.ranges.values())
        length, at = (-(-count // _WINDOWS) for count in (min(SAMPLED, held_count), held_count))
        places = list[tuple[str, int, int]]()
        first = 0
        for name, (low, high) in shadow.ranges.items():
            size = high - low
            for window in range(first // at if at else 0, _WINDOWS):
                start, stop = max(window * at, first) - first, min(window * at + length, first + size) - first
                if start >= size:
                    break
                if start < stop:
                    places.append((name, start, stop))
            first += size
        self._old = [*zip(places, shadow.windows(places), strict=True)]

    def compaction_bytes(self, shadow: Shadow) -> float:
        """Return the estimated size of a delta to the bits of now, by the entropy of the sample's steps, zeros included.

        Nothing is known of a model of which the first rank holds nothing: then it is infinite.
        """
        known = [(place, old_N) for place, old_N in self._old if place[0] in shadow.ranges]
        new = shadow.windows([place for place, _ in known])
        steps = [(new_N - old_N).astype(np.int64) for new_N, (_, old_N) in zip(new, known, strict=True)]
        if not steps:
            return math.inf if self._element_count else 0.0
        _, count = np.unique(np.concatenate(steps), return_counts=True)
        share = count / count.sum()
        return float(-(share * np.log2(share)).sum()) * self._element_count / 8


class Chain:
    """The chain of a late joiner to the newest version, and the budget to shorten it. Several threads use it.

    Attributes:
        base: The newest full weights that are stored, None if there are none.
        bytes: Bytes of the deltas since then.
        can_compact: Whether the base's weights could be read when a compaction was last made of them.
        stamp: `checkpoint.stamp` of the checkpoint that the base refers to, if it does.
        last_compaction: Key of the newest compaction since the base, None if there is none.
    """

    def __init__(self, chain: Sequence[StoredRecord] = ()) -> None:
        self.base = chain[0] if chain else None
        self.bytes = sum(_bytes_of(stored) for stored in chain[1:])
        self.can_compact = True
        self._before_bytes = self.bytes  # what led from the base to the version that was resumed
        self._budget = Budget(chain[-1].record.version if chain else 0)
        self._estimated = 0.0
        self._factor = 1.0  # actual by estimated size of the last compaction
        self._sample: Sample | None = None
        self._lock = threading.Lock()
        self.stamp = _stamp(self.base)
        self.last_compaction = next((stored.key for stored in reversed(chain) if stored.is_compaction), None)

    @property
    def compacted(self) -> int:
        """Number of the version to which the newest compaction leads, or the full weights."""
        return self._budget.compacted

    @property
    def base_version(self) -> int:
        """Number of the version with the newest full weights, 0 if there is none."""
        return 0 if self.base is None else self.base.record.version

    def begin(self, base: StoredRecord, sample: Sample | None, later_bytes: int = 0, *, paid: bool = False) -> None:
        """Start from new full weights, after which there are deltas of `later_bytes`.

        `sample` is of these weights, None if they are not known; `paid` says whether the budget pays for them.
        """
        with self._lock:
            self.base, self.bytes, self.can_compact, self._sample = base, later_bytes, True, sample
            self.stamp, self.last_compaction = _stamp(base), None
            self._before_bytes = 0
            self._budget.end(base.record.version, base.record.payload_bytes if paid else 0)

    def add(self, stored: StoredRecord) -> None:
        """Add the next delta."""
        with self._lock:
            self.bytes += _bytes_of(stored)
            self._budget.earn(_bytes_of(stored))

    def is_due(self, version: int, shadow: Shadow, *, compactions: bool) -> str | None:
        """Return `compaction`, if these are wanted, or `anchor` if that is to be stored with a version.

        The shadow has its bits; its own delta does not count yet.
        """
        full_bytes = shadow.layout.nbytes
        with self._lock:
            if self._sample is None:
                self._sample = Sample(shadow)
            sample = self._sample

            def compaction_bytes() -> float:
                self._estimated = self._before_bytes + sample.compaction_bytes(shadow)
                return self._factor * self._estimated

            if self.base is None:
                return None
            return self._budget.choose(version, full_bytes, compaction_bytes, compactions=compactions and self.can_compact)

    def follows(self, version: int, every: int) -> bool:
        """Whether a version comes so many versions after the newest compaction, or after the full weights."""
        return self.base is not None and version - self._budget.compacted >= every

    def is_compacted(self, version: int, stored: StoredRecord | None) -> None:
        """Note a compaction to a version; None if it could not be stored."""
        with self._lock:
            size = 0 if stored is None else _bytes_of(stored)
            self.last_compaction = self.last_compaction if stored is None else stored.key
            self._budget.end(version, size)
            if size and self._estimated:
                self._factor = size / self._estimated


def _is_whole(reader: ChannelReader, file: File) -> bool:
    """Whether a file is in the store with its size."""
    return any((info.key, info.bytes) == (file.key, file.bytes) for info in reader.store.list(file.key))


def _stamp(base: StoredRecord | None) -> object:
    return None if base is None or base.record.reference is None else checkpoint.stamp(base.record.reference)


def _bytes_of(stored: StoredRecord) -> int:
    return stored.size + sum(file.bytes for file in stored.record.payload_files)
