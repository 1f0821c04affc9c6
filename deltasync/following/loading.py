"""Weights in host memory that nobody uses yet: chains are loaded, which takes no second copy and cannot be
undone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from deltasync.channel import payloads
from deltasync.channel.documents import VersionId
from deltasync.channel.reading import ChannelReader
from deltasync.channel.record import StoredRecord
from deltasync.errors import DeltaSyncError, FingerprintMismatchError
from deltasync.following.weights import LiveWeights, map_out_of_memory
from deltasync.live import HostMemory, model_fingerprint

_Item = TypeVar("_Item")


class HostWeights(LiveWeights):
    """Weights that this process has made on the host; once somebody uses them, they are staged as others
    are.
    """

    def __init__(self, reader: ChannelReader, memory: HostMemory) -> None:
        super().__init__(reader, memory)
        self._host = memory
        self._loaded: list[StoredRecord] = []  # the chain that `load` has taken

    def load(self, chain: Sequence[StoredRecord]) -> VersionId:
        """Apply a chain. It cannot be undone.

        If a version fails, everything up to the one before is loaded again. So `version` is the last good
        one, or None.

        Raises:
            StoreError, FormatError, MissingVersionError, StageError, FingerprintMismatchError: as `stage` and
                `confirm`.
        """
        try:
            self._load(chain)
        except DeltaSyncError:
            if self.version is None and self._loaded:
                self._load([*self._loaded])
            raise
        return chain[-1].version

    def _load(self, chain: Sequence[StoredRecord]) -> None:
        wanted: dict[str, int | None] = {}
        done: list[StoredRecord] = []
        try:
            with contextlib.closing(self.fetched(chain)) as fetched:
                for stored in chain:
                    with self.blaming(stored), map_out_of_memory(stored.record.version):
                        got = next(fetched)
                        self.version, self.settled = None, False
                        if stored.use_anchor:
                            self._loaded.clear()
                            self._host.load(self._progressing(payloads.weights(self.reader, stored)))
                        else:
                            delta, digests = payloads.delta(self.reader, stored, self.memory.bits, None, got)
                            self._host.apply(delta)
                            self.progressed_s = time.monotonic()
                            wanted |= digests
                    done.append(dataclasses.replace(stored, data=None))
        finally:
            found = self.memory.fingerprints
            right = all(found.get(name) == expected for name, expected in wanted.items())
            if done and right and f"{model_fingerprint(found):016x}" == done[-1].record.fingerprint:
                self.identified(done[-1])
                self._loaded += done
        if self.version != chain[-1].version:
            raise FingerprintMismatchError(
                f"The tensors of version {chain[-1].record.version} are not its model."
            )

    def _progressing(self, items: Iterable[_Item]) -> Iterator[_Item]:
        """Yield items, and note when each was finished."""
        for item in items:
            yield item
            self.progressed_s = time.monotonic()
