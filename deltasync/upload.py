"""PUBLISH: one background thread that makes versions visible, in order: payload, then manifest, then head.

Crash points of `Uploader._store`, for one version v:

    before or between payload files   nothing visible; files without a manifest are garbage for `prune`
    after the manifest                v is defined for good, but readers still see v-1; a resumed publisher rolls forward
    after head                        v is visible as a whole
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from deltasync import layout, manifest
from deltasync.config import PublisherSettings
from deltasync.errors import (
    CorruptDataError,
    DeltaSyncError,
    HeadConflictError,
    ObjectExistsError,
    ObjectMissingError,
    PublishError,
    PublishLostError,
    PublishStateUnknownError,
    TransientStoreError,
)
from deltasync.manifest import Channel, FileRef, Head, Link, Manifest
from deltasync.stores.base import Store
from deltasync.types import Patch

logger = logging.getLogger(__name__)

_LONGEST_DELAY_S = 30.0
_LOOKS = 3
_STALL_S = 5.0  # since head was known to be our own; after that, another publisher may have gone on, and forgotten versions

_Result = TypeVar("_Result")


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
        base: The tip it builds on.
        patches: Steps against the base, kept so that a later publish can be folded in while the job waits.
        channel: Stored first if it is not there yet; None if it is known to be.
        manifest: Complete but for the file lists of `delta` and `anchor`.
        delta_files, anchor_files: (file name, bytes).
        fold: To be stored once head names the version; nothing waits for it.
        opening: A version to store first: the reference that this one builds on.
        uploaded: Resolved when head names the version, or with what went wrong.
        manifest_attempted: Whether the manifest may be in the store.
    """

    base: Tip
    patches: dict[str, Patch]
    channel: Channel | None
    manifest: Manifest
    delta_files: Sequence[tuple[str, bytes]]
    anchor_files: Sequence[tuple[str, bytes]]
    uploaded: Future[None]
    fold: EncodedFold | None = None
    opening: Job | None = None
    manifest_attempted: bool = False

    @property
    def attempted_version(self) -> int:
        """The newest version whose manifest may be stored, should the upload have failed."""
        if self.manifest_attempted:
            return self.manifest.version
        return self.manifest.version - 1 if self.opening is None else self.opening.attempted_version


class Uploader:
    """Uploads jobs one after the other. At most one job uploads and one waits."""

    def __init__(
        self,
        store: Store,
        settings: PublisherSettings,
        head: Head | None,
        chain: Sequence[Link],
        on_published: Callable[[Job], None],
    ) -> None:
        self._on_published = on_published
        # What the next delta builds on: the last link is the newest manifest that is stored.
        self._chain = list(chain)
        self._head = head
        self._head_known_s = -math.inf
        self._objects = store
        self._settings = settings
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
            job.uploaded.set_exception(_builds_on_lost(job, lost[1]))
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
            job.uploaded.set_result(None)
            self._on_published(job)

    def _give_up(self, job: Job, error: PublishError) -> None:
        logger.error("%s", error)
        with self._lock:
            self._lost = (job, error)
            # At once, so that a publish that learns of the loss cannot fold anything into what builds on it.
            waiting, self._waiting = self._waiting, None
        job.uploaded.set_exception(error)
        if waiting is not None:
            waiting.uploaded.set_exception(_builds_on_lost(waiting, error))

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
            channel = manifest.encode(job.channel)
            self._create_or_conflict(layout.CHANNEL, channel, "created this channel")
        delta, anchor = job.manifest.delta, job.manifest.anchor
        if delta is not None:
            _, files = self._put_files(layout.delta_dir, version, job.delta_files)
            delta = dataclasses.replace(delta, files=files, base_manifest_sha256=self._chain[-1].manifest_sha256)
        if anchor is not None and anchor.reference is None:
            directory, files = self._put_files(layout.anchor_dir, version, job.anchor_files)
            weights = [file for file in files if file.key.endswith(".safetensors")]
            anchor = dataclasses.replace(anchor, directory=directory, files=weights)
        chain = [] if delta is None else self._chain
        document = dataclasses.replace(job.manifest, delta=delta, anchor=anchor, chain=chain)
        data = manifest.encode(document)
        sha256 = manifest.sha256_hex(data)
        self._retry(self._check_lease)
        job.manifest_attempted = True
        self._create_or_conflict(layout.manifest(version), data, f"wrote version {version}")
        self._chain = document.chain_onward(sha256)
        head = Head(format=manifest.FORMAT, run_id=job.manifest.run_id, version=version, manifest_sha256=sha256)
        try:
            self._retry(lambda: self._move_head(head))
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
        self._objects.replace(layout.HEAD, manifest.encode(head))
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
            self._retry(lambda: self._create(key, data))
        except ObjectExistsError:
            raise HeadConflictError(
                f"Another publisher {what} ({self._objects.url}); ours is not visible. Stop one of the two."
            ) from None

    def _put_files(
        self, folder: Callable[[int, int], str], version: int, files: Sequence[tuple[str, bytes]]
    ) -> tuple[str, list[FileRef]]:
        """Create the files of one version in a folder that no other attempt has used.

        A dead or racing publisher may have left other files under the same names; objects are never overwritten, so the
        next attempt takes the next folder, and the manifest decides which one counts.
        """
        for attempt in itertools.count():
            directory = folder(version, attempt)
            refs = []
            try:
                for name, data in files:
                    key = f"{directory}/{name}"
                    self._retry(lambda key=key, data=data: self._create(key, data))  # type: ignore[misc]
                    refs.append(FileRef(key=key, bytes=len(data), sha256=manifest.sha256_hex(data)))
            except ObjectExistsError:
                continue
            return directory, refs
        raise AssertionError("unreachable")

    def _create(self, key: str, data: bytes) -> None:
        """Create-only put that recognises its own earlier success, whose reply may have been lost."""
        try:
            self._objects.create(key, data)
        except ObjectExistsError:
            # Asked more than once before it is taken for another publisher's: an answer may be damaged on the way.
            for _ in range(_LOOKS):
                try:
                    if self._objects.read(key) == data:
                        return
                except ObjectMissingError as error:
                    raise TransientStoreError(f"{key} is there, and is not: {error}") from error
            raise

    def _retry(self, action: Callable[[], _Result]) -> _Result:
        """Run `action`, again after transient store errors."""
        delay_s = self._settings.retry_delay_s
        for left in range(self._settings.retries, -1, -1):
            try:
                return action()
            except TransientStoreError as error:
                if left == 0:
                    raise
                logger.warning("%s Trying again in %.2f s (%d left).", error, delay_s, left)
                time.sleep(delay_s)
                delay_s = min(2 * delay_s, _LONGEST_DELAY_S)
        raise AssertionError("unreachable")


def _builds_on_lost(job: Job, error: PublishError) -> PublishLostError:
    return PublishLostError(f"Version {job.manifest.version} builds on a lost one. {error}")
