"""The uploads of a rank that is not the first one: its parts of each version, and of compactions.

A thread follows the log of the first rank (`upload`), and stores the rank's parts of a version once that rank begins it.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future

from deltasync.channel import keys
from deltasync.channel.documents import File
from deltasync.config import PublisherSettings
from deltasync.errors import ChainError, PublishError, PublishLostError, PublishPendingError, error_of, get_logger
from deltasync.publish import writes
from deltasync.publish.compact import Steps
from deltasync.publish.encode import GroupEncoder
from deltasync.publish.pending import Pending
from deltasync.publish.upload import PUTS
from deltasync.ranks.ranks import Ranks, attempt
from deltasync.stores import Store
from deltasync.threads import Workers, daemon

logger = get_logger(__name__)


class PartQueue:
    """As `UploadQueue`, for this rank's parts of versions and compactions."""

    def __init__(self, store: Store, settings: PublisherSettings, ranks: Ranks, *, compacts: bool) -> None:
        self._store, self._compacts = store, compacts
        self.settings = settings
        self._ranks = ranks
        self._encoder = GroupEncoder(settings.codec)
        self._pending: dict[int, Pending] = {}
        self._changed = threading.Condition()
        self._closing = False
        self._puts = Workers(PUTS, "upload")
        self._steps: Steps | None = None
        self._compaction: tuple[int, str] | None = None  # of the running job: base and folder
        self._compactions = Workers(1, "maintenance")
        # A daemon, since nothing would end it if the first rank died.
        self._thread = daemon("upload", self._run)
        self._thread.start()

    is_first = False

    def pause(self) -> None:
        """Do nothing: the first rank decides which jobs begin."""

    warm_up = unpause = let_go = pause

    def base(self, *, joins: bool = True) -> tuple[int, bool, Pending | None]:
        """Return the newest job, which the first rank joins, with its number and whether it has full weights."""
        with self._changed:
            job = self._pending.popitem()[1]
        return job.version, job.full, job

    def wait_released(self) -> None:
        """As `UploadQueue.wait_released`. If the first rank is lost, the jobs fail, which releases them."""
        with self._changed:
            jobs = list(self._pending.values())
        for job in jobs:
            job.released.wait()

    def drop(self, job: Pending | None) -> None:
        """As `UploadQueue.drop`."""
        if job is not None:
            job.fail(PublishLostError(f"Version {job.version} was lost: the next one could not join it."))

    def resume(self, steps: Steps) -> None:
        """Note the steps that lead to the newest version; the first rank decides what the next version builds on."""
        self._steps = steps

    def submit(self, *jobs: Pending) -> None:
        """Upload this rank's parts of jobs when the first rank begins them."""
        for job in jobs:
            if job.full:
                job.released.set()  # its weights were collected
        with self._changed:
            self._pending |= {job.serial: job for job in jobs}
            self._changed.notify_all()

    def close(self) -> None:
        """Wait until all submitted jobs have ended, but not for a first rank that says nothing."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        self._puts.close()
        self._compactions.close()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending or self._closing)
                if not self._pending:
                    return
            try:
                line = self._ranks.next_line()
                if "error" in line:
                    self._end(**line)
                else:
                    self._upload(**line)
            except PublishError as error:
                self._give_up(error)

    def _upload(self, serial: int, folder: str, base: int | None) -> None:
        """Store this rank's parts of a job; with a `base`, those of a compaction follow once the job has ended well."""
        files: list[File] = []
        problem = None

        def store(number: int, data: bytes) -> Future[File]:
            key = f"{folder}/{keys.part(self._ranks.rank, number)}"
            return self._puts.submit(writes.put_file, self._store, key, data)

        try:
            job = self._submitted(serial)
            stored, _, _ = self._encoder.encode(job, store, inline=False)
            self._compaction = None if base is None else (base, folder)
            job.released.set()
            files = [future.result() for future in stored]
        except Exception as error:  # noqa: BLE001 - whatever it is, the first rank must hear of it
            problem = error
            logger.error("A part was not stored: %s", error)
        self._ranks.answer("part", serial, files, problem)

    def _end(self, serial: int, error: tuple[str, str] | None, digest: str, payload_bytes: int) -> None:
        job = self._submitted(serial)
        with self._changed:
            del self._pending[serial]
        compacts, self._compaction = self._compaction, None
        if error is None:
            self._stored(job, *(compacts or (None, "")))
            job.succeed(digest, payload_bytes)
        else:
            problem = error_of(*error, PublishError)
            if isinstance(problem, PublishPendingError):  # the next version builds on it all the same
                self._stored(job, None, "")
            job.fail(problem)
        self._ranks.answer("seen", serial, None)

    def _stored(self, job: Pending, base: int | None, folder: str) -> None:
        """Note a version that is visible or pending, and compact the steps from a base to it."""
        if not self._compacts:
            return
        if job.full or self._steps is None:
            self._steps = Steps.of(job)
            return
        steps = self._steps
        if base is not None:
            steps.start(base)  # if these weights were stored since
        steps.add(job.delta)
        if job.collected:
            steps.mark(job.version)
        if base is not None:
            self._compactions.submit(self._compact, job, base, folder, steps, steps.frozen())

    def _compact(self, job: Pending, base: int, folder: str, steps: Steps, frozen: Steps) -> None:
        def put(name: str, data: bytes) -> File:
            return writes.put_file(self._store, f"{folder}/{name}", data)

        def store() -> tuple[list[File], int]:
            assert job.fingerprints is not None
            if frozen.base != base:
                raise ChainError(f"it has the steps since version {frozen.base}, not {base}.")
            return frozen.store(job.version, job.fingerprints, put, rank=self._ranks.rank)[:2]

        parts, problem = attempt(store)
        steps.thaw()
        self._ranks.answer("compaction", job.serial, parts, problem)

    def _submitted(self, serial: int) -> Pending:
        """Wait for a job, which the first rank may have submitted earlier than this one."""
        with self._changed:
            self._changed.wait_for(lambda: serial in self._pending or self._closing)
            if serial not in self._pending:
                raise PublishError("This rank has given the version up.")
            return self._pending[serial]

    def _give_up(self, error: Exception) -> None:
        with self._changed:
            jobs, self._pending = list(self._pending.values()), {}
        for job in jobs:
            lost = PublishPendingError(f"The first rank does not say what became of version {job.version}: {error}")
            logger.error("%s", lost)
            job.fail(lost)
