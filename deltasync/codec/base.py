"""The container that all codecs share: a safetensors file and its metadata.

The `__metadata__` of a payload holds strings only:

    format        "deltasync/2"
    codec         "raw" | "packed" | "context"
    version, base_version   decimal
    changed       decimal: number of changed elements

A codec adds metadata of its own. Tensors that did not change are not named. No payload has an entry
`.record`: a record that contains a payload keeps its document there (`channel.record`).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import re
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np
from safetensors import SafetensorError

from deltasync.errors import CorruptDataError, FormatError, ModelMismatchError, StageError
from deltasync.tensors import ITEM_BYTES, SAFETENSORS_DTYPES, Region, Sparse, TensorSpec

if TYPE_CHECKING:
    import torch

FORMAT = "deltasync/2"

RECORD = ".record"
"""Name of the entry that a record adds to those of its payload."""

MOST_HEADER_BYTES = 100_000_000
"""Largest header that the safetensors library reads."""

LIBRARY_ERRORS = (SafetensorError, ValueError, KeyError, TypeError, RuntimeError, AssertionError)
"""Errors that the safetensors library, or torch below it, raises for a malformed file."""

_BITS = {
    entry: np.dtype(f"{'i' if name.startswith('int') else 'u'}{ITEM_BYTES[name]}")
    for name, entry in SAFETENSORS_DTYPES.items()
}

OldBits = Callable[[str], "Bits"]  # flat bits of a tensor before the delta, by its name
# the new flat bits of a tensor's range, by its name; its first element
NewBits = Callable[[str], tuple[np.ndarray, int]]
# the regions of a tensor to decode, by its name; None for all of it
Wanted = Callable[[str], Sequence[Region] | None]


class Bits(Protocol):
    """The flat unsigned bit patterns of a tensor, read by ranges: an array, or what makes one for each
    range.
    """

    @property
    def size(self) -> int:
        """Elements of the tensor."""

    @property
    def dtype(self) -> np.dtype:
        """Their dtype."""

    def __getitem__(self, part: slice, /) -> np.ndarray:
        """Return the elements `part.start` to `part.stop`, contiguous."""


@dataclasses.dataclass(frozen=True, slots=True)
class RangeBits:
    """The bits of a tensor of which one range is held, before steps were added. Elements outside are 0.

    Attributes:
        held: The bits of the range.
        start: Its first element.
        size: Elements of the tensor.
        steps: The steps, by flat indices; None for none.
    """

    held: np.ndarray
    start: int
    size: int
    steps: Sparse | None = None

    @property
    def dtype(self) -> np.dtype:
        """See `Bits`."""
        return self.held.dtype

    def __getitem__(self, part: slice) -> np.ndarray:
        """See `Bits`; the memory of `held` where it can be, else a copy."""
        first, last = max(part.start, self.start), min(part.stop, self.start + self.held.size)
        held_P = self.held[first - self.start : max(first, last) - self.start]
        if self.steps is None and held_P.size == part.stop - part.start:
            return held_P
        bits_P = np.zeros(part.stop - part.start, self.held.dtype)
        if held_P.size:
            bits_P[first - part.start : last - part.start] = held_P
        if self.steps is not None:
            at_K, step_K = self.steps
            if bits_P.size < self.size:
                at_K, step_K = self.steps.between(part.start, part.stop)
                at_K = at_K - at_K.dtype.type(part.start)
            bits_P[at_K] -= step_K
        return bits_P


@dataclasses.dataclass(frozen=True)
class Encoded:
    """An encoded delta: the payload's entries, which do not change any more, and its metadata."""

    arrays: dict[str, torch.Tensor]
    metadata: dict[str, str]

    @classmethod
    def of(
        cls,
        codec: str,
        version: int,
        base_version: int,
        changed: int,
        arrays: dict[str, torch.Tensor],
        extra: Mapping[str, str],
    ) -> Self:
        """Return a payload; `extra` is the codec's own metadata."""
        metadata = {
            "format": FORMAT,
            "codec": codec,
            "version": str(version),
            "base_version": str(base_version),
            "changed": str(changed),
            **extra,
        }
        return cls(arrays, metadata)

    def to_bytes(self) -> bytes:
        """Return the payload file, which is made once."""
        return self._file

    def of_record(self, record_bytes: int) -> tuple[bytes, memoryview]:
        """Return what a record with this payload has before its document: the header, and all entries but
        `.record`.

        Args:
            record_bytes: Size of the last entry `.record`.
        """
        from deltasync.tensors.bits import spec_of

        file, specs = memoryview(self._file), itertools.starmap(spec_of, self.arrays.items())
        return layout(specs, self.metadata, record_bytes)[0], file[8 + struct.unpack_from("<Q", file)[0] :]

    @functools.cached_property
    def _file(self) -> bytes:
        return b"".join(body(self.arrays, self.metadata))


