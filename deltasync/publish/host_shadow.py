"""A shadow's bits in host memory, and comparing with them there: many tensors by one launch."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from deltasync.kernels import native
from deltasync.publish.detect import Difference, addresses_of, on_host
from deltasync.publish.shards import pieces
from deltasync.tensors import ITEM_BYTES, Delta, Fingerprints, Layout, Vector, fingerprint
from deltasync.tensors.bits import cast, has_nan, nan_bounds

_FIRST_GUESS = 1 / 64  # fraction of the elements that is expected to change, before anything is known
_DTYPES = {name: getattr(torch, name) for name in ITEM_BYTES}
_BATCH = 1 << 26  # elements that are compared by one call
_COPIED = 1 << 20  # elements of a tensor that is copied, to be compared with others, where its memory may be used again
_COPIES_BYTES = 4 << 20
"""Bytes of tensors in another dtype or order than the published one, of which copies are compared together."""


class _VectorMemory:
    """Where the held ranges of one vector lie.

    Attributes:
        vector: The vector.
        start_T: Flat index of the first held element of each tensor.
        address_T: Address of that element.
        zero_T: As in `native.add`.
        bound_T2: As in `native.compare`.
    """

    def __init__(self, vector: Vector, bits: Mapping[str, np.ndarray], ranges: Mapping[str, tuple[int, int]]) -> None:
        self.vector = vector
        self.start_T = np.array([ranges[name][0] for name in vector.names], np.int64)
        self.address_T = np.array([bits[name].ctypes.data for name in vector.names], np.int64)
        self.zero_T = self.address_T - (vector.first_T[:-1] + self.start_T) * vector.width
        self.bound_T2 = np.array([nan_bounds(spec) for spec in vector.specs], np.uint64)


class _Launch(NamedTuple):
    """Tensors of a table that are compared together.

    Attributes:
        low, high: Bounds of the tensors in the stream.
        cast: Which of them have to be copied first, because they have another dtype or are not contiguous.
        rows: By width, the places of tensors between `low` and `high`, and their rows for `native.compare`, in the order of
            the vector; the address of the new bits is missing.
    """

    low: int
    high: int
    cast: list[int]
    rows: dict[int, tuple[np.ndarray, np.ndarray]]


class HostShadow:
    """Bits of the ranges that this rank holds, in host memory.

    Attributes:
        device: None, as it is no accelerator.
        bits: Unsigned bit patterns of each range. Whoever reads them keeps the shadow from changing.
    """

    device = None

    def __init__(self, layout: Layout, ranges: Mapping[str, tuple[int, int]], bits: Mapping[str, np.ndarray]) -> None:
        self.bits = dict(bits)
        self._layout, self._ranges = layout, ranges
        self._memory = {width: _VectorMemory(vector, bits, ranges) for width, vector in layout.vectors.items()}
        self._launches: list[_Launch] = []
        self._large: list[tuple[int, str]] = []
        self._fraction: dict[int, float] = {}

    @property
    def size_bytes(self) -> int:
        """Memory of the bits."""
        return sum(bits.nbytes for bits in self.bits.values())

    def fingerprints(self) -> tuple[Fingerprints, list[str]]:
        """Return the share of each range in the fingerprint of its tensor, and the tensors with a NaN."""
        with_nan = [name for name, held in self.bits.items() if has_nan(held, self._layout.specs[name])]
        found = {
            name: native.fingerprint(fingerprint.tensor_key(name), held, self._ranges[name][0])
            for name, held in self.bits.items()
        }
        return Fingerprints.by_name(self._layout, found), with_nan

    def expected(self, width: int, row_RF: np.ndarray) -> int:
        """Return how many elements of rows are expected to change, as many as in the last comparison."""
        return int(self._fraction.get(width, _FIRST_GUESS) * row_RF[:, 2].sum())

    def plan(self, names: Sequence[str], held: Sequence[torch.Tensor]) -> None:
        """Make the table for `compare`. Only addresses and bits of the tensors may change from here on."""
        layout = self._layout
        dtypes = [layout.specs[name].dtype for name in names]
        count_S = np.array([tensor.numel() for tensor in held], np.int64)
        place_S2 = np.array([layout.places[name] for name in names], np.int64).reshape(-1, 2)
        is_cast = [
            not (tensor.is_cpu and tensor.is_contiguous() and tensor.dtype is _DTYPES[dtype])
            for tensor, dtype in zip(held, dtypes, strict=True)
        ]
        is_large_S = np.array([not tensor.is_cpu for tensor in held], bool) | (np.array(is_cast, bool) & (count_S > _COPIED))
        self._large = [(at, names[at]) for at in np.flatnonzero(is_large_S).tolist()]
        copied_S = np.cumsum(np.where(is_cast, count_S, 0) * ~is_large_S)
        edges = np.flatnonzero(np.diff(copied_S // _COPIED, prepend=0)).tolist()
        self._launches, self._dtypes = [], dtypes
        for low, high in itertools.pairwise([*dict.fromkeys((0, *edges)), len(names)]):
            rows = {}
            for width, memory in self._memory.items():
                at_R = np.flatnonzero((place_S2[low:high, 0] == width) & ~is_large_S[low:high])
                at_R = at_R[np.argsort(place_S2[low:high, 1][at_R])]
                tensor_R, count_R = place_S2[low:high, 1][at_R], count_S[low:high][at_R]
                columns = tensor_R, memory.start_T[tensor_R], count_R, memory.address_T[tensor_R], np.zeros_like(tensor_R)
                rows[width] = at_R, np.stack(columns, axis=1)
            cast_S = [at for at in range(low, high) if is_cast[at] and not is_large_S[at]]
            self._launches.append(_Launch(low, high, cast_S, rows))

    def compare(self, held: Sequence[torch.Tensor]) -> Difference:
        """Compare the tensors of the table."""
        collected = _Collected(self)
        for low, high, cast_S, rows in self._launches:
            address_S = addresses_of(held[low:high])
            copies = {at: cast(held[at], self._dtypes[at]).contiguous() for at in cast_S}
            for at, copy in copies.items():
                address_S[at - low] = copy.data_ptr()
            for width, (at_R, row_RF) in rows.items():
                if at_R.size:
                    row_RF[:, 4] = address_S[at_R]
                    collected.launch(width, row_RF)
        for at, name in self._large:  # piece by piece, so that copies take little memory
            collected.add(name, held[at], lasting=True)
        return collected.difference()

    def add(self, delta: Delta) -> None:
        """Add steps to the bits."""
        for width, steps in delta.steps.items():
            of = self._memory[width]
            native.add(of.vector, of.zero_T, steps)

    def compare_each(self, parts: Iterable[tuple[str, torch.Tensor]]) -> Difference:
        """Compare tensors as they come; each may be gone when the next one is asked for."""
        collected = _Collected(self)
        for name, held in parts:
            collected.add(name, held, lasting=False)
        return collected.difference()


class _Collected:
    """The findings of one comparison, and the rows that wait to be compared together."""

    def __init__(self, shadow: HostShadow) -> None:
        self._shadow, self._layout, self._memory = shadow, shadow._layout, shadow._memory
        self._pieces: list[Delta] = []
        self._gains = {w: np.zeros(len(m.vector.specs), np.uint64) for w, m in self._memory.items()}
        self._aboves = {w: np.zeros(len(m.vector.specs), np.int64) for w, m in self._memory.items()}
        self._clear()

    def _clear(self) -> None:
        self._rows: dict[int, list[tuple[int, int, int, int]]] = {}  # without addresses of the shadow
        self._held: list[torch.Tensor] = []
        self._count = self._copied_bytes = 0

    def launch(self, width: int, row_RF: np.ndarray) -> None:
        """Compare rows of one vector, which are in the order of positions."""
        memory = self._memory[width]
        steps, gain_T, above_T = native.compare(row_RF, memory.vector, memory.bound_T2, self._shadow.expected(width, row_RF))
        if steps.at_K.size:
            self._pieces.append(Delta(self._layout, {width: steps}))
            self._gains[width] += gain_T
            self._aboves[width] += above_T

    def add(self, name: str, held: torch.Tensor, *, lasting: bool) -> None:
        """Add a tensor's range, in any dtype, order and place. Its memory may change after return unless it is lasting."""
        spec, start, count = self._layout.specs[name], self._shadow._ranges[name][0], held.numel()
        if not held.is_cpu:
            for first, piece in on_host(held, spec.dtype):
                self._row(name, start + first, piece)
                self._flush()  # before the next piece comes
            return
        if held.is_contiguous() and held.dtype is _DTYPES[spec.dtype]:
            if not lasting and count <= _COPIED:
                held = held.detach().clone()
                self._copied_bytes += held.nbytes
            self._row(name, start, held)
            if not (lasting or count <= _COPIED):
                self._flush()
            return
        for at, piece in pieces(held):
            new = cast(piece, spec.dtype).contiguous()
            new = new if lasting or new.data_ptr() != piece.data_ptr() else new.clone()
            self._copied_bytes += new.nbytes
            self._row(name, start + at, new)

    def _row(self, name: str, start: int, new: torch.Tensor) -> None:
        """Add contiguous elements in the served dtype, from index `start` of the tensor on."""
        width, number = self._layout.places[name]
        self._rows.setdefault(width, []).append((number, start, new.numel(), new.data_ptr()))
        self._held.append(new)
        self._count += new.numel()
        if self._count >= _BATCH or self._copied_bytes >= _COPIES_BYTES:
            self._flush()

    def _flush(self) -> None:
        """Compare what was added."""
        for width, given in self._rows.items():
            row_R4 = np.array(sorted(given), np.int64)
            memory, tensor_R = self._memory[width], row_R4[:, 0]
            address_R = memory.address_T[tensor_R] + (row_R4[:, 1] - memory.start_T[tensor_R]) * width
            self.launch(width, np.insert(row_R4, 3, address_R, axis=1))
        self._clear()

    def difference(self) -> Difference:
        """Compare what is left, and return everything."""
        self._flush()
        pieces, memory = self._pieces, self._memory
        for width, of in memory.items():
            changed = sum(piece.steps[width].at_K.size for piece in pieces if width in piece.steps)
            self._shadow._fraction[width] = changed / max(of.vector.element_count, 1)

        def apply() -> None:
            for piece in pieces:
                self._shadow.add(piece)

        return Difference(pieces, self._gains, self._aboves, apply)
