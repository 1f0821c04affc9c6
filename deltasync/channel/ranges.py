"""Ranges of the tensors in weight files, read piece by piece, so that memory does not grow with the largest tensor.

A rank of a sharded trainer needs a part of each tensor. It asks the store, or the disk, for these bytes only. They have no
sha256; the ranks add up the fingerprints of their ranges, and compare the sum with that of the version.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import zstandard

from deltasync import limits
from deltasync.channel.anchors import contents
from deltasync.codec.base import MOST_HEADER_BYTES
from deltasync.codec.dense import MOST_WINDOW_BYTES
from deltasync.errors import CorruptDataError
from deltasync.tensors import TensorSpec
from deltasync.threads import ahead

_GAP_BYTES = 1 << 17  # unwanted bytes that cost less than another request
_HEADER_BYTES = 1 << 16  # most headers are smaller

Ranges = Mapping[str, tuple[int, int]]
"""The elements to read of each tensor: flat index of the first one, and of the one behind the last."""

Piece = tuple[str, int, np.ndarray]
"""A tensor's name, the flat index of the piece's first element, and its bits: unsigned, flat, perhaps read-only."""


class RangedFile(NamedTuple):
    """A safetensors file of `size` bytes, of which `read` returns ranges: from a first byte up to another one, excluded."""

    size: int
    read: Callable[[int, int], bytes]

    @classmethod
    def local(cls, path: Path) -> RangedFile:
        """Return a file on this machine. Reading raises CorruptDataError if it fails."""

        def read(first: int, last: int) -> bytes:
            try:
                with path.open("rb") as file:
                    file.seek(first)
                    data = file.read(last - first)
            except OSError as error:
                raise CorruptDataError(f"{path} cannot be read: {error.strerror}.") from error
            if len(data) < last - first:
                raise CorruptDataError(f"{path} ends before byte {last}.")
            return data

        try:
            return cls(path.stat().st_size, read)
        except OSError as error:
            raise CorruptDataError(f"{path} cannot be read: {error.strerror}.") from error

    def header(self) -> bytes:
        """Return the first bytes of the file, with all of its header. Raise CorruptDataError if the header is too long."""
        if self.size < 8:
            raise CorruptDataError("Not a safetensors file: it is too short.")
        data = self.read(0, min(self.size, _HEADER_BYTES))
        end = 8 + int.from_bytes(data[:8], "little")
        if end > min(self.size, MOST_HEADER_BYTES):
            raise CorruptDataError("Not a safetensors file: the header is too long.")
        return data if len(data) >= end else data + self.read(len(data), end)


class _Span(NamedTuple):
    """Bytes of a file that hold elements of a tensor, which are to be read in one piece."""

    first: int
    last: int
    name: str
    element: int  # flat index of the first one


def read_spans(file: RangedFile, wanted: Iterable[tuple[str, int, int, int, int]]) -> Iterator[tuple[str, int, memoryview]]:
    """Read ranges of entries, in the order of the file: name, flat index of the first element, and the bytes.

    `wanted` has name, first byte of the entry, bytes of an element, and the elements: the first, and behind the last.
    """
    spans = []
    for name, start, width, first, last in wanted:
        step = limits.PIECE_BYTES // width
        for element in range(first, last, step):
            end = min(element + step, last)
            spans.append(_Span(start + element * width, start + end * width, name, element))
    requests: list[list[_Span]] = []
    for span in sorted(spans):
        near = requests and span.first - requests[-1][-1].last <= _GAP_BYTES
        if near and span.last - requests[-1][0].first <= limits.PIECE_BYTES:
            requests[-1].append(span)
        else:
            requests.append([span])
    read = (
        ahead(lambda request: file.read(request[0].first, request[-1].last), requests, limits.PIECES_AHEAD)
        if requests
        else ()
    )
    for request, data in zip(requests, read, strict=True):
        start = request[0].first
        for span in request:
            yield span.name, span.element, memoryview(data)[span.first - start : span.last - start]


def read_weights(file: RangedFile, specs: Mapping[str, TensorSpec], ranges: Ranges) -> Iterator[str | Piece]:
    """Read ranges of a weight file, compressed or not: the name of each tensor that it holds, then the pieces."""
    plain, compressed = list[tuple[str, int, int, int, int]](), list[tuple[TensorSpec, int, list[int]]]()
    for spec, first, _, sizes in contents(file.header(), file.size, specs):
        if sizes is None:
            plain.append((spec.name, first, spec.item_bytes, *ranges[spec.name]))
        else:
            compressed.append((spec, first, sizes))
        yield spec.name
    for name, element, data in read_spans(file, plain):
        yield name, element, np.require(np.frombuffer(data, specs[name].bits_dtype), requirements="A")
    for spec, first, sizes in compressed:
        yield from _decompressed(file, first, sizes, spec, *ranges[spec.name])


def _decompressed(
    file: RangedFile, first: int, sizes: list[int], spec: TensorSpec, start: int, stop: int
) -> Iterator[Piece]:
    """Decompress the planes of a tensor from their beginning, side by side, and yield the range."""
    if start >= stop:
        return
    planes = []
    for size in sizes:
        planes.append(_Plane(file, first, first + size, spec))
        first += size
    step = limits.PIECE_BYTES // spec.item_bytes
    for at in range(0, stop, step):
        count = min(step, stop - at)
        byte_NW = np.empty((count, spec.item_bytes), np.uint8)
        for w, plane in enumerate(planes):
            byte_NW[:, w] = np.frombuffer(plane.read(count), np.uint8)
        if at + count > start:
            skipped = max(start - at, 0)
            yield spec.name, at + skipped, byte_NW.reshape(-1).view(spec.bits_dtype)[skipped:]


class _Plane:
    """One plane of a compressed tensor, read from its beginning."""

    def __init__(self, file: RangedFile, first: int, last: int, spec: TensorSpec) -> None:
        self._name = spec.name
        most = max(MOST_WINDOW_BYTES, spec.element_count)
        self._stream = zstandard.ZstdDecompressor(max_window_size=most).stream_reader(
            io.BufferedReader(_Bytes(file, first, last), 1 << 16)
        )

    def read(self, count: int) -> bytes:
        """Return the next bytes."""
        try:
            data = self._stream.read(count)
            while len(data) < count and (more := self._stream.read(count - len(data))):
                data += more
        except zstandard.ZstdError as error:
            raise CorruptDataError(f"A plane of {self._name!r} is no zstandard frame: {error}.") from error
        if len(data) != count:
            raise CorruptDataError(f"A plane of {self._name!r} is shorter than its tensor.")
        return data


class _Bytes(io.RawIOBase):
    """A part of a file as a stream, fetched in pieces."""

    def __init__(self, file: RangedFile, first: int, last: int) -> None:
        self._file, self._at, self._last = file, first, last
        self._data = memoryview(b"")

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read the next bytes into a buffer and return their number, 0 at the end."""
        if not self._data and self._at < self._last:
            end = min(self._at + limits.PIECE_BYTES // 4, self._last)
            self._data = memoryview(self._file.read(self._at, end))
            self._at = end
        count = min(len(buffer), len(self._data))
        buffer[:count], self._data = self._data[:count], self._data[count:]
        return count
