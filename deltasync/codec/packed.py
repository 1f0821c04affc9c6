"""`packed`: gaps and ULP steps, entropy coded block by block; needs no old value to decode.

The arrays are those of `blocks`; `.blocks` has two columns, and the tables of a group are that of its gaps, then that of
its steps (`tables` describes their bytes). The stream of a block holds, for each changed element in ascending order,

- the gap: the number of unchanged elements between it and the one before, in the first one's case the start of the block;
- the step: new minus old bit pattern modulo 2**width as a signed number, 1, -1, 2, -2 -> 1, 0, 3, 2;

each as a bucket, 12 bits of the state by the group's table, and the bits below it. Bucket s below 16 is the number s;
bucket s from 16 on holds numbers from (4 + s % 4) << e to ((5 + s % 4) << e) - 1 with e = s // 4 - 2, and their low e bits
follow, from the top, in groups of 24 and a last one of what is left, each a uniform symbol (start = value, freq = 1, bits =
size of the group).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import ClassVar

import numpy as np

from deltasync.codec import blocks as shared
from deltasync.codec import tables
from deltasync.codec.base import OldBits, Payload, Wanted
from deltasync.codec.blocks import BlockEncoder, Change
from deltasync.kernels import coder
from deltasync.kernels.coder import Blocks, Tables
from deltasync.types import Patch, TensorSpec


class PackedModel:
    """See `blocks.Model`."""

    codec: ClassVar[str] = "packed"
    block_fields: ClassVar[int] = 2

    def __init__(self, freq_TS: np.ndarray) -> None:
        self.tables = Tables.of(freq_TS)

    @classmethod
    def group(cls, change: Change) -> Hashable:
        """Width and density to the next power of two."""
        return change.step_K.itemsize, round(math.log2(change.new.size / change.index_K.size))

    @classmethod
    def fit(cls, changes: Sequence[Change]) -> PackedModel:
        """See `blocks.Model.fit`."""
        count_TS = np.sum([coder.count_packed(change.blocks, change.index_K, change.step_K) for change in changes], axis=0)
        return cls(np.stack([tables.fit(count_S) for count_S in count_TS]))

    @classmethod
    def read(cls, cursor: tables.Cursor) -> PackedModel:
        """See `blocks.Model.read`."""
        return cls(np.stack([cursor.table(), cursor.table()]))

    def to_bytes(self) -> bytes:
        """See `blocks.Model.to_bytes`."""
        return b"".join(tables.to_bytes(freq_S) for freq_S in self.tables.freq_TS)

    def encode(self, change: Change) -> tuple[np.ndarray, np.ndarray]:
        """See `blocks.Model.encode`."""
        words, count_B = coder.encode_packed(change.blocks, change.index_K, change.step_K, self.tables)
        return words, np.stack([np.diff(change.blocks.bound_B), count_B], axis=1).astype(np.int32)

    def decode(
        self,
        spec: TensorSpec,
        blocks: Blocks,
        row_BF: np.ndarray,
        words: np.ndarray,
        word_B: np.ndarray,
        old: OldBits | None,
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """See `blocks.Model.decode`."""
        index_K, step_K = shared.outputs(spec, blocks)
        return (index_K, step_K) if coder.decode_packed(blocks, words, word_B, self.tables, index_K, step_K) else None


class PackedCodec:
    """See `Codec`."""

    name = "packed"
    needs_old = False

    def encoder(self) -> BlockEncoder:
        """See `Codec.encoder`."""
        return BlockEncoder(PackedModel)

    def decode(
        self,
        payload: Payload,
        specs: Mapping[str, TensorSpec],
        old: OldBits | None = None,
        wanted: Wanted | None = None,
    ) -> Iterator[Patch]:
        """See `Codec.decode`."""
        return shared.decode(PackedModel, payload, specs, old, wanted)
