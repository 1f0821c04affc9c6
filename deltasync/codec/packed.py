"""The tables of a group of `context` that is coded by gaps, as `packed` codes vectors (`vector`): of gaps, then of steps."""

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

    needs_old: ClassVar[bool] = False

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
