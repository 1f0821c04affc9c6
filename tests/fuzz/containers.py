"""What fuzzed inputs are made of: safetensors files, records, JSON, and bundles (several objects by name, as
msgpack).
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import msgspec

Parts = dict[str, bytes]


def bundle(parts: Parts) -> bytes:
    return msgspec.msgpack.encode(parts)


def unbundle(data: bytes) -> Parts:
    """Nothing for what is no bundle."""
    try:
        return msgspec.msgpack.decode(data, type=Parts)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}


def split(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Header and data of a safetensors file that is well formed enough to be taken apart."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    if length > len(data) - 8 or not isinstance(header, dict):
        raise ValueError
    return header, data[8 + length :]


def join(header: dict[str, Any], body: bytes) -> bytes:
    encoded = json.dumps(header).encode()
    return len(encoded).to_bytes(8, "little") + encoded + body


def split_record(data: bytes) -> tuple[dict[str, Any], bytes, dict[str, Any]]:
    """Header, data of the entries before the document, and document of a record that is whole enough to be
    taken apart.
    """
    length = int.from_bytes(data[-8:], "little")
    document = json.loads(data[-8 - length : -8])
    header, body = split(data)
    if (
        not 0 < length <= len(data) - 8
        or not isinstance(document, dict)
        or not isinstance(header[".record"], dict)
    ):
        raise ValueError
    return header, body[: -8 - length], document


def join_record(header: dict[str, Any], body: bytes, document: dict[str, Any]) -> bytes:
    """A record whose lengths and digests are right, apart from what `header` says of other entries."""
    length = 0
    while True:
        header[".record"] = {
            "dtype": "U8",
            "shape": [length + 8],
            "data_offsets": [len(body), len(body) + length + 8],
        }
        front = join(header, body)
        document |= {"body_bytes": len(front), "body_sha256": hashlib.sha256(front).hexdigest()}
        text = json.dumps(document).encode("utf-8", "surrogatepass")
        if len(text) == length:
            return front + text + length.to_bytes(8, "little")
        length = len(text)
