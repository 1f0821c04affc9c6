"""A record as it is stored: a safetensors file whose last entry, `.record`, is the document.

    body        length of the header, header, all other entries, which are a payload
    document    JSON in one line, then its length as 8 bytes, little-endian

A reader finds the document from the end without parsing anything else. The document names the digest of the
body.
"""

from __future__ import annotations

import dataclasses
import hashlib
import struct

from deltasync.channel import documents, signing
from deltasync.channel.documents import Channel, Record, VersionId
from deltasync.channel.signing import Signer, Trusted
from deltasync.codec.base import Encoded
from deltasync.errors import ConfigError, CorruptDataError

INLINE_BYTES = 4 << 20  # largest payload that is stored inside its record, in bytes

_LENGTH = struct.Struct("<Q")
_NO_DIGEST = "0" * 64
_MOST_BODY_BYTES = (1 << 63) - 1  # a document has room to name it, so its size is known before the body's


@dataclasses.dataclass(frozen=True, slots=True)
class StoredRecord:
    """A record as an object of the store; `data` is the object's `size` bytes, or None once they were
    dropped.
    """

    key: str
    sha256: str
    size: int
    record: Record
    data: bytes | None = dataclasses.field(default=None, repr=False)

    @property
    def version(self) -> VersionId:
        """Identity of the version or, for a shortcut, of the version that it leads to."""
        record = self.record
        return VersionId(
            record.version, record.epoch, self.sha256 if record.sha256 is None else record.sha256
        )

    @property
    def base(self) -> VersionId | None:
        """The version whose bits it builds on; None for full weights, even if they follow a version in the
        log.
        """
        return None if self.use_anchor else self.record.base

    @property
    def use_anchor(self) -> bool:
        """Whether it has full weights."""
        return self.record.anchor is not None

    @property
    def is_compaction(self) -> bool:
        """Whether it is a compaction: one delta over several versions, outside the log."""
        return self.record.kind == "compaction"

    @property
    def is_shortcut(self) -> bool:
        """Whether it is a shortcut: a compaction, or the announcement of an anchor."""
        return self.record.kind in documents.SHORTCUTS


def encode(record: Record, key: str, payload: Encoded | None, signer: Signer | None) -> StoredRecord:
    """Make the object of a record to be stored at `key`; `body_bytes` and `body_sha256` are filled in
    here.
    """
    payload = payload or Encoded({}, {})
    widest = dataclasses.replace(record, body_bytes=_MOST_BODY_BYTES, body_sha256=_NO_DIGEST)
    document_bytes = len(documents.encode(widest))
    size = document_bytes if signer is None else document_bytes + signing.SIGNATURE_BYTES
    front = payload.of_record(size + _LENGTH.size)
    digest = hashlib.sha256()
    for part in front:
        digest.update(part)
    filled = dataclasses.replace(record, body_bytes=sum(map(len, front)), body_sha256=digest.hexdigest())
    document = documents.encode(filled, document_bytes)
    end = (document if signer is None else signer.seal(key, document)) + _LENGTH.pack(size)
    digest.update(end)
    data = b"".join((*front, end))
    return StoredRecord(key, digest.hexdigest(), len(data), filled, data)


def encode_checked(
    record: Record,
    key: str,
    payload: Encoded | None,
    signer: Signer | None,
    channel: Channel,
    trusted: Trusted | None,
) -> StoredRecord:
    """Make the object of a record as `encode` does, hold it to the bounds of its channel, and read its
    document back.

    Raises:
        ConfigError: the record, or the files that it names, are larger than readers allow.
        CorruptDataError: readers would refuse the document.
    """
    stored = encode(record, key, payload, signer)
    assert stored.data is not None
    for what, size, most in (
        (f"{key} has", stored.size, channel.most_bytes(key)),
        (
            f"Files named by {key} total",
            stored.record.payload_bytes - stored.record.body_bytes,
            channel.most_payload_bytes,
        ),
    ):
        if size > most:
            raise ConfigError(f"{what} {size:,} bytes; this channel allows {most:,}.")
    return dataclasses.replace(stored, record=decode_document(stored.data, stored.size, key, trusted))


def decode(data: bytes, key: str, trusted: Trusted | None) -> StoredRecord:
    """Parse and check the whole object at `key`, whose bytes are hashed once.

    Raises CorruptDataError, and reads nothing else, if `trusted` is given and none of its keys has signed it;
    CorruptDataError if it is not a record, or contradicts itself; FormatError like
    `documents.decode`.
    """
    found = decode_document(data, len(data), key, trusted)
    view = memoryview(data)
    digest = hashlib.sha256(view[: found.body_bytes])
    if found.body_sha256 != digest.hexdigest():
        raise CorruptDataError(f"{key} has another body than its document says.")
    digest.update(view[found.body_bytes :])
    return StoredRecord(key, digest.hexdigest(), len(data), found, data)


def document_bytes(end: bytes, key: str) -> int:
    """Size of the document and of its length, by the bytes at the end of an object."""
    if len(end) < _LENGTH.size:
        raise CorruptDataError(f"{key} does not end in a document.")
    return int(_LENGTH.unpack_from(end, len(end) - _LENGTH.size)[0]) + _LENGTH.size


def decode_document(end: bytes, size: int, key: str, trusted: Trusted | None) -> Record:
    """Parse and check the document at the end of an object of `size` bytes, but not the body. Raises like
    `decode`.

    `end` is the last bytes of the object, at least `document_bytes`.
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
    """`signing.signed_by` of the document in a record."""
    return signing.signed_by(_document(data, "it"))
