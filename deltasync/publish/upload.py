"""PUBLISH: encode versions and make them visible, in order, in one background thread.

A queue holds the versions; what makes them visible is handed to it (`append.Appender`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple, Protocol

from deltasync.channel import keys
from deltasync.channel.documents import File
from deltasync.codec.base import Encoded
from deltasync.ending import finish_at_exit
from deltasync.errors import PublishError, get_logger
from deltasync.publish.agreement import Alone
from deltasync.publish.encode import GroupEncoder
from deltasync.publish.pending import Pending
from deltasync.threads import Workers, release_after_interrupt

logger = get_logger(__name__)

PUTS = 4
"""Parts that one process stores at the same time."""

EXIT_S = 30.0
"""The process ends before everything is stored if the store has taken nothing for so long."""

_ENDING_S = 2.0  # how long threads may take to end once they were told to


class Decision(NamedTuple):
    """The number and kind of the next version."""

    serial: int  # of its job, or of a reference's before it, which takes one more
    version: int
    full: bool  # whether it has full weights
    collects: bool  # whether full weights are collected for it, or for an anchor beside it
    joins: bool  # whether it joins a waiting job


class Busy(Protocol):
    """Work in the background."""

    @property
    def busy(self) -> bool:
        """Whether anything is under way."""

    def close(self) -> None:
        """Finish what is under way."""


class Finisher(Protocol):
    """Makes the versions of a queue visible, or does its part of that.

    Attributes:
        keeps_joined: Whether a publish that fails leaves the job as it is that it was to join.
    """

    keeps_joined: bool

    @property
    def agreement(self) -> Alone:
        """The agreement with other processes."""

    @property
    def work(self) -> tuple[Busy, ...]:
        """Work beside the queue's own threads."""

    @property
    def is_stopped(self) -> bool:
        """Whether waits were ended."""

    def decide(
        self, queue: UploadQueue, starts_over: bool, problem: BaseException | None, same: str
    ) -> Decision:
        """Decide what the next version is; set the job that it joins. Raises `problem`, if there is one."""

    def warm_up(self, queue: UploadQueue) -> None:
        """Open connections again that have been idle, so that no record waits for that."""

    def run_next(self, queue: UploadQueue) -> bool:
        """Run the next job, if it may begin; return whether another one may follow at once."""

    def moved_s(self) -> float:
        """When the uploads last advanced, by `time.monotonic`."""

    def give_up(self) -> None:
        """End waits for a retry; what is under way fails."""

    def stop(self, lost: Pending | None, is_busy: bool) -> None:
        """End what still waits: the process ends, perhaps with a version that is not stored."""


