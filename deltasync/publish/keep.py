"""KEEP: store and announce anchors, write folds, forget and prune, in a thread that neither training nor uploads wait for.

No version depends on this thread. What fails is logged, and tried again with a later version.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future

from deltasync import housekeeping, kernels
from deltasync.channel import anchors, keys
from deltasync.channel.documents import Anchor, Delta, File, Version
from deltasync.channel.reading import ChannelReader
from deltasync.channel.record import Stored
from deltasync.channel.threads import Workers
from deltasync.codec.base import Encoded
from deltasync.config import Retention
from deltasync.errors import DeltaSyncError, get_logger
from deltasync.housekeeping import Keep
from deltasync.publish.collect import Weights
from deltasync.publish.log import Log

logger = get_logger(__name__)

_LEAST_BETWEEN = 16
"""Versions from one sweep to the next, which reads all records."""

_STORED_AT_ONCE = 2
"""Weight files that are stored at once, so that the disk or the line is never idle while one begins or ends."""

_MOST_BESIDE_BYTES = 1 << 27
"""A larger weight file is stored before the next one is made."""


class Keeper:
    """Looks after one channel as `retention` says. `model_files`, by name, are stored beside the weights of an anchor.

    Attributes:
        announcing: Whether an anchor is being stored and announced.
        failed: Whether that failed for the last one.
    """

    def __init__(self, reader: ChannelReader, log: Log, retention: Retention, model_files: Mapping[str, bytes]) -> None:
        self.reader = reader
        self.retention = retention
        self.announcing = self.failed = False
        self._log = log
        self._model_files = model_files
        self._swept = 0
        self._workers = Workers(1, "deltasync-keep")

    def store(self, weights: Weights, version: int) -> Anchor:
        """Store the files of an anchor, two at a time, while the next one is made.

        Raises:
            CorruptDataError: the weights in memory are damaged.
            FencedError, StoreError, OSError: as `Log.put_file`, or the local disk failed.
        """
        log, stored = self._log, list[Future[File]]()
        folder = keys.anchor_folder(version, log.epoch, log.attempt(version))
        companions = [log.put_file(folder, name, data) for name, data in self._model_files.items()]
        workers = Workers(_STORED_AT_ONCE, "deltasync-anchor")
        with kernels.cpu.beside(_STORED_AT_ONCE):
            for name, data in weights.files:
                if len(stored) >= _STORED_AT_ONCE:
                    stored[-_STORED_AT_ONCE].result()  # so that no more are in memory
                stored.append(workers.submit(log.put_file, folder, name, data))
                if len(data) > _MOST_BESIDE_BYTES:
                    stored[-1].result()
                del data  # before the next one is made
            files = [future.result() for future in stored]
        if files[-1].key.endswith(anchors.INDEX):
            companions.append(files.pop())
        return Anchor(directory=folder, files=files, companions=companions)

    def announce(self, stored: Stored, weights: Weights, requires: list[str]) -> None:
        """Store the weights of a version and announce them as another way to it; returns at once."""
        self.announcing = True
        self._workers.submit(self._announce, stored.version, str(stored.record.fingerprint), weights, requires)

    def fold(self, base: Version, stored: Stored, delta: Delta, payload: Encoded | None) -> None:
        """Store a fold from one version to another; returns at once."""
        digest = str(stored.record.fingerprint)
        self._workers.submit(self._guarded, lambda: self._log.fold(stored.version, digest, payload, base=base, delta=delta))

    def published(self, version: int) -> None:
        """Forget and prune if that is due now that a version is visible."""
        keep_last = self.retention.keep_last
        due = max(_LEAST_BETWEEN, (keep_last or 0) // 2)
        if (keep_last is not None or self.retention.keep_anchors is not None) and version >= self._swept + due:
            self._swept = version
            self._workers.submit(self._guarded, self._sweep)

    @property
    def busy(self) -> bool:
        """Whether anything is under way."""
        return self._workers.busy

    def close(self) -> None:
        """Finish what is under way."""
        self._workers.close()

    def _announce(self, version: Version, digest: str, weights: Weights, requires: list[str]) -> None:
        self.failed = not self._guarded(
            lambda: self._log.announce(version, digest, self.store(weights, version.version), requires)
        )
        weights.close()
        if self.failed:
            self._log.give_up(version.version)
        self.announcing = False

    def _sweep(self) -> None:
        grace_s = self.retention.prune_grace_s
        keep = Keep(last=self.retention.keep_last, anchors=self.retention.keep_anchors)
        housekeeping.forget(self.reader, keep, grace_s=grace_s)
        housekeeping.prune(self.reader, grace_s=grace_s)

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
