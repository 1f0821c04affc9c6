"""After PUBLISH: write folds, forget and prune, in a thread of its own that neither training nor uploads wait for.

Nothing here is needed for a version to be right. What fails is logged, and tried again with a later version.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from deltasync import housekeeping
from deltasync.config import Retention
from deltasync.errors import DeltaSyncError
from deltasync.reader import ChannelReader
from deltasync.retention import Keep
from deltasync.signing import Signer
from deltasync.upload import EncodedFold

logger = logging.getLogger(__name__)

_LEAST_BETWEEN = 16  # versions between two times of forgetting: each reads the manifests that there are


class Keeper:
    """Looks after one channel as `Retention` says."""

    def __init__(self, reader: ChannelReader, retention: Retention, signer: Signer | None) -> None:
        self._reader = reader
        self._signer = signer
        self._retention = retention
        self._swept = 0
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="deltasync-keep")

    def published(self, version: int, fold: EncodedFold | None) -> None:
        """Do what is due now that a version is visible, in the background."""
        if fold is not None:
            self._pool.submit(self._guarded, lambda: self._fold(version, fold))
        keep_last = self._retention.keep_last
        due = max(_LEAST_BETWEEN, (keep_last or 0) // 2)
        if (keep_last is not None or self._retention.keep_anchors is not None) and version >= self._swept + due:
            self._swept = version
            self._pool.submit(self._guarded, self._sweep)

    def close(self) -> None:
        """Finish what is under way, and end the thread."""
        self._pool.shutdown(wait=True)

    def _fold(self, version: int, fold: EncodedFold) -> None:
        housekeeping.store_fold(
            self._reader,
            fold.base_version,
            version,
            codec_name=fold.codec,
            changed=fold.changed,
            payload=fold.payload,
            signer=self._signer,
        )

    def _sweep(self) -> None:
        housekeeping.forget(self._reader, Keep(last=self._retention.keep_last, anchors=self._retention.keep_anchors))
        housekeeping.prune(self._reader, grace_s=self._retention.prune_grace_s)

    @staticmethod
    def _guarded(action: Callable[[], None]) -> None:
        try:
            action()
        except DeltaSyncError as error:
            logger.warning("Looking after the channel failed, and will be tried again: %s", error)
        except Exception:  # the thread goes on; training is not to end for this
            logger.exception("Looking after the channel failed unexpectedly.")
