"""Look after a channel while it is written: compactions, anchors beside the log, garbage collection.

It happens in a thread that neither training nor uploads wait for, and no version depends on it. A failure is
logged, and tried again with a later version.

A late joiner takes the newest full weights (an anchor, or the reference), the newest compaction from them,
and the deltas since. A compaction is the sum of the deltas since the full weights, which `Steps` keeps: no
weights are read for it.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Self

import numpy as np

from deltasync import ops
from deltasync.channel import anchors, documents, keys
from deltasync.channel.documents import Anchor, File
from deltasync.channel.plan import find_chain
from deltasync.channel.reading import ChannelReader
from deltasync.channel.record import INLINE_BYTES, StoredRecord
from deltasync.codec.base import Encoded
from deltasync.config import Retention
from deltasync.errors import DeltaSyncError, FormatError, MissingVersionError, get_logger
from deltasync.opening import checkpoint
from deltasync.ops.retention import KeepPolicy
from deltasync.ops.scan import exists
from deltasync.publish.detect import HostShadow
from deltasync.publish.encode import encode
from deltasync.publish.log import Log
from deltasync.publish.pending import Pending
from deltasync.publish.shadow import Weights, held_bytes
from deltasync.stores.retries import retried
from deltasync.tensors import Delta, Layout, count_below
from deltasync.tensors.delta import joined, of_tensor
from deltasync.threads import Workers
from deltasync.trainer.ranks import Range, Ranks

logger = get_logger(__name__)

CODEC = "packed"
"""Codec of compactions: it decodes without old bits, and is the smaller one where much has changed."""

GROUP_ELEMENTS = 1 << 25
"""Elements whose changes make a part of a compaction, unless a single tensor has more."""

STORED_AT_ONCE = 2
"""Parts of a compaction, or weight files, that are stored at once, so that the disk or link never idles
between two.
"""

SAMPLED = 1 << 18
"""Elements by which the size of a compaction is estimated."""

_WINDOWS = 64

_LEAST_BETWEEN = 16
"""Versions from one garbage collection to the next, which reads all records."""

_LOOK_S, _LOOK_VERSIONS = 60.0, 16
"""From one look whether a late joiner could start to the next, whichever is over first."""

_MOST_BESIDE_BYTES = 1 << 27
"""A larger weight file is stored before the next one is made."""

SHARE = 0.33
"""Bytes of compactions and anchors that may be stored for each byte of delta, so that they stay a small part
of all.
"""

LARGE = 0.5
"""A compaction of more than this part of the weights is not written; full weights are, once the bytes of
deltas pay.
"""

# versions that the next compaction covers at least: fewer are read about as soon without it
LEAST_COMPACTED = 16


class Steps:
    """The steps from the newest full weights to the newest version, of the ranges that this rank holds, in
    host memory.

    They are the deltas since; once these take a quarter of the weights' bytes, they are added up, one step
    for each element. One thread adds; another one may read `frozen` ones meanwhile.

    Attributes:
        base: The version with the full weights.
    """

    def __init__(self, layout: Layout, ranges: Mapping[str, Range], base: int) -> None:
        self.base = base
        self._layout, self._ranges = layout, ranges
        self._held_bytes = held_bytes(layout, ranges)
        self._lock = threading.Lock()
        self._deltas: list[Delta] = []
        self._sum: HostShadow | None = None  # of earlier ones
        self._is_read = False
        # a version whose full weights are being stored, and steps since
        self._marked: tuple[int, list[Delta]] | None = None

    @classmethod
    def after(cls, before: Self | None, job: Pending) -> Self:
        """Return the steps to the version of a job: those before it with its own, or none yet, from its full
        weights on.
        """
        if job.full or before is None:
            return cls(job.shadow.layout, job.shadow.ranges, job.version)
        before.add(job.delta)
        if job.collected:
            before.mark(job.version)
        return before

    def add(self, delta: Delta) -> None:
        """Add the steps of the next version."""
        with self._lock:
            self._deltas.append(delta)
            if self._marked is not None:
                self._marked[1].append(delta)
            if not self._is_read and 4 * sum(each.nbytes for each in self._deltas) > self._held_bytes:
                if self._sum is None:
                    bits = {
                        n: np.zeros(b - a, self._layout.specs[n].bits_dtype)
                        for n, (a, b) in self._ranges.items()
                    }
                    self._sum = HostShadow(self._layout, self._ranges, bits)
                for each in self._deltas:
                    self._sum.add(each)
                self._deltas = []

    def mark(self, version: int) -> None:
        """Note that full weights of the newest version are being stored, so that steps may `start` from
        it.
        """
        with self._lock:
            self._marked = version, []

    def start(self, base: int) -> None:
        """Start from the full weights of a version, if that is the marked one."""
        with self._lock:
            if self._marked is not None and self._marked[0] == base:
                (self.base, self._deltas), self._sum, self._marked = self._marked, None, None

    def frozen(self) -> Self:
        """Return these steps, which later ones are not added to. Call `thaw` once they are read."""
        with self._lock:
            self._is_read, found = True, copy.copy(self)
            found._deltas = [*self._deltas]
            return found

    def thaw(self) -> None:
        """Let frozen steps change, which nobody reads any more."""
        self._is_read = False

    def between(self, name: str, first: int, last: int) -> np.ndarray:
        """Return the steps of a tensor's elements from flat index `first` on and below `last`, a new
        array.
        """
        width, at, _ = self._layout.span(name)
        start = self._ranges[name][0]
        found = np.zeros(last - first, f"u{width}")
        if self._sum is not None:
            found[:] = self._sum.bits[name][first - start : last - start]
        for delta in self._deltas:
            if width in delta.steps:
                at_K, step_K = delta.steps[width].between(at + first, at + last)
                found[at_K - at_K.dtype.type(at + first)] += step_K
        return found

    def groups(self) -> Iterator[Delta]:
        """Yield what the steps add up to, in groups of tensors that differ."""
        group, size = list[Delta](), 0
        for name, (start, stop) in self._ranges.items():
            step_N = self.between(name, start, stop)
            index_K = np.flatnonzero(step_N)
            if index_K.size:
                group.append(of_tensor(self._layout, name, index_K, step_N[index_K], start=start))
                size += step_N.size
            if size >= GROUP_ELEMENTS:
                yield joined(group)
                group, size = [], 0
        if group:
            yield joined(group)

    def store(
        self,
        version: int,
        fingerprints: Mapping[str, int],
        put: Callable[[str, bytes], File],
        *,
        rank: int | None,
    ) -> tuple[list[File], int, Encoded | None]:
        """Encode and prove these steps, to a version, and store them. Return the parts, and how many elements
        they change.

        `put` stores a part, by its file name. With None for the `rank` a single small payload is returned,
        for the record, instead. `fingerprints` are those of the whole tensors at the version.

        Raises:
            CorruptDataError: a payload does not decode to the steps.
            StoreError: a part cannot be stored.
        """
        puts, stored = Workers(STORED_AT_ONCE, "upload"), list[Future[File]]()
        waiting: tuple[Encoded, bytes] | None = None
        changed = 0

        def store(payload: bytes) -> None:
            if len(stored) >= STORED_AT_ONCE:
                stored[-STORED_AT_ONCE].result()  # so that no more are in memory
            stored.append(
                puts.submit(put, keys.compaction_part(self.base, rank or 0, len(stored) + 1), payload)
            )

        def unread(name: str) -> tuple[np.ndarray, int]:
            raise AssertionError(f"{CODEC} needs no bits of {name}")

        for delta in self.groups():
            if waiting is not None:
                store(waiting[1])
            waiting = encode(CODEC, delta, unread, fingerprints, version, self.base)
            changed += delta.changed
        if waiting is not None and (stored or rank is not None or len(waiting[1]) > INLINE_BYTES):
            store(waiting[1])
            waiting = None
        return [part.result() for part in stored], changed, None if waiting is None else waiting[0]

    def estimated_bytes(self) -> float:
        """Estimate the size of a compaction by the entropy of some elements' steps, zeros included.

        Other ranks' elements are assumed to change as much. If the first rank holds nothing, it is infinite.
        """
        held_count = sum(stop - start for start, stop in self._ranges.values())
        length, every = (-(-count // _WINDOWS) for count in (min(SAMPLED, held_count), held_count))
        windows, before = dict[int, list[tuple[str, int, int]]](), 0
        for name, (start, stop) in self._ranges.items():
            size = stop - start
            for window in range(before // every if every else 0, _WINDOWS):
                first, last = max(window * every - before, 0), min(window * every + length - before, size)
                if first >= size:
                    break
                if first < last:
                    windows.setdefault(self._layout.places[name][0], []).append(
                        (name, start + first, start + last)
                    )
            before += size
        if not windows:
            return math.inf if self._layout.element_count else 0.0
        found = [self._at(width, held) for width, held in windows.items()]
        _, count = np.unique(
            np.concatenate([step_N[step_N != 0].astype(np.int64) for step_N in found]), return_counts=True
        )
        count = np.append(count, sum(map(np.size, found)) - count.sum())  # the zeros, which need no sorting
        share = count[count > 0] / count.sum()
        return float(-(share * np.log2(share)).sum()) * self._layout.element_count / 8

    def _at(self, width: int, windows: Sequence[tuple[str, int, int]]) -> np.ndarray:
        """Return the steps of elements of one width, as `between` does for each of the windows, one after the
        other.
        """
        first_W, last_W = np.array(
            [[self._layout.span(name)[1] + edge for edge in at] for name, *at in windows]
        ).T
        found_N = np.zeros((last_W - first_W).sum(), f"u{width}")
        end_W = np.cumsum(last_W - first_W)
        if self._sum is not None:
            bits, ranges = self._sum.bits, self._ranges
            held = [
                bits[name][first - ranges[name][0] : last - ranges[name][0]] for name, first, last in windows
            ]
            np.concatenate(held, out=found_N)
        for at_K, step_K in (delta.steps[width] for delta in self._deltas if width in delta.steps):
            low_W, high_W = (count_below(at_K, edge_W) for edge_W in (first_W, last_W))
            count_W = high_W - low_W
            index_K = np.arange(count_W.sum()) + np.repeat(high_W - np.cumsum(count_W), count_W)
            found_N[at_K[index_K] + np.repeat(end_W - last_W, count_W)] += step_K[index_K]
        return found_N


class Compactor:
    """Looks after one channel as `retention` says. `model_files`, by name, are stored beside the weights of
    an anchor.

    `chain` leads a late joiner to the newest version. `ranks` are those of a sharded trainer: each makes its
    parts of a compaction, and all collect an anchor as they publish.

    Attributes:
        base: The newest full weights that are stored, None if there are none.
        steps: The steps since then, if compactions are made of them.
        storing: Whether an anchor or a compaction is being stored.
        failed: Whether the last anchor could not be stored.
        lost: Whether the store, or the checkpoint that the channel refers to, has lost what a late joiner
            starts from.
        affords: Whether the bytes of deltas pay for an anchor that the ranks have to collect with the next
            version.
    """

    def __init__(
        self,
        reader: ChannelReader,
        log: Log,
        retention: Retention,
        model_files: Mapping[str, bytes],
        chain: Sequence[StoredRecord],
        anchor_every: int | None,
        ranks: Ranks | None,
    ) -> None:
        self.reader = reader
        self.retention = retention
        self.base = chain[0] if chain else None
        self.steps: Steps | None = None
        self.storing = self.failed = self.lost = self.affords = False
        self._stamp = _stamp(self.base)
        compactions = [at for at, stored in enumerate(chain) if stored.is_compaction]
        self._last_compaction = chain[compactions[-1]].key if compactions else None
        last = compactions[-1] if compactions else 0
        # Where the newest compaction ends, or the version with the full weights; what is left of the bytes
        # that deltas have earned for the next one, and how many that needs.
        self._compacted = chain[last].record.version if chain else 0
        self._left, self._needed = SHARE * sum(map(_bytes_of, chain[last + 1 :])), 0.0
        # size of the next compaction; actual by estimated size of the last one
        self._estimated, self._factor = 0.0, 1.0
        self._lock = threading.Lock()
        self._looked_s = time.monotonic()
        self._looked = self._looks = 0  # the version at the last look, and the number of looks
        # how often something was lost, and the version from which it may be again
        self._losses = self._lost_from = 0
        self._anchor_every, self._ranks = anchor_every, ranks
        self._log = log
        self._model_files = model_files
        # the version at the last collection; publishes that failed in a row
        self._collected = self._failures = 0
        self._is_over = False  # whether `look_at_end` has looked
        self._workers = Workers(1, "maintenance")

    def begin(self, base: StoredRecord, *, paid: bool = False) -> None:
        """Start from new full weights. `paid`: deltas pay for them."""
        with self._lock:
            self.base, self._stamp, self._last_compaction = base, _stamp(base), None
            self._end(base.record.version, base.record.payload_bytes if paid else 0)

    def resume(self, steps: Steps) -> None:
        """Make compactions of these steps, which lead to the newest version."""
        self.steps = None if self.retention.compact_every == 0 else steps

    def stored(self, stored: StoredRecord, job: Pending) -> None:
        """Note the next version, of a job: full weights, or a delta."""
        if job.full:
            self.begin(stored)
        else:
            with self._lock:
                self._left += SHARE * _bytes_of(stored)
        if job.full or self.steps is not None:
            self.resume(Steps.after(self.steps, job))

    def is_due(self, version: int) -> bool:
        """Whether an anchor is to be stored beside a version, whatever it costs."""
        every, base = self._anchor_every, 0 if self.base is None else self.base.record.version
        due = self.failed or self.lost or self.affords or (every is not None and version - base >= every)
        return due and not self.storing

    def wanted(self, version: int, full_bytes: int) -> str | None:
        """Return what to store beside a version, if it has no anchor yet: a `compaction`, an `anchor`, or
        None.

        Ranks have to collect an anchor, with the next version. `full_bytes` are those of the weights.
        """
        every, base, steps = self.retention.compact_every, self.base, self.steps
        if self.storing:
            return None
        self.affords, found = False, None
        compacts = steps is not None and base is not None and steps.base == base.record.version
        if self.is_due(version):
            found = "anchor"
        elif every and base is not None:
            found = "compaction" if compacts and version - self._compacted >= every else None
        elif base is not None and version - self._compacted >= LEAST_COMPACTED and self._left >= self._needed:
            self._needed, kind = float(full_bytes), "anchor"
            if compacts and steps is not None:
                self._estimated = steps.estimated_bytes()
                if self._factor * self._estimated <= LARGE * full_bytes:
                    self._needed, kind = self._factor * self._estimated, "compaction"
            found = kind if self._left >= self._needed else None
            self.affords = found == "anchor"
        return None if found == "anchor" and self._ranks is not None else found

    def _end(self, version: int, paid_bytes: float = 0.0) -> None:
        """Note that a version has the newest compaction or full weights, for which deltas paid so many
        bytes.
        """
        self._compacted, self._needed = version, 0.0
        self._left -= paid_bytes

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

    def announce(self, stored: StoredRecord, weights: Weights) -> None:
        """Store the weights of the newest version as an anchor and announce it. Returns at once."""
        self.storing, paid, self.affords = True, self.affords, False
        self._workers.submit(self._announce, stored, weights, paid)

    def compact(self, stored: StoredRecord, folder: str, job: Pending) -> None:
        """Store a compaction from the base to the newest version, which a job made, with parts in a folder.

        Returns at once.
        """
        assert self.steps is not None
        self.storing = True
        self._workers.submit(self._compact, stored, folder, job, self.steps, self.steps.frozen())

    def published(self, version: int) -> None:
        """Look after the channel now that a version is visible: collect garbage if that is due."""
        self._failures = 0
        passed = version >= self._looked + _LOOK_VERSIONS or time.monotonic() - self._looked_s >= _LOOK_S
        if (passed or self._log.doubted) and not self._workers.busy:
            self._looked, self._looked_s, self._log.doubted = version, time.monotonic(), False
            self._workers.submit(self._guarded, self._look)
        keep_last = self.retention.keep_last
        due = max(_LEAST_BETWEEN, (keep_last or 0) // 2)
        if keep_last is not None and version >= self._collected + due:
            self._collected = version
            self._collect(keep_last)

    def not_published(self) -> None:
        """Note that a version could not be stored: collect garbage, because the disk may be full.

        That is done at the first failure in a row, and each time that their number has doubled.
        """
        self._failures, keep_last = self._failures + 1, self.retention.keep_last
        if keep_last is not None and not self._failures & (self._failures - 1) and not self._workers.busy:
            self._collect(keep_last)

    def _collect(self, keep_last: int) -> None:
        kept, grace_s = KeepPolicy(last=keep_last), self.retention.grace_s
        self._workers.submit(self._guarded, lambda: ops.gc(self.reader, kept, grace_s=grace_s))

    @property
    def busy(self) -> bool:
        """Whether anything is under way."""
        return self._workers.busy

    def close(self) -> None:
        """Finish what is under way. See `look_at_end`."""
        self._workers.close()
        self.look_at_end()

    def look_at_end(self) -> None:
        """Say, once, if the checkpoint that the channel refers to was overwritten since the last look. Asks
        no store.
        """
        base = self.base
        if self._is_over or self.lost or base is None or (reference := base.record.reference) is None:
            return
        self._is_over = True
        if checkpoint.stamp(reference) != self._stamp:
            logger.error(
                "%s, which version %d of %s refers to, was overwritten during the run. Nobody can join the "
                "channel now. Put "
                "the checkpoint back, or publish once more with resume=True, which then stores full weights.",
                *(reference, base.record.version, self.reader.store.url),
            )

    def _announce(self, stored: StoredRecord, weights: Weights, paid: bool) -> None:
        version, digest = stored.version, str(stored.record.fingerprint)

        def announce() -> None:
            announced = self._log.shortcut(version, digest, None, anchor=self.store(weights, version.version))
            if self.base is not None and self.base.record.version > version.version:
                return  # other full weights were published since
            self.begin(announced, paid=paid)
            if self.steps is not None:
                self.steps.start(version.version)

        self.failed = not self._guarded(announce)
        weights.close()
        if self.failed:
            self._log.give_up(version.version)
        else:
            self.lost = False
        self.storing = False

    def _compact(self, stored: StoredRecord, folder: str, job: Pending, steps: Steps, frozen: Steps) -> None:
        """Store the parts of all ranks; then the compaction."""
        log, others, compacted = self._log, self._ranks, list[StoredRecord]()
        assert job.fingerprints is not None
        fingerprints = job.fingerprints

        def put(name: str, data: bytes) -> File:
            return log.put_file(folder, name, data)

        def compact() -> None:
            self._look()  # which may find other full weights to start from
            if self.lost or (base := self.base) is None or base.record.version != frozen.base:
                return
            files, changed, inline = frozen.store(
                job.version, fingerprints, put, rank=None if others is None else 0
            )
            for more, count in (
                others.answers("compaction", job.serial, tuple[list[File], int]) if others else ()
            ):
                files, changed = files + more, changed + count
            delta = documents.Delta(codec=CODEC, changed=changed, parts=files)
            digest = str(stored.record.fingerprint)
            compacted.append(log.shortcut(stored.version, digest, inline, base=base.version, delta=delta))

        self._guarded(compact)
        steps.thaw()
        with self._lock:
            size = sum(map(_bytes_of, compacted))
            self._last_compaction = compacted[0].key if compacted else self._last_compaction
            self._end(stored.record.version, size)
            if size and self._estimated:
                self._factor = size / self._estimated
        self.storing = False

    def _look(self) -> None:
        """See by a few small requests whether a late joiner could start. Put back what is known, or order
        full weights.

        A bucket may have a rule that deletes old objects, somebody may have emptied it, or a run may have
        saved into the directory of the checkpoint that it started from.
        """
        url, restored, base = self.reader.store.url, self._log.check_channel(), self.base
        if restored is not None:
            logger.error(
                "%s: %s. Nobody could join without it: look for a rule that deletes old objects.",
                url,
                restored,
            )
        self._looks += 1
        newest = 0 if self._log.tip is None else self._log.tip.version
        if base is None or self.lost or newest < self._lost_from:
            return
        key, problem = self._problem(base)
        if key is None or self._starts_elsewhere(base, key, problem):
            return
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

    def _problem(self, base: StoredRecord) -> tuple[str | None, str]:
        """Return the key of an object that a late joiner needs and that is not as it was, and what is wrong
        with it.

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
        if record.reference is not None and checkpoint.stamp(record.reference) != self._stamp:
            return base.key, f"{record.reference}, which version {record.version} refers to, was overwritten"
        for file in record.payload_files[self._looks % max(len(record.payload_files), 1) :][:1]:
            if not _is_whole(reader, file):
                return base.key, f"{file.key} is gone, or has another size"
        last = self._last_compaction
        later = [
            keys.slot(number, self._log.epoch)
            for number in list(self._log.published)
            if number > self._compacted
        ]
        needed = ([] if last is None else [last]) + later
        key = needed[self._looks % len(needed)] if needed else None
        if key is not None and not exists(reader.store, key):
            return key, f"{key} is gone"
        return None, ""

    def _starts_elsewhere(self, base: StoredRecord, key: str, problem: str) -> bool:
        """Whether a late joiner has another chain, as where a tool stored an anchor and forgot what was
        before.
        """
        if self._log.tip is None:
            return False
        try:
            chain = find_chain(self.reader, None, self._log.tip, {key: f"{problem}."})
        except (MissingVersionError, FormatError):
            return False
        if not all(_is_whole(self.reader, file) for file in chain[0].record.payload_files):
            return False
        if chain[0].key != base.key:
            self.begin(dataclasses.replace(chain[0], data=None))
        return True

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


def _is_whole(reader: ChannelReader, file: File) -> bool:
    return any((info.key, info.bytes) == (file.key, file.bytes) for info in reader.store.list(file.key))


def _stamp(base: StoredRecord | None) -> object:
    return None if base is None or base.record.reference is None else checkpoint.stamp(base.record.reference)


def _bytes_of(stored: StoredRecord) -> int:
    return stored.size + sum(file.bytes for file in stored.record.payload_files)