class UploadQueue:
    """Queue of at most two versions, one that runs and one that waits; a first reference may precede them.

    Attributes:
        finisher: Makes them visible.
        full: Whether the next version needs full weights, because there is no base whose bits are known.
        joined: Of the waiting jobs, that which a publish joins.
        waiting: The jobs that have not begun.
        running: The one that has.
        lock: Held while these change.
        paused: The thread that publishes.
        newest: Serial of the newest job that was submitted.
        is_closing: Whether no job will follow.
        puts: The threads that store parts.
        codec_name: The codec of deltas.
    """

    def __init__(self, finisher: Finisher, codec_name: str) -> None:
        self.finisher = finisher
        self.full = True
        self.joined: Pending | None = None
        self.waiting: list[Pending] = []
        self.running: Pending | None = None
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.paused: threading.Thread | None = None
        self.newest, self.is_closing = 0, False
        self.puts = Workers(PUTS, "upload")
        self.codec_name = codec_name
        self._encoder = GroupEncoder(codec_name)
        self._worker = Workers(1, "upload", idle_s=1.0)  # starting a thread costs a small model a tenth
        finish_at_exit(self)

    @property
    def jobs(self) -> list[Pending]:
        """All jobs but the joined one."""
        with self.lock:
            found = (self.running, *self.waiting)
            return [job for job in found if job is not None and job is not self.joined]

    @property
    def is_lost(self) -> bool:
        """Whether nothing is there to build on, and nothing under way."""
        with self.lock:
            return self.full and self.running is None and not self.waiting

    def pause(self) -> None:
        """Begin no job until `submit` or `unpause`, so that another publish can join the one that waits."""
        with self.lock:
            self.paused = threading.current_thread()

    def unpause(self) -> None:
        """Let the waiting job go on as it is."""
        with self.lock:
            self.paused = self.joined = None
        self._worker.submit(self._run)

    def recover(self, *, is_torn: bool) -> None:
        """Go on after a publish that failed or was interrupted, in this thread. If it has torn the bits, the
        joined job fails, which would be encoded from them.
        """
        self._let_go()
        with self.lock:
            job, self.joined = self.joined, None
            is_lost = job in self.waiting and (is_torn or not self.finisher.keeps_joined)
            if is_lost and job is not None:
                self.waiting.remove(job)
        if is_lost and job is not None:
            job.fail(
                PublishError(f"Version {job.version} was lost: an interrupt came while its bits changed.")
            )

    def wait_released(self) -> None:
        """Wait until no job but the joined one needs the shadow as it is. No other one begins, unless none is
        joined: then one waits that an interrupt kept from its beginning.
        """
        with self.lock:
            begins = self.joined is None and any(not job.released.is_set() for job in self.waiting)
        if begins:
            self.unpause()
        for job in self.jobs:
            job.released.wait()
        if begins:
            self.pause()

    def submit(self, *jobs: Pending) -> None:
        """Upload jobs after the others, in the place of the joined one."""
        for job in jobs:
            if job.full and (job.collected or job.reference is not None):
                job.released.set()
        with self.lock:
            self.waiting = [*(job for job in self.waiting if job is not self.joined), *jobs]
            self.paused = self.joined = None
            self.newest = jobs[-1].serial
            self.changed.notify_all()
        self._worker.submit(self._run)

    def encode(
        self, job: Pending, put: Callable[[str, bytes], File], *, rank: int = 0, inline: bool = True
    ) -> tuple[list[Future[File]], Encoded | None, int]:
        """Encode a job's delta as `GroupEncoder.encode` does; `put` stores a part, by its file name."""

        def store(number: int, data: bytes) -> Future[File]:
            return self.puts.submit(put, keys.part(rank, number), data)

        return self._encoder.encode(job, store, inline=inline)

    @property
    def busy(self) -> bool:
        """Whether anything is under way."""
        return any(part.busy for part in (self._worker, self.puts, *self.finisher.work))

    def close(self) -> None:
        """Finish what was submitted, and what follows it. Ctrl-C ends waits for a retry."""
        self._end_waits()
        try:
            for part in (self._worker, self.puts, *self.finisher.work):
                part.close()
        except BaseException:
            self.finisher.give_up()
            raise

    def leave(self) -> None:
        """Tell the other processes that this one publishes no more."""
        self.finisher.agreement.leave()

    def finish(self) -> None:
        """Finish what was submitted as long as the store takes something; the process ends."""
        if self.finisher.is_stopped:
            return
        self._let_go()
        began_s, here = time.monotonic(), threading.current_thread()
        while self.paused not in (None, here) and time.monotonic() - began_s < _ENDING_S:
            time.sleep(0.01)  # another thread is about to submit a version
        self._end_waits()
        moved_s = time.monotonic()
        while self.busy and time.monotonic() - moved_s < EXIT_S:
            moved_s = max(moved_s, self.finisher.moved_s())
            time.sleep(0.01)
        with self.lock:
            lost = self.running or (self.waiting[0] if self.waiting else None)
        self.finisher.stop(lost, self.busy)
        ended_s = time.monotonic()
        while self.busy and time.monotonic() - ended_s < _ENDING_S:
            time.sleep(0.01)  # a thread that runs on while the interpreter ends may abort the process

    def _let_go(self) -> None:
        """Release the locks that an interrupt has left this thread holding."""
        for lock in (self.lock, self._worker.lock, self.puts.lock):
            release_after_interrupt(lock)

    def _end_waits(self) -> None:
        with self.lock:
            self.is_closing = True
            self.changed.notify_all()
        self.unpause()

    def _run(self) -> None:
        try:
            while self.finisher.run_next(self):
                pass
        except Exception as error:
            with self.lock:
                job, self.running, self.full = self.running, None, True
            logger.exception(
                "The upload failed in a way that deltasync does not expect; the next version has full weights"
            )
            if job is not None:
                job.fail(PublishError(f"Version {job.version} was lost: {type(error).__name__}: {error}"))
