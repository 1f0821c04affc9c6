"""Changes of a whole model: ascending positions and what happens there, for each vector of a `Layout`.

Deltas are merged and undone exactly, without the weights: of two new values the later one wins, steps add up, and what
cancels out is dropped.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from deltasync.tensors.layout import Layout, count_below


class Sparse(NamedTuple):
    """Elements of one vector.

    Attributes:
        at_K: Positions, strictly ascending; the vector's `index_dtype`.
        data_K: Unsigned integers of the vector's width: steps, new minus old bit pattern modulo 2**(8 width);
            or new bit patterns.
    """

    at_K: np.ndarray
    data_K: np.ndarray

    def between(self, first: int, last: int) -> Sparse:
        """Return the elements from position `first` on and below `last`; views."""
        low, high = count_below(self.at_K, (first, last))
        return Sparse(self.at_K[low:high], self.data_K[low:high])


@dataclasses.dataclass(frozen=True, eq=False)
class Delta:
    """Changes of a model.

    Attributes:
        layout: The model.
        steps: Steps by width. Widths without any are absent.
        known: New bit patterns by width, of elements without steps.
    """

    layout: Layout
    steps: Mapping[int, Sparse]
    known: Mapping[int, Sparse] = dataclasses.field(default_factory=dict)

    @property
    def changed(self) -> int:
        """Number of elements."""
        return sum(sparse.at_K.size for sparse in (*self.steps.values(), *self.known.values()))

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        return sum(array.nbytes for sparse in (*self.steps.values(), *self.known.values()) for array in sparse)

    def counts(self) -> dict[str, int]:
        """Return how many elements of each changed tensor it changes, in the order of the layout."""
        found: dict[str, int] = {}
        for width, vector in self.layout.vectors.items():
            held = [of[width].at_K for of in (self.steps, self.known) if width in of]
            if held:
                count_T = sum(map(vector.count, held), np.zeros(len(vector.specs), np.int64))
                changed = np.flatnonzero(count_T)
                found |= dict(zip((vector.names[t] for t in changed), count_T[changed].tolist(), strict=True))
        return found

    def undone(self) -> Delta:
        """Return the delta that undoes this one, which has only steps."""
        assert not self.known
        return Delta(self.layout, {width: Sparse(at_K, np.negative(step_K)) for width, (at_K, step_K) in self.steps.items()})

    def of(self, name: str) -> tuple[Sparse, Sparse]:
        """Return the steps and the new bits of a tensor, by flat indices."""
        width, first, last = self.layout.span(name)
        found = []
        for of in (self.steps, self.known):
            at_K, data_K = of[width].between(first, last) if width in of else _nothing(self.layout, width)
            found.append(Sparse(at_K - at_K.dtype.type(first), data_K))
        return found[0], found[1]

    def apply(self, name: str, bits_N: np.ndarray) -> None:
        """Apply its changes to a whole tensor's unsigned bit patterns, in place."""
        steps, known = self.of(name)
        bits_N[steps.at_K] += steps.data_K
        bits_N[known.at_K] = known.data_K

    def split(self, most: int) -> Iterator[Delta]:
        """Yield it in pieces of about `most` elements, which end where tensors end; nothing if it is empty."""
        assert not self.known
        piece, count = dict[int, Sparse](), 0
        for width, (at_K, data_K) in self.steps.items():
            edge_T, low = self.layout.vectors[width].first_T, 0
            while low < at_K.size:
                end = edge_T[np.searchsorted(edge_T, at_K[min(low + most - count, at_K.size) - 1], side="right")]
                high = int(count_below(at_K, end))
                piece[width] = Sparse(at_K[low:high], data_K[low:high])
                count, low = count + high - low, high
                if count >= most:
                    yield Delta(self.layout, piece)
                    piece, count = {}, 0
        if piece:
            yield Delta(self.layout, piece)


class Changed(NamedTuple):
    """The changes of one version, or of several merged ones.

    Attributes:
        delta: The changes.
        fingerprints: The new fingerprints of changed tensors; None where only the model's is known.
    """

    delta: Delta
    fingerprints: Mapping[str, int | None]


def of_tensor(
    layout: Layout, name: str, index_K: np.ndarray | None, data_K: np.ndarray, absolute: bool = False, start: int = 0
) -> Delta:
    """Return changes of one tensor as a delta.

    Args:
        layout: The model.
        name: The tensor.
        index_K: Ascending flat indices, counted from element `start`; None for all elements.
        data_K: Steps, or new bit patterns.
        absolute: Whether they are new bit patterns.
        start: Where indices begin.
    """
    width, first, last = layout.span(name)
    index = layout.vectors[width].index_dtype
    at_K = np.arange(first, last, dtype=index) if index_K is None else index_K.astype(index) + index.type(first + start)
    found = {width: Sparse(at_K, data_K)} if at_K.size else {}
    return Delta(layout, {}, found) if absolute else Delta(layout, found)