@dataclasses.dataclass(frozen=True)
class Payload:
    """An opened delta payload. The container is checked; the changes are not decoded yet.

    Its arrays are views of the file, floats as unsigned bits; `dtypes` are safetensors' names.
    """

    codec: str
    version: int
    base_version: int
    changed: int
    arrays: Mapping[str, np.ndarray]
    dtypes: Mapping[str, str]
    metadata: Mapping[str, str]


def body(arrays: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> list[memoryview]:
    """Serialize a safetensors file.

    The safetensors library may put `.record` before other entries, and metadata into any order. Here entries
    of large items come first, so that all are aligned, and the same input gives the same bytes.

    Args:
        arrays: The entries, on the host.
        metadata: The `__metadata__`.

    Returns:
        Buffers to concatenate. They share memory with contiguous `arrays`.

    Raises:
        ModelMismatchError: an entry has a reserved name, or a dtype that is not supported.
    """
    from deltasync.tensors.bits import bits_of, spec_of

    head, order = layout(itertools.starmap(spec_of, arrays.items()), metadata)
    return [memoryview(head), *(bits_of(arrays[spec.name]).view(np.uint8).data for spec in order)]


def layout(
    specs: Iterable[TensorSpec], metadata: Mapping[str, str], record_bytes: int | None = None
) -> tuple[bytes, list[TensorSpec]]:
    """Return the header of a safetensors file, its length included, and the order of the tensors behind it;
    see `body`.

    `record_bytes` is the size of a last entry `.record`; None for no such entry.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    order = sorted(specs, key=lambda spec: -spec.item_bytes)
    end = 0
    for spec in order:
        if spec.name in ("__metadata__", RECORD):
            raise ModelMismatchError(f"A tensor cannot be named {spec.name!r}.")
        start, end = end, end + spec.nbytes
        header[spec.name] = _entry(SAFETENSORS_DTYPES[spec.dtype], list(spec.shape), start, end)
    if record_bytes is not None:
        header[RECORD] = _entry("U8", [record_bytes], end, end + record_bytes)
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, order


def _entry(dtype: str, shape: list[int], start: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def open_payload(data: bytes) -> Payload:
    """Parse a delta payload. Its container and header are checked, its patches are not.

    Raises:
        CorruptDataError: the file is malformed, or its metadata is incomplete or contradicts itself.
        FormatError: the payload has another format.
    """
    head = _header(data)
    metadata = _metadata(head[1])
    if metadata.get("format") != FORMAT:
        raise FormatError(f"Payload has format {metadata.get('format')!r}; this version reads {FORMAT!r}.")
    found = {name: entry for name, entry in _entries(*head, len(data)).items() if name != RECORD}
    try:
        return Payload(
            codec=metadata["codec"],
            version=_decimal(metadata["version"]),
            base_version=_decimal(metadata["base_version"]),
            changed=_decimal(metadata["changed"]),
            arrays={name: _array(data, *entry) for name, entry in found.items()},
            dtypes={name: entry[0] for name, entry in found.items()},
            metadata=metadata,
        )
    except (KeyError, ValueError) as error:
        raise CorruptDataError(f"Payload header cannot be read: {error!r}.") from error


def _decimal(text: str) -> int:
    if not re.fullmatch("[0-9]{1,20}", text):
        raise ValueError(f"{text!r:.40} is no number")
    return int(text)


def _array(data: bytes | memoryview, dtype: str, shape: tuple[int, ...], first: int, last: int) -> np.ndarray:
    array: np.ndarray = np.frombuffer(data, np.uint8)[first:last].view(_BITS[dtype]).reshape(shape)
    return np.require(array, requirements="A")


def entries(data: bytes | memoryview, size: int) -> dict[str, tuple[str, tuple[int, ...], int, int]]:
    """Return the entries of a safetensors file: safetensors' name of the dtype, shape, first byte, byte
    behind the last one.

    Args:
        data: The first bytes of the file, with all of its header.
        size: Bytes of the file.

    Raises:
        CorruptDataError: the file is malformed, or its entries do not fill it without gaps from the header to
            the end.
    """
    return _entries(*_header(data), size)


def _entries(start: int, header: Any, size: int) -> dict[str, tuple[str, tuple[int, ...], int, int]]:
    try:
        found, end = dict[str, tuple[str, tuple[int, ...], int, int]](), 0
        listed = ((name, entry) for name, entry in header.items() if name != "__metadata__")
        for name, entry in sorted(listed, key=lambda item: item[1]["data_offsets"]):
            (first, last), shape = entry["data_offsets"], entry["shape"]
            lengths = isinstance(shape, list) and all(type(length) is int and length >= 0 for length in shape)
            if (
                type(first) is not int
                or type(last) is not int
                or first != end
                or not lengths
                or last - first != math.prod(shape) * _BITS[entry["dtype"]].itemsize
            ):
                raise ValueError(f"{name!r} has wrong offsets or a wrong shape")
            found[name], end = (entry["dtype"], tuple(shape), start + first, start + last), last
        if start + end != size:
            raise ValueError("the file does not end where its last entry does")
    except (*LIBRARY_ERRORS, AttributeError, OverflowError) as error:
        raise CorruptDataError(f"Not a safetensors file: {error!r}.") from error
    return found


def _header(data: bytes | memoryview) -> tuple[int, Any]:
    """Return the byte at which the entries begin, and the parsed header."""
    try:
        (length,) = struct.unpack_from("<Q", data)
        if length > min(len(data) - 8, MOST_HEADER_BYTES):
            raise ValueError("the header is too long")
        return 8 + length, json.loads(bytes(data[8 : 8 + length]))
    except (struct.error, ValueError, RecursionError) as error:
        raise CorruptDataError(f"Not a safetensors file: {error!r}.") from error


def read_metadata(data: bytes | memoryview) -> dict[str, str]:
    """Return the `__metadata__` of a safetensors file in memory; the library reads it only from files on
    disk.

    Raises:
        CorruptDataError: the file is malformed or has no metadata.
    """
    return _metadata(_header(data)[1])


def _metadata(header: Any) -> dict[str, str]:
    metadata = header.get("__metadata__") if isinstance(header, dict) else None
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CorruptDataError("The safetensors metadata is not an object of strings.")
    return metadata


def take(payload: Payload, key: str, dtype: str, size: int) -> np.ndarray:
    """Return the bit patterns of one entry, flat.

    Args:
        payload: An opened payload.
        key: Name of the entry.
        dtype: torch's name of the dtype that it must have.
        size: Number of elements that it must have.

    Raises:
        CorruptDataError: the entry is missing, or has another dtype or size.
    """
    array = payload.arrays.get(key)
    if array is None or payload.dtypes[key] != SAFETENSORS_DTYPES[dtype] or array.size != size:
        found = "nothing" if array is None else f"{payload.dtypes[key]}[{array.size}]"
        raise CorruptDataError(f"Payload should hold {key!r} as {dtype}[{size}], found {found}.")
    return array.reshape(-1).view(f"u{array.itemsize}")


def old_bits(old: OldBits, spec: TensorSpec) -> Bits:
    """Return the old bits of a tensor, checked.

    Raises:
        StageError: they have another size or dtype.
    """
    bits_N = old(spec.name)
    if isinstance(bits_N, np.ndarray):
        bits_N = np.ascontiguousarray(bits_N).reshape(-1)
    if bits_N.size != spec.element_count or bits_N.dtype != spec.bits_dtype:
        raise StageError(f"The old bits of {spec} are {bits_N.dtype}[{bits_N.size}].")
    return bits_N
