"""`packed`: gaps and ULP steps, entropy coded block by block; decoding needs no old values.

The arrays are those of `blocks`; `.blocks` has two columns. The tables of a group are that of gaps, then that of steps
(`tables`). The stream of a block holds two numbers for each changed element, in ascending order:

- the gap: unchanged elements between it and the changed one before, or the start of the block;
- the step: new minus old bit pattern modulo 2**width, as a signed number, 1, -1, 2, -2 -> 1, 0, 3, 2.

A number is coded as a bucket, 12 bits of the state by the group's table, and extra bits. Bucket s below 16 is the number s.
Bucket s from 16 on holds the numbers from (4 + s % 4) << e to ((5 + s % 4) << e) - 1 with e = s // 4 - 2. Their low e bits
follow from the top, in groups of 24 and a last one of what is left, each a uniform symbol (start = value, freq = 1, bits =
size of the group).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import ClassVar, Self

import numpy as np

from deltasync.codec import tables
from deltasync.codec.base import Change
from deltasync.kernels import counts
from deltasync.kernels.rans import Context, Tables
from deltasync.tensors import TensorSpec


class PackedModel:
    """The two tables of a group of tensors: of gaps and of steps."""

    codec: ClassVar[str] = "packed"
    needs_old: ClassVar[bool] = False
    block_fields: ClassVar[int] = 2

    def __init__(self, freq_TS: np.ndarray) -> None:
        self.tables = Tables.of(freq_TS)

    @classmethod
    def group(cls, change: Change) -> Hashable:
        """Return the key of the group that a small tensor shares: width, and density to the nearest power of two."""
        return change.step_K.itemsize, round(math.log2(change.new.size / change.index_K.size))

    @classmethod
    def fit(cls, changes: Sequence[Change]) -> Self:
        """Return the model that codes these changes best."""
        count_TS = np.sum([counts.count_packed(change.blocks, change.index_K, change.step_K) for change in changes], axis=0)
        return cls(np.stack([tables.fit(count_S) for count_S in count_TS]))

    @classmethod
    def read(cls, cursor: tables.Cursor) -> Self:
        """Read the tables of a group."""
        return cls(np.stack([cursor.table(), cursor.table()]))

    def to_bytes(self) -> bytes:
        """Return the bytes that `read` reads."""
        return b"".join(tables.to_bytes(freq_S) for freq_S in self.tables.freq_TS)

    def for_encoding(self, change: Change) -> Context | None:
        """Return what the coder needs beside the tables."""
        return None

    def for_decoding(self, spec: TensorSpec, old_N: np.ndarray | None, row_BF: np.ndarray) -> Context | None:
        """As `for_encoding`, from the old bits of a tensor and its rows of `.blocks`."""
        return None
