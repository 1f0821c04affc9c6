"""What a late joiner of a channel fetches, and when to shorten it: by a fold from the full weights, or by new full weights.

A late joiner takes the newest full weights (an anchor, or the reference), the newest fold from them, and the deltas since.
Folds and anchors are paid from a budget, `SHARE` of the bytes of deltas, so that they stay a small part of what is stored
at any rate of change: the next fold is written once it fits. Full weights take a fold's place where it is no longer small.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

import numpy as np

from deltasync.channel.record import Stored
from deltasync.errors import get_logger

logger = get_logger(__name__)

SHARE = 0.33
"""Bytes of folds and anchors that may be stored for each byte of delta."""

LARGE = 0.5
"""A fold of more than this part of the weights is not written; full weights are, once they fit into the budget."""

LEAST_FOLDED = 16
"""Versions that the next fold covers at least: fewer are read about as soon without it."""

SAMPLED = 1 << 20
"""Elements by which the size of a fold is estimated."""

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

    def fold_bytes(self, bits: Mapping[str, np.ndarray]) -> float:
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
    """The way of a late joiner to the newest version, and the budget to shorten it. Several threads use it.

    Attributes:
        base: The newest full weights that are stored, None if there are none.
        bytes: Of the deltas since then.
        foldable: Whether the base's weights could be read when a fold was last made of them.
    """

    def __init__(self, way: Sequence[Stored] = ()) -> None:
        self.base = way[0] if way else None
        self.bytes = sum(_bytes_of(stored) for stored in way[1:])
        self.foldable = True
        self._before_bytes = self.bytes  # what led from the base to the version that was resumed
        self._folded = way[-1].record.version if way else 0  # where the newest fold ends
        self._earned = self._spent = self._needed = self._estimated = 0.0
        self._factor = 1.0  # actual by estimated size of the last fold
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

    def begin(self, base: Stored, sample: Sample | None, later_bytes: int = 0, *, paid: bool = False) -> None:
        """Start from new full weights, after which there are deltas of `later_bytes`.

        `sample` is of these weights, `paid` whether the budget pays for them.
        """
        with self._lock:
            self.base, self.bytes, self.foldable, self._sample = base, later_bytes, True, sample
            self._before_bytes, self._folded, self._needed = 0, base.record.version, 0.0
            self._spent += base.record.payload_bytes if paid else 0

    def add(self, stored: Stored) -> None:
        """Add the next delta."""
        with self._lock:
            self.bytes += _bytes_of(stored)
            self._earned += SHARE * _bytes_of(stored)

    def is_due(self, version: int, bits: Mapping[str, np.ndarray], full_bytes: int, *, folds: bool) -> str | None:
        """Return `fold` or `anchor` if that is to be stored with a version, whose bits these are.

        Args:
            version: The version; its own delta does not count yet.
            bits: Of the whole model.
            full_bytes: Of an anchor.
            folds: Whether folds are wanted.
        """
        with self._lock:
            if self._sample is None:
                self._sample = Sample(bits)
            left = self._earned - self._spent
            if self.base is None or version - self._folded < LEAST_FOLDED or left < self._needed:
                return None
            self._estimated = self._before_bytes + self._sample.fold_bytes(bits)
            size = self._factor * self._estimated
            is_fold = folds and self.foldable and size <= LARGE * full_bytes
            self._needed = size if is_fold else float(full_bytes)
            return None if left < self._needed else "fold" if is_fold else "anchor"

    def follows(self, version: int, every: int) -> bool:
        """Whether a version comes so many versions after the newest fold, or after the full weights."""
        return self.base is not None and version - self._folded >= every

    def is_folded(self, version: int, stored: Stored | None) -> None:
        """Note a fold to a version; None if it could not be stored."""
        with self._lock:
            self._folded, self._needed = version, 0.0
            if stored is not None:
                size = _bytes_of(stored)
                self._spent += size
                self._factor = size / self._estimated if self._estimated else 1.0


def _bytes_of(stored: Stored) -> int:
    return stored.size + sum(file.bytes for file in stored.record.payload_files)
