"""A shadow's bits in host memory, and comparing with them there: many tensors by one launch."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch

from deltasync.kernels import native
from deltasync.publish.detect import Difference, addresses_of, on_host
from deltasync.publish.shards import pieces
from deltasync.tensors import ITEM_BYTES, Delta, Fingerprints, Layout, fingerprint
from deltasync.tensors.bits import cast, has_nan, nan_bounds

_FIRST_GUESS = 1 / 64  # fraction of the elements that is expected to change, before anything is known
_DTYPES = {name: getattr(torch, name) for name in ITEM_BYTES}
_BATCH = 1 << 26  # elements that are compared by one call
_COPIED = 1 << 20  # elements of a tensor that is copied, to be compared with others, where its memory may be used again
_COPIES_BYTES = 4 << 20
"""Bytes of tensors in another dtype or order than the published one, of which copies are compared together."""


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
        vectors = layout.vectors
        # By width, of each tensor: the first held element, its address, and the bounds of `native.compare`.
        self._start_T = {w: np.array([ranges[name][0] for name in of.names], np.int64) for w, of in vectors.items()}
        self._address_T = {w: np.array([bits[name].ctypes.data for name in of.names], np.int64) for w, of in vectors.items()}
        self._bound_T2 = {w: np.array([nan_bounds(spec) for spec in of.specs], np.uint64) for w, of in vectors.items()}
        # Of tensors that are compared together: those of the stream, which of them have to be copied first, because they
        # have another dtype or are not contiguous, and by width their places and rows, which lack the address of new bits.
        self._launches: list[tuple[slice, list[int], dict[int, tuple[np.ndarray, np.ndarray]]]] = []
        self._large: list[tuple[int, str]] = []
        self._fraction: dict[int, float] = {}
        self._clear()

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
            for width in layout.vectors:
                at_R = np.flatnonzero((place_S2[low:high, 0] == width) & ~is_large_S[low:high])
                at_R = at_R[np.argsort(place_S2[low:high, 1][at_R])]
                tensor_R = place_S2[low:high, 1][at_R]
                columns = tensor_R, self._start_T[width][tensor_R], count_S[low:high][at_R], self._address_T[width][tensor_R]
                rows[width] = at_R, np.stack((*columns, np.zeros_like(tensor_R)), axis=1)
            cast_S = [at for at in range(low, high) if is_cast[at] and not is_large_S[at]]
            self._launches.append((slice(low, high), cast_S, rows))

    def compare(self, held: Sequence[torch.Tensor]) -> Difference:
        """Compare the tensors of the table."""
        found = self._begun()
        for part, cast_S, rows in self._launches:
            address_S = addresses_of(held[part])
            copies = {at: cast(held[at], self._dtypes[at]).contiguous() for at in cast_S}
            for at, copy in copies.items():
                address_S[at - part.start] = copy.data_ptr()
            for width, (at_R, row_RF) in rows.items():
                if at_R.size:
                    row_RF[:, 4] = address_S[at_R]
                    self._launch(width, row_RF, found)
        for at, name in self._large:  # piece by piece, so that copies take little memory
            self._add(name, held[at], found, lasting=True)
        return self._ended(found)

    def compare_each(self, parts: Iterable[tuple[str, torch.Tensor]]) -> Difference:
        """Compare tensors as they come; each may be gone when the next one is asked for."""
        found = self._begun()
        for name, held in parts:
            self._add(name, held, found, lasting=False)
        return self._ended(found)

    def add(self, delta: Delta) -> None:
        """Add steps to the bits."""
        for width, steps in delta.steps.items():
            vector = self._layout.vectors[width]
            zero_T = self._address_T[width] - (vector.first_T[:-1] + self._start_T[width]) * width
            native.add(vector, zero_T, steps)

    def _begun(self) -> _Found:
        counts = {width: len(vector.specs) for width, vector in self._layout.vectors.items()}
        self._clear()
        return (
            [],
            {width: np.zeros(count, np.uint64) for width, count in counts.items()},
            {width: np.zeros(count, np.int64) for width, count in counts.items()},
        )

    def _launch(self, width: int, row_RF: np.ndarray, found: _Found) -> None:
        """Compare rows of one vector, which are in the order of positions. As many changes as the last time are expected."""
        expected = int(self._fraction.get(width, _FIRST_GUESS) * row_RF[:, 2].sum())
        steps, gain_T, above_T = native.compare(row_RF, self._layout.vectors[width], self._bound_T2[width], expected)
        if steps.at_K.size:
            pieces, gains, aboves = found
            pieces.append(Delta(self._layout, {width: steps}))
            gains[width] += gain_T
            aboves[width] += above_T

    def _clear(self) -> None:
        """No rows wait to be compared together."""
        self._rows: dict[int, list[tuple[int, int, int, int]]] = {}  # without addresses of the shadow
        self._held: list[torch.Tensor] = []
        self._count = self._copied_bytes = 0

    def _add(self, name: str, held: torch.Tensor, found: _Found, *, lasting: bool) -> None:
        """Add a tensor's range, in any dtype, order and place. Its memory may change after return unless it is lasting."""
        spec, start, count = self._layout.specs[name], self._ranges[name][0], held.numel()
        if not held.is_cpu:
            for first, piece in on_host(held, spec.dtype):
                self._row(name, start + first, piece, found)
                self._flush(found)  # before the next piece comes
            return
        if held.is_contiguous() and held.dtype is _DTYPES[spec.dtype]:
            if not lasting and count <= _COPIED:
                held = held.detach().clone()
                self._copied_bytes += held.nbytes
            self._row(name, start, held, found)
            if not (lasting or count <= _COPIED):
                self._flush(found)
            return
        for at, piece in pieces(held):
            new = cast(piece, spec.dtype).contiguous()
            new = new if lasting or new.data_ptr() != piece.data_ptr() else new.clone()
            self._copied_bytes += new.nbytes
            self._row(name, start + at, new, found)

    def _row(self, name: str, start: int, new: torch.Tensor, found: _Found) -> None:
        """Add contiguous elements in the served dtype, from index `start` of the tensor on."""
        width, number = self._layout.places[name]
        self._rows.setdefault(width, []).append((number, start, new.numel(), new.data_ptr()))
        self._held.append(new)
        self._count += new.numel()
        if self._count >= _BATCH or self._copied_bytes >= _COPIES_BYTES:
            self._flush(found)

    def _flush(self, found: _Found) -> None:
        """Compare what was added."""
        for width, given in self._rows.items():
            row_R4 = np.array(sorted(given), np.int64)
            tensor_R = row_R4[:, 0]
            address_R = self._address_T[width][tensor_R] + (row_R4[:, 1] - self._start_T[width][tensor_R]) * width
            self._launch(width, np.insert(row_R4, 3, address_R, axis=1), found)
        self._clear()

    def _ended(self, found: _Found) -> Difference:
        """Compare what is left, and return everything."""
        self._flush(found)
        pieces, gains, aboves = found
        for width, vector in self._layout.vectors.items():
            changed = sum(piece.steps[width].at_K.size for piece in pieces if width in piece.steps)
            self._fraction[width] = changed / max(vector.element_count, 1)

        def apply() -> None:
            for piece in pieces:
                self.add(piece)

        return Difference(pieces, gains, aboves, apply)


_Found = tuple[list[Delta], dict[int, np.ndarray], dict[int, np.ndarray]]
"""Steps, and as in `Difference` gains and aboves, of one comparison."""
