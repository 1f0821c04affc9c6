"""A shadow's bits in the memory of an accelerator, and comparing with them there; what differs stays
there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from deltasync.gpu import groups
from deltasync.gpu.delta import ALIGNED, BLOCK, DeviceBits, DeviceDelta, DeviceSparse, joined
from deltasync.publish.detect import Difference, addresses_of
from deltasync.tensors import Delta, Fingerprints, Layout
from deltasync.tensors.bits import SIGNED, nan_bounds

if TYPE_CHECKING:
    from deltasync.codec.base import Encoded
    from deltasync.gpu.detect import Comparison, Found
    from deltasync.gpu.encode import DeviceCoder

LEFT_FREE = 0.1
"""Fraction of a device's memory that `auto` leaves free when it places the shadow there."""

Cut = tuple[int, tuple[Any, ...], torch.dtype]
"""Place of a tensor among those given, an index of a part of it, and the dtype in which that is compared."""


def room_bytes(device: torch.device) -> int:
    """Return the bytes of a device's memory that a shadow may take.

    They are the free bytes and those in the allocator's cache, less what this process needed at its peak,
    less `LEFT_FREE`. Memory for activations, which training needs between two publishes, is free during a
    publish and needed again afterwards.
    """
    if device.type != "cuda":
        return 1 << 62  # the host, which plays a device under Triton's interpreter
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    needed_bytes = max(torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device))
    return int(free_bytes + torch.cuda.memory_reserved(device) - needed_bytes - LEFT_FREE * total_bytes)


