"""DETECT: what a stream holds, and how it differs from the shadow. Comparing only reads.

A list or a mapping keeps its tensors until `publish` returns. They are checked once: as long as names, types, dtypes, shapes
and devices stay what they were, a publish only looks at these and at the tensors' addresses, in loops that run outside of
Python. A generator's tensors are checked and compared as they come, because each of them may be gone when the next one is
asked for.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch

from deltasync.errors import ConfigError, ModelMismatchError
from deltasync.publish.shards import MARKS
from deltasync.publish.stream import Stream, TensorRange, Tensors, fp8_blocks, pair_of, range_of, tensors_of
from deltasync.tensors import Delta, TensorSpec
from deltasync.tensors.bits import cast, served_dtype, served_name
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


_NAME, _GIVEN = operator.itemgetter(0), operator.itemgetter(1)
_DTYPE, _SHAPE, _DEVICE, _DICT = map(operator.attrgetter, ("dtype", "shape", "device", "__dict__"))

Looks = tuple[list[torch.dtype], list[torch.Size], list[torch.device], list[bool], list[bool]]


def looks_of(held: Sequence[torch.Tensor]) -> Looks:
    """Return dtypes, shapes, devices, and which are contiguous or negated; no Python is called for a tensor."""
    contiguous, negated = [*map(torch.Tensor.is_contiguous, held)], [*map(torch.Tensor.is_neg, held)]
    return [*map(_DTYPE, held)], [*map(_SHAPE, held)], [*map(_DEVICE, held)], contiguous, negated


def addresses_of(held: Sequence[torch.Tensor]) -> np.ndarray:
    """Return the address of each tensor, int64; no Python is called for a tensor."""
    return np.fromiter(map(torch.Tensor.data_ptr, held), np.int64, len(held))


class Seen:
    """A stream of whole tensors, or of ranges, that was checked and found to be the shadow's."""

    def __init__(
        self, names: Sequence[str], given: Sequence[Any], how: tuple[str, int], held: Sequence[torch.Tensor]
    ) -> None:
        self._names, self._how = [*names], how
        self._types = [*map(type, given)]
        self._ranges = _ranges(given)
        self._looks = looks_of(held)

    @classmethod
    def of(cls, pairs: Collection[Any], parts: Sequence[tuple[str, TensorRange]], dtype: str, rank: int) -> Self | None:
        """Return what is known of a stream now; None if its parts are not its tensors, so that each is asked each time."""
        given = [*map(_GIVEN, pairs)]
        if all(part is of or part.held is of for (_, part), of in zip(parts, given, strict=True)):
            return cls([*map(_NAME, pairs)], given, (dtype, rank), [part.held for _, part in parts])
        return None

    def again(self, pairs: Collection[Any], dtype: str, rank: int) -> list[torch.Tensor] | None:
        """Return the tensors of a stream if they differ from the known ones in their addresses and bits alone."""
        if self._how != (dtype, rank) or len(pairs) != len(self._names):
            return None
        try:
            names, given = zip(*pairs, strict=True)
        except (TypeError, ValueError):
            return None
        if [*names] != self._names or [*map(type, given)] != self._types or _ranges(given) != self._ranges:
            return None
        held = [each.held if type(each) is TensorRange else each for each in given]
        if looks_of(held) != self._looks or not all(map(MARKS.isdisjoint, map(_DICT, held))):
            return None
        if not all(map(torch.Tensor.data_ptr, held)) and any(each.numel() and not each.data_ptr() for each in held):
            return None  # memory was freed
        return held


def _ranges(given: Sequence[Any]) -> list[tuple[int, tuple[int, ...]]]:
    return [(each.start, each.shape) for each in given if type(each) is TensorRange]


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


def served_tensors(stream: Stream, dtype: str) -> tuple[Tensors, str]:
    """Return the stream, quantized if that is the served dtype, and the dtype to cast its tensors to."""
    tensors = tensors_of(stream)
    return (fp8_blocks(map(pair_of, tensors)), "keep") if dtype == "fp8" else (tensors, dtype)


def parts_of(
    stream: Tensors, dtype: str, rank: int, specs: dict[str, TensorSpec], known: Mapping[str, TensorSpec]
) -> Iterator[tuple[str, TensorRange]]:
    """Yield the ranges that a rank publishes of a stream; fill `specs` with the whole tensors in the served dtype.

    A tensor that is as it was `known` has the same spec there.

    Raises:
        ModelMismatchError: a tensor occurs twice, or is one that no channel carries.
        ConfigError: a tensor cannot be read from here.
    """
    for name, tensor in map(pair_of, stream):
        if name in specs:
            raise ModelMismatchError(f"The stream held {name} twice; nothing was published.")
        part = range_of(name, tensor, rank)
        if part.held.is_meta:
            raise ConfigError(
                f"{name} is offloaded: it is on the meta device, without values. Train without offloading, or publish "
                "tensors that were gathered."
            )
        served, spec = served_name(name, part.held.dtype, dtype), known.get(name)
        if spec is None or (spec.dtype, spec.shape) != (served, part.shape):
            spec = TensorSpec(name, served, part.shape)
        specs[name] = spec
        yield name, part
