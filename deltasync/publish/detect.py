"""DETECT on the host: how tensors differ from a shadow's bits there, and how they cross to it. Comparing only
reads.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from deltasync.errors import CorruptDataError
from deltasync.kernels import native
from deltasync.tensors import Delta, Fingerprints, Layout, bounds, fingerprint
from deltasync.tensors.bits import cast, has_nan, nan_bounds, served_dtype

PIECE_BYTES = 32 << 20
"""Most bytes that cross to the host at once, through pinned memory. A power of two, up to which PyTorch would
round it.
"""

_FIRST_GUESS = 1 / 64  # fraction of the elements that is expected to change, before anything is known
_BATCH = 1 << 26  # elements that are compared by one call
# elements of a tensor that is copied, to be compared with others, where its memory may be used again
_COPIED = 1 << 20
_COPIES_BYTES = 4 << 20
"""Bytes of tensors in another dtype or order than the published one, of which copies are compared
together.
"""


@dataclasses.dataclass(frozen=True, eq=False)
class Difference:
    """How a stream differs from a shadow.

    Attributes:
        pieces: The steps, in pieces of different elements.
        gains: Sum of what they add to the fingerprints, by width; uint64[T] each.
        new_nan_counts: How many elements of each tensor become NaN, by width; int64[T] each.
        found: Further values that the shadow's memory needs to apply it.
    """

    pieces: Sequence[Delta] = ()
    gains: Mapping[int, np.ndarray] = dataclasses.field(default_factory=dict)
    new_nan_counts: Mapping[int, np.ndarray] = dataclasses.field(default_factory=dict)
    found: Any = None

    @property
    def changed(self) -> int:
        """Number of elements."""
        return sum(piece.changed for piece in self.pieces)


_TRAITS: tuple[Callable[[torch.Tensor], Any], ...] = (
    *map(operator.attrgetter, ("dtype", "shape", "device")),
    torch.Tensor.is_contiguous,
    torch.Tensor.is_neg,
)

Traits = list[list[Any]]
"""Dtypes, shapes and devices of tensors, and which are contiguous or negated."""


def traits_of(held: Sequence[torch.Tensor]) -> Traits:
    """Return the traits of tensors."""
    return [[*map(trait, held)] for trait in _TRAITS]


def have_traits(held: Sequence[torch.Tensor], traits: Traits) -> bool:
    """Whether as many tensors have these traits.

    No Python is called for a tensor, and no list is made: 18,819 shapes at once start the garbage
    collector.
    """
    return len(held) == len(traits[0]) and all(
        all(map(operator.eq, map(trait, held), values)) for trait, values in zip(_TRAITS, traits, strict=True)
    )


def addresses_of(held: Sequence[torch.Tensor]) -> np.ndarray:
    """Return the address of each tensor, int64; no Python is called for a tensor."""
    return np.fromiter(map(torch.Tensor.data_ptr, held), np.int64, len(held))


def on_host(held: torch.Tensor, dtype: str) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield a tensor of an accelerator, cast, in flat pieces on the host, each with the index of its first
    element.

    A piece is valid until the next one is asked for, which crosses meanwhile.
    """
    flat, is_cuda, itemsize = held.detach().reshape(-1), held.is_cuda, served_dtype(held, dtype).itemsize
    size = PIECE_BYTES // itemsize
    room_bytes = min(PIECE_BYTES, flat.numel() * itemsize)
    rooms = [torch.empty(room_bytes, dtype=torch.uint8, pin_memory=is_cuda, device="cpu") for _ in range(2)]

    def send(start: int) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        piece = cast(flat[start : start + size], dtype)
        room = rooms[start // size % 2][: piece.nbytes].view(piece.dtype)
        room.copy_(piece, non_blocking=True)
        return room, torch.cuda.current_stream(held.device).record_event() if is_cuda else None

    coming = send(0)
    for start in range(0, flat.numel(), size):
        (room, done), following = coming, start + size
        if following < flat.numel():
            coming = send(following)
        if done is not None:
            done.synchronize()
        yield start, room


_PIECE = 1 << 20  # elements


def pieces(tensor: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield a tensor in flat pieces on the host, views where possible, each with the index of its first
    element.
    """
    if tensor.numel() <= _PIECE or tensor.is_contiguous():
        flat = tensor.detach().reshape(-1)
        for start in range(0, flat.numel(), _PIECE):
            yield start, flat[start : start + _PIECE].cpu()
        return
    row = tensor[0].numel()
    rows = max(1, _PIECE // row)
    for number in range(0, len(tensor), rows):
        for start, piece in pieces(tensor[number : number + rows] if rows > 1 else tensor[number]):
            yield number * row + start, piece


def copied(held: torch.Tensor, dtype: str) -> torch.Tensor:
    """Return a copy of a tensor on the host, contiguous, in the served dtype."""
    copy = torch.empty(held.shape, dtype=getattr(torch, dtype), device="cpu")
    if held.is_cpu:
        copy.copy_(held.detach())  # casts in all threads
    else:
        for first, piece in on_host(held, dtype):
            copy.view(-1)[first : first + piece.numel()] = piece
    return copy


class HostShadow:
    """Bits of the ranges that this rank holds, in host memory. Many tensors are compared by one launch.

    Attributes:
        device: None, as it is no accelerator.
        bits: Unsigned bit patterns of each range. Whoever reads them keeps the shadow from changing.
    """

    device = None

    def __init__(
        self, layout: Layout, ranges: Mapping[str, tuple[int, int]], bits: Mapping[str, np.ndarray]
    ) -> None:
        self.bits = dict(bits)
        self._layout, self._ranges = layout, ranges
        vectors = layout.vectors
        # By width, of each tensor: the first held element, how many there are, its address, and bounds of
        # `native.compare`.
        self._start_T = {
            w: np.array([ranges[name][0] for name in of.names], np.int64) for w, of in vectors.items()
        }
        held = {width: [bits[name] for name in of.names] for width, of in vectors.items()}
        self._count_T = {width: np.array([each.size for each in of], np.int64) for width, of in held.items()}
        self._address_T = {
            width: np.array([each.ctypes.data for each in of], np.int64) for width, of in held.items()
        }
        self._bound_T2 = {
            w: np.array([nan_bounds(spec) for spec in of.specs], np.uint64) for w, of in vectors.items()
        }
        # Of the planned tensors: by width the places of those that are compared as they are, with their rows,
        # which lack the address of new bits; and the places and names of the others.
        self._rows: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._others: list[tuple[int, str]] = []
        self._fraction: dict[int, float] = {}
        self._begin()

    def fingerprints(self) -> tuple[Fingerprints, list[str]]:
        """Return the share of each range in the fingerprint of its tensor, and the tensors with a NaN."""
        with_nan = [name for name, held in self.bits.items() if has_nan(held, self._layout.specs[name])]
        found = dict(zip(self.bits, self.digests([*self.bits]), strict=True))
        return Fingerprints.by_name(self._layout, found), with_nan

    def digests(self, names: Sequence[str]) -> list[int]:
        """Return the share of these ranges in the fingerprints of their tensors, computed from the bits."""
        keys = map(fingerprint.tensor_key, names)
        return [
            native.fingerprint(key, self.bits[n], self._ranges[n][0])
            for key, n in zip(keys, names, strict=True)
        ]

    def plan(self, names: Sequence[str], held: Sequence[torch.Tensor]) -> None:
        """Make the table for `compare`. Only addresses and bits of the tensors may change from here on."""
        layout = self._layout
        place_S2 = np.array([layout.places[name] for name in names], np.int64).reshape(-1, 2)
        count_S = np.array([tensor.numel() for tensor in held], np.int64)
        is_row_S = np.array([self._is_served(*pair) for pair in zip(names, held, strict=True)], bool)
        self._others = [(s, names[s]) for s in np.flatnonzero(~is_row_S).tolist()]
        for width in layout.vectors:
            at_R = np.flatnonzero(is_row_S & (place_S2[:, 0] == width))
            at_R = at_R[np.argsort(place_S2[at_R, 1])]
            tensor_R = place_S2[at_R, 1]
            columns = (
                tensor_R,
                self._start_T[width][tensor_R],
                count_S[at_R],
                self._address_T[width][tensor_R],
            )
            self._rows[width] = at_R, np.stack((*columns, np.zeros_like(tensor_R)), axis=1)

    def compare(self, held: Sequence[torch.Tensor]) -> Difference:
        """Compare the tensors of the table."""
        self._begin()
        address_S = addresses_of(held)
        for width, (at_R, row_RF) in self._rows.items():
            if at_R.size:
                row_RF[:, 4] = address_S[at_R]
                self._launch(width, row_RF)
        for at, name in self._others:
            self._add(name, held[at], lasting=True)
        return self._ended()

    def compare_each(self, parts: Iterable[tuple[str, torch.Tensor]]) -> Difference:
        """Compare tensors as they come; each may be gone when the next one is asked for."""
        self._begin()
        for name, held in parts:
            self._add(name, held, lasting=False)
        return self._ended()

    def apply(self, difference: Difference) -> None:
        """Add a difference to the bits. If this raises, or is interrupted, they are not known any more."""
        for piece in difference.pieces:
            self.add(piece)

    def encode(self, *_: Any) -> Iterator[Any] | None:
        """Return None: `publish.encode` reads the bits here."""
        return None

    def add(self, delta: Delta) -> None:
        """Add steps to the bits."""
        for width, steps in delta.steps.items():
            native.add(self._layout.vectors[width], self._zero_T(width), steps)

    def gains(self, delta: Delta) -> dict[int, np.ndarray]:
        """Return what steps that the bits have taken have added to the fingerprints, by width; uint64[T]
        each.

        Raises:
            CorruptDataError: they are of elements that are not held.
        """
        found = {}
        for width, steps in delta.steps.items():
            vector = self._layout.vectors[width]
            low_T = vector.first_T[:-1] + self._start_T[width]
            bound_T = bounds(vector.count(steps.at_K))
            changed_T = np.flatnonzero(np.diff(bound_T))
            first, last = steps.at_K[bound_T[changed_T]], steps.at_K[bound_T[changed_T + 1] - 1]
            if ((first < low_T[changed_T]) | (last >= (low_T + self._count_T[width])[changed_T])).any():
                raise CorruptDataError("Steps lead outside of what this rank holds.")
            found[width], _ = native.add(vector, self._zero_T(width), steps, is_done=True)
        return found

    def _zero_T(self, width: int) -> np.ndarray:
        """Return the address that position 0 would have, for each tensor."""
        vector = self._layout.vectors[width]
        zero_T: np.ndarray = self._address_T[width] - (vector.first_T[:-1] + self._start_T[width]) * width
        return zero_T

    def _is_served(self, name: str, held: torch.Tensor) -> bool:
        """Whether a tensor is compared as it is: on the host, in order, in the served dtype."""
        return (
            held.is_cpu
            and held.is_contiguous()
            and held.dtype is getattr(torch, self._layout.specs[name].dtype)
        )

    def _begin(self) -> None:
        """Nothing was found, and nothing waits to be compared."""
        counts = {width: len(vector.specs) for width, vector in self._layout.vectors.items()}
        self._pieces: list[Delta] = []
        self._gains = {width: np.zeros(count, np.uint64) for width, count in counts.items()}
        self._new_nan_counts = {width: np.zeros(count, np.int64) for width, count in counts.items()}
        self._clear()

    def _launch(self, width: int, row_RF: np.ndarray) -> None:
        """Compare rows of one vector, which are in the order of positions. As many changes as the last time
        are expected.
        """
        expected = int(self._fraction.get(width, _FIRST_GUESS) * row_RF[:, 2].sum())
        steps, gain_T, above_T = native.compare(
            row_RF, self._layout.vectors[width], self._bound_T2[width], expected
        )
        if steps.at_K.size:
            self._pieces.append(Delta(self._layout, {width: steps}))
            self._gains[width] += gain_T
            self._new_nan_counts[width] += above_T

    def _clear(self) -> None:
        """No rows wait to be compared together."""
        self._waiting: dict[int, list[tuple[int, int, int, int]]] = {}  # without addresses of the shadow
        self._held: list[torch.Tensor] = []
        self._count = self._copied_bytes = 0

    def _add(self, name: str, held: torch.Tensor, *, lasting: bool) -> None:
        """Add a tensor's range, in any dtype, order and place. Its memory may change after return unless it
        is lasting.
        """
        dtype, start, held = self._layout.specs[name].dtype, self._ranges[name][0], held.detach()
        if not held.is_cpu:
            for at, piece in on_host(held, dtype):
                self._row(name, start + at, piece)
                self._flush()  # before the next piece comes
            return
        # Piece by piece, so that copies take little memory.
        for at, piece in [(0, held)] if self._is_served(name, held) else pieces(held):
            new = cast(piece, dtype).contiguous()
            is_lent = new.data_ptr() == piece.data_ptr() and not lasting
            if is_lent and new.numel() <= _COPIED:
                new, is_lent = new.clone(), False
            self._copied_bytes += new.nbytes
            self._row(name, start + at, new)
            if is_lent:
                self._flush()

    def _row(self, name: str, start: int, new: torch.Tensor) -> None:
        """Add contiguous elements in the served dtype, from index `start` of the tensor on."""
        width, number = self._layout.places[name]
        self._waiting.setdefault(width, []).append((number, start, new.numel(), new.data_ptr()))
        self._held.append(new)
        self._count += new.numel()
        if self._count >= _BATCH or self._copied_bytes >= _COPIES_BYTES:
            self._flush()

    def _flush(self) -> None:
        for width, given in self._waiting.items():
            row_R4 = np.array(sorted(given), np.int64)
            tensor_R = row_R4[:, 0]
            address_R = (
                self._address_T[width][tensor_R] + (row_R4[:, 1] - self._start_T[width][tensor_R]) * width
            )
            self._launch(width, np.insert(row_R4, 3, address_R, axis=1))
        self._clear()

    def _ended(self) -> Difference:
        """Compare what is left, and return everything."""
        self._flush()
        found, self._pieces = self._pieces, []
        for width, vector in self._layout.vectors.items():
            changed = sum(piece.steps[width].at_K.size for piece in found if width in piece.steps)
            self._fraction[width] = changed / max(vector.element_count, 1)
        return Difference(found, self._gains, self._new_nan_counts)
