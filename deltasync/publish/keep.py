"""After PUBLISH: announce anchors, write folds, forget and prune, in a thread that neither training nor uploads wait for.

Nothing here is needed for a version to be right. What fails is logged, and tried again with a later version.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from deltasync import housekeeping
from deltasync.channel import keys
from deltasync.channel.documents import Delta, Version
from deltasync.channel.reading import ChannelReader
from deltasync.channel.record import Stored
from deltasync.codec.base import Encoded
from deltasync.config import PublisherSettings, Retention
from deltasync.errors import DeltaSyncError
from deltasync.housekeeping import Keep
from deltasync.publish.collect import Weights, requires_of
from deltasync.publish.log import Log

logger = logging.getLogger(__name__)

_LEAST_BETWEEN = 16  # versions between two times of forgetting: each reads the records that there are


class Keeper:
    """Looks after one channel as `Retention` says.

    Attributes:
        reader: The channel's.
        announcing: Whether an anchor is under way.
        failed: Whether the last one could not be announced.
    """

    def __init__(self, reader: ChannelReader, log: Log, retention: Retention) -> None:
        self.reader = reader
        self.announcing = self.failed = False
        self._log = log
        self._retention = retention
        self._swept = 0
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="deltasync-keep")

    def announce(
        self, stored: Stored, weights: Weights, model_files: Mapping[str, bytes], settings: PublisherSettings
    ) -> None:
        """Store the weights of a version, and announce them as another way to it."""
        self.announcing = True
        self._pool.submit(self._announce, stored, weights, model_files, settings)

    def fold(self, base: Version, stored: Stored, delta: Delta, payload: Encoded | None) -> None:
        """Store a fold from a version to another one."""
        assert stored.record.fingerprint is not None
        digest = stored.record.fingerprint
        self._pool.submit(self._guarded, lambda: self._log.fold(base, stored.version, digest, delta, payload))

    def published(self, version: int) -> None:
        """Forget and prune if that is due now that a version is visible."""
        keep_last = self._retention.keep_last
        due = max(_LEAST_BETWEEN, (keep_last or 0) // 2)
        if (keep_last is not None or self._retention.keep_anchors is not None) and version >= self._swept + due:
            self._swept = version
            self._pool.submit(self._guarded, self._sweep)

    def close(self) -> None:
        """Finish what is under way, and end the thread."""
        self._pool.shutdown(wait=True)

    def _announce(
        self, stored: Stored, weights: Weights, model_files: Mapping[str, bytes], settings: PublisherSettings
    ) -> None:
        log, version, digest = self._log, stored.version, stored.record.fingerprint
        assert digest is not None

        def store() -> None:
            folder = keys.anchor_folder(version.version, log.epoch, log.attempt(version.version))
            anchor = weights.put(log.put_file, folder, model_files)
            log.announce(version, digest, anchor, requires_of(settings))

        self.failed = not self._guarded(store)
        weights.close()
        if self.failed:
            log.give_up(version.version)
        self.announcing = False

    def _sweep(self) -> None:
        keep, grace_s = (
            Keep(last=self._retention.keep_last, anchors=self._retention.keep_anchors),
            self._retention.prune_grace_s,
        )
        housekeeping.forget(self.reader, keep, grace_s=grace_s)
        housekeeping.prune(self.reader, grace_s=grace_s)

    @staticmethod
    def _guarded(action: Callable[[], object]) -> bool:
        try:
            action()
        except DeltaSyncError as error:
            logger.warning("Looking after the channel failed, and will be tried again: %s", error)
        except Exception:  # the thread goes on; training is not to end for this
            logger.exception("Looking after the channel failed unexpectedly.")
        else:
            return True
        return False
