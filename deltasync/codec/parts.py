"""The entries of a payload for blocks of one vector that are coded in one way, and how they are read.

A *part* is a table of blocks, int32[B, 2] of changes and words, if smaller as byte planes (`planes`); the
words; and the tables of groups of blocks. The metadata has the first block of each group, and the sizes of
the planes.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from deltasync.codec import planes
from deltasync.codec.base import Payload, take
from deltasync.errors import CorruptDataError
from deltasync.tensors import bounds

GAPS, TILES = ("blocks", "tables", "words"), ("tiles", "tile_tables", "tile_words")
"""Entries of the parts of a vector: their table of blocks, the tables of groups, and the words."""

Coded = tuple[dict[str, torch.Tensor], dict[str, Any]]
"""Entries of a payload and what its metadata says of them."""

_MOST_ROWS = 1 << 24  # of a table of blocks in planes: small planes could ask for any amount of memory


def coded(
    kind: tuple[str, str, str],
    row_B2: np.ndarray,
    groups: Sequence[int],
    tables: bytes | bytearray,
    words: torch.Tensor,
) -> Coded:
    """Return a part.

    Args:
        kind: `GAPS` or `TILES`.
        row_B2: Changes and words of each block, int32.
        groups: First block of each group.
        tables: The bytes of their tables.
        words: The words, int32.
    """
    more_B2 = np.diff(row_B2, axis=0, prepend=np.zeros_like(row_B2[:1]))
    found = planes.compress(
        np.ascontiguousarray(((more_B2 << 1) ^ (more_B2 >> 31)).T).view(np.uint32).reshape(-1)
    )
    rows, sizes = torch.from_numpy(row_B2), None
    if found is not None and len(row_B2) <= _MOST_ROWS:
        rows, sizes = torch.frombuffer(bytearray(found[1]), dtype=torch.uint8), found[0]
    entries = rows, torch.frombuffer(bytearray(tables), dtype=torch.uint8), words
    return dict(zip(kind, entries, strict=True)), {"groups": groups, "planes": sizes}


class Part:
    """A part of an opened payload, checked but for its tables and words.

    Args:
        payload: The payload.
        width: Bytes of an element.
        kind: `GAPS` or `TILES`.
        row: Its metadata.
        count: Number of its blocks.

    Attributes:
        row_B2: Changes and words of each block.
        bound_B, word_B: Changes and words before each block, and of all.
        groups: First block of each group.
        tables: The bytes of their tables.
        words: The words of all blocks, uint32.

    Raises:
        CorruptDataError: an entry is missing or has another size, a number of changes or words is negative,
            or groups do not ascend from 0.
    """

    def __init__(
        self, payload: Payload, width: int, kind: tuple[str, str, str], row: Mapping[str, Any], count: int
    ) -> None:
        blocks, tables, words = (f".{width}.{name}" for name in kind)
        self.row_B2 = _rows(payload, blocks, count, row.get("planes"))
        self.bound_B, self.word_B = bounds(self.row_B2[:, 0]), bounds(self.row_B2[:, 1])
        self.groups = _groups(row, count)
        self.words = take(payload, words, "int32", int(self.word_B[-1]))
        if payload.dtypes.get(tables) != "U8":
            raise CorruptDataError("Payload has no uint8 tables.")
        self.tables = payload.arrays[tables].tobytes()

    @functools.cached_property
    def group_B(self) -> np.ndarray:
        """Number of each block's group, int64."""
        return np.repeat(np.arange(len(self.groups)), np.diff([*self.groups, len(self.row_B2)]))

    def words_of(self, at_B: np.ndarray) -> np.ndarray:
        """Return the first word of each of these blocks, and the one behind its last; int64[B, 2]."""
        return np.stack((self.word_B[at_B], self.word_B[at_B + 1]), axis=1)


def _rows(payload: Payload, key: str, count: int, sizes: object) -> np.ndarray:
    """Return a table of blocks, int32[count, 2], from its entry and the sizes of its planes, None for no
    planes.
    """
    if sizes is not None and count <= _MOST_ROWS:
        if not isinstance(sizes, list) or not all(isinstance(size, int) and size > 0 for size in sizes):
            raise CorruptDataError(f"The planes of {key!r} have sizes {sizes!r:.100}.")
        entry = take(payload, key, "uint8", sum(sizes))
        number_N = planes.decompress(entry, sizes, key, 2 * count)
        more_2B = ((number_N >> 1) ^ (0 - (number_N & 1))).view(np.int32).reshape(2, count)
        row_B2 = np.cumsum(more_2B, axis=1, dtype=np.int32).T
    else:
        row_B2 = take(payload, key, "int32", 2 * count).view(np.int32).reshape(count, 2)
        if payload.arrays[key].shape != row_B2.shape:
            raise CorruptDataError(f"Payload has no table of blocks {key!r}, int32[{count}, 2].")
    if (row_B2 < 0).any():
        raise CorruptDataError("Payload has a block with a negative number of changes or words.")
    return row_B2


def _groups(row: Mapping[str, Any], count: int) -> list[int]:
    match row.get("groups"):
        case [] if not count:
            return []
        case [0, *_] as groups if all(type(block) is int for block in groups):
            if all(one < other for one, other in itertools.pairwise([*groups, count])):
                return groups
    raise CorruptDataError("Payload has groups that are not ascending blocks.")


def packed(flag_N: np.ndarray) -> torch.Tensor:
    """Return bits as an entry."""
    return torch.from_numpy(np.packbits(flag_N, bitorder="little"))


def flags(payload: Payload, key: str, count: int) -> np.ndarray:
    """Return `count` bits of an entry, bool.

    Raises:
        CorruptDataError: the entry has another size, or more bits.
    """
    found = np.unpackbits(take(payload, key, "uint8", -(-count // 8)), bitorder="little").view(np.bool_)
    if found[count:].any():
        raise CorruptDataError("Payload names tensors that the channel does not have.")
    return found[:count]
