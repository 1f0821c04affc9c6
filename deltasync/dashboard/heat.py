"""How much of each layer a version changed, by the tables in the headers of its payloads."""

from __future__ import annotations

import json
import re
import struct
from collections import Counter
from collections.abc import Iterable

from deltasync.channel.documents import File
from deltasync.codec.base import MOST_HEADER_BYTES
from deltasync.errors import CorruptDataError
from deltasync.stores.base import Store

_FIRST_BYTES = 1 << 16  # the header of some 500 patches: usually one request is enough
_NUMBERED = re.compile(r"(?:[^.]+\.)*?\d+(?=\.)")


def layer_of(name: str) -> str:
    """The layer of a tensor: its name up to the first number, or else without the last part.

    `model.layers.3.mlp.experts.7.up_proj.weight` belongs to `model.layers.3`, `lm_head.weight` to `lm_head`.
    """
    numbered = _NUMBERED.match(name)
    return numbered[0] if numbered else name.rpartition(".")[0] or name


def read_changed(store: Store, file: File) -> dict[str, int]:
    """Changed elements of each tensor, from the header of a record or part; empty for a record whose payload is in parts.

    Reads the header only, so no digest is checked.

    Raises:
        CorruptDataError: the header cannot be read.
        ObjectMissingError, StoreError: as `Store.read_range`.
    """
    data = store.read_range(file.key, 0, min(max(file.bytes, 1), _FIRST_BYTES))
    if len(data) < 8 or (size := 8 + struct.unpack_from("<Q", data)[0]) > file.bytes:
        raise CorruptDataError(f"{file.key} is not a safetensors file.")
    if size > MOST_HEADER_BYTES:
        raise CorruptDataError(f"{file.key} has a header of {size} bytes.")
    if size > len(data):
        data += store.read_range(file.key, len(data), size)
    try:
        header = json.loads(data[8:size])
        patches = header["__metadata__"]["patches"] if "__metadata__" in header else "{}"
        return {name: int(row["changed"]) for name, row in json.loads(patches).items()}
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptDataError(f"The header of {file.key} cannot be read: {error!r}.") from error


def by_layer(counts: Iterable[tuple[str, int]]) -> Counter[str]:
    """Add up (tensor, count) pairs for each layer, in the order of the tensors."""
    found = Counter[str]()
    for name, count in counts:
        found[layer_of(name)] += count
    return found
