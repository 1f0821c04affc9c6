"""The parts of a rank that is not the first one: stored once the first rank begins a version or a
compaction.
"""

from __future__ import annotations

import functools
import time
from concurrent.futures import Future

from deltasync.channel.documents import File
from deltasync.errors import PublishError, PublishPendingError, error_of, get_logger
from deltasync.publish.agreement import attempt
from deltasync.publish.log import put_file
from deltasync.publish.maintenance import Maintenance
from deltasync.publish.pending import Pending
from deltasync.publish.upload import Busy, Decision, UploadQueue
from deltasync.stores import Store
from deltasync.trainer.agreement import Agreement

logger = get_logger(__name__)

_LOOK_S = 1.0  # from one look at the first rank to the next, while a process ends


class Answerer:
    """Follows the first rank, which decides what becomes of the versions of a queue, and answers it.

    Args:
        store: Where parts go.
        agreement: The agreement of the ranks.
        maintenance: This rank's parts of compactions.
    """

    keeps_joined = False  # the first rank may have begun it by other bits

    def __init__(self, store: Store, agreement: Agreement, maintenance: Maintenance) -> None:
        self.agreement: Agreement = agreement
        self._store, self.maintenance = store, maintenance
        self._moved_s = self._looked_s = time.monotonic()
        self._seen = b""
        self.is_stopped = False

    @property
    def work(self) -> tuple[Busy, ...]:
        """See `Finisher`."""
        return (self.maintenance,)

    def decide(
        self, queue: UploadQueue, starts_over: bool, problem: BaseException | None, same: str
    ) -> Decision:
        """See `Finisher`: the first rank knows what became of the versions before."""

        def none() -> Decision:
            raise AssertionError("only the first rank decides")

        decision = self.agreement.first(none, Decision, problem=problem, same=same)
        if decision.joins:
            with queue.lock:
                queue.joined = queue.waiting[-1] if queue.waiting else None
        return decision

    def warm_up(self, queue: UploadQueue) -> None:
        """Do nothing: parts wait for the first rank anyway."""

    def give_up(self) -> None:
        """Do nothing: a rank waits for the first one."""

    def moved_s(self) -> float:
        """See `Finisher`: this rank or the first one advanced."""
        if time.monotonic() - self._looked_s > _LOOK_S:
            self._looked_s, before, self._seen = time.monotonic(), self._seen, self.agreement.state(0)
            if self._seen != before:
                self._moved_s = self._looked_s
        return self._moved_s

    def stop(self, lost: Pending | None, is_busy: bool) -> None:
        """See `Finisher`."""
        if is_busy:
            logger.error("The process ends before the first rank has said what became of its last versions.")
            self.is_stopped = True
            self.agreement.stop()

    def run_next(self, queue: UploadQueue) -> bool:
        """Do what the first rank says next of this rank's jobs."""
        if not queue.jobs:
            return False
        try:
            line = self.agreement.next_line()
            self._moved_s = time.monotonic()
            if "error" in line:
                self._end(queue, **line)
            else:
                self._upload(queue, **line)
        except PublishError as error:
            self._lose(queue, error)
        return True

    def _upload(self, queue: UploadQueue, serial: int, folder: str, base: int | None) -> None:
        """Store this rank's parts of a job; with a `base`, those of a compaction follow once the job has
        ended well.
        """
        put = functools.partial(self._put, folder)

        def store() -> list[File]:
            job = self._begun(queue, serial)
            if job is None:
                raise PublishError("This rank has given the version up.")
            stored: list[Future[File]] = queue.encode(job, put, rank=self.agreement.rank, inline=False)[0]
            self.maintenance.plan(job, put, base)
            job.released.set()
            return [future.result() for future in stored]

        files, problem = attempt(store)
        if problem is not None:
            logger.error("A part was not stored: %s", problem)
        self.agreement.answer("part", serial, files, problem)

    def _end(
        self, queue: UploadQueue, serial: int, error: tuple[str, str] | None, digest: str, payload_bytes: int
    ) -> None:
        job = self._begun(queue, serial)
        with queue.lock:
            queue.running = None
        if job is None:
            logger.error("This rank had given up a version that has ended: %s", error or digest)
        elif error is None:
            self.maintenance.stored(job, None)
            job.succeed(digest, payload_bytes)
        else:
            problem = error_of(*error, PublishError)
            if isinstance(problem, PublishPendingError):  # the next version builds on it all the same
                self.maintenance.stored(job, None, is_visible=False)
            job.fail(problem)
        self.agreement.answer("seen", serial, None)

    def _put(self, folder: str, name: str, data: bytes | memoryview) -> File:
        file = put_file(self._store, f"{folder}/{name}", data)
        self._moved_s = time.monotonic()
        return file

    def _begun(self, queue: UploadQueue, serial: int) -> Pending | None:
        """Wait for a job that the first rank has begun, perhaps before it was submitted here, and let it run;
        None if this rank gave it up.
        """
        with queue.changed:
            queue.changed.wait_for(lambda: queue.is_closing or queue.newest >= serial)
            found = next((job for job in queue.jobs if job.serial == serial), None)
            if found is not None and found in queue.waiting:
                queue.waiting.remove(found)
                queue.running = found
            return found

    def _lose(self, queue: UploadQueue, error: Exception) -> None:
        """Fail all jobs: the first rank is lost."""
        with queue.lock:
            jobs, queue.running = queue.jobs, None
            queue.waiting = [job for job in queue.waiting if job is queue.joined]
        for job in jobs:
            lost = PublishPendingError(
                f"The first rank does not say what became of version {job.version}: {error}"
            )
            logger.error("%s", lost)
            job.fail(lost)
