"""What a late joiner of a channel fetches, and when to shorten it: by a compaction from the full weights, or by new full
weights.

A late joiner takes the newest full weights (an anchor, or the reference), the newest compaction from them, and the deltas
since.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

import numpy as np

from deltasync.channel.record import StoredRecord
from deltasync.publish.budget import Budget

SAMPLED = 1 << 18
"""Elements by which the size of a compaction is estimated."""

_WINDOWS = 64


class Sample:
    """Some of a model's elements as they were, to estimate how large a delta from then to now would be."""

    def __init__(self, bits: Mapping[str, np.ndarray]) -> None:
        self._element_count = sum(held.size for held in bits.values())
        length = -(-min(SAMPLED, self._element_count) // _WINDOWS)
        at = -(-self._element_count // _WINDOWS)
        self._old: list[tuple[str, int, np.ndarray]] = []
        first = 0
        for name, held in bits.items():
            for window in range(first // at if at else 0, _WINDOWS):
                start, stop = max(window * at, first) - first, min(window * at + length, first + held.size) - first
                if start >= held.size:
                    break
                if start < stop:
                    self._old.append((name, start, held[start:stop].copy()))
            first += held.size

    def compaction_bytes(self, bits: Mapping[str, np.ndarray]) -> float:
        """Return the estimated size of a delta to these bits, by the entropy of the steps of the sample, zeros included."""
        steps = [
            (bits[name][start : start + old.size] - old).astype(np.int64) for name, start, old in self._old if name in bits
        ]
        if not steps:
            return 0.0
        _, count = np.unique(np.concatenate(steps), return_counts=True)
        share = count / count.sum()
        return float(-(share * np.log2(share)).sum()) * self._element_count / 8


class Chain:
    """The chain of a late joiner to the newest version, and the budget to shorten it. Several threads use it.

    Attributes:
        base: The newest full weights that are stored, None if there are none.
        bytes: Of the deltas since then.
        can_compact: Whether the base's weights could be read when a compaction was last made of them.
    """

    def __init__(self, chain: Sequence[StoredRecord] = ()) -> None:
        self.base = chain[0] if chain else None
        self.bytes = sum(_bytes_of(stored) for stored in chain[1:])
        self.can_compact = True
        self._before_bytes = self.bytes  # what led from the base to the version that was resumed
        self._budget = Budget(chain[-1].record.version if chain else 0)
        self._estimated = 0.0
        self._factor = 1.0  # actual by estimated size of the last compaction
        self._sample: Sample | None = None
        self._lock = threading.Lock()

    @property
    def base_version(self) -> int:
        """Number of the version with the newest full weights, 0 if there is none."""
        return 0 if self.base is None else self.base.record.version

    @property
    def by_reference(self) -> bool:
        """Whether these weights are a checkpoint elsewhere."""
        return self.base is not None and self.base.record.reference is not None

    def begin(self, base: StoredRecord, sample: Sample | None, later_bytes: int = 0, *, paid: bool = False) -> None:
        """Start from new full weights, after which there are deltas of `later_bytes`.

        `sample` is of these weights, `paid` whether the budget pays for them.
        """
        with self._lock:
            self.base, self.bytes, self.can_compact, self._sample = base, later_bytes, True, sample
            self._before_bytes = 0
            self._budget.end(base.record.version, base.record.payload_bytes if paid else 0)

    def add(self, stored: StoredRecord) -> None:
        """Add the next delta."""
        with self._lock:
            self.bytes += _bytes_of(stored)
            self._budget.earn(_bytes_of(stored))

    def is_due(self, version: int, bits: Mapping[str, np.ndarray], full_bytes: int, *, compactions: bool) -> str | None:
        """Return `compaction` or `anchor` if that is to be stored with a version, whose bits these are.

        Args:
            version: The version; its own delta does not count yet.
            bits: Of the whole model.
            full_bytes: Of an anchor.
            compactions: Whether compactions are wanted.
        """
        with self._lock:
            if self._sample is None:
                self._sample = Sample(bits)
            sample = self._sample

            def compaction_bytes() -> float:
                self._estimated = self._before_bytes + sample.compaction_bytes(bits)
                return self._factor * self._estimated

            if self.base is None:
                return None
            return self._budget.choose(version, full_bytes, compaction_bytes, compactions=compactions and self.can_compact)

    def follows(self, version: int, every: int) -> bool:
        """Whether a version comes so many versions after the newest compaction, or after the full weights."""
        return self.base is not None and version - self._budget.compacted >= every

    def is_compacted(self, version: int, stored: StoredRecord | None) -> None:
        """Note a compaction to a version; None if it could not be stored."""
        with self._lock:
            size = 0 if stored is None else _bytes_of(stored)
            self._budget.end(version, size)
            if size and self._estimated:
                self._factor = size / self._estimated


def _bytes_of(stored: StoredRecord) -> int:
    return stored.size + sum(file.bytes for file in stored.record.payload_files)