def merge(deltas: Sequence[Delta]) -> Delta:
    """Merge consecutive deltas of one model, oldest first, at least one. Their arrays are not mutated."""
    layout = deltas[0].layout
    if len(deltas) == 1:
        return deltas[0]
    all_steps: dict[int, Sparse] = {}
    all_known: dict[int, Sparse] = {}
    for width in layout.vectors:
        steps, known = _nothing(layout, width), _nothing(layout, width)
        only_steps = not any(width in delta.known for delta in deltas)
        if only_steps:
            steps = _sum([delta.steps[width] for delta in deltas if width in delta.steps] or [steps])
        else:
            for delta in deltas:
                if width in delta.steps:
                    steps, known = _step(steps, known, delta.steps[width])
                if width in delta.known:
                    added = delta.known[width]
                    steps = _without(steps, added.at_K)
                    known = _joined(_without(known, added.at_K), added)
        if steps.at_K.size:
            all_steps[width] = steps
        if known.at_K.size:
            all_known[width] = known
    return Delta(layout, all_steps, all_known)


def joined(deltas: Sequence[Delta]) -> Delta:
    """Join deltas that change different elements, such as the parts of one version.

    Raises:
        ValueError: two of them change the same element.
    """
    first = deltas[0]
    if len(deltas) == 1:
        return first
    found: tuple[dict[int, Sparse], dict[int, Sparse]] = {}, {}
    for width in first.layout.vectors:
        for kind, into in zip(("steps", "known"), found, strict=True):
            parts = [of[width] for delta in deltas if width in (of := getattr(delta, kind))]
            parts.sort(key=lambda part: int(part.at_K[0]))
            if not parts:
                continue
            at_K, data_K = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
            if any(int(one.at_K[-1]) >= int(other.at_K[0]) for one, other in itertools.pairwise(parts)):
                order = np.argsort(at_K, kind="stable")
                at_K, data_K = at_K[order], data_K[order]
                if (at_K[1:] == at_K[:-1]).any():
                    raise ValueError("an element occurs twice")
            into[width] = Sparse(at_K, data_K)
        steps, known = (into.get(width) for into in found)
        if steps is not None and known is not None and not _outside(known.at_K, steps.at_K).all():
            raise ValueError("an element occurs twice")
    return Delta(first.layout, *found)


def _nothing(layout: Layout, width: int) -> Sparse:
    vector = layout.vectors[width]
    return Sparse(np.empty(0, vector.index_dtype), np.empty(0, vector.bits_dtype))


def _outside(at_K: np.ndarray, other_K: np.ndarray) -> np.ndarray:
    """Return which of the ascending positions are not among the ascending others, as a mask."""
    place_K = np.searchsorted(other_K, at_K)
    inside_K = place_K < other_K.size
    inside_K[inside_K] = other_K[place_K[inside_K]] == at_K[inside_K]
    return ~inside_K


def _without(sparse: Sparse, at_K: np.ndarray) -> Sparse:
    left_K = _outside(sparse.at_K, at_K)
    return Sparse(sparse.at_K[left_K], sparse.data_K[left_K])


def _joined(first: Sparse, second: Sparse) -> Sparse:
    """Join disjoint elements."""
    at_K = np.concatenate((first.at_K, second.at_K))
    order = np.argsort(at_K, kind="stable")
    return Sparse(at_K[order], np.concatenate((first.data_K, second.data_K))[order])


def _step(steps: Sparse, known: Sparse, added: Sparse) -> tuple[Sparse, Sparse]:
    """Add steps to the new bits where those are known, and to the steps elsewhere."""
    outside_K = _outside(added.at_K, known.at_K)
    if not outside_K.all():
        data_K = known.data_K.copy()
        data_K[np.searchsorted(known.at_K, added.at_K[~outside_K])] += added.data_K[~outside_K]
        known = Sparse(known.at_K, data_K)
    left = Sparse(added.at_K[outside_K], added.data_K[outside_K])
    return (_sum([steps, left]) if steps.at_K.size else left), known


def _sum(steps: Sequence[Sparse]) -> Sparse:
    """Add steps of the same position, and drop those that add up to zero."""
    if len(steps) == 1:
        return steps[0]
    at_K = np.concatenate([each.at_K for each in steps])
    order = np.argsort(at_K, kind="stable")  # merges the ascending runs
    at_K = at_K[order]
    if not at_K.size:
        return steps[0]
    first = np.append(0, np.flatnonzero(at_K[1:] != at_K[:-1]) + 1)
    step_K = np.concatenate([each.data_K for each in steps])[order]
    step_K = np.add.reduceat(step_K, first, dtype=step_K.dtype)
    kept_K = step_K != 0
    return Sparse(at_K[first[kept_K]], step_K[kept_K])
