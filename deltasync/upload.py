"""PUBLISH: one background thread that makes versions visible, in order: payload, then manifest, then head.

Crash points of `Uploader._store`, for one version v:

    before or between payload files   nothing visible; files without a manifest are garbage for `prune`
    after the manifest                v is defined for good, but readers still see v-1; a resumed publisher rolls forward
    after head                        v is visible as a whole
"""

from __future__ import annotations

import dataclasses
import logging
import math
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from deltasync import layout, manifest
from deltasync.errors import (
    CorruptDataError,
    DeltaSyncError,
    HeadConflictError,
    ObjectExistsError,
    ObjectMissingError,
    PublishError,
    PublishLostError,
    PublishStateUnknownError,
)
from deltasync.manifest import Channel, Head, Link, Manifest
from deltasync.peers import Signals
from deltasync.types import Patch
from deltasync.writer import Contents, Writer

logger = logging.getLogger(__name__)

_STALL_S = 5.0  # since head was known to be our own; after that, another publisher may have gone on, and forgotten versions


@dataclasses.dataclass(frozen=True, slots=True)
class Tip:
    """Where a channel stands after a version.

    Attributes:
        version: The newest version, 0 before the first.
        anchor_version: The newest one with an anchor, 0 if the next version must be one.
        chain_bytes: Bytes of the deltas since then.
        by_reference: Whether that anchor is a reference.
    """

    version: int = 0
    anchor_version: int = 0
    chain_bytes: int = 0
    by_reference: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class EncodedFold:
    """A fold that waits for the version it leads to.

    Attributes:
        payload: None if no element differs.
    """

    base_version: int
    codec: str
    changed: int
    payload: bytes | None


@dataclasses.dataclass(kw_only=True)
class Job:
    """One version on its way to the store.

    Attributes:
        serial: Number of the publish that made it, the same on all ranks.
        base: The tip it builds on.
        tip: The one that it leads to.
        patches: Steps against the base, kept so that a later publish can be folded in while the job waits.
        channel: Stored first if it is not there yet; None if it is known to be.
        manifest: Complete but for the file lists of `delta` and `anchor`.
        delta_files: (file name, bytes) of this rank's part.
        anchor_files: (file name, contents), at the first rank.
        fold: To be stored once head names the version; nothing waits for it.
        opening: A version to store first: the reference that this one builds on.
        uploaded: Resolved when head names the version, or with what went wrong.
        payload_bytes, anchor_bytes: As in `Receipt`.
        spool: Where the files of the anchor lie; emptied once they are not needed any more.
        manifest_attempted: Whether the manifest may be in the store.
    """

    serial: int
    base: Tip
    tip: Tip
    patches: dict[str, Patch]
    channel: Channel | None
    manifest: Manifest
    delta_files: Sequence[tuple[str, bytes]]
    anchor_files: Sequence[tuple[str, Contents]]
    payload_bytes: int
    anchor_bytes: int
    uploaded: Future[None]
    spool: tempfile.TemporaryDirectory[str] | None = None
    fold: EncodedFold | None = None
    opening: Job | None = None
    manifest_attempted: bool = False

    @property
    def attempted_version(self) -> int:
        """The newest version whose manifest may be stored, should the upload have failed."""
        if self.manifest_attempted:
            return self.manifest.version
        return self.manifest.version - 1 if self.opening is None else self.opening.attempted_version

    def drop_files(self) -> None:
        """Delete what lies on the local disk for it."""
        if self.spool is not None:
            self.spool.cleanup()


