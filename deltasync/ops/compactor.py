"""Look after a channel while it is written: compactions, anchors beside the log, garbage collection.

It happens in a thread that neither training nor uploads wait for, and no version depends on it. A failure is
logged, and tried again with a later version.

A late joiner takes the newest full weights (an anchor, or the reference), the newest compaction from them,
and the deltas since. A compaction is the sum of the deltas since the full weights (`steps`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

from deltasync import ops
from deltasync.channel import documents
from deltasync.channel.documents import File
from deltasync.channel.reading import ChannelReader
from deltasync.channel.record import StoredRecord
from deltasync.config import Retention
from deltasync.errors import ChainError, DeltaSyncError, get_logger
from deltasync.ops.retention import KeepPolicy
from deltasync.ops.scan import Known
from deltasync.ops.steps import CODEC, Steps
from deltasync.ops.watch import JoinPoint, JoinWatch
from deltasync.publish.agreement import Alone, attempt
from deltasync.publish.anchor import store_anchor
from deltasync.publish.log import Log
from deltasync.publish.maintenance import Maintenance
from deltasync.publish.pending import Pending
from deltasync.publish.ranges import Range
from deltasync.publish.snapshot import Weights
from deltasync.tensors import Delta, Layout
from deltasync.threads import Workers

logger = get_logger(__name__)

_LEAST_BETWEEN = 16
"""Versions from one garbage collection to the next, which lists all records."""

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


def maintains(
    reader: ChannelReader,
    log: Log | None,
    retention: Retention,
    model_files: Mapping[str, bytes],
    chain: Sequence[StoredRecord],
    anchor_every: int | None,
    ranks: Alone,
) -> Maintenance:
    """Return what maintains a channel at one of the `ranks` as `retention` says.

    Args:
        reader: Reads the channel.
        log: Writes it; None at all ranks but the first.
        retention: Versions to keep, and how often to compact.
        model_files: The files to store beside the weights of an anchor, by name.
        chain: Leads a late joiner to the newest version; empty if nobody can join.
        anchor_every: Versions from one anchor to the next, whatever they cost; None for as deltas pay.
        ranks: Those of the trainer. Each makes its parts of a compaction, and all collect an anchor as they
            publish.
    """
    if log is not None:
        return Compactor(reader, log, retention, model_files, chain, anchor_every, ranks)
    return PartCompactor(ranks) if retention.compact_every != 0 else Maintenance()


class Budget:
    """The bytes of shortcuts that deltas pay for.

    Attributes:
        left: Earned bytes that are not spent.
        needed: Those of the next shortcut, as far as that is known.
    """

    def __init__(self, left: float) -> None:
        self.left, self.needed = left, 0.0
        self._estimated, self._factor = 0.0, 1.0  # of the last compaction, and actual by estimated bytes

    def choose(self, full_bytes: int, steps: Steps | None) -> str | None:
        """Return what can be paid for: a `compaction` of these steps, an `anchor` of so many bytes, or None."""
        if self.left < self.needed:
            return None
        self.needed, kind = float(full_bytes), "anchor"
        if steps is not None:
            self._estimated = steps.estimated_bytes()
            if self._factor * self._estimated <= LARGE * full_bytes:
                self.needed, kind = self._factor * self._estimated, "compaction"
        return kind if self.left >= self.needed else None

    def spend(self, paid_bytes: float) -> None:
        """Pay for a shortcut; what the next one needs is not known."""
        self.left -= paid_bytes
        self.needed = 0.0

    def learn(self, size: int) -> None:
        """Note the bytes of the last compaction."""
        if size and self._estimated:
            self._factor = size / self._estimated


class Collector:
    """Collects garbage now and then, as long as the retention has versions to delete."""

    def __init__(self, reader: ChannelReader, retention: Retention) -> None:
        self._reader, self._retention = reader, retention
        self._collected = self._failures = 0  # version at the last collection; failed publishes in a row
        self._known: Known = {}

    def is_due(self, version: int) -> bool:
        """Whether to `collect` now that a version is visible."""
        self._failures, keep_last = 0, self._retention.keep_last
        if keep_last is None or version < self._collected + max(_LEAST_BETWEEN, keep_last // 2):
            return False
        self._collected = version
        return True

    def is_due_now(self) -> bool:
        """Whether to `collect` now that a version could not be stored, because the disk may be full.

        That is at the first failure in a row, and each time that their number has doubled.
        """
        self._failures += 1
        return self._retention.keep_last is not None and not self._failures & (self._failures - 1)

    def collect(self) -> None:
        """Collect garbage."""
        keep = KeepPolicy(last=self._retention.keep_last)
        ops.gc(self._reader, keep, grace_s=self._retention.grace_s, known=self._known)


class Compactor(Maintenance):
    """Maintains a channel at the only rank, or at the first one of several. Arguments as of `maintains`."""

    def __init__(
        self,
        reader: ChannelReader,
        log: Log,
        retention: Retention,
        model_files: Mapping[str, bytes],
        chain: Sequence[StoredRecord],
        anchor_every: int | None,
        ranks: Alone,
    ) -> None:
        self._log, self._model_files = log, model_files
        self._compact_every, self._anchor_every = retention.compact_every, anchor_every
        self._ranks = ranks if ranks.size > 1 else None
        self._watch, self._collector = JoinWatch(reader, log), Collector(reader, retention)
        self._workers, self._lock = Workers(1, "maintenance"), threading.Lock()
        self._point = JoinPoint.of(chain) if chain else None
        since = 0 if self._point is None else self._point.version
        self._budget = Budget(SHARE * sum(_bytes_of(each) for each in chain if each.record.version > since))
        self._steps: Steps | None = None  # since the newest full weights, if compactions are made of them
        self._put: Callable[[str, bytes], File] | None = None  # of the compaction that is planned
        # whether a shortcut is being stored, whether the last anchor could not be, and whether deltas pay for
        # one that the ranks have to collect
        self._is_storing = self._has_failed = self._affords = False

    @property
    def busy(self) -> bool:
        """Whether anything is under way."""
        return self._workers.busy

    def replay(self, layout: Layout, ranges: Mapping[str, Range], base: int) -> Callable[[Delta], None]:
        """Keep the deltas for compactions."""
        if self._compact_every == 0:
            return super().replay(layout, ranges, base)
        self._steps = Steps(layout, ranges, base)
        return self._steps.add

    def is_due(self, version: int) -> bool:
        """Whether an anchor is to be stored beside a version, whatever it costs."""
        every, base = self._anchor_every, 0 if self._point is None else self._point.base.record.version
        due = self._has_failed or self._watch.lost or self._affords
        return (due or (every is not None and version - base >= every)) and not self._is_storing

    def plan(self, job: Pending, put: Callable[[str, bytes], File], base: int | None = None) -> int | None:
        """Decide on an anchor, a compaction, or nothing."""
        kind = "anchor" if job.collected else self._wanted(job.version, job.shadow.layout.nbytes)
        self._put = put if kind == "compaction" else None
        if kind == "anchor":
            job.weights = job.weights or Weights.of(job.shadow)
        return self._point.base.record.version if kind == "compaction" and self._point is not None else None

    def _wanted(self, version: int, full_bytes: int) -> str | None:
        """Return what to store beside a version, whose full weights have so many bytes.

        Ranks have to collect an anchor, with the next version.
        """
        every, point, steps = self._compact_every, self._point, self._steps
        if self._is_storing:
            return None
        self._affords, found = False, None
        if steps is None or point is None or steps.base != point.base.record.version:
            steps = None
        if self.is_due(version):
            found = "anchor"
        elif every and point is not None:
            found = "compaction" if steps is not None and version - point.version >= every else None
        elif point is not None and version - point.version >= LEAST_COMPACTED:
            found = self._budget.choose(full_bytes, steps)
            self._affords = found == "anchor"
        return None if found == "anchor" and self._ranks is not None else found

    def stored(self, job: Pending, record: StoredRecord | None, *, is_visible: bool = True) -> None:
        """Note the next version; begin to store the anchor or the compaction beside it."""
        assert record is not None
        weights, put, self._put = None if job.full else job.weights, self._put, None
        if job.full:
            self._begin(JoinPoint.of([record]))
        else:
            with self._lock:
                self._budget.left += SHARE * _bytes_of(record)
        announces = is_visible and weights is not None
        if self._steps is not None or (job.full and self._compact_every != 0):
            self._steps = Steps.after(self._steps, job, marks=announces)
        if announces and weights is not None:
            job.weights, self._is_storing = None, True
            paid, self._affords = self._affords, False
            self._workers.submit(self._announce, record, weights, paid)
        elif is_visible and put is not None and self._steps is not None:
            self._is_storing = True
            self._workers.submit(self._compact, record, put, job, self._steps, self._steps.frozen())

    def published(self, version: int) -> None:
        """Look after what a late joiner needs, and collect garbage, if that is due."""
        if not self._workers.busy and self._watch.is_due(version):
            self._workers.submit(_succeeds, self._look)
        if self._collector.is_due(version):
            self._workers.submit(_succeeds, self._collector.collect)

    def not_published(self) -> None:
        """Collect garbage, because the disk may be full."""
        if self._collector.is_due_now() and not self._workers.busy:
            self._workers.submit(_succeeds, self._collector.collect)

    def close(self) -> None:
        """Finish what is under way. See `look_at_end`."""
        self._workers.close()
        self.look_at_end()

    def look_at_end(self) -> None:
        """Say, once, if the checkpoint that the channel refers to was overwritten."""
        self._watch.look_at_end(self._point)

    def _begin(self, point: JoinPoint, paid_bytes: int = 0) -> None:
        """Start from other full weights, for which deltas paid so many bytes."""
        with self._lock:
            self._point = point
            self._budget.spend(paid_bytes)

    def _look(self) -> None:
        known = self._point
        if (found := self._watch.look(known)) is not known and found is not None:
            self._begin(found)

    def _announce(self, stored: StoredRecord, weights: Weights, paid: bool) -> None:
        """Store the weights of a version as an anchor and announce it. `paid`: deltas pay for them."""
        version, digest = stored.version, str(stored.record.fingerprint)

        def announce() -> None:
            anchor = store_anchor(self._log, weights, version.version, self._model_files)
            announced = self._log.shortcut(version, digest, None, anchor=anchor)
            if self._point is not None and self._point.base.record.version > version.version:
                return  # other full weights were published since
            self._begin(JoinPoint.of([announced]), announced.record.payload_bytes if paid else 0)
            if self._steps is not None:
                self._steps.start(version.version)

        self._has_failed = not _succeeds(announce)
        weights.close()
        if self._has_failed:
            self._log.give_up(version.version)
        else:
            self._watch.lost = False
        self._is_storing = False

    def _compact(
        self,
        stored: StoredRecord,
        put: Callable[[str, bytes], File],
        job: Pending,
        steps: Steps,
        frozen: Steps,
    ) -> None:
        """Store the parts of all ranks; then the compaction."""
        others, compacted = self._ranks, list[StoredRecord]()
        assert job.fingerprints is not None
        fingerprints = job.fingerprints

        def compact() -> None:
            self._look()  # which may find other full weights to start from
            point = self._point
            if self._watch.lost or point is None or point.base.record.version != frozen.base:
                return
            files, changed, inline = frozen.store(
                job.version, fingerprints, put, rank=None if others is None else 0
            )
            for more, count in (
                others.answers("compaction", job.serial, tuple[list[File], int]) if others else ()
            ):
                files, changed = files + more, changed + count
            delta = documents.DeltaFiles(codec=CODEC, changed=changed, parts=files)
            digest = str(stored.record.fingerprint)
            compacted.append(
                self._log.shortcut(stored.version, digest, inline, base=point.base.version, delta=delta)
            )

        _succeeds(compact)
        steps.thaw()
        with self._lock:
            size = sum(map(_bytes_of, compacted))
            self._budget.spend(size)
            self._budget.learn(size)
            if self._point is not None:
                self._point = self._point.compacted(stored.record.version, *(each.key for each in compacted))
        self._is_storing = False


class PartCompactor(Maintenance):
    """Stores the parts of compactions of a rank that is not the first one."""

    def __init__(self, ranks: Alone) -> None:
        self._ranks = ranks
        self._steps: Steps | None = None
        # base of the compaction that follows the running job, and how to store its parts
        self._planned: tuple[int, Callable[[str, bytes], File]] | None = None
        self._workers = Workers(1, "maintenance")

    @property
    def busy(self) -> bool:
        """Whether anything is under way."""
        return self._workers.busy

    def replay(self, layout: Layout, ranges: Mapping[str, Range], base: int) -> Callable[[Delta], None]:
        """Keep the deltas for compactions."""
        self._steps = Steps(layout, ranges, base)
        return self._steps.add

    def plan(self, job: Pending, put: Callable[[str, bytes], File], base: int | None = None) -> int | None:
        """Note what the first rank has planned."""
        self._planned = None if base is None else (base, put)
        return base

    def stored(self, job: Pending, record: StoredRecord | None, *, is_visible: bool = True) -> None:
        """Note the next version, and compact the steps from a base to it."""
        planned, self._planned = self._planned if is_visible else None, None
        if planned is not None and self._steps is not None:
            self._steps.start(planned[0])  # if these weights were stored since
        self._steps = Steps.after(self._steps, job, marks=job.collected)
        if planned is not None:
            self._workers.submit(self._compact, job, *planned, self._steps, self._steps.frozen())

    def close(self) -> None:
        """Finish what is under way."""
        self._workers.close()

    def _compact(
        self, job: Pending, base: int, put: Callable[[str, bytes], File], steps: Steps, frozen: Steps
    ) -> None:
        def store() -> tuple[list[File], int]:
            assert job.fingerprints is not None
            if frozen.base != base:
                raise ChainError(f"it has the steps since version {frozen.base}, not {base}.")
            return frozen.store(job.version, job.fingerprints, put, rank=self._ranks.rank)[:2]

        parts, problem = attempt(store)
        steps.thaw()
        self._ranks.answer("compaction", job.serial, parts, problem)


def _succeeds(action: Callable[[], object]) -> bool:
    """Run an action, and log its failure."""
    try:
        action()
    except DeltaSyncError as error:
        logger.warning("Channel maintenance failed, and will be tried again: %s", error)
    except Exception:  # the thread goes on; training is not to end for this
        logger.exception("Channel maintenance failed unexpectedly.")
    else:
        return True
    return False


def _bytes_of(stored: StoredRecord) -> int:
    return stored.size + sum(file.bytes for file in stored.record.payload_files)
