"""PUBLISH: encode versions and make them visible, in order, in one background thread.

The first rank alone decides what becomes of a version (`UploadQueue`). A thread of each other rank follows
its log, and stores the rank's parts of a version, and of a compaction, once the first rank begins it
(`PartQueue`).
"""

from __future__ import annotations

import functools
import re
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future

from deltasync import limits
from deltasync.channel import documents, keys
from deltasync.channel.documents import Anchor, Delta, File
from deltasync.channel.record import StoredRecord
from deltasync.config import PublisherSettings
from deltasync.ending import finish_at_exit
from deltasync.errors import (
    DeltaSyncError,
    FencedError,
    PublishError,
    PublishPendingError,
    error_of,
    get_logger,
)
from deltasync.publish.anchor import store_anchor
from deltasync.publish.encode import GroupEncoder
from deltasync.publish.log import Log, put_file
from deltasync.publish.maintenance import Maintenance
from deltasync.publish.pending import Pending
from deltasync.publish.shadow import Weights
from deltasync.stores import Store
from deltasync.threads import Workers, daemon, let_go
from deltasync.trainer.ranks import Ranks

logger = get_logger(__name__)

PUTS = 4
"""Parts that one rank stores at the same time."""

EXIT_S = 30.0
"""The process ends before everything is stored if the store has taken nothing for so long."""

_LOOK_S = 1.0  # from one look at the first rank to the next, while a process ends
_ENDING_S = 2.0  # how long threads may take to end once they were told to
_IDLE_S = 5.0  # after which a connection is opened again before it is needed

_NUMBERS = re.compile(r"[0-9a-f]*[0-9][0-9a-f.-]*")  # in which messages of one cause differ


