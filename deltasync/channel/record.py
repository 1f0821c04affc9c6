"""A record as it is stored: a safetensors file whose last entry, `.record`, is the document.

    body        length of the header, header, all other entries: a payload, if there are any
    document    the last entry: JSON, one line, then its length as 8 bytes, little-endian

So the document is found from the end without parsing anything else, and it names the digest of all that is before it.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Mapping

from deltasync.channel import documents, keys, signing
from deltasync.channel.documents import Record, Version, sha256_hex
from deltasync.channel.signing import Signer, Trusted
from deltasync.codec.base import Encoded, body
from deltasync.errors import CorruptDataError
from deltasync.tensors import TensorSpec, weight_elements

INLINE_BYTES = 4 << 20
"""The largest payload that goes into its record, in bytes."""

_LENGTH = struct.Struct("<Q")


@dataclasses.dataclass(frozen=True, slots=True)
class Stored:
    """One record, read or written: a version, a seal, or a fold.

    Attributes:
        size: Bytes of the object.
        data: The object's bytes, None once they are dropped.
    """

    key: str
    sha256: str
    size: int
    record: Record
    data: bytes | None = dataclasses.field(default=None, repr=False)

    @property
    def version(self) -> Version:
        """The version that it is, or leads to."""
        record = self.record
        return Version(record.version, record.epoch, self.sha256 if record.sha256 is None else record.sha256)

    @property
    def base(self) -> Version | None:
        """The version whose bits it builds on; None for full weights."""
        return None if self.use_anchor else self.record.base

    @property
    def use_anchor(self) -> bool:
        """Whether it leads to its version from nothing."""
        return self.record.anchor is not None

    @property
    def is_fold(self) -> bool:
        """Whether it lies beside the log."""
        return self.record.kind == "fold"

    @property
    def payload_bytes(self) -> int:
        """See `Record.payload_bytes`."""
        return self.record.payload_bytes


def encode(record: Record, key: str, payload: Encoded | None, signer: Signer | None) -> Stored:
    """The object of a record, which is complete but for `body_bytes` and `body_sha256`."""
    arrays, metadata = ({}, {}) if payload is None else (payload.arrays, payload.metadata)
    document_bytes = 0
    while True:  # the header names the length of the document, and the document that of the header
        front = b"".join(body(arrays, metadata, document_bytes + _LENGTH.size))
        filled = dataclasses.replace(record, body_bytes=len(front), body_sha256=sha256_hex(front))
        document = documents.encode(filled)
        if signer is not None:
            document = signer.seal(key, document)
        if len(document) == document_bytes:
            break
        document_bytes = len(document)
    data = b"".join((front, document, _LENGTH.pack(len(document))))
    return Stored(key, sha256_hex(data), len(data), filled, data)


def decode(data: bytes, key: str, trusted: Trusted | None) -> Stored:
    """Check the whole object at `key`.

    Raises:
        SignatureError: none of the keys that are trusted, if any are, has signed it; nothing else in it was looked at.
        CorruptDataError: it is not a record, or contradicts itself.
        UnsupportedFormatError: as `documents.decode`.
    """
    found = decode_document(data, len(data), key, trusted)
    if found.body_sha256 != sha256_hex(memoryview(data)[: found.body_bytes]):
        raise CorruptDataError(f"{key} has another body than its document says.")
    return Stored(key, sha256_hex(data), len(data), found, data)


def document_bytes(end: bytes, key: str) -> int:
    """How many bytes at the end of an object its document takes, with its length."""
    if len(end) < _LENGTH.size:
        raise CorruptDataError(f"{key} does not end in a document.")
    return int(_LENGTH.unpack_from(end, len(end) - _LENGTH.size)[0]) + _LENGTH.size


def decode_document(end: bytes, size: int, key: str, trusted: Trusted | None) -> Record:
    """The document of an object of `size` bytes, of which at least the last `document_bytes` were read.

    Raises:
        SignatureError, CorruptDataError, UnsupportedFormatError: as `decode`; the body is not looked at.
    """
    document = _document(end, key)
    if trusted is not None:
        trusted.check(key, document)
    found = documents.decode(document, Record, key)
    if found.body_bytes + len(document) + _LENGTH.size != size:
        raise CorruptDataError(f"{key} has another body than its document says.")
    return found


def _document(data: bytes, key: str) -> bytes:
    size = document_bytes(data, key)
    if not _LENGTH.size < size <= len(data):
        raise CorruptDataError(f"{key} does not end in a document.")
    return data[-size : -_LENGTH.size]


def signed_by(data: bytes) -> str | None:
    """The key that a stored record says it is signed with; nothing is checked. None if it says nothing."""
    return signing.signed_by(_document(data, "it"))


def most_bytes(key: str, specs: Mapping[str, TensorSpec]) -> int:
    """Most bytes that the object of a record or fold may have."""
    names = sum(len(name.encode()) for name in specs)
    most = (5 << 20) + (len(specs) << 10) + 32 * names
    span = keys.fold_of(key)
    return most if span is None or span.base == 0 else most + most_payload_bytes(specs)


def most_payload_bytes(specs: Mapping[str, TensorSpec]) -> int:
    """Most bytes that the parts, or the weight files, of one record may have together."""
    elements, names = weight_elements(specs.values()), sum(len(name.encode()) for name in specs)
    return 32 * elements + (len(specs) << 12) + 64 * names + (1 << 20)
