"""One model as a few vectors: the tensors of one element width lie one after the other, in the order of the
channel's table.

A *position* is an index into such a vector. A tensor's elements are row-major, from its first position on.
Code that works on all changed elements of a model works on ascending positions, whatever the number of
tensors.

Shape suffixes: T tensors of one width, K changed elements.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Self

import numpy as np

from deltasync.tensors import fingerprint
from deltasync.tensors.specs import TensorSpec, index_dtype


def count_below(at_K: np.ndarray, limit_N: np.ndarray | tuple[int, int] | np.int64) -> np.ndarray:
    """Return how many of these ascending positions are below each limit, which is at most the number of
    elements; int64[N].

    It is `np.searchsorted` in the dtype of `at_K`: with limits of another dtype numpy would copy all of
    `at_K` first.
    """
    return np.searchsorted(at_K, np.asarray(limit_N).astype(at_K.dtype, copy=False))


def bounds(count_N: np.ndarray | Sequence[int]) -> np.ndarray:
    """Return the sum of the counts before each, and of all; int64[N + 1]."""
    return np.append(0, np.cumsum(count_N, dtype=np.int64))


@dataclasses.dataclass(frozen=True, eq=False)
class Vector:
    """The tensors of one element width.

    Attributes:
        width: Bytes of an element.
        specs: The tensors, in order.
        first_T: Position of the first element of each tensor, and the number of all elements; int64[T + 1].
    """

    width: int
    specs: tuple[TensorSpec, ...]
    first_T: np.ndarray

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors."""
        return tuple(spec.name for spec in self.specs)

    @functools.cached_property
    def key_T(self) -> np.ndarray:
        """Fingerprint key of each tensor, uint64."""
        return np.array([fingerprint.tensor_key(name) for name in self.names], np.uint64)

    @property
    def element_count(self) -> int:
        """Elements of all tensors."""
        return int(self.first_T[-1])

    @property
    def index_dtype(self) -> np.dtype:
        """dtype of positions: int32, or int64 from 2**31 elements on."""
        return index_dtype(self.element_count)

    @property
    def bits_dtype(self) -> np.dtype:
        """The unsigned integer dtype of bit patterns."""
        return np.dtype(f"u{self.width}")

    def count(self, at_K: np.ndarray) -> np.ndarray:
        """Return how many of these ascending positions lie in each tensor, int64[T]."""
        if at_K.size < len(self.specs):
            return np.bincount(self.tensor(at_K), minlength=len(self.specs))
        counts: np.ndarray = np.diff(count_below(at_K, self.first_T))
        return counts

    def tensor(self, at_K: np.ndarray) -> np.ndarray:
        """Return the number of the tensor in which each position lies, int64[K]."""
        numbers: np.ndarray = np.searchsorted(self.first_T, at_K, side="right") - 1
        return numbers


class Layout:
    """The vectors of a model, and where each tensor lies in them.

    Attributes:
        specs: The tensors by name, in order.
        vectors: By element width in bytes, the widths ascending.
        places: Width of each tensor and its number in that vector, by name.
    """

    def __init__(self, specs: Mapping[str, TensorSpec]) -> None:
        self.specs = dict(specs)
        by_width: dict[int, list[TensorSpec]] = {}
        for spec in self.specs.values():
            by_width.setdefault(spec.item_bytes, []).append(spec)
        self.vectors = {
            width: Vector(
                width, tuple(held), np.cumsum([0, *(spec.element_count for spec in held)], dtype=np.int64)
            )
            for width, held in sorted(by_width.items())
        }
        self.places = {
            name: (width, number)
            for width, vector in self.vectors.items()
            for number, name in enumerate(vector.names)
        }

    @property
    def element_count(self) -> int:
        """Elements of all tensors."""
        return sum(vector.element_count for vector in self.vectors.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(vector.element_count * vector.width for vector in self.vectors.values())

    def named(self, count: Mapping[int, np.ndarray]) -> dict[str, int]:
        """Return the counts that are not 0, by tensor, of arrays for all tensors of a width."""
        found: dict[str, int] = {}
        for width in sorted(count):
            held = np.flatnonzero(count[width])
            found |= dict(
                zip((self.vectors[width].names[t] for t in held), count[width][held].tolist(), strict=True)
            )
        return found

    def span(self, name: str) -> tuple[int, int, int]:
        """Return a tensor's width, its first position, and the position behind its last one."""
        width, number = self.places[name]
        first, last = self.vectors[width].first_T[number : number + 2]
        return width, int(first), int(last)


class Fingerprints(Mapping[str, int]):
    """Fingerprints of a model's tensors, or of the ranges that a rank holds of them, by name.

    Attributes:
        of: The same by width, in the order of the vector; uint64[T] each.
    """

    def __init__(self, layout: Layout, of: Mapping[int, np.ndarray]) -> None:
        self.of = of
        self._layout = layout

    @classmethod
    def by_name(cls, layout: Layout, found: Mapping[str, int]) -> Self:
        """Return those of all tensors of a layout."""
        return cls(
            layout,
            {
                w: np.array([found[name] for name in vector.names], np.uint64)
                for w, vector in layout.vectors.items()
            },
        )

    def __getitem__(self, name: str) -> int:
        width, number = self._layout.places[name]
        return int(self.of[width][number])

    def __iter__(self) -> Iterator[str]:
        return iter(self._layout.specs)

    def __len__(self) -> int:
        return len(self._layout.specs)

    def copy(self) -> Self:
        """Return a copy that does not change when this does."""
        return type(self)(self._layout, {width: found_T.copy() for width, found_T in self.of.items()})

    def with_gains(self, gains: Mapping[int, np.ndarray]) -> Self:
        """Return new ones, to which these are added, by width."""
        of = {
            width: found_T + gains[width] if width in gains else found_T.copy()
            for width, found_T in self.of.items()
        }
        return type(self)(self._layout, of)

    @property
    def total(self) -> int:
        """The fingerprint of the model."""
        return sum(int(found_T.sum(dtype=np.uint64)) for found_T in self.of.values()) & fingerprint.MASK
