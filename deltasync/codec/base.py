"""What all encodings share: the safetensors container, its metadata and the table of patches.

The payload is a safetensors file. Its `__metadata__` holds strings only:

    format        "deltasync/2"
    codec         "raw" | "packed" | "context"
    version, base_version   decimal
    patches       JSON: {tensor name: {"changed": K, "fingerprint": 16 hex digits after the delta, ...codec's own fields}}

plus whatever the codec adds. Tensors that did not change are not named. Payloads have no entry named `.record`; where a
payload is part of a record, that entry is the record's document, which is not this room's business.
"""

from __future__ import annotations

import dataclasses
import json
import math
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from safetensors import SafetensorError

from deltasync.errors import CorruptDataError, ModelMismatchError, UnsupportedFormatError
from deltasync.tensors import ITEM_BYTES, SAFETENSORS_DTYPES, Region, TensorSpec

if TYPE_CHECKING:
    import torch

    from deltasync.kernels.rans import Blocks

FORMAT = "deltasync/2"

RECORD = ".record"
"""The entry that a record has beside those of its payload."""

MOST_HEADER_BYTES = 100_000_000
"""What the safetensors library reads at most."""

LIBRARY_ERRORS = (SafetensorError, ValueError, KeyError, TypeError, RuntimeError, AssertionError)
"""What the safetensors library, or torch for it, raises about files that are none."""

_ITEM_BYTES = {entry: ITEM_BYTES[name] for name, entry in SAFETENSORS_DTYPES.items()}

OldBits = Callable[[str], np.ndarray]
Wanted = Callable[[str], Sequence[Region] | None]


@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    """One changed tensor, or a range of it, and the blocks of it that may have changed.

    Attributes:
        index_K: Flat indices in the tensor, or for `context` in the range, as those of the blocks; ascending in each block.
        new: New bit patterns of the range.
        start: Where the range begins.
        ways: Rows and columns of tiles, if those are the blocks.
        by_gaps: Whether it is coded as by `packed`.
    """

    spec: TensorSpec
    index_K: np.ndarray
    step_K: np.ndarray
    new: np.ndarray
    fingerprint: str
    start: int
    blocks: Blocks
    ways: tuple[int, int] | None = None
    by_gaps: bool = False

    @property
    def whole(self) -> bool:
        """Whether `new` are all elements of the tensor."""
        return self.new.size == self.spec.element_count


@dataclasses.dataclass(frozen=True, slots=True)
class Encoded:
    """An encoded delta that is not yet a file: entries and metadata of the payload (see `body`)."""

    arrays: dict[str, torch.Tensor]
    metadata: dict[str, str]

    @classmethod
    def of(
        cls,
        codec: str,
        version: int,
        base_version: int,
        rows: Mapping[str, Mapping[str, Any]],
        arrays: dict[str, torch.Tensor],
        extra: Mapping[str, str],
    ) -> Self:
        """A payload with this table of patches, and what the codec adds to the metadata."""
        metadata = {
            "format": FORMAT,
            "codec": codec,
            "version": str(version),
            "base_version": str(base_version),
            "patches": json.dumps(rows, separators=(",", ":")),
            **extra,
        }
        return cls(arrays, metadata)

    def to_bytes(self) -> bytes:
        """The payload file."""
        return b"".join(body(self.arrays, self.metadata))


@dataclasses.dataclass(frozen=True)
class Payload:
    """An opened delta payload: header checked, patches not yet decoded."""

    codec: str
    version: int
    base_version: int
    patches: Mapping[str, Mapping[str, Any]]
    arrays: Mapping[str, torch.Tensor]
    metadata: Mapping[str, str]

    @property
    def fingerprints(self) -> dict[str, int]:
        """Fingerprint of each changed tensor after the delta."""
        return {name: int(row["fingerprint"], 16) for name, row in self.patches.items()}


def body(
    arrays: Mapping[str, torch.Tensor], metadata: Mapping[str, str], record_bytes: int | None = None
) -> list[memoryview]:
    """A safetensors file, or all of a record that precedes the bytes of its document.

    The safetensors library puts entries into an order of its own, in which `.record` need not be the last, and metadata into
    any order. Here large items come first, so that all are aligned, and the same input gives the same bytes.

    Args:
        arrays: The entries, on the host.
        metadata: The `__metadata__`.
        record_bytes: Size of the last entry, `.record`, whose bytes are not included; None for none. A body does not become
            shorter by a larger one.

    Returns:
        Buffers whose concatenation it is. They share memory with contiguous `arrays`.

    Raises:
        ModelMismatchError: an entry has a name that only the format may use, or a dtype that is not supported.
    """
    from deltasync.tensors.bits import bits_of, spec_of

    head, order = layout([spec_of(name, array) for name, array in arrays.items()], metadata, record_bytes)
    return [memoryview(head), *(bits_of(arrays[spec.name]).view(np.uint8).data for spec in order)]


