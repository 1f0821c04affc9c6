"""The sum of the deltas since the newest full weights, of which a compaction is made: no weights are read for
it.
"""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Self

import numpy as np

from deltasync.channel import keys
from deltasync.channel.documents import File
from deltasync.channel.record import INLINE_BYTES
from deltasync.codec.base import Encoded
from deltasync.publish.anchor import STORED_AT_ONCE
from deltasync.publish.detect import HostShadow
from deltasync.publish.encode import GROUP_CHANGED, encode
from deltasync.publish.pending import Pending
from deltasync.publish.placement import held_bytes
from deltasync.publish.ranges import Range
from deltasync.tensors import Delta, Layout, count_below
from deltasync.tensors.delta import joined, of_tensor
from deltasync.threads import Workers

CODEC = "packed"
"""Codec of compactions: it decodes without old bits, and is the smaller one where much has changed."""

GROUP_ELEMENTS = 1 << 25
"""Elements whose changes make a part of a compaction, unless a single tensor has more, or they are less than
`GROUP_CHANGED`: the record, which names the parts, grows with the changes.
"""

SAMPLED = 1 << 18
"""Elements by which the size of a compaction is estimated."""

_WINDOWS = 64


class Steps:
    """The steps from the newest full weights to the newest version, of the ranges that this rank holds, in
    host memory.

    They are the deltas since; once these take a quarter of the weights' bytes, they are added up, one step
    for each element. One thread adds; another one may read `frozen` ones meanwhile.

    Attributes:
        base: The version with the full weights.
    """

    def __init__(self, layout: Layout, ranges: Mapping[str, Range], base: int) -> None:
        self.base = base
        self._layout, self._ranges = layout, ranges
        self._held_bytes = held_bytes(layout, ranges)
        self._lock = threading.Lock()
        self._deltas: list[Delta] = []
        self._sum: HostShadow | None = None  # of earlier ones
        self._is_read = False
        # a version whose full weights are being stored, and steps since
        self._marked: tuple[int, list[Delta]] | None = None

    @classmethod
    def after(cls, before: Self | None, job: Pending, *, marks: bool) -> Self:
        """Return the steps to the version of a job: those before it with its own, or none yet, from its full
        weights on.

        `marks`: full weights of the version are being stored.
        """
        if job.full or before is None:
            return cls(job.shadow.layout, job.shadow.ranges, job.version)
        before.add(job.delta.host())
        if marks:
            before.mark(job.version)
        return before

    def add(self, delta: Delta) -> None:
        """Add the steps of the next version."""
        with self._lock:
            self._deltas.append(delta)
            if self._marked is not None:
                self._marked[1].append(delta)
            if not self._is_read and 4 * sum(each.nbytes for each in self._deltas) > self._held_bytes:
                if self._sum is None:
                    bits = {
                        n: np.zeros(b - a, self._layout.specs[n].bits_dtype)
                        for n, (a, b) in self._ranges.items()
                    }
                    self._sum = HostShadow(self._layout, self._ranges, bits)
                for each in self._deltas:
                    self._sum.add(each)
                self._deltas = []

    def mark(self, version: int) -> None:
        """Note that full weights of the newest version are being stored, so that steps may `start` from
        it.
        """
        with self._lock:
            self._marked = version, []

    def start(self, base: int) -> None:
        """Start from the full weights of a version, if that is the marked one."""
        with self._lock:
            if self._marked is not None and self._marked[0] == base:
                (self.base, self._deltas), self._sum, self._marked = self._marked, None, None

    def frozen(self) -> Self:
        """Return these steps, which later ones are not added to. Call `thaw` once they are read."""
        with self._lock:
            self._is_read, found = True, copy.copy(self)
            found._deltas = [*self._deltas]
            return found

    def thaw(self) -> None:
        """Let frozen steps change, which nobody reads any more."""
        self._is_read = False

    def between(self, name: str, first: int, last: int) -> np.ndarray:
        """Return the steps of a tensor's elements from flat index `first` on and below `last`, a new
        array.
        """
        return self._at(self._layout.span(name)[0], [(name, first, last)])

    def groups(self) -> Iterator[Delta]:
        """Yield what the steps add up to, in groups of tensors that differ."""
        group, size, changed = list[Delta](), 0, 0
        for name, (start, stop) in self._ranges.items():
            step_N = self.between(name, start, stop)
            index_K = np.flatnonzero(step_N)
            if index_K.size:
                group.append(of_tensor(self._layout, name, index_K, step_N[index_K], start=start))
                size, changed = size + step_N.size, changed + index_K.size
            if size >= GROUP_ELEMENTS and changed >= GROUP_CHANGED:
                yield joined(group)
                group, size, changed = [], 0, 0
        if group:
            yield joined(group)

    def store(
        self,
        version: int,
        fingerprints: Mapping[str, int],
        put: Callable[[str, bytes], File],
        *,
        rank: int | None,
    ) -> tuple[list[File], int, Encoded | None]:
        """Encode and prove these steps, to a version, and store them. Return the parts, and how many elements
        they change.

        `put` stores a part, by its file name. With None for the `rank` a single small payload is returned,
        for the record, instead. `fingerprints` are those of the whole tensors at the version.

        Raises:
            CorruptDataError: a payload does not decode to the steps.
            StoreError: a part cannot be stored.
        """
        puts, stored = Workers(STORED_AT_ONCE, "upload"), list[Future[File]]()
        waiting: tuple[Encoded, bytes] | None = None
        changed = 0

        def store(payload: bytes) -> None:
            if len(stored) >= STORED_AT_ONCE:
                stored[-STORED_AT_ONCE].result()  # so that no more are in memory
            stored.append(
                puts.submit(put, keys.compaction_part(self.base, rank or 0, len(stored) + 1), payload)
            )

        def unread(name: str) -> tuple[np.ndarray, int]:
            raise AssertionError(f"{CODEC} needs no bits of {name}")

        for delta in self.groups():
            if waiting is not None:
                store(waiting[1])
            waiting = encode(CODEC, delta, unread, fingerprints, version, self.base)
            changed += delta.changed
        if waiting is not None and (stored or rank is not None or len(waiting[1]) > INLINE_BYTES):
            store(waiting[1])
            waiting = None
        return [part.result() for part in stored], changed, None if waiting is None else waiting[0]

    def estimated_bytes(self) -> float:
        """Estimate the size of a compaction by the entropy of some elements' steps, zeros included.

        Other ranks' elements are assumed to change as much. If the first rank holds nothing, it is infinite.
        """
        held_count = sum(stop - start for start, stop in self._ranges.values())
        length, every = (-(-count // _WINDOWS) for count in (min(SAMPLED, held_count), held_count))
        windows, before = dict[int, list[tuple[str, int, int]]](), 0
        for name, (start, stop) in self._ranges.items():
            size = stop - start
            for window in range(before // every if every else 0, _WINDOWS):
                first, last = max(window * every - before, 0), min(window * every + length - before, size)
                if first >= size:
                    break
                if first < last:
                    windows.setdefault(self._layout.places[name][0], []).append(
                        (name, start + first, start + last)
                    )
            before += size
        if not windows:
            return math.inf if self._layout.element_count else 0.0
        found = [self._at(width, held) for width, held in windows.items()]
        _, count = np.unique(
            np.concatenate([step_N[step_N != 0].astype(np.int64) for step_N in found]), return_counts=True
        )
        count = np.append(count, sum(map(np.size, found)) - count.sum())  # the zeros, which need no sorting
        share = count[count > 0] / count.sum()
        return float(-(share * np.log2(share)).sum()) * self._layout.element_count / 8

    def _at(self, width: int, windows: Sequence[tuple[str, int, int]]) -> np.ndarray:
        """Return the steps of elements of one width, as `between` does for each of the windows, one after the
        other.
        """
        first_W, last_W = np.array(
            [[self._layout.span(name)[1] + edge for edge in at] for name, *at in windows]
        ).T
        found_N = np.zeros((last_W - first_W).sum(), f"u{width}")
        end_W = np.cumsum(last_W - first_W)
        if self._sum is not None:
            bits, ranges = self._sum.bits, self._ranges
            held = [
                bits[name][first - ranges[name][0] : last - ranges[name][0]] for name, first, last in windows
            ]
            np.concatenate(held, out=found_N)
        for at_K, step_K in (delta.steps[width] for delta in self._deltas if width in delta.steps):
            low_W, high_W = (count_below(at_K, edge_W) for edge_W in (first_W, last_W))
            count_W = high_W - low_W
            index_K = np.arange(count_W.sum()) + np.repeat(high_W - np.cumsum(count_W), count_W)
            found_N[at_K[index_K] + np.repeat(end_W - last_W, count_W)] += step_K[index_K]
        return found_N