class Uploader:
    """Uploads jobs one after the other. At most one job uploads and one waits.

    Args:
        writer: The channel's.
        head: The channel's when it was opened.
        chain: What the next delta builds on; the last link is the newest manifest that is stored.
        on_published: Called when a version is visible.
        signals: To the other ranks.
    """

    def __init__(
        self,
        writer: Writer,
        head: Head | None,
        chain: Sequence[Link],
        on_published: Callable[[Job], None],
        signals: Signals,
    ) -> None:
        self._on_published = on_published
        self._chain = list(chain)
        self._head = head
        self._head_known_s = -math.inf
        self._writer = writer
        self._objects = writer.store
        self._signals = signals
        self._lock = threading.Lock()
        self._waiting: Job | None = None
        self._lost: tuple[Job, PublishError] | None = None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="deltasync-upload")

    def take_waiting(self) -> Job | None:
        """Take back the job that has not started, to fold another version into it."""
        with self._lock:
            job, self._waiting = self._waiting, None
            return job

    def take_lost(self) -> tuple[Job, PublishError] | None:
        """The job that was given up and why, once; afterwards jobs are accepted again.

        Raises:
            HeadConflictError: it was given up because another publisher writes to the channel; this stays so.
        """
        with self._lock:
            lost = self._lost
            if lost is not None and isinstance(lost[1], HeadConflictError):
                raise lost[1]
            self._lost = None
            return lost

    def submit(self, job: Job) -> None:
        """Upload `job` after the current one. The caller took the waiting job before."""
        with self._lock:
            assert self._waiting is None
            self._waiting = job
        self._pool.submit(self._run)

    def close(self) -> None:
        """Finish what was submitted and end the thread."""
        self._pool.shutdown(wait=True)

    def _run(self) -> None:
        job = self.take_waiting()
        if job is None:
            return
        with self._lock:
            lost = self._lost
        if lost is not None:
            self._end(job, _builds_on_lost(job, lost[1]))
            return
        started = time.perf_counter()
        try:
            self._store(job)
        except PublishError as error:
            self._give_up(job, error)
        except Exception as error:  # noqa: BLE001 - whatever ended the upload must reach the receipt
            version = job.manifest.version
            lost_error = PublishLostError(f"Version {version} was not published and is not visible: {error}")
            lost_error.__cause__ = error
            self._give_up(job, lost_error)
        else:
            logger.info("published version=%d upload_s=%.3f", job.manifest.version, time.perf_counter() - started)
            self._end(job, None)
            self._on_published(job)

    def _give_up(self, job: Job, error: PublishError) -> None:
        logger.error("%s", error)
        with self._lock:
            self._lost = (job, error)
            # At once, so that a publish that learns of the loss cannot fold anything into what builds on it.
            waiting, self._waiting = self._waiting, None
        self._end(job, error)
        if waiting is not None:
            self._end(waiting, _builds_on_lost(waiting, error))

    def _end(self, job: Job, error: PublishError | None) -> None:
        job.drop_files()
        self._signals.end(job.serial, error)
        settle(job, error)

    def _store(self, job: Job) -> None:
        """Payload, manifest, head.

        Raises:
            HeadConflictError: another publisher wrote this version.
            PublishStateUnknownError: the manifest is stored, head may not be.
            StoreError: nothing is visible.
        """
        version = job.manifest.version
        if job.opening is not None:
            self._store(job.opening)
        if job.channel is not None:
            channel = self._writer.encode(job.channel, layout.CHANNEL)
            self._create_or_conflict(layout.CHANNEL, channel, "created this channel")
        if job.manifest.reference is None:
            self._signals.begin(job.serial)
        delta, anchor = job.manifest.delta, job.manifest.anchor
        if delta is not None:
            _, files = self._writer.put_files(layout.delta_dir, version, job.delta_files)
            files += self._signals.collect(job.serial)
            delta = dataclasses.replace(delta, files=files, base_manifest_sha256=self._chain[-1].manifest_sha256)
        if anchor is not None and anchor.reference is None:
            directory, files = self._writer.put_files(layout.anchor_dir, version, job.anchor_files)
            weights = [file for file in files if file.key.endswith(".safetensors")]
            companions = [file for file in files if file not in weights]
            anchor = dataclasses.replace(anchor, directory=directory, files=weights, companions=companions)
        chain = [] if delta is None else self._chain
        document = dataclasses.replace(job.manifest, delta=delta, anchor=anchor, chain=chain)
        data = self._writer.encode(document, layout.manifest(version))
        sha256 = manifest.sha256_hex(data)
        self._writer.retry(self._check_lease)
        job.manifest_attempted = True
        self._create_or_conflict(layout.manifest(version), data, f"wrote version {version}")
        self._chain = document.chain_onward(sha256)
        head = Head(format=manifest.FORMAT, run_id=job.manifest.run_id, version=version, manifest_sha256=sha256)
        try:
            self._writer.retry(lambda: self._move_head(head))
        except HeadConflictError:
            raise
        except DeltaSyncError as error:
            raise PublishStateUnknownError(
                f"Version {version} is complete, but head may not name it yet: {error} The next publish repairs that."
            ) from error

    def _move_head(self, head: Head) -> None:
        self._check_lease()
        self._head = head
        before_s = time.monotonic()
        self._objects.replace(layout.HEAD, self._writer.encode(head, layout.HEAD))
        self._head_known_s = before_s

    def _check_lease(self) -> None:
        """Find out another publisher, where the store does not decide who creates an object, or after a long while.

        Head must not be further than where this publisher left it, and the newest manifest must still be its own. An older
        head is a stale reply, or a rewind that the next head ends; so is one that cannot be read.

        Where the store decides, head is all there is to look at: that a manifest can be created says that nobody else wrote
        this version, unless it was forgotten since, and then head is further.

        Raises:
            HeadConflictError: another publisher writes to this channel.
        """
        decided = self._objects.capabilities.conditional_put
        looked_s = time.monotonic()
        if decided and looked_s - self._head_known_s <= _STALL_S:
            return
        try:
            head = manifest.decode(self._objects.read(layout.HEAD), Head, layout.HEAD)
        except (CorruptDataError, ObjectMissingError):
            head = None
        ours = self._head
        if head is not None and (
            ours is None
            or head.run_id != ours.run_id
            or head.version > ours.version
            or (head != ours and head.version == ours.version)
        ):
            raise HeadConflictError(
                f"Another publisher moved head to version {head.version} ({self._objects.url}); ours is not visible. "
                "Stop one of the two."
            )
        if self._chain and not decided:
            newest = self._chain[-1]
            data = self._objects.read(layout.manifest(newest.version))
            if manifest.sha256_hex(data) != newest.manifest_sha256:
                raise HeadConflictError(
                    f"Another publisher also wrote version {newest.version} ({self._objects.url}). Stop both, resume one."
                )
        self._head_known_s = looked_s

    def _create_or_conflict(self, key: str, data: bytes, what: str) -> None:
        try:
            self._writer.create(key, data)
        except ObjectExistsError:
            raise HeadConflictError(
                f"Another publisher {what} ({self._objects.url}); ours is not visible. Stop one of the two."
            ) from None


def _builds_on_lost(job: Job, error: PublishError) -> PublishLostError:
    return PublishLostError(f"Version {job.manifest.version} builds on a lost one. {error}")


def settle(job: Job, error: PublishError | None) -> None:
    """Tell the job's receipts how it ended."""
    if error is None:
        job.uploaded.set_result(None)
    else:
        job.uploaded.set_exception(error)
