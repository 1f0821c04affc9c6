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
from deltasync.types import TensorSpec

INLINE_BYTES = 4 << 20
"""A payload of up to so many bytes goes into its record."""

_LENGTH = struct.Struct("<Q")


@dataclasses.dataclass(frozen=True, slots=True)
class Stored:
    """One record, read or written: a version, a seal, or a fold.

    Attributes:
        key: Where it is.
        sha256: Digest of the object.
        size: Its bytes.
        record: Its document.
        data: The object's bytes, None once they are dropped; `payload` is in them.
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
        return self.record.base if self.record.anchor is None else None

    @property
    def use_anchor(self) -> bool:
        """Whether it leads to its version from nothing."""
        return self.record.anchor is not None

    @property
    def is_fold(self) -> bool:
        """Whether it lies beside the log."""
        return self.record.kind == "fold"

    @property
    def file(self) -> documents.File:
        """The object as other documents name files."""
        return documents.File(key=self.key, bytes=self.size, sha256=self.sha256)

    @property
    def payload_bytes(self) -> int:
        """Bytes to download for its bits: of the body and the parts, or of the weights."""
        return self.record.payload_bytes

    @property
    def payload_files(self) -> list[documents.File]:
        """The parts, or the weights, beside what is in the object itself."""
        record = self.record
        if record.anchor is not None:
            return record.anchor.files
        return [] if record.delta is None else record.delta.parts


def encode(record: Record, key: str, payload: Encoded | None, signer: Signer | None) -> Stored:
    """The object of a record.

    Args:
        record: Complete but for `body_bytes` and `body_sha256`.
        key: Where it will be.
        payload: What goes into it.
        signer: What it is signed with.
    """
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
    """Check an object that was read and take it apart.

    Args:
        data: All of it.
        key: Where it was.
        trusted: Keys one of which must have signed it.

    Raises:
        SignatureError: none has; nothing else in it was looked at.
        CorruptDataError: it is not a record, or contradicts itself.
        UnsupportedFormatError: as `documents.decode`.
    """
    document = _document(data, key)
    if trusted is not None:
        trusted.check(key, document)
    front = memoryview(data)[: len(data) - len(document) - _LENGTH.size]
    found = documents.decode(document, Record, key)
    if (found.body_bytes, found.body_sha256) != (len(front), sha256_hex(front)):
        raise CorruptDataError(f"{key} has another body than its document says.")
    return Stored(key, sha256_hex(data), len(data), found, data)


def document_bytes(end: bytes, key: str) -> int:
    """How many bytes at the end of an object its document takes, with its length.

    Raises:
        CorruptDataError: it does not end so.
    """
    if len(end) < _LENGTH.size:
        raise CorruptDataError(f"{key} does not end in a document.")
    return int(_LENGTH.unpack_from(end, len(end) - _LENGTH.size)[0]) + _LENGTH.size


def decode_document(end: bytes, size: int, key: str, trusted: Trusted | None) -> Record:
    """The document of an object whose end was read.

    Args:
        end: At least `document_bytes`.
        size: Of the object.
        key: Where it is.
        trusted: As in `decode`.

    Raises:
        CorruptDataError, UnsupportedFormatError: as `decode`, as far as it can be told from the document.
    """
    document = _document(end, key)
    if trusted is not None:
        trusted.check(key, document)
    found = documents.decode(document, Record, key)
    if found.body_bytes + len(document) + _LENGTH.size != size:
        raise CorruptDataError(f"{key} has another body than its document says.")
    return found


def _document(data: bytes, key: str) -> bytes:
    end = len(data) - _LENGTH.size
    length = _LENGTH.unpack_from(data, end)[0] if end >= 0 else 0
    if not 0 < length <= end:
        raise CorruptDataError(f"{key} does not end in a document.")
    return data[end - length : end]


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
    elements, names = sum(spec.element_count for spec in specs.values()), sum(len(name.encode()) for name in specs)
    return 32 * elements + (len(specs) << 12) + 64 * names + (1 << 20)