def needed_bytes(layout: Layout, ranges: Mapping[str, tuple[int, int]]) -> int:
    """Return the bytes that a shadow of these ranges takes on a device, with what comparing takes beside
    it.
    """
    total = 0
    for width, vector in layout.vectors.items():
        count_T = np.array([ranges[name][1] - ranges[name][0] for name in vector.names], np.int64)
        blocks = int((-(-count_T // BLOCK)).sum())
        changes = groups.room(int(groups.FIRST_GUESS * count_T.sum()), int(count_T.sum()))
        total += int((-(-count_T // ALIGNED) * ALIGNED).sum()) * width
        total += groups.beside_bytes(blocks, width) + changes * (4 + width)
    return total


class DeviceShadow:
    """Bits of the ranges that this rank holds: one buffer for each width, on one device.

    Args:
        layout: The whole tensors.
        ranges: The range that is held of each.
        device: The device.

    Attributes:
        device: The device.
        bits: Copies, on the host, of the unsigned bit patterns of each range, made when they are asked for.
        there: Where the bits are.
    """

    def __init__(self, layout: Layout, ranges: Mapping[str, tuple[int, int]], device: torch.device) -> None:
        self.device, self._layout, self._ranges = device, layout, ranges
        self.bits = _Fetched(self)
        self.there: dict[int, DeviceBits] = {}
        for width, vector in layout.vectors.items():
            start_T, stop_T = np.array([ranges[name] for name in vector.names], np.int64).reshape(-1, 2).T
            count_T = stop_T - start_T
            room_T = -(-count_T // ALIGNED) * ALIGNED
            place_T = np.cumsum(room_T) - room_T
            bits_N = torch.empty(int(room_T.sum()), dtype=SIGNED[width], device=device)
            self.there[width] = DeviceBits(
                bits_N, np.stack((vector.first_T[:-1] + start_T, count_T, place_T), axis=1)
            )
        self.ready: torch.cuda.Event | None = None
        self._comparisons: dict[int, tuple[Comparison, np.ndarray, np.ndarray, list[Cut]]] = {}
        self._coder: DeviceCoder | None = None

    def view(self, name: str) -> torch.Tensor:
        """Return the bits of a tensor's range, as signed integers, flat, on the device."""
        width, number = self._layout.places[name]
        _, count, place = self.there[width].run_T3[number].tolist()
        return self.there[width].bits_N[place : place + count]

    def set(self, name: str, held: torch.Tensor) -> None:
        """Set the bits of a tensor's range to those of a tensor in any dtype, order and place."""
        to = self.view(name).view(getattr(torch, self._layout.specs[name].dtype))
        if to.numel():
            to.view(held.shape).copy_(held.detach())

    def is_settled(self) -> None:
        """Note that the bits were set: streams that read them wait for it."""
        if self.device.type == "cuda":
            self.ready = torch.cuda.current_stream(self.device).record_event()

    def wait(self) -> None:
        """Let the current stream wait until the bits are set."""
        if self.ready is not None:
            torch.cuda.current_stream(self.device).wait_event(self.ready)

    def fingerprints(self) -> tuple[Fingerprints, list[str]]:
        """Return the share of each range in the fingerprint of its tensor, and the tensors with a NaN."""
        found, with_nan = {}, list[str]()
        for width, vector in self._layout.vectors.items():
            self.wait()
            comparison, _ = self._comparison(width, vector.names, None)
            found[width] = np.zeros(len(vector.specs), np.uint64)
            if comparison is not None:
                found[width], above_T = comparison.sums()
                with_nan += [vector.names[t] for t in np.flatnonzero(above_T).tolist()]
        return Fingerprints(self._layout, found), with_nan

    def digests(self, names: Sequence[str]) -> list[int]:
        """Return the share of these ranges in the fingerprints of their tensors, computed from the bits, beside
        the trainer's work.
        """
        found: dict[str, int] = {}
        with self._kept_coder().after(self.ready):
            for width in self._layout.vectors:
                of_width = sorted(
                    (number, n) for n in names for w, number in [self._layout.places[n]] if w == width
                )
                held = [name for _, name in of_width]
                comparison = self._comparison(width, held, None)[0] if held else None
                sum_T = np.zeros(len(held), np.uint64) if comparison is None else comparison.sums()[0]
                found |= dict(zip(held, sum_T.tolist(), strict=True))
        return [found[name] for name in names]

    def plan(self, names: Sequence[str], held: Sequence[torch.Tensor]) -> None:
        """Make the tables for `compare`. Only addresses and bits of the tensors may change from here on."""
        self._comparisons = {}
        for width in self._layout.vectors:
            at_S = [s for s, name in enumerate(names) if self._layout.places[name][0] == width]
            at_S.sort(key=lambda s: self._layout.places[names[s]][1])
            comparison, cuts = self._comparison(width, [names[s] for s in at_S], [held[s] for s in at_S])
            if comparison is not None:
                cuts = [(at_S[s], index, dtype) for s, index, dtype in cuts]
                number_T = np.array([self._layout.places[names[s]][1] for s in at_S], np.int64)
                place_R = np.array([s for s, *_ in cuts], np.int64)
                self._comparisons[width] = comparison, number_T, place_R, cuts

    def compare(self, held: Sequence[torch.Tensor]) -> Difference:
        """Compare the tensors of the table.

        Raises:
            torch.OutOfMemoryError: the device has no memory for what differs.
        """
        address_S, waiting = addresses_of(held), {}
        self.wait()
        for width, (comparison, number_T, place_R, cuts) in self._comparisons.items():
            comparison.move(address_S[place_R])
            waiting[width] = number_T, comparison, comparison.launch(_filler(held, cuts))
        return self._difference(
            {
                width: [(number_T, comparison, finish())]
                for width, (number_T, comparison, finish) in waiting.items()
            }
        )

    def compare_each(self, parts: Iterable[tuple[str, torch.Tensor]]) -> Difference:
        """Compare tensors as they come; each may be gone when the next one is asked for. Raises as
        `compare`.
        """
        found: dict[int, list[_Part]] = {}
        self.wait()
        for name, held in parts:
            width, number = self._layout.places[name]
            comparison, cuts = self._comparison(width, [name], [held])
            if comparison is not None:
                of = comparison.launch(_filler([held], cuts))()
                found.setdefault(width, []).append((np.array([number]), comparison, of))
        return self._difference(found)

    def _comparison(
        self, width: int, names: Sequence[str], held: Sequence[torch.Tensor] | None
    ) -> tuple[Comparison | None, list[Cut]]:
        """Return the table of these tensors, which are in the vector's order, and what each of its runs is.

        None instead of a table if all are empty. With None for `held` the shadow is compared with itself.
        """
        from deltasync.gpu.detect import Comparison

        vector, there = self._layout.vectors[width], self.there[width]
        lines, new_widths, tensors, copied, cuts = (
            list[list[int]](),
            list[int](),
            list[int](),
            list[int](),
            list[Cut](),
        )
        address = there.bits_N.data_ptr()
        for s, name in enumerate(names):
            number = self._layout.places[name][1]
            position, count, place = there.run_T3[number].tolist()
            spec = vector.specs[number]
            tensor = self.view(name) if held is None else held[s]
            rounds = tensor.dtype == torch.float32 and spec.dtype == "bfloat16"
            dtype = torch.float32 if rounds else getattr(torch, spec.dtype)
            new_width = 4 if rounds else width
            is_there = held is None or (
                tensor.device == self.device and tensor.is_contiguous() and tensor.dtype == dtype
            )
            parts = [((), 0, count)] if is_there else _cut(tensor.shape, groups.COPIED)
            key = int(vector.key_T[number].view(np.int64))
            mask, largest = nan_bounds(spec)
            for index, first, size in parts:
                if size:
                    at = position + first
                    old, new = address + (place + first) * width, tensor.data_ptr() if is_there else 0
                    lines.append(
                        [old, new, 0, size, at, key, at - int(vector.first_T[number]), mask, largest]
                    )
                    new_widths.append(new_width)
                    tensors.append(s)
                    copied.append(0 if is_there else size * new_width)
                    cuts.append((s, index, dtype))
        if not lines:
            return None, cuts
        places = np.array(lines, np.int64), np.array(new_widths, np.int64), np.array(tensors, np.int64)
        return Comparison(self.device, width, *places, len(names), np.array(copied, np.int64)), cuts

    def _difference(self, found: Mapping[int, Sequence[_Part]]) -> Difference:
        steps, gains, new_nan_counts = dict[int, DeviceSparse](), {}, {}
        changed: list[tuple[Comparison, DeviceSparse]] = []
        for width, parts in found.items():
            tensors = len(self._layout.vectors[width].specs)
            gains[width], new_nan_counts[width] = np.zeros(tensors, np.uint64), np.zeros(tensors, np.int64)
            count_T, held = np.zeros(tensors, np.int64), list[DeviceSparse]()
            for number_T, comparison, of in parts:
                if of.steps is not None:
                    gains[width][number_T], new_nan_counts[width][number_T], count_T[number_T] = (
                        of.gain_T,
                        of.above_T,
                        of.steps.count_T,
                    )
                    held.append(of.steps)
                    changed.append((comparison, of.steps))
            if held:
                steps[width] = joined(held, count_T)
        delta = DeviceDelta(self._layout, steps, self.there)
        return Difference([delta] if steps else [], gains, new_nan_counts, changed)

    def apply(self, difference: Difference) -> None:
        """Add a difference to the bits. If this raises, or is interrupted, they are not known any more."""
        for comparison, steps in difference.found or ():
            comparison.apply(steps)
        self.is_settled()
        for piece in difference.pieces:
            assert isinstance(piece, DeviceDelta)
            piece.ready = self.ready

    def gains(self, delta: Delta) -> None:
        """Return None: payloads are proven by the steps that they decode to."""

    def encode(
        self, codec_name: str, delta: Delta, digests: Mapping[int, np.ndarray], version: int, most: int
    ) -> Iterator[tuple[Encoded, bytes]] | None:
        """Return payloads of about `most` changes with their bytes, made and proven here; None for a delta on
        the host, and for `raw`. The bits have taken the delta.

        Raises:
            CorruptDataError: a payload does not decode to what was encoded.
        """
        if not isinstance(delta, DeviceDelta) or codec_name == "raw":
            self._coder = None
            return None
        return self._encoded(codec_name, delta, digests, version, most)

    def _encoded(
        self, codec_name: str, delta: DeviceDelta, digests: Mapping[int, np.ndarray], version: int, most: int
    ) -> Iterator[tuple[Encoded, bytes]]:
        coder, self._coder = self._kept_coder(), None  # its memory stays only if it had enough
        yield from coder.payloads(codec_name, delta, digests, version, [*delta.split(most)])
        self._coder = coder

    def _kept_coder(self) -> DeviceCoder:
        if self._coder is None:
            from deltasync.gpu.encode import DeviceCoder

            self._coder = DeviceCoder(self._layout, self.device)
        return self._coder


_Part = tuple[np.ndarray, "Comparison", "Found"]
"""Numbers of the tensors in the vector, the table, and what was found."""


class _Fetched(Mapping[str, np.ndarray]):
    """Copies on the host of a device's bits."""

    def __init__(self, shadow: DeviceShadow) -> None:
        self._shadow = shadow

    def __getitem__(self, name: str) -> np.ndarray:
        self._shadow.wait()
        found: np.ndarray = self._shadow.view(name).cpu().numpy()
        if self._shadow.device.type == "cpu":
            found = found.copy()
        return found.view(f"u{found.itemsize}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._shadow._layout.specs)

    def __len__(self) -> int:
        return len(self._shadow._layout.specs)


def _cut(shape: Sequence[int], most: int) -> Iterator[tuple[tuple[Any, ...], int, int]]:
    """Yield parts of a tensor of at most so many elements: index, first element in row-major order, number of
    elements.
    """
    size = int(np.prod(shape, dtype=np.int64))
    if size <= most:
        yield (), 0, size
        return
    row = size // shape[0]
    if rows := most // row:
        for number in range(0, shape[0], rows):
            yield (slice(number, number + rows),), number * row, min(rows, shape[0] - number) * row
        return
    for number in range(shape[0]):
        for index, first, count in _cut(shape[1:], most):
            yield (number, *index), number * row + first, count


def _filler(held: Sequence[torch.Tensor], cuts: Sequence[Cut]) -> Callable[[int, torch.Tensor], None]:
    """Return a function that writes what a run is of these tensors to bytes on the device."""

    def fill(run: int, to: torch.Tensor) -> None:
        s, index, dtype = cuts[run]
        part = held[s].detach()[index]
        to.view(dtype).view(part.shape).copy_(part)

    return fill
