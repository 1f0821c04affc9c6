"""DETECT: how tensors differ from the shadow, and how they cross to the host. Comparing only reads."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch

from deltasync.tensors import Delta
from deltasync.tensors.bits import cast, served_dtype
from deltasync.tensors.device import DeviceDelta

PIECE_BYTES = 32 << 20
"""Most bytes that cross to the host at once, through pinned memory. A power of two, up to which PyTorch would round it."""


@dataclasses.dataclass(frozen=True, eq=False)
class Difference:
    """How a stream differs from a shadow.

    Attributes:
        pieces: The steps, in pieces of different elements.
        gains: Sum of what they add to the fingerprints, by width; uint64[T] each.
        aboves: How many elements of each tensor become NaN, by width; int64[T] each.
        apply: Adds them to the shadow's bits. If it raises, or is interrupted, these are not known any more.
    """

    pieces: Sequence[Delta | DeviceDelta] = ()
    gains: Mapping[int, np.ndarray] = dataclasses.field(default_factory=dict)
    aboves: Mapping[int, np.ndarray] = dataclasses.field(default_factory=dict)
    apply: Callable[[], None] = lambda: None

    @property
    def changed(self) -> int:
        """Number of elements."""
        return sum(piece.changed for piece in self.pieces)


_DTYPE, _SHAPE, _DEVICE = map(operator.attrgetter, ("dtype", "shape", "device"))

Looks = tuple[list[torch.dtype], list[torch.Size], list[torch.device], list[bool], list[bool]]


def looks_of(held: Sequence[torch.Tensor]) -> Looks:
    """Return dtypes, shapes, devices, and which are contiguous or negated; no Python is called for a tensor."""
    contiguous, negated = [*map(torch.Tensor.is_contiguous, held)], [*map(torch.Tensor.is_neg, held)]
    return [*map(_DTYPE, held)], [*map(_SHAPE, held)], [*map(_DEVICE, held)], contiguous, negated


def addresses_of(held: Sequence[torch.Tensor]) -> np.ndarray:
    """Return the address of each tensor, int64; no Python is called for a tensor."""
    return np.fromiter(map(torch.Tensor.data_ptr, held), np.int64, len(held))


def on_host(held: torch.Tensor, dtype: str) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield a tensor of an accelerator, cast, in flat pieces on the host, each with the index of its first element.

    A piece is valid until the next one is asked for, which crosses meanwhile.
    """
    flat, is_cuda, itemsize = held.detach().reshape(-1), held.is_cuda, served_dtype(held, dtype).itemsize
    size = PIECE_BYTES // itemsize
    room_bytes = min(PIECE_BYTES, flat.numel() * itemsize)
    rooms = [torch.empty(room_bytes, dtype=torch.uint8, pin_memory=is_cuda) for _ in range(2)]

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


def copied(held: torch.Tensor, dtype: str) -> torch.Tensor:
    """Return a copy of a tensor on the host, contiguous, in the served dtype."""
    copy = torch.empty(held.shape, dtype=getattr(torch, dtype))
    if held.is_cpu:
        copy.copy_(held.detach())  # casts in all threads
    else:
        for first, piece in on_host(held, dtype):
            copy.view(-1)[first : first + piece.numel()] = piece
    return copy
