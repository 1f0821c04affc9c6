"""KEEP: store and announce anchors, store compactions, forget and prune, in a thread that neither training nor uploads wait
for.

No version depends on this thread. What fails is logged, and tried again with a later version.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future

from deltasync import kernels, maintenance
from deltasync.channel import anchors, keys, requests
from deltasync.channel.documents import Anchor, Delta, File
from deltasync.channel.reading import ChannelReader
from deltasync.channel.record import INLINE_BYTES, StoredRecord
from deltasync.channel.threads import Workers
from deltasync.codec.base import Encoded
from deltasync.config import Retention
from deltasync.errors import ChainError, DeltaSyncError, FormatError, get_logger
from deltasync.maintenance import Keep
from deltasync.publish import compaction
from deltasync.publish.chain import Chain, Sample
from deltasync.publish.collect import Weights
from deltasync.publish.log import Log
from deltasync.publish.shadow import Snapshot

logger = get_logger(__name__)

_LEAST_BETWEEN = 16
"""Versions from one sweep to the next, which reads all records."""

_LOOK_S = 15.0
"""From one look for a request to the next, at least."""

_STORED_AT_ONCE = 2
"""Weight files or parts of a compaction that are stored at once, so that the disk or link never idles between two."""

_MOST_BESIDE_BYTES = 1 << 27
"""A larger weight file is stored before the next one is made."""


class Keeper:
    """Looks after one channel as `retention` says. `model_files`, by name, are stored beside the weights of an anchor.

    Attributes:
        chain: What a late joiner fetches.
        storing: Whether an anchor or a compaction is being stored.
        failed: Whether the last anchor could not be stored, or the one that a compaction needs cannot be read.
        asked: The newest version when somebody asked for an anchor, 0 if nobody did.
    """

    def __init__(
        self, reader: ChannelReader, log: Log, retention: Retention, model_files: Mapping[str, bytes], chain: Chain
    ) -> None:
        self.reader = reader
        self.retention = retention
        self.chain = chain
        self.storing = self.failed = False
        self.asked = 0
        self._looked_s = time.monotonic()
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
        model_files = [log.put_file(folder, name, data) for name, data in self._model_files.items()]
        workers = Workers(_STORED_AT_ONCE, "deltasync-anchor")
        with kernels.cpu.leave_cores(_STORED_AT_ONCE):
            for name, data in weights.files:
                if len(stored) >= _STORED_AT_ONCE:
                    stored[-_STORED_AT_ONCE].result()  # so that no more are in memory
                stored.append(workers.submit(log.put_file, folder, name, data))
                if len(data) > _MOST_BESIDE_BYTES:
                    stored[-1].result()
                del data  # before the next one is made
            files = [future.result() for future in stored]
        if files[-1].key.endswith(anchors.INDEX):
            model_files.append(files.pop())
        return Anchor(directory=folder, files=files, model_files=model_files)

    def announce(
        self, stored: StoredRecord, weights: Weights, requires: list[str], sample: Sample | None, *, paid: bool
    ) -> None:
        """Store the weights of a version and announce them as another way to it; returns at once.

        `sample` and `paid` are as in `Chain.begin`.
        """
        self.storing = True
        self._workers.submit(self._announce, stored, weights, requires, sample, self.chain.bytes, paid)

    def compaction(self, stored: StoredRecord, snapshot: Snapshot) -> None:
        """Store a compaction from the chain's base to a version, whose bits a snapshot has; returns at once."""
        self.storing = True
        self._workers.submit(self._compaction, stored, snapshot)

    def published(self, version: int) -> None:
        """Look after the channel now that a version is visible: forget and prune if that is due, and see what is asked."""
        if time.monotonic() - self._looked_s >= _LOOK_S and not self._workers.busy:
            self._looked_s = time.monotonic()
            self._workers.submit(self._guarded, self._refresh)
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

    def _announce(
        self,
        stored: StoredRecord,
        weights: Weights,
        requires: list[str],
        sample: Sample | None,
        before_bytes: int,
        paid: bool,
    ) -> None:
        version, digest = stored.version, str(stored.record.fingerprint)

        def announce() -> None:
            announced = self._log.announce(version, digest, self.store(weights, version.version), requires)
            self.chain.begin(announced, sample, self.chain.bytes - before_bytes, paid=paid)

        self.failed = not self._guarded(announce)
        weights.close()
        if self.failed:
            self._log.give_up(version.version)
        self.storing = False

    def _compaction(self, stored: StoredRecord, snapshot: Snapshot) -> None:
        chain, base = self.chain, self.chain.base
        assert base is not None
        compacted: StoredRecord | None = None

        def store() -> None:
            nonlocal compacted
            try:
                compacted = self._store_compaction(base, stored, snapshot)
            except (FormatError, ChainError) as error:
                chain.can_compact = False
                self.failed = not chain.by_reference  # the next version gets an anchor
                logger.warning("The full weights of version %d cannot be read: %s", base.record.version, error)

        self._guarded(store)
        snapshot.close()
        chain.is_compacted(stored.record.version, compacted)
        self.storing = False

    def _store_compaction(self, base: StoredRecord, stored: StoredRecord, snapshot: Snapshot) -> StoredRecord:
        """Store the parts of a compaction, two at a time, while the next one is encoded; then the compaction."""
        log, number = self._log, stored.record.version
        folder = keys.parts_folder(number, log.epoch, log.attempt(number))
        puts, parts = Workers(_STORED_AT_ONCE, "deltasync-compaction"), list[Future[File]]()
        inline: Encoded | None = None
        total = 0
        with kernels.cpu.leave_cores(_STORED_AT_ONCE):
            for encoded, changed in compaction.payloads_of(self.reader, base, number, snapshot):
                if inline is not None:
                    parts.append(self._put_part(puts, folder, base, parts, inline))
                inline, total = encoded, total + changed
        if inline is not None and (parts or len(inline.to_bytes()) > INLINE_BYTES):
            parts.append(self._put_part(puts, folder, base, parts, inline))
            inline = None
        files = [part.result() for part in parts]
        delta = Delta(codec=compaction.CODEC, changed=total, parts=files)
        return log.compaction(stored.version, str(stored.record.fingerprint), inline, base=base.version, delta=delta)

    def _put_part(
        self, puts: Workers, folder: str, base: StoredRecord, parts: list[Future[File]], payload: Encoded
    ) -> Future[File]:
        if len(parts) >= _STORED_AT_ONCE:
            parts[-_STORED_AT_ONCE].result()  # so that no more are in memory
        name = keys.compaction_part(base.record.version, len(parts) + 1)
        return puts.submit(self._log.put_file, folder, name, payload.to_bytes())

    def _refresh(self) -> None:
        self.asked = max(self.asked, requests.asked(self.reader.store))

    def _sweep(self) -> None:
        grace_s = self.retention.prune_grace_s
        keep = Keep(last=self.retention.keep_last, anchors=self.retention.keep_anchors)
        maintenance.forget(self.reader, keep, grace_s=grace_s)
        maintenance.prune(self.reader, grace_s=grace_s)

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
