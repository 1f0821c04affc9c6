"""What fuzzed inputs are made of: safetensors files, JSON, and bundles (several objects by name, as msgpack)."""

from __future__ import annotations

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
