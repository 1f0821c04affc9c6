"""Ranges of the tensors in weight files, read piece by piece, so that memory does not grow with the largest
tensor.

A rank of a sharded trainer needs a part of each tensor. It asks the store, or the disk, for these bytes only.
They have no sha256; the ranks add up the fingerprints of their ranges, and compare the sum with that of the
version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from deltasync import limits
from deltasync.codec.base import MOST_HEADER_BYTES
from deltasync.errors import CorruptDataError
from deltasync.tensors import TensorSpec
from deltasync.threads import ahead

_GAP_BYTES = 1 << 17  # unwanted bytes that cost less than another request
_HEADER_BYTES = 1 << 16  # most headers are smaller

Ranges = Mapping[str, tuple[int, int]]
"""The elements to read of each tensor: flat index of the first one, and of the one behind the last."""

Piece = tuple[str, int, np.ndarray]
"""A tensor's name, the flat index of the piece's first element, and its bits: unsigned, flat, perhaps
read-only.
"""


class RangedFile(NamedTuple):
    """A safetensors file of `size` bytes, of which `read` returns ranges: from a first byte up to another
    one, excluded.
    """

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
        """Return the first bytes of the file, with all of its header. Raise CorruptDataError if the header is
        too long.
        """
        if self.size < 8:
            raise CorruptDataError("Not a safetensors file: it is too short.")
        data = self.read(0, min(self.size, _HEADER_BYTES))
        end = 8 + int.from_bytes(data[:8], "little")
        if end > min(self.size, MOST_HEADER_BYTES):
            raise CorruptDataError("Not a safetensors file: the header is too long.")
        return data if len(data) >= end else data + self.read(len(data), end)


def read_spans(
    file: RangedFile, wanted: Iterable[tuple[str, int, int, int, int]]
) -> Iterator[tuple[str, int, memoryview]]:
    """Read ranges of entries, in the order of the file: name, flat index of the first element, and the bytes.

    `wanted` has name, first byte of the entry, bytes of an element, and the elements: the first, and behind
    the last.
    """
    # first byte, byte behind the last, tensor, flat index of the first element
    spans = list[tuple[int, int, str, int]]()
    for name, start, width, first, last in wanted:
        step = limits.PIECE_BYTES // width
        for element in range(first, last, step):
            end = min(element + step, last)
            spans.append((start + element * width, start + end * width, name, element))
    requests: list[list[tuple[int, int, str, int]]] = []
    for span in sorted(spans):
        near = requests and span[0] - requests[-1][-1][1] <= _GAP_BYTES
        if near and span[1] - requests[-1][0][0] <= limits.PIECE_BYTES:
            requests[-1].append(span)
        else:
            requests.append([span])
    read = ahead(lambda request: file.read(request[0][0], request[-1][1]), requests, limits.PIECES_AHEAD)
    for request, data in zip(requests, read, strict=True):
        start = request[0][0]
        for first, last, name, element in request:
            yield name, element, memoryview(data)[first - start : last - start]


def read_weights(file: RangedFile, specs: Mapping[str, TensorSpec], ranges: Ranges) -> Iterator[str | Piece]:
    """Read ranges of a weight file: the name of each tensor that it holds, then the pieces."""
    # imports torch, which commands that read headers do without
    from deltasync.channel.anchors import contents

    wanted = list[tuple[str, int, int, int, int]]()
    for spec, first, _ in contents(file.header(), file.size, specs):
        wanted.append((spec.name, first, spec.item_bytes, *ranges[spec.name]))
        yield spec.name
    for name, element, data in read_spans(file, wanted):
        yield name, element, np.require(np.frombuffer(data, specs[name].bits_dtype), requirements="A")
