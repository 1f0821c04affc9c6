"""Full weights as files, of the bits that a shadow had at one moment, while it advances."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, Self

import numpy as np

from deltasync import limits
from deltasync.channel import anchors
from deltasync.errors import CorruptDataError
from deltasync.kernels import native
from deltasync.publish.shadow import Shadow
from deltasync.tensors import Delta, fingerprint
from deltasync.tensors.delta import merge

_MOST_LATER = 8
"""Deltas that a snapshot keeps one by one; more are merged."""


class Snapshot:
    """The bits that a shadow had at one moment, of the ranges that it holds, while it advances: less the
    steps since.

    Each tensor is read once. The shadow's lock is held while the bits change, and while a tensor is read
    again that changed while it was being read.
    """

    def __init__(self, shadow: Shadow) -> None:
        self._fingerprints = shadow.fingerprints
        self._shadow: Shadow | None = shadow
        self._left = set(shadow.specs)
        self._later: list[Delta] = []
        with shadow.lock:
            shadow.told = [*shadow.told, self._note]

    def _note(self, delta: Delta) -> None:
        """Note a step of the shadow, which holds the lock."""
        before = self._later
        self._later = [*([merge(before)] if len(before) >= _MOST_LATER else before), delta]

    def take(self, name: str, out_N: np.ndarray) -> int:
        """Write a tensor's range of bits into `out_N`, unsigned and flat, and return its share of the
        fingerprint.

        Raises:
            CorruptDataError: memory has damaged them.
        """
        assert self._shadow is not None
        lock, bits_N, (start, _) = self._shadow.lock, self._shadow.bits[name], self._shadow.ranges[name]
        key = native.key_from(fingerprint.tensor_key(name), start)
        with lock:
            before = self._later
        # Without the lock, so that the trainer does not wait for it.
        found = native.take(key, bits_N, out_N)
        with lock:
            later = self._later
            if later is not before:  # each step makes another list
                np.copyto(out_N, self._shadow.bits[name])
            self._left.discard(name)
        for delta in later:
            steps = delta.of(name)
            out_N[steps.at_K - steps.at_K.dtype.type(start)] -= steps.data_K
        if later:
            found = native.fingerprint(key, out_N)
        if found != self._fingerprints[name]:
            raise CorruptDataError(f"The bits of {name} in memory are not those that were published.")
        if not self._left:
            self.close()
        return found

    def close(self) -> None:
        """Drop the steps since; no tensor is read any more."""
        if (shadow := self._shadow) is not None:
            with shadow.lock:
                shadow.told = [tell for tell in shadow.told if tell != self._note]
                self._left, self._later, self._shadow = set(), [], None


class Weights(NamedTuple):
    """The weight files of one version, made one at a time."""

    files: Iterator[tuple[str, bytes | memoryview]]  # name and content of each, made when it is asked for
    close: Callable[[], None]  # frees what they are made from

    @classmethod
    def of(cls, shadow: Shadow) -> Self:
        """Return the weights that a shadow with the whole model holds now; it may advance meanwhile."""
        snapshot = Snapshot(shadow)
        return cls(anchors.taken_files(shadow.specs, snapshot.take, limits.WEIGHT_FILE_BYTES), snapshot.close)