class UploadQueue:
    """Queue of at most two versions, one that runs and one that waits; a first reference may precede them.

    Attributes:
        full: Whether the next version needs full weights, because there is no base whose bits are known.
        joined: Of the waiting jobs, that which a publish joins.
        maintenance: Compactions, anchors and garbage collection.
    """

    def __init__(
        self,
        log: Log,
        maintenance: Maintenance,
        settings: PublisherSettings,
        ranks: Ranks,
        model_files: Mapping[str, bytes],
    ) -> None:
        self.full = True
        self.joined: Pending | None = None
        self.settings = settings
        self._log = log
        self.maintenance = maintenance
        self._model_files = model_files
        self._ranks = ranks if ranks.size > 1 else None  # of a sharded trainer
        self._encoder = GroupEncoder(settings.codec)
        self._lock = threading.RLock()
        self._waiting: list[Pending] = []
        self._running: Pending | None = None
        self._fenced: FencedError | None = None
        self._cause = ""  # why the last version of a sharded trainer was lost, after which there was no delta
        self._refusal: PublishError | None = None  # what the next publish raises
        self._used_s = time.monotonic()
        self._paused: threading.Thread | None = None  # who publishes
        self._puts = Workers(PUTS, "upload")
        self._worker = Workers(1, "upload", idle_s=1.0)  # starting a thread costs a small model a tenth
        ranks.moved_s = self._moved_s
        finish_at_exit(self)

    @property
    def is_first(self) -> bool:
        """Whether the next version is the channel's first one, after an attempt that was lost."""
        with self._lock:
            return self.full and self._running is None and not self._waiting and self._log.next_version == 1

    def pause(self) -> None:
        """Begin no job until `submit` or `unpause`, so that another publish can join the one that waits."""
        with self._lock:
            self._paused = threading.current_thread()

    def unpause(self) -> None:
        """Let the waiting job go on as it is."""
        with self._lock:
            self._paused = self.joined = None
        self._worker.submit(self._run)

    def base(self, *, joins: bool = True) -> tuple[int, bool]:
        """Return the number of the next version, and whether it has full weights. Set the job that it joins.

        Raises:
            FencedError: another publisher has opened the channel; every later call raises it too.
            PublishError: two versions of a sharded trainer were lost for one cause; the next call goes
                on.
        """
        with self._lock:
            refusal, self._refusal = self._fenced or self._refusal, None
            if refusal is not None:
                raise refusal
            newest = self._waiting[-1] if self._waiting else self._running
            if joins and self._waiting and self._waiting[-1].reference is None:
                self.joined = self._waiting[-1]
                return self.joined.version, self.joined.full
            return (self._log.next_version, self.full) if newest is None else (newest.version + 1, False)

    def drop(self) -> None:
        """Fail the joined job: the bits that it would be encoded from are not there any more."""
        with self._lock:
            job, self.joined = self.joined, None
            if job is None or job not in self._waiting:
                return
            self._waiting.remove(job)
        job.fail(PublishError(f"Version {job.version} was lost: an interrupt came while its bits changed."))

    def let_go(self) -> None:
        """Release the locks that an interrupt has left this thread holding."""
        for lock in (self._lock, self._worker.lock, self._puts.lock):
            let_go(lock)

    def wait_released(self) -> None:
        """Wait until the running job does not need the shadow as it is. No other one begins."""
        with self._lock:
            running = self._running
        if running is not None:
            running.released.wait()

    def submit(self, *jobs: Pending) -> None:
        """Upload jobs after the others, in the place of the joined one."""
        with self._lock:
            self._waiting = [*(job for job in self._waiting if job is not self.joined), *jobs]
            self._paused = self.joined = None
        self._worker.submit(self._run)

    def warm_up(self) -> None:
        """Open connections again that have been idle, so that no record waits for that."""
        if time.monotonic() - self._used_s > _IDLE_S:
            self._used_s = time.monotonic()
            self._puts.submit(self._log.store.read, keys.HEAD, limits.SMALL_BYTES)

    def resume(self) -> None:
        """Build the next version on the newest one, whose bits are known."""
        self.full = False

    def close(self) -> None:
        """Finish what was submitted, the maintenance, and the work of the log. Ctrl-C ends waits for a
        retry.
        """
        self.unpause()
        try:
            for part in (self._worker, self._puts, self.maintenance, self._log):
                part.close()
        except BaseException:
            self._log.store.stop.set()
            raise

    def leave(self) -> None:
        """Tell the other ranks that this one publishes no more."""
        if self._ranks is not None:
            self._ranks.leave()

    def finish(self) -> None:
        """Finish what was submitted as long as the store takes something; the process ends."""
        if self._log.store.stop.is_set():
            return
        self.let_go()
        began_s, here = time.monotonic(), threading.current_thread()
        while self._paused not in (None, here) and time.monotonic() - began_s < _ENDING_S:
            time.sleep(0.01)  # another thread is about to submit a version
        self.unpause()
        parts = (self._worker, self._puts, self.maintenance, self._log)
        moved_s = time.monotonic()
        while any(part.busy for part in parts) and time.monotonic() - moved_s < EXIT_S:
            moved_s = max(moved_s, self._moved_s())
            time.sleep(0.01)
        with self._lock:
            lost = self._running or (self._waiting[0] if self._waiting else None)
        self.maintenance.look_at_end()
        if any(part.busy for part in parts):
            self._log.store.stop.set()
            if self._ranks is not None:
                self._ranks.stop()
            ended_s = time.monotonic()
            while any(part.busy for part in parts) and time.monotonic() - ended_s < _ENDING_S:
                time.sleep(0.01)  # a thread that runs on while the interpreter ends may abort the process
        elif self._ranks is not None:
            self._ranks.wait_until_seen()
        if lost is not None:
            logger.error(
                "The process ends, and version %d is not in %s, which has taken nothing for %g s.",
                *(lost.version, self._log.store.url, EXIT_S),
            )

    def _moved_s(self) -> float:
        """When the upload last advanced, by `time.monotonic`.

        Only waits for the store count: on a busy machine a version may take longer to encode.
        """
        running = self._running
        return (
            time.monotonic() if running is not None and not running.released.is_set() else self._log.stored_s
        )

    def _run(self) -> None:
        try:
            while self._run_next():
                pass
        except Exception as error:
            with self._lock:
                job, self._running, self.full = self._running, None, True
            logger.exception(
                "The upload failed in a way that deltasync does not expect; the next version has full weights"
            )
            if job is not None:
                job.fail(PublishError(f"Version {job.version} was lost: {type(error).__name__}: {error}"))

    def _run_next(self) -> bool:
        """Run the next job, if it may begin; return whether another one may follow at once."""
        with self._lock:
            waited = bool(self._waiting)
        try:
            self._log.settle()  # while the job waits and may still be joined
            problem: Exception | None = None
        except Exception as error:  # noqa: BLE001 - whatever ends the upload must reach the receipt
            problem = error
        with self._lock:
            if self._paused is not None or not self._waiting:
                return False
            if problem is not None and not waited:
                return True  # the job came meanwhile, perhaps with what was missing: ask again
            job = self._running = self._waiting.pop(0)
        started = time.perf_counter()
        try:
            if problem is not None:
                raise problem
            if job.version != self._log.next_version or (self.full and not job.full):
                raise PublishError(f"Version {job.version} builds on one that was lost.")
            stored = self._store_full(job) if job.full else self._store_delta(job)
        except Exception as error:  # noqa: BLE001 - likewise
            if isinstance(problem, PublishPendingError) and self._ranks is None:
                self._keep(job, problem)
                self.maintenance.not_published()
                return False
            self._fail(job, error)
            if not isinstance(error, FencedError):
                self.maintenance.not_published()
        else:
            logger.info(
                "published version=%d kind=%s digest=%.12s upload_s=%.3f",
                *(job.version, job.kind, stored.sha256, time.perf_counter() - started),
            )
            self._end(job, None, stored.sha256)
            self.maintenance.published(job.version)
        return True

    def _end(self, job: Pending, error: Exception | None, digest: str = "") -> None:
        self._used_s = time.monotonic()
        payload_bytes = 0 if error is not None else job.encoded.result()[0]
        with self._lock:
            self._running = None
        if self._ranks is not None:
            described = None if error is None else (type(error).__name__, str(error))
            try:
                self._ranks.say(
                    serial=job.serial, error=described, digest=digest, payload_bytes=payload_bytes
                )
            except RuntimeError:  # they time out
                logger.exception("The other ranks could not be told how an upload ended.")
        if error is None:
            self._cause = self._cause if job.full else ""
            job.succeed(digest, payload_bytes)
        else:
            job.fail(error)

    def _keep(self, job: Pending, error: PublishPendingError) -> None:
        """Let a job wait for the next publish, which puts the version before it again: that has no answer
        yet.
        """
        with self._lock:
            tell = job.renewed()
            self._running = None
            self._waiting.insert(0, job)
        tell(error)

    def _fail(self, job: Pending, error: Exception) -> None:
        """End a job that failed, and those that build on it if it is lost. A pending version keeps its number
        and bits.
        """
        version, pending, lost, cause = job.version, self._log.pending, list[Pending](), error
        if isinstance(error, FencedError):
            with self._lock:
                self._fenced = error
                lost = self._drop_waiting()
        elif pending is not None and pending.version.version == version:
            self.full = job.collected = False  # its weights are given up
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
            with self._lock:
                self.full, self._running = True, None
                lost = self._drop_waiting()
                if self._ranks is not None and error.__cause__ is cause:
                    before, self._cause = self._cause, _NUMBERS.sub("", f"{type(cause).__name__} {cause}")
                    if self._cause == before:
                        self._cause = ""
                        self._refusal = PublishError(
                            f"Two versions were lost for one cause, so it will not pass: {cause} Remove it; "
                            "the next "
                            "publish tries again, with full weights."
                        )
        logger.error("%s", error, exc_info=None if isinstance(cause, DeltaSyncError) else cause)
        self._end(job, error)
        for other in lost:
            self._end(
                other,
                self._fenced or PublishError(f"Version {other.version} builds on a lost one. {error}"),
            )

    def _drop_waiting(self) -> list[Pending]:
        """Forget and return the waiting jobs. A joined one stays, and is found lost when it is its turn."""
        lost = [job for job in self._waiting if job is not self.joined]
        self._waiting = [job for job in self._waiting if job is self.joined]
        return lost

    def _store_delta(self, job: Pending) -> StoredRecord:
        """Store the parts, then the record. After return: visible as a whole.

        Raises:
            FencedError, PublishPendingError, StoreError, ConfigError, CorruptDataError: as `Log.append`.
        """
        log = self._log
        folder = keys.parts_folder(job.version, log.epoch, log.attempt(job.version))
        base = self.maintenance.plan(job, functools.partial(log.put_file, folder))
        if self._ranks is not None:
            self._ranks.say(serial=job.serial, folder=folder, base=base)
        stored, inline, size = self._encoder.encode(
            job, lambda number, data: self._puts.submit(log.put_file, folder, keys.part(0, number), data)
        )
        job.released.set()
        answers = [] if self._ranks is None else self._ranks.answers("part", job.serial, list[File])
        others = [file for files in answers for file in files]
        payload_bytes = size + sum(file.bytes for file in others)
        parts = [future.result() for future in stored] + others
        job.end_encoding(payload_bytes)
        delta = Delta(codec=self.settings.codec, changed=job.changed, parts=parts)
        record = log.append(job.record(log.run_id, log.epoch, delta=delta), inline)
        self.full = False
        self.maintenance.stored(job, record)
        return record

    def _store_full(self, job: Pending) -> StoredRecord:
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
        self.full = False
        self.maintenance.stored(job, stored)
        return stored


