"""DETECT: compare a stream with the shadow's bits, find the steps, and set the bits to the stream's.

Tensors in host memory are compared by one launch for many of them. `DeviceCopies` compares those of an accelerator there.

A list or a mapping keeps its tensors until `publish` returns. They are checked once: as long as names, types, dtypes and
shapes stay what they were, a publish only reads the tensors' addresses. A generator's tensors are checked and compared as
they come, because each of them may be gone when the next one is asked for.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, ItemsView, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from deltasync import kernels
from deltasync.errors import ConfigError, ModelMismatchError
from deltasync.kernels import cpu_rows
from deltasync.kernels.cpu_rows import Taken
from deltasync.publish.device_copies import DeviceCopies, Difference, on_host
from deltasync.publish.shards import is_marked, pieces
from deltasync.publish.stream import Stream, TensorRange, Tensors, fp8_blocks, pair_of, range_of, stays, tensors_of
from deltasync.tensors import ITEM_BYTES, Delta, Layout, Sparse, TensorSpec, Vector, check_specs
from deltasync.tensors.bits import cast, nan_bounds, readable, served_name

_DTYPES = {name: getattr(torch, name) for name in ITEM_BYTES}
_BATCH = 1 << 26  # elements that are compared by one call
_COPIED = 1 << 20  # elements of a tensor that is copied, to be compared with others, where its memory may be used again
_COPIES_BYTES = 4 << 20
"""Bytes of tensors in another dtype or order than the published one, of which copies are compared together."""


class VectorMemory:
    """Where the held ranges of one vector lie in host memory.

    Attributes:
        vector: The vector.
        start_T: Flat index of the first held element of each tensor.
        address_T: Address of that element.
        zero_T: As in `cpu_rows.add`.
        bound_T2: As in `cpu_rows.advance`.
    """

    def __init__(self, vector: Vector, bits: Mapping[str, np.ndarray], ranges: Mapping[str, tuple[int, int]]) -> None:
        self.vector = vector
        self.start_T = np.array([ranges[name][0] for name in vector.names], np.int64)
        self.address_T = np.array([bits[name].ctypes.data for name in vector.names], np.int64)
        self.zero_T = self.address_T - (vector.first_T[:-1] + self.start_T) * vector.width
        self.bound_T2 = np.array([nan_bounds(spec) for spec in vector.specs], np.uint64)


class Held(NamedTuple):
    """Where the bits of a shadow are.

    Attributes:
        layout: The whole tensors.
        ranges: The range that is held of each.
        memory: Where these are, by width.
    """

    layout: Layout
    ranges: Mapping[str, tuple[int, int]]
    memory: Mapping[int, VectorMemory]


class Step:
    """A change of the bits of one vector: a launch of `cpu_rows.advance`, or steps that are known already."""

    def __init__(self, layout: Layout, memory: VectorMemory, taken: Taken | None, steps: Sparse | None = None) -> None:
        self.memory = memory
        self.delta: Delta | None = None  # once it has happened
        self.noted = False  # by the shadow and all snapshots
        self._layout, self._taken, self._steps = layout, taken, steps

    def take(self) -> tuple[Delta, np.ndarray, np.ndarray]:
        """Set the bits. Return the steps, what they add to fingerprints, and where they made NaN; see `cpu_rows.advance`."""
        memory, vector = self.memory, self.memory.vector
        if self._taken is None:
            assert self._steps is not None
            steps = self._steps
            gain_T, above_T = cpu_rows.add(vector, memory.zero_T, steps, memory.bound_T2)
        else:
            gain_T, above_T = cpu_rows.advance(self._taken, vector.key_T, memory.bound_T2, vector.bits_dtype)
            steps = Sparse(*self._taken.join(vector.index_dtype, vector.bits_dtype))
        self.delta = Delta(self._layout, {vector.width: steps})
        return self.delta, gain_T, above_T

    def undo(self, is_new: Callable[[str], bool]) -> list[str]:
        """Undo what has happened of the step, however far `take` came. No array of the size of the steps is allocated.

        Args:
            is_new: Whether the bits of a tensor are others than before the step.

        Returns:
            The tensors that the step touches, if it was interrupted.
        """
        memory, vector = self.memory, self.memory.vector
        if self.delta is not None:
            cpu_rows.subtract(vector, memory.zero_T, self.delta.steps[vector.width])
            return []
        if self._taken is not None:
            touched_R = self._taken.chunk_RF[self._taken.count_R > 0, 0]
            self._taken.undo(vector.bits_dtype)
            return [vector.names[t] for t in np.unique(touched_R).tolist()]
        assert self._steps is not None
        touched = vector.touched(self._steps.at_K)
        if any(map(is_new, touched)):
            cpu_rows.subtract(vector, memory.zero_T, self._steps)
        return touched


class _Launch(NamedTuple):
    """Tensors of a `_Table` that are compared together.

    Attributes:
        low, high: Bounds of the tensors in the stream.
        cast: Which of them have to be copied first, because they have another dtype or are not contiguous.
        rows: By width, the places of tensors between `low` and `high`, and their rows for `cpu_rows.chunks`, in the order of
            the vector; the address of the new bits is missing.
    """

    low: int
    high: int
    cast: list[int]
    rows: dict[int, tuple[np.ndarray, np.ndarray]]


class _Table:
    """Tensors of a stream on the host that were checked and found to be those of the shadow.

    Attributes:
        large: Place in the stream and name of large tensors that have to be copied first; `rows` leaves them out.
    """

    def __init__(
        self, held: Held, parts: Sequence[tuple[str, TensorRange]], tensors: Tensors, dtype: str, rank: int
    ) -> None:
        # All that was checked about plain tensors, but their addresses. Others are checked each time.
        self._read_as: tuple[str, int] | None = None
        self._known: list[tuple[str, Any, torch.dtype, torch.Size, bool]] = []
        if all(part.held is tensor for (_, part), (_, tensor) in zip(parts, tensors, strict=True)):
            self._read_as = dtype, rank
            self._known = [
                (name, type(new), new.dtype, new.shape, new.is_contiguous())
                for (name, _), (_, part) in zip(tensors, parts, strict=True)
                for new in (part.held,)
            ]
        self._dtypes = [held.layout.specs[name].dtype for name, _ in parts]
        count_S = self._count_S = np.array([part.held.numel() for _, part in parts], np.int64)
        place_S2 = np.array([held.layout.places[name] for name, _ in parts], np.int64).reshape(-1, 2)
        is_cast = [
            not part.held.is_contiguous() or part.held.dtype is not _DTYPES[dtype]
            for (_, part), dtype in zip(parts, self._dtypes, strict=True)
        ]
        is_large_S = np.array(is_cast, bool) & (count_S > _COPIED)
        self.large = [(at, parts[at][0]) for at in np.flatnonzero(is_large_S).tolist()]
        copied_S = np.cumsum(np.where(is_cast, count_S, 0) * ~is_large_S)
        edges = np.flatnonzero(np.diff(copied_S // _COPIED, prepend=0)).tolist()
        self._launches = []
        for low, high in itertools.pairwise([*dict.fromkeys((0, *edges)), len(parts)]):
            rows = {}
            for width, memory in held.memory.items():
                at_R = np.flatnonzero((place_S2[low:high, 0] == width) & ~is_large_S[low:high])
                at_R = at_R[np.argsort(place_S2[low:high, 1][at_R])]
                tensor_R, count_R = place_S2[low:high, 1][at_R], count_S[low:high][at_R]
                columns = tensor_R, memory.start_T[tensor_R], count_R, memory.address_T[tensor_R], np.zeros_like(tensor_R)
                rows[width] = at_R, np.stack(columns, axis=1)
            cast_S = [at for at in range(low, high) if is_cast[at] and not is_large_S[at]]
            self._launches.append(_Launch(low, high, cast_S, rows))

    def held(self, tensors: Collection[Any], dtype: str, rank: int) -> list[torch.Tensor] | None:
        """Return the tensors of a stream if they differ from those of the table in their addresses and bits alone.

        No object is made and kept for a tensor, because thousands of new objects set off the garbage collector.
        """
        found: list[torch.Tensor] = []
        if self._read_as != (dtype, rank) or len(tensors) != len(self._known):
            return None
        for pair, (known, kind, dtype_, shape, contiguous) in zip(tensors, self._known, strict=True):
            if type(pair) is not tuple or len(pair) != 2:
                return None
            name, tensor = pair
            if (
                type(tensor) is not kind
                or name != known
                or tensor.dtype is not dtype_
                or tensor.shape != shape
                or tensor.is_contiguous() is not contiguous
                or not tensor.is_cpu
                or is_marked(tensor)
            ):
                return None
            found.append(tensor)
        return found

    def rows(self, held: Sequence[torch.Tensor]) -> Iterator[tuple[int, np.ndarray]]:
        """Yield rows for `cpu_rows.chunks` by width, with the addresses of these tensors, which are those of the table."""
        for low, high, cast_S, rows in self._launches:
            address_S = np.fromiter(map(torch.Tensor.data_ptr, held[low:high]), np.int64, high - low)
            for at in np.flatnonzero((address_S == 0) & (self._count_S[low:high] > 0)).tolist():
                readable(self._known[low + at][0], held[low + at])  # which raises: the memory was freed since
            copies = {at: cast(held[at], self._dtypes[at]).contiguous() for at in cast_S}
            for at, copy in copies.items():
                address_S[at - low] = copy.data_ptr()
            for width, (at_R, row_RF) in rows.items():
                if at_R.size:
                    row_RF[:, 4] = address_S[at_R]
                    yield width, row_RF


class Detector:
    """Compares streams with a shadow's bits."""

    def __init__(self, held: Held) -> None:
        self.copies = DeviceCopies()
        self._shadow = held
        self._table: _Table | None = None
        # Of tensors that come one by one and wait for a launch: rows without addresses of the shadow, and the tensors.
        self._rows: dict[int, list[tuple[int, int, int, int]]] = {}
        self._held: list[torch.Tensor] = []
        self._count = self._copied_bytes = 0
        self._found: dict[int, list[tuple[int, np.ndarray, np.ndarray]]] = {}

    def take(self, stream: Stream, dtype: str, rank: int, placement: str) -> Iterator[Step]:
        """Yield the steps from the shadow's bits to the stream's. The caller takes each of them before the next one.

        Raises:
            ModelMismatchError: the stream holds other tensors, or other ranges of them.
        """
        self._clear()
        tensors, dtype = served_tensors(stream, dtype)
        lasting = tensors if isinstance(tensors, ItemsView | Sequence) else None
        on_host = placement == "host" or (placement == "auto" and "cpu" not in kernels.ACCELERATORS)
        if on_host and lasting is not None and self._table is not None:
            held = self._table.held(lasting, dtype, rank)
            if held is not None:
                yield from self._together(self._table, held)
                return
        is_lasting = stays(tensors)
        self.copies.begin(placement)
        seen: dict[str, TensorSpec] = {}
        parts = self._known(parts_of(tensors, dtype, rank, seen, self._shadow.layout.specs), seen)
        if on_host and lasting is not None and is_lasting:
            listed = list(parts)
            if all(part.held.is_cpu for _, part in listed):
                check_specs(self._shadow.layout.specs, seen, "The published model")
                self._table = _Table(self._shadow, listed, lasting, dtype, rank)
                yield from self._together(self._table, [part.held for _, part in listed])
                return
            parts = iter(listed)
        for name, part in parts:
            spec = self._shadow.layout.specs[name]
            if on_host and part.held.is_cpu:
                self.copies.forget(name)
                yield from self._add(name, part.held, spec, is_lasting)
            else:
                yield from self._different(self.copies.differences(name, part.held, spec.dtype, placement, is_lasting))
        yield from self._different(self.copies.rest())
        yield from self._flush()
        check_specs(self._shadow.layout.specs, seen, "The published model")

    def _known(
        self, parts: Iterable[tuple[str, TensorRange]], seen: Mapping[str, TensorSpec]
    ) -> Iterator[tuple[str, TensorRange]]:
        """Yield the parts of tensors that are the shadow's. `check_specs` refuses the others, once the stream was read."""
        shadow = self._shadow
        for name, part in parts:
            if seen[name] is not shadow.layout.specs.get(name):
                continue
            if shadow.ranges[name] != (part.start, part.stop):
                raise ModelMismatchError(
                    f"{name} was published from element {shadow.ranges[name][0]} on by this rank, and now comes from "
                    f"{part.start} on."
                )
            yield name, part

    def _together(self, table: _Table, held: Sequence[torch.Tensor]) -> Iterator[Step]:
        self.copies.clear()  # which would be left behind
        for width, row_RF in table.rows(held):
            yield from self._launch(width, row_RF)
        for at, name in table.large:  # piece by piece, so that copies take little memory
            yield from self._add(name, held[at], self._shadow.layout.specs[name], lasting=True)
        yield from self._flush()

    def _launch(self, width: int, row_RF: np.ndarray) -> Iterator[Step]:
        memory = self._shadow.memory[width]
        for taken in cpu_rows.chunks(row_RF, memory.vector.first_T, memory.vector.bits_dtype):
            yield Step(self._shadow.layout, memory, taken)

    def _add(self, name: str, held: torch.Tensor, spec: TensorSpec, lasting: bool, first: int = 0) -> Iterator[Step]:
        """Add elements on the host, from element `first` of a tensor's range on, in any dtype.

        Their memory may change after return unless it is lasting.
        """
        start, count = self._shadow.ranges[name][0] + first, held.numel()
        if held.is_contiguous() and held.dtype is _DTYPES[spec.dtype]:
            if not lasting and count <= _COPIED:
                held = held.detach().clone()
                self._copied_bytes += held.nbytes
            yield from self._row(name, start, held)
            if not (lasting or count <= _COPIED):
                yield from self._flush()
            return
        for at, piece in pieces(held):
            new = cast(piece, spec.dtype).contiguous()
            new = new if lasting or new.data_ptr() != piece.data_ptr() else new.clone()
            self._copied_bytes += new.nbytes
            yield from self._row(name, start + at, new)

    def _row(self, name: str, start: int, new: torch.Tensor) -> Iterator[Step]:
        """Add contiguous elements in the served dtype, from index `start` of the tensor on."""
        width, number = self._shadow.layout.places[name]
        self._rows.setdefault(width, []).append((number, start, new.numel(), new.data_ptr()))
        self._held.append(new)
        self._count += new.numel()
        if self._count >= _BATCH or self._copied_bytes >= _COPIES_BYTES:
            yield from self._flush()

    def _different(self, differences: Iterator[Difference]) -> Iterator[Step]:
        """Add what `DeviceCopies` found: where ranges differ and by which steps, or their new values."""
        for name, at_K, data in differences:
            if isinstance(data, torch.Tensor):
                spec = self._shadow.layout.specs[name]
                for first, piece in on_host(data, spec.dtype):
                    yield from self._add(name, piece, spec, lasting=False, first=first)
            elif at_K is not None and at_K.size:
                width, number = self._shadow.layout.places[name]
                self._found.setdefault(width, []).append((number, at_K, data))

    def _flush(self) -> Iterator[Step]:
        """Yield the steps of all that was added."""
        for width, found in self._found.items():
            memory = self._shadow.memory[width]
            first_T, index = memory.vector.first_T[:-1] + memory.start_T, memory.vector.index_dtype
            found.sort(key=lambda item: item[0])
            at_K = np.concatenate([at_K.astype(index) + index.type(first_T[t]) for t, at_K, _ in found])
            steps = Sparse(at_K, np.concatenate([step_K for *_, step_K in found]))
            yield Step(self._shadow.layout, memory, None, steps)
        for width, given in self._rows.items():
            row_R4 = np.array(sorted(given), np.int64)
            memory, tensor_R = self._shadow.memory[width], row_R4[:, 0]
            address_R = memory.address_T[tensor_R] + (row_R4[:, 1] - memory.start_T[tensor_R]) * width
            yield from self._launch(width, np.insert(row_R4, 3, address_R, axis=1))
        self._clear()

    def _clear(self) -> None:
        self._rows, self._held, self._count, self._copied_bytes, self._found = {}, [], 0, 0, {}


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
