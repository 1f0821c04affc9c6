"""Encodings of a delta: patches to one safetensors payload and back.

`get(name)` is the registry. A codec encodes tensor by tensor, so that the publisher never holds two copies of the
model, and decodes tensor by tensor, so that a replica never holds more than one decoded patch it did not ask for.
"""

from __future__ import annotations

from deltasync.codec.base import Codec, DeltaEncoder, OldBits, Wanted, open_payload
from deltasync.codec.context import ContextCodec
from deltasync.codec.packed import PackedCodec
from deltasync.codec.raw import RawCodec
from deltasync.errors import UnsupportedFormatError

_CODECS: dict[str, Codec] = {codec.name: codec for codec in (PackedCodec(), ContextCodec(), RawCodec())}

__all__ = ["Codec", "DeltaEncoder", "OldBits", "Wanted", "get", "open_payload"]


def get(name: str) -> Codec:
    """The codec of this name.

    Raises:
        UnsupportedFormatError: no such codec.
    """
    if name not in _CODECS:
        raise UnsupportedFormatError(f"Unknown codec {name!r}; this version reads {', '.join(_CODECS)}. Upgrade deltasync.")
    return _CODECS[name]