class PartQueue:
    """As `UploadQueue`, for the parts of a rank that is not the first one."""

    def __init__(
        self, store: Store, settings: PublisherSettings, ranks: Ranks, maintenance: Maintenance
    ) -> None:
        self._store, self._maintenance = store, maintenance
        self.joined: Pending | None = None
        self.settings = settings
        self._ranks = ranks
        self._encoder = GroupEncoder(settings.codec)
        self._pending: dict[int, Pending] = {}
        self._changed = threading.Condition()
        self._closing = False
        self._puts = Workers(PUTS, "upload")
        self._moved_s = time.monotonic()
        # A daemon, since nothing would end it if the first rank died.
        self._thread = daemon("upload", self._run)
        self._thread.start()
        finish_at_exit(self)

    is_first = False

    def pause(self) -> None:
        """Do nothing: the first rank decides which jobs begin."""

    warm_up = unpause = let_go = resume = pause

    def join(self) -> None:
        """Set the newest job as that which the first rank joins."""
        with self._changed:
            self.joined = self._pending.popitem()[1]

    def wait_released(self) -> None:
        """As `UploadQueue.wait_released`. If the first rank is lost, the jobs fail, which releases them."""
        with self._changed:
            jobs = list(self._pending.values())
        for job in jobs:
            job.released.wait()

    def drop(self) -> None:
        """As `UploadQueue.drop`."""
        if self.joined is not None:
            self.joined.fail(
                PublishError(f"Version {self.joined.version} was lost: the next one could not join it.")
            )
            self.joined = None

    def submit(self, *jobs: Pending) -> None:
        """Upload this rank's parts of jobs when the first rank begins them."""
        for job in jobs:
            if job.full:
                job.released.set()  # its weights were collected
        with self._changed:
            self.joined, self._pending = None, self._pending | {job.serial: job for job in jobs}
            self._changed.notify_all()

    def close(self) -> None:
        """Wait until all submitted jobs have ended, but not for a first rank that says nothing."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        self._puts.close()
        self._maintenance.close()

    def leave(self) -> None:
        """As `UploadQueue.leave`."""
        self._ranks.leave()

    def finish(self) -> None:
        """Store this rank's parts of what was submitted, as long as this rank or the first one advances."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        moved_s, looked_s, seen = time.monotonic(), 0.0, b""
        while self._is_busy and time.monotonic() - max(moved_s, self._moved_s) < EXIT_S:
            if time.monotonic() - looked_s > _LOOK_S:
                looked_s, before, seen = time.monotonic(), seen, self._ranks.state(0)
                moved_s = looked_s if seen != before else moved_s
            time.sleep(0.01)
        if self._is_busy:
            logger.error("The process ends before the first rank has said what became of its last versions.")
            self._ranks.stop()
            ended_s = time.monotonic()
            while self._is_busy and time.monotonic() - ended_s < _ENDING_S:
                time.sleep(0.01)

    @property
    def _is_busy(self) -> bool:
        return self._thread.is_alive() or self._puts.busy or self._maintenance.busy

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending or self._closing)
                if not self._pending:
                    return
            try:
                line = self._ranks.next_line()
                self._moved_s = time.monotonic()
                if "error" in line:
                    self._end(**line)
                else:
                    self._upload(**line)
            except PublishError as error:
                self._give_up(error)

    def _upload(self, serial: int, folder: str, base: int | None) -> None:
        """Store this rank's parts of a job; with a `base`, those of a compaction follow once the job has
        ended well.
        """
        files: list[File] = []
        problem = None

        def store(number: int, data: bytes) -> Future[File]:
            return self._puts.submit(self._put, folder, keys.part(self._ranks.rank, number), data)

        try:
            job = self._submitted(serial)
            if job is None:
                raise PublishError("This rank has given the version up.")
            stored, _, _ = self._encoder.encode(job, store, inline=False)
            self._maintenance.plan(job, functools.partial(self._put, folder), base)
            job.released.set()
            files = [future.result() for future in stored]
        except Exception as error:  # noqa: BLE001 - whatever it is, the first rank must hear of it
            problem = error
            logger.error("A part was not stored: %s", error)
        self._ranks.answer("part", serial, files, problem)

    def _end(self, serial: int, error: tuple[str, str] | None, digest: str, payload_bytes: int) -> None:
        job = self._submitted(serial)
        with self._changed:
            self._pending.pop(serial, None)
        if job is None:
            logger.error("This rank had given up a version that has ended: %s", error or digest)
        elif error is None:
            self._maintenance.stored(job, None)
            job.succeed(digest, payload_bytes)
        else:
            problem = error_of(*error, PublishError)
            if isinstance(problem, PublishPendingError):  # the next version builds on it all the same
                self._maintenance.stored(job, None, is_visible=False)
            job.fail(problem)
        self._ranks.answer("seen", serial, None)

    def _put(self, folder: str, name: str, data: bytes | memoryview) -> File:
        file = put_file(self._store, f"{folder}/{name}", data)
        self._moved_s = time.monotonic()
        return file

    def _submitted(self, serial: int) -> Pending | None:
        """Wait for a job, which the first rank may have submitted earlier than this one; None if this one
        gave it up.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._closing or any(job >= serial for job in self._pending))
            return self._pending.get(serial)

    def _give_up(self, error: Exception) -> None:
        with self._changed:
            jobs, self._pending = list(self._pending.values()), {}
        for job in jobs:
            lost = PublishPendingError(
                f"The first rank does not say what became of version {job.version}: {error}"
            )
            logger.error("%s", lost)
            job.fail(lost)
