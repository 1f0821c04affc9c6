"""Codecs encode the patches of a delta as one safetensors payload, and decode it.

Importing this package does not load torch.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, TypeAlias

from deltasync.codec.base import OldBits, Wanted, open_payload
from deltasync.errors import FormatError

if TYPE_CHECKING:
    from deltasync.codec.raw import RawCodec
    from deltasync.codec.vector import VectorCodec

    Codec: TypeAlias = VectorCodec | RawCodec

__all__ = [
    "OldBits",
    "Wanted",
    "base",
    "classes",
    "get",
    "open_payload",
    "parts",
    "planes",
    "reader",
    "tables",
    "tiles",
    "vector",
]


@functools.cache
def _codecs() -> dict[str, Codec]:
    from deltasync.codec.raw import RawCodec
    from deltasync.codec.vector import VectorCodec

    return {
        "packed": VectorCodec("packed", needs_old=False),
        "context": VectorCodec("context", needs_old=True),
        "raw": RawCodec(),
    }


def get(name: str) -> Codec:
    """Return the codec with this name.

    Raises:
        FormatError: there is no such codec.
    """
    codecs = _codecs()
    if name not in codecs:
        raise FormatError(
            f"Unknown codec {name!r}; this version reads {', '.join(codecs)}. Upgrade deltasync."
        )
    return codecs[name]
