"""Compute the changed fraction of each layer from the tables in a version's payloads. Blocks are not read."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from deltasync.channel.documents import DeltaFiles, File
from deltasync.errors import CorruptDataError
from deltasync.opening.ranges import RangedFile
from deltasync.stores.base import ObjectInfo, Store
from deltasync.tensors import Layout

_NUMBERED = re.compile(r"(?:[^.]+\.)*?\d+(?=\.)")


def layer_of(name: str) -> str:
    """Return the layer of a tensor: its name up to the first number, or else without the last part.

    `model.layers.3.mlp.experts.7.up_proj.weight` belongs to `model.layers.3`, `lm_head.weight` to `lm_head`.
    """
    numbered = _NUMBERED.match(name)
    return numbered[0] if numbered else name.rpartition(".")[0] or name


def _read_changed(store: Store, file: File, layout: Layout) -> dict[str, int]:
    """Return the changed elements of each tensor, from the tables of a record or part.

    The result is empty for a record whose payload is in parts. Only the header and the counts are read, so no
    digest is checked.
    """
    try:
        data = RangedFile(file.bytes, functools.partial(store.read_range, file.key)).header()
        size = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:size])
        metadata = header.get("__metadata__", {})
        if "vectors" not in metadata:
            return {
                name: int(row["changed"]) for name, row in json.loads(metadata.get("patches", "{}")).items()
            }
        found: dict[str, int] = {}
        for width, row in json.loads(metadata["vectors"]).items():
            names = layout.vectors[int(width)].names[row["tensor"] :][: row["tensors"]]
            if f".{width}.tensors" in header:
                flags = np.unpackbits(
                    _entry(store, file, header, size, f".{width}.tensors"), bitorder="little"
                )
                names = tuple(name for name, flag in zip(names, flags, strict=False) if flag)
            found |= dict(
                zip(names, _entry(store, file, header, size, f".{width}.counts").tolist(), strict=True)
            )
        return found
    except (CorruptDataError, KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptDataError(f"The header of {file.key} cannot be read: {error!r}.") from error


def changed_of(store: Store, info: ObjectInfo, delta: DeltaFiles, layout: Layout) -> Counter[str]:
    """Return the changed elements of each tensor in a version, from its record's entry in a listing and its
    parts.
    """
    found = Counter[str]()
    for file in (File(key=info.key, bytes=info.bytes, sha256=""), *delta.parts):
        found.update(_read_changed(store, file, layout))
    return found


_ENTRY_DTYPES = {"U8": "u1", "I32": "<i4", "I64": "<i8"}


def _entry(store: Store, file: File, header: Mapping[str, Any], start: int, key: str) -> np.ndarray:
    """Read one entry of a safetensors file."""
    first, last = header[key]["data_offsets"]
    if not 0 <= first <= last <= file.bytes - start:
        raise ValueError(f"{key} has wrong offsets")
    return np.frombuffer(
        store.read_range(file.key, start + first, start + last), _ENTRY_DTYPES[header[key]["dtype"]]
    )


def by_layer(counts: Iterable[tuple[str, int]]) -> Counter[str]:
    """Add up (tensor, count) pairs for each layer, in the order of the tensors."""
    found = Counter[str]()
    for name, count in counts:
        found[layer_of(name)] += count
    return found


@dataclasses.dataclass(slots=True)
class Heat:
    """The changed fractions of the layers of a channel's newest versions.

    Attributes:
        last: The number of versions to read.
        layers: The number of elements of each layer.
        fractions: By version, the changed fraction of each layer.
        tried: Versions whose headers were read since the last listing, damaged or not.
    """

    last: int
    layers: Counter[str] = dataclasses.field(default_factory=Counter)
    fractions: dict[int, list[float]] = dataclasses.field(default_factory=dict)
    tried: set[int] = dataclasses.field(default_factory=set)

    def note(self, version: int, changed: Mapping[str, int]) -> None:
        """Note the changed elements of each tensor in a version."""
        found = by_layer(changed.items())
        self.fractions[version] = [
            float(f"{found[layer] / max(count, 1):.4g}") for layer, count in self.layers.items()
        ]
