"""After PUBLISH: announce anchors, write folds, forget and prune, in a thread that neither training nor uploads wait for.

Nothing here is needed for a version to be right. What fails is logged, and tried again with a later version.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from deltasync import housekeeping
from deltasync.channel import keys
from deltasync.channel.documents import Anchor, Delta, Version
from deltasync.channel.reading import ChannelReader
from deltasync.channel.record import Stored
from deltasync.codec.base import Encoded
from deltasync.config import Retention
from deltasync.errors import DeltaSyncError, get_logger
from deltasync.housekeeping import Keep
from deltasync.publish.collect import Weights
from deltasync.publish.log import Log

logger = get_logger(__name__)

_LEAST_BETWEEN = 16  # versions between two times of forgetting: each reads the records that there are


class Keeper:
    """Looks after one channel as `retention` says; `model_files`, by name, lie beside the weights of an anchor.

    Attributes:
        announcing: Whether an anchor is under way.
        failed: Whether the last one could not be announced.
    """

    def __init__(self, reader: ChannelReader, log: Log, retention: Retention, model_files: Mapping[str, bytes]) -> None:
        self.reader = reader
        self.retention = retention
        self.announcing = self.failed = False
        self._log = log
        self._model_files = model_files
        self._swept = 0
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="deltasync-keep")

    def store(self, weights: Weights, version: int) -> Anchor:
        """Store the files of an anchor; raises as `Weights.put` and `Log.put_file`."""
        folder = keys.anchor_folder(version, self._log.epoch, self._log.attempt(version))
        return weights.put(self._log.put_file, folder, self._model_files)

    def announce(self, stored: Stored, weights: Weights, requires: list[str]) -> None:
        """Store the weights of a version, and announce them as another way to it."""
        self.announcing = True
        self._pool.submit(self._announce, stored.version, str(stored.record.fingerprint), weights, requires)

    def fold(self, base: Version, stored: Stored, delta: Delta, payload: Encoded | None) -> None:
        """Store a fold from a version to another one."""
        digest = str(stored.record.fingerprint)
        self._pool.submit(self._guarded, lambda: self._log.fold(stored.version, digest, payload, base=base, delta=delta))

    def published(self, version: int) -> None:
        """Forget and prune if that is due now that a version is visible."""
        keep_last = self.retention.keep_last
        due = max(_LEAST_BETWEEN, (keep_last or 0) // 2)
        if (keep_last is not None or self.retention.keep_anchors is not None) and version >= self._swept + due:
            self._swept = version
            self._pool.submit(self._guarded, self._sweep)

    def close(self) -> None:
        """Finish what is under way, and end the thread."""
        self._pool.shutdown(wait=True)

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
