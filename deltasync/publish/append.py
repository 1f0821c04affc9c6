"""Make versions visible: store the parts of each, then its record, and decide what becomes of one that fails.

Of many processes that publish together the first one does this, and the others store parts of their own
(`Alone.say`, `Alone.answers`).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping

from deltasync import limits
from deltasync.channel import documents, keys
from deltasync.channel.documents import Anchor, DeltaFiles, File
from deltasync.channel.record import StoredRecord
from deltasync.errors import (
    DeltaSyncError,
    FencedError,
    PublishError,
    PublishPendingError,
    get_logger,
)
from deltasync.publish.agreement import Alone
from deltasync.publish.anchor import store_anchor
from deltasync.publish.log import Log
from deltasync.publish.maintenance import Maintenance
from deltasync.publish.pending import Pending
from deltasync.publish.snapshot import Weights
from deltasync.publish.upload import EXIT_S, Busy, Decision, UploadQueue

logger = get_logger(__name__)

_IDLE_S = 5.0  # after which a connection is opened again before it is needed


class Appender:
    """Makes the versions of a queue visible, in order.

    Attributes:
        agreement: The agreement with other processes.
        maintenance: Compactions, anchors and garbage collection.
    """

    keeps_joined = True

    def __init__(
        self, log: Log, maintenance: Maintenance, agreement: Alone, model_files: Mapping[str, bytes]
    ) -> None:
        self.maintenance, self.agreement = maintenance, agreement
        self._log, self._model_files = log, model_files
        self._fenced: FencedError | None = None
        self._refusal: PublishError | None = None  # what the next publish raises
        self._used_s = time.monotonic()
        self._serial = 0
        self._running: Pending | None = None
        agreement.moved_s = self.moved_s

    @property
    def work(self) -> tuple[Busy, ...]:
        """See `Finisher`."""
        return self.maintenance, self._log

    @property
    def is_stopped(self) -> bool:
        """See `Finisher`."""
        return self._log.store.stop.is_set()

    def decide(
        self, queue: UploadQueue, starts_over: bool, problem: BaseException | None, same: str
    ) -> Decision:
        """See `Finisher`.

        Raises:
            FencedError: another publisher has opened the channel; every later call raises it too.
            PublishError: versions are lost for a cause that will not pass; the next call goes on.
        """
        return self.agreement.first(
            lambda: self._decide(queue, starts_over), Decision, problem=problem, same=same
        )

    def _decide(self, queue: UploadQueue, starts_over: bool) -> Decision:
        with queue.lock:
            refusal, self._refusal = self._fenced or self._refusal, None
            if refusal is not None:
                raise refusal
            newest = queue.waiting[-1] if queue.waiting else queue.running
            if not starts_over and queue.waiting and queue.waiting[-1].reference is None:
                queue.joined = queue.waiting[-1]
                version, full = queue.joined.version, queue.joined.full
            elif newest is None:
                version, full = self._log.next_version, queue.full
            else:
                version, full = newest.version + 1, False
        full = full or starts_over
        collects = self.agreement.collects(full or self.maintenance.is_due(version))
        self._serial += 2
        return Decision(self._serial, version, full, collects, queue.joined is not None)

    def warm_up(self, queue: UploadQueue) -> None:
        """See `Finisher`."""
        if time.monotonic() - self._used_s > _IDLE_S:
            self._used_s = time.monotonic()
            queue.puts.submit(self._log.store.read, keys.HEAD, limits.SMALL_BYTES)

    def give_up(self) -> None:
        """See `Finisher`."""
        self._log.store.stop.set()

    def stop(self, lost: Pending | None, is_busy: bool) -> None:
        """See `Finisher`."""
        self.maintenance.look_at_end()
        if is_busy:
            self.give_up()
            self.agreement.stop()
        else:
            self.agreement.wait_until_seen()
        if lost is not None:
            logger.error(
                "The process ends, and version %d is not in %s, which has taken nothing for %g s.",
                *(lost.version, self._log.store.url, EXIT_S),
            )

    def moved_s(self) -> float:
        """See `Finisher`. Only waits for the store count: on a busy machine encoding takes longer."""
        running = self._running
        is_encoding = running is not None and not running.released.is_set()
        return time.monotonic() if is_encoding else self._log.stored_s

    def run_next(self, queue: UploadQueue) -> bool:
        """See `Finisher`."""
        with queue.lock:
            waited = bool(queue.waiting)
        try:
            self._log.settle()  # while the job waits and may still be joined
            problem: Exception | None = None
        except Exception as error:  # noqa: BLE001 - whatever ends the upload must reach the receipt
            problem = error
        with queue.lock:
            if queue.paused is not None or not queue.waiting:
                return False
            if problem is not None and not waited:
                return True  # the job came meanwhile, perhaps with what was missing: ask again
            job = queue.waiting[0]
            if isinstance(problem, PublishPendingError) and self.agreement.keeps:
                # it waits for the next publish, which puts the version before it again
                tell = job.detach_receipts()
            else:
                tell, queue.running = None, job
                self._running = queue.waiting.pop(0)
        if tell is not None and problem is not None:
            tell(problem)
            self.maintenance.not_published()
            return False
        started = time.perf_counter()
        try:
            if problem is not None:
                raise problem
            if job.version != self._log.next_version or (queue.full and not job.full):
                raise PublishError(f"Version {job.version} builds on one that was lost.")
            stored = self._store_full(queue, job) if job.full else self._store_delta(queue, job)
        except Exception as error:  # noqa: BLE001 - likewise
            self._fail(queue, job, error)
            if not isinstance(error, FencedError):
                self.maintenance.not_published()
        else:
            logger.info(
                "published version=%d kind=%s digest=%.12s upload_s=%.3f",
                *(job.version, job.kind, stored.sha256, time.perf_counter() - started),
            )
            self._end(queue, job, None, stored.sha256)
            self.maintenance.published(job.version)
        return True

    def _end(self, queue: UploadQueue, job: Pending, error: Exception | None, digest: str = "") -> None:
        self._used_s = time.monotonic()
        payload_bytes = 0 if error is not None else job.encoded.result()[0]
        with queue.lock:
            queue.running = self._running = None
        self.agreement.ended(job, error, digest, payload_bytes)
        if error is None:
            job.succeed(digest, payload_bytes)
        else:
            job.fail(error)

    def _fail(self, queue: UploadQueue, job: Pending, error: Exception) -> None:
        """End a job that failed, and those that build on it if it is lost. A pending version keeps its number
        and bits.
        """
        version, pending, lost, cause = job.version, self._log.pending, list[Pending](), error
        if isinstance(error, FencedError):
            with queue.lock:
                self._fenced = error
                lost = _drop_waiting(queue)
        elif pending is not None and pending.version.version == version:
            queue.full = job.collected = False  # its weights are given up
            self.maintenance.stored(job, pending, is_visible=False)
            if not isinstance(error, PublishError):
                error = PublishPendingError(
                    f"Version {version} is not visible yet; the next publish puts it again. {error}"
                )
                error.__cause__ = cause
        else:
            self._log.give_up(version)
            if not isinstance(error, PublishError):
                error = PublishError(f"Version {version} was not published and is not visible: {error}")
                error.__cause__ = cause
            # At once, so that a publish that learns of the loss cannot merge anything into what builds on it.
            with queue.lock:
                queue.full, queue.running = True, None
                lost = _drop_waiting(queue)
                if error is not cause:
                    self._refusal = self.agreement.lost(cause)
        logger.error("%s", error, exc_info=None if isinstance(cause, DeltaSyncError) else cause)
        self._end(queue, job, error)
        for other in lost:
            self._end(
                queue,
                other,
                self._fenced or PublishError(f"Version {other.version} builds on a lost one. {error}"),
            )

    def _store_delta(self, queue: UploadQueue, job: Pending) -> StoredRecord:
        """Store the parts, then the record. After return: visible as a whole.

        Raises:
            FencedError, PublishPendingError, StoreError, ConfigError, CorruptDataError: as `Log.append`.
        """
        log = self._log
        folder = keys.parts_folder(job.version, log.epoch, log.attempt(job.version))
        put = functools.partial(log.put_file, folder)
        self.agreement.say(serial=job.serial, folder=folder, base=self.maintenance.plan(job, put))
        stored, inline, size = queue.encode(job, put)
        job.released.set()
        answers = self.agreement.answers("part", job.serial, list[File])
        others = [file for files in answers for file in files]
        payload_bytes = size + sum(file.bytes for file in others)
        parts = [future.result() for future in stored] + others
        job.end_encoding(payload_bytes)
        delta = DeltaFiles(codec=queue.codec_name, changed=job.changed, parts=parts)
        record = log.append(job.record(log.run_id, log.epoch, delta=delta), inline)
        queue.full = False
        self.maintenance.stored(job, record)
        return record

    def _store_full(self, queue: UploadQueue, job: Pending) -> StoredRecord:
        """Store the weight files, unless it is a reference, then the record. Raises as `_store_delta`."""
        log, requires = self._log, [documents.REFERENCE]
        if job.reference is None:
            requires = []
            job.fingerprints = job.fingerprints or job.shadow.fingerprints
            job.shadow.warn_of_nan(job.version)
            job.weights = job.weights or Weights.of(job.shadow)
        job.released.set()
        if log.channel is None:
            log.describe(job.channel)
        anchor = (
            Anchor(reference=job.reference)
            if job.weights is None
            else store_anchor(log, job.weights, job.version, self._model_files)
        )
        stored = log.append(job.record(log.run_id, log.epoch, anchor=anchor, requires=requires), None)
        queue.full = False
        self.maintenance.stored(job, stored)
        return stored


def _drop_waiting(queue: UploadQueue) -> list[Pending]:
    """Forget and return the waiting jobs. A joined one stays, and is found lost when it is its turn."""
    lost = [job for job in queue.waiting if job is not queue.joined]
    queue.waiting = [job for job in queue.waiting if job is queue.joined]
    return lost