def layout(
    specs: Iterable[TensorSpec], metadata: Mapping[str, str], record_bytes: int | None = None
) -> tuple[bytes, list[TensorSpec]]:
    """What a safetensors file of these tensors begins with, and the order in which their bits follow it; see `body`."""
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
    """Check the container and the header of a delta payload.

    Raises:
        CorruptDataError: not a safetensors file, or its metadata is incomplete or contradicts itself.
        UnsupportedFormatError: another format.
    """
    metadata = read_metadata(data)
    if metadata.get("format") != FORMAT:
        raise UnsupportedFormatError(f"Payload has format {metadata.get('format')!r}; this version reads {FORMAT!r}.")
    try:
        payload = Payload(
            codec=metadata["codec"],
            version=int(metadata["version"]),
            base_version=int(metadata["base_version"]),
            patches=json.loads(metadata["patches"]),
            arrays={name: array for name, array in load_tensors(data).items() if name != RECORD},
            metadata=metadata,
        )
        rows = payload.fingerprints
        counts_ok = all(isinstance(row["changed"], int) and row["changed"] > 0 for row in payload.patches.values())
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptDataError(f"Payload header cannot be read: {error!r}.") from error
    if not counts_ok or len(rows) != len(payload.patches):
        raise CorruptDataError("Payload header has a patch without changed elements.")
    return payload


def load_tensors(data: bytes) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file in memory, in copies.

    Raises:
        CorruptDataError: not such a file, or with tensors that cannot be.
    """
    from safetensors.torch import load

    try:
        tensors: dict[str, torch.Tensor] = load(data)
    except LIBRARY_ERRORS as error:
        said = str(error).partition("\n")[0]
        raise CorruptDataError(f"Not a safetensors file: {said}.") from error
    return tensors


def views(data: bytes | memoryview) -> dict[str, tuple[str, tuple[int, ...], np.ndarray]]:
    """The entries of a safetensors file in memory, without a copy: safetensors' dtype, shape, bytes.

    Raises:
        CorruptDataError: not such a file, or the entries do not follow each other from the header to the end.
    """
    try:
        start, header = _header(data)
        file_B, end = np.frombuffer(data, np.uint8)[start:], 0
        found = {}
        entries = ((name, entry) for name, entry in header.items() if name != "__metadata__")
        for name, entry in sorted(entries, key=lambda item: item[1]["data_offsets"]):
            (first, last), shape = entry["data_offsets"], entry["shape"]
            lengths = isinstance(shape, list) and all(type(length) is int and length >= 0 for length in shape)
            if first != end or not lengths or last - first != math.prod(shape) * _ITEM_BYTES[entry["dtype"]]:
                raise ValueError(f"{name!r} has another place than follows")
            found[name], end = (entry["dtype"], tuple(shape), file_B[first:last]), last
        if end != file_B.size:
            raise ValueError("it does not end where its last entry does")
    except (struct.error, *LIBRARY_ERRORS, RecursionError, AttributeError, OverflowError) as error:
        raise CorruptDataError(f"Not a safetensors file: {error!r}.") from error
    return found


def _header(data: bytes | memoryview) -> tuple[int, Any]:
    """Where the entries begin, and the header as JSON."""
    (length,) = struct.unpack_from("<Q", data)
    if length > min(len(data) - 8, MOST_HEADER_BYTES):
        raise ValueError("header too long")
    return 8 + length, json.loads(bytes(data[8 : 8 + length]))


def read_metadata(data: bytes | memoryview) -> dict[str, str]:
    """The `__metadata__` of a safetensors file in memory; safetensors itself gives it only for files on disk.

    Raises:
        CorruptDataError: not such a file, or without metadata.
    """
    try:
        metadata = _header(data)[1]["__metadata__"]
    except (struct.error, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptDataError(f"Not a safetensors file with metadata: {error!r}.") from error
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CorruptDataError("The safetensors metadata is not an object of strings.")
    return metadata


def take(payload: Payload, key: str, dtype: str, size: int) -> np.ndarray:
    """Bit patterns of one flat array of the payload, checked.

    Args:
        payload: An opened payload.
        key: Entry of the safetensors file.
        dtype: torch's name of its dtype.
        size: Number of elements it must have.

    Raises:
        CorruptDataError: missing, of another dtype or another size.
    """
    from deltasync.tensors.bits import bits_of

    array = payload.arrays.get(key)
    if array is None or str(array.dtype) != f"torch.{dtype}" or array.numel() != size:
        found = "nothing" if array is None else f"{array.dtype}[{array.numel()}]"
        raise CorruptDataError(f"Payload should hold {key!r} as {dtype}[{size}], found {found}.")
    return bits_of(array)


def spec_for(specs: Mapping[str, TensorSpec], name: str, changed: int) -> TensorSpec:
    """The spec of a patch's tensor.

    Raises:
        CorruptDataError: the channel has no such tensor, or fewer elements than the patch.
    """
    spec = specs.get(name)
    if spec is None or changed > spec.element_count:
        raise CorruptDataError(f"Payload patches {changed} elements of {name!r}, which the channel does not have.")
    return spec
