"""PUBLISH, on all ranks but the first: upload this rank's part of a version once the first rank has begun it.

What becomes of a version is decided by the first rank alone (`upload`); here one thread follows what it says.
"""

from __future__ import annotations

import logging
import threading

import torch.distributed as dist

from deltasync import layout
from deltasync.errors import PublishError, PublishStateUnknownError
from deltasync.manifest import FileRef
from deltasync.peers import Signals, error_of
from deltasync.upload import Job, settle
from deltasync.writer import Writer

logger = logging.getLogger(__name__)


class PartUploader:
    """As `Uploader`, for this rank's part."""

    def __init__(self, writer: Writer, signals: Signals) -> None:
        self._writer = writer
        self._signals = signals
        self._pending: dict[int, Job] = {}
        self._changed = threading.Condition()
        self._closing = False
        # A daemon, since nothing would end it if the first rank died.
        self._thread = threading.Thread(target=self._run, name="deltasync-upload", daemon=True)
        self._thread.start()

    def take_waiting(self) -> Job:
        """Take back the newest job, as the first rank has done."""
        with self._changed:
            return self._pending.popitem()[1]

    def submit(self, job: Job) -> None:
        """Upload the job's part when the first rank begins it."""
        with self._changed:
            self._pending[job.serial] = job
            self._changed.notify_all()

    def close(self) -> None:
        """Wait until all that was submitted has ended, but not for a first rank that says nothing; end the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending or self._closing)
                if not self._pending:
                    return
            try:
                line = self._signals.next_line()
                if "begin" in line:
                    self._upload(line["begin"])
                else:
                    self._end(line["end"], line["error"])
            except dist.DistNetworkError as error:
                self._give_up(error)
            except RuntimeError as error:  # nothing was said for a while: it may be trying again
                if self._closing:
                    self._give_up(error)

    def _upload(self, serial: int) -> None:
        files: list[FileRef] = []
        problem = None
        try:
            job = self._submitted(serial)
            _, files = self._writer.put_files(layout.delta_dir, job.manifest.version, job.delta_files)
        except Exception as error:  # noqa: BLE001 - whatever it is, the first rank must hear of it
            problem = error
            logger.error("A part was not stored: %s", error)
        self._signals.answer(serial, files, problem)

    def _end(self, serial: int, error: tuple[str, str] | None) -> None:
        job = self._submitted(serial)
        with self._changed:
            del self._pending[serial]
        found = None if error is None else error_of(error)
        assert found is None or isinstance(found, PublishError)
        settle(job, found)
        self._signals.seen(serial)

    def _submitted(self, serial: int) -> Job:
        """A job, which the first rank may have submitted earlier than this one.

        Raises:
            PublishError: it does not come.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: serial in self._pending, self._signals.timeout_s):
                raise PublishError("This rank has given the version up.")
            return self._pending[serial]

    def _give_up(self, error: Exception) -> None:
        with self._changed:
            jobs = list(self._pending.values())
            self._pending.clear()
        for job in jobs:
            version = job.manifest.version
            logger.error("The first rank does not say what became of version %d: %s", version, error)
            settle(job, PublishStateUnknownError(f"The first rank does not say what became of version {version}: {error}"))
