"""Changes of a whole model: ascending positions and what happens there, for each vector of a `Layout`.

Deltas are merged exactly, without the weights: steps add up, and what cancels out is dropped.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from deltasync.tensors.layout import Layout, Vector, count_below


class Sparse(NamedTuple):
    """Elements of one vector.

    Attributes:
        at_K: Positions, strictly ascending; the vector's `index_dtype`.
        data_K: Unsigned integers of the vector's width: steps, new minus old bit pattern modulo 2**(8 width).
    """

    at_K: np.ndarray
    data_K: np.ndarray

    @classmethod
    def of(cls, vector: Vector, count: int = 0) -> Sparse:
        """Return new arrays, of any contents, for so many elements of a vector."""
        return cls(np.empty(count, vector.index_dtype), np.empty(count, vector.bits_dtype))

    @property
    def changed(self) -> int:
        """K."""
        return self.at_K.size

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        return self.at_K.nbytes + self.data_K.nbytes

    def between(self, first: int, last: int) -> Sparse:
        """Return the elements from position `first` on and below `last`; views."""
        low, high = count_below(self.at_K, (first, last))
        return Sparse(self.at_K[low:high], self.data_K[low:high])


@dataclasses.dataclass(eq=False)
class Delta:
    """Changes of a model. `gpu.delta.DeviceDelta` has them on a device.

    Attributes:
        layout: The model.
        steps: Steps by width. Widths without any are absent.
    """

    layout: Layout
    steps: Mapping[int, Sparse]

    @property
    def changed(self) -> int:
        """Number of elements."""
        return sum(steps.changed for steps in self.steps.values())

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        return sum(steps.nbytes for steps in self.steps.values())

    def counts(self) -> dict[str, int]:
        """Return how many elements of each changed tensor it changes, in the order of the layout."""
        return self.layout.named(self._count_T())

    @functools.cached_property
    def _bound_T(self) -> dict[int, np.ndarray]:
        """By width, how many of its elements lie before each tensor, and how many there are; int64[T + 1]."""
        return {w: count_below(at_K, self.layout.vectors[w].first_T) for w, (at_K, _) in self.steps.items()}

    def _count_T(self) -> dict[int, np.ndarray]:
        return {width: np.diff(bound_T) for width, bound_T in self._bound_T.items()}

    def host(self) -> Delta:
        """Return it with its arrays on the host, where they are."""
        return self

    def of(self, name: str) -> Sparse:
        """Return the steps of a tensor, by flat indices."""
        width, number = self.layout.places[name]
        vector = self.layout.vectors[width]
        if width not in self.steps:
            return Sparse.of(vector)
        low, high = self._bound_T[width][number : number + 2]
        at_K, step_K = self.steps[width]
        return Sparse(at_K[low:high] - vector.first_T[number].astype(at_K.dtype), step_K[low:high])

    def apply(self, name: str, bits_N: np.ndarray) -> None:
        """Apply its changes to a whole tensor's unsigned bit patterns, in place."""
        at_K, step_K = self.of(name)
        bits_N[at_K] += step_K

    def split(self, most: int) -> Iterator[Piece]:
        """Yield pieces of about `most` elements, which end where tensors end; nothing if it is empty."""
        return pieces(self._count_T(), most)

    def part(self, piece: Piece) -> Delta:
        """Return a piece of it; views."""
        vectors, steps = self.layout.vectors, dict[int, Sparse]()
        for width, numbers in piece.items():
            first, last = vectors[width].first_T[[*numbers]].tolist()
            steps[width] = self.steps[width].between(first, last)
        return Delta(self.layout, steps)


Piece = Mapping[int, tuple[int, int]]
"""The tensors of each width that a part of a delta has, from number to number."""


def pieces(count: Mapping[int, np.ndarray], most: int) -> Iterator[Piece]:
    """Yield pieces of about `most` changes, which end where tensors end. `count` has those of each tensor by
    width.
    """
    piece, taken = dict[int, tuple[int, int]](), 0
    for width, count_T in count.items():
        end_T, low, begin = np.cumsum(count_T), 0, 0
        while low < end_T[-1]:
            end = int(np.searchsorted(end_T, min(low + most - taken, end_T[-1]) - 1, side="right")) + 1
            piece[width] = begin, end
            taken, low, begin = taken + int(end_T[end - 1]) - low, int(end_T[end - 1]), end
            if taken >= most:
                yield piece
                piece, taken = {}, 0
    if piece:
        yield piece


class Changed(NamedTuple):
    """The changes of one version, or of several merged ones.

    Attributes:
        delta: The changes.
        fingerprints: The new fingerprints of changed tensors.
    """

    delta: Delta
    fingerprints: Mapping[str, int]


def of_tensor(layout: Layout, name: str, index_K: np.ndarray, step_K: np.ndarray, start: int = 0) -> Delta:
    """Return the steps of one tensor as a delta. `index_K` are ascending flat indices, counted from element
    `start`.
    """
    width, first, _ = layout.span(name)
    index = layout.vectors[width].index_dtype
    at_K = index_K.astype(index) + index.type(first + start)
    return Delta(layout, {width: Sparse(at_K, step_K)} if at_K.size else {})


def merge(deltas: Sequence[Delta]) -> Delta:
    """Merge consecutive deltas of one model, oldest first, at least one. Their arrays are not mutated.

    One stays where it is; several are merged on the host.
    """
    layout = deltas[0].layout
    if len(deltas) == 1:
        return deltas[0]
    deltas = [delta.host() for delta in deltas]
    found = {
        width: _sum([delta.steps[width] for delta in deltas if width in delta.steps])
        for width in layout.vectors
    }
    return Delta(
        layout, {width: steps for width, steps in found.items() if steps is not None and steps.at_K.size}
    )


def joined(deltas: Sequence[Delta], layout: Layout | None = None) -> Delta:
    """Join deltas that change different elements, such as the parts of one version, on the host.

    One alone stays where it is. Where there may be none, `layout` is needed.

    Raises:
        ValueError: two of them change the same element.
    """
    if len(deltas) == 1:
        return deltas[0]
    deltas, layout = [delta.host() for delta in deltas], layout or deltas[0].layout
    found: dict[int, Sparse] = {}
    for width in layout.vectors:
        parts = [delta.steps[width] for delta in deltas if width in delta.steps]
        parts.sort(key=lambda part: int(part.at_K[0]))
        if not parts:
            continue
        at_K, data_K = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        if any(int(one.at_K[-1]) >= int(other.at_K[0]) for one, other in itertools.pairwise(parts)):
            order = np.argsort(at_K, kind="stable")
            at_K, data_K = at_K[order], data_K[order]
            if (at_K[1:] == at_K[:-1]).any():
                raise ValueError("an element occurs twice")
        found[width] = Sparse(at_K, data_K)
    return Delta(layout, found)


def _sum(steps: Sequence[Sparse]) -> Sparse | None:
    """Add steps of the same position, and drop those that add up to zero. Return None for no steps."""
    if len(steps) < 2:
        return steps[0] if steps else None
    at_K = np.concatenate([each.at_K for each in steps])
    if not at_K.size:
        return steps[0]
    order = np.argsort(at_K, kind="stable")  # merges the ascending runs
    at_K = at_K[order]
    first = np.append(0, np.flatnonzero(at_K[1:] != at_K[:-1]) + 1)
    step_K = np.concatenate([each.data_K for each in steps])[order]
    step_K = np.add.reduceat(step_K, first, dtype=step_K.dtype)
    kept_K = step_K != 0
    return Sparse(at_K[first[kept_K]], step_K[kept_K])
