"""`context`: changed elements and their steps are coded given the exponents of the old values.

Both ends hold the old bits. The class of an element is the exponent field of its old bits, (bits >> shift) & mask
(`_CLASSES`). Class c of a block has the hazard level q(c) = clip(level of the class + level of the block, 0, 176), and
H(c) = floor(2**(q / 8)) units of time. A clock starts at 0 at the start of the block and after each changed element; an
element of class c takes H(c) units. The next change comes after t units with probability density proportional to
2**-(t / 2**20), whatever lies in between. So a change in the element that lasts from t to t + H owns the slots
[S(t), S(min(t + H, 2**22))) of 2**28. S is linear between the multiples of 2**16:

    S(j * 2**16) = 2**28 - (R[j % 16] >> j // 16),  R[i] = the largest integer with R[i]**16 <= 2**(448 - i),  j = 0 ... 64
    S(t) = S(j * 2**16) + ((t - j * 2**16) * (S((j + 1) * 2**16) - S(j * 2**16)) >> 16)

The slots from S(2**22) on are one symbol: nothing changes for 2**22 units, and t counts from there. It comes as often as
needed, before the element's symbol. The element's step follows as in `packed`, by the step table of its class.

The arrays are those of `blocks`; the third column of `.blocks` is the level of the block, signed. The tables of a group, in
bytes:

    first class; number of classes less one
    level of each of these classes, at most 176; other classes have level 0
    number of step tables, 1 to 64
    number of the step table of each of these classes; other classes have table 0
    the step tables (`tables`)
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import ClassVar, Self

import numpy as np

from deltasync.codec import tables
from deltasync.codec.base import Change
from deltasync.errors import CorruptDataError, StageError
from deltasync.kernels import counts
from deltasync.kernels.rans import HAZARD, LEVELS, Classes, Context, Tables, hazards
from deltasync.tensors import TensorSpec

_CLASSES = {
    "bfloat16": (7, 0xFF),
    "float16": (10, 0x1F),
    "float32": (23, 0xFF),
    "float64": (55, 0xFF),  # the upper 8 bits of the exponent
    "float8_e4m3fn": (3, 0x0F),
    "float8_e5m2": (2, 0x1F),
}
_ONE_CLASS = (0, 0)
_CLASS_COUNT = 256
_STEP_TABLES = 64
_STEP_TABLE_CHANGES = 512  # changed elements that justify one more step table
# Classes of large tensors are sampled: runs of 32 elements, about 2**17 in all, but at least one element in 64.
_SAMPLE_RUN, _SAMPLE_COUNT, _SAMPLE_PERIOD = 32, 1 << 17, 64


def classes_of(spec: TensorSpec) -> Classes:
    """Return how the classes of a tensor's elements follow from their bits."""
    return Classes(*map(spec.bits_dtype.type, _CLASSES.get(spec.dtype, _ONE_CLASS)))


def _class_counts(change: Change) -> np.ndarray:
    """Estimate the elements of each class, float64[C], by the new values, which hardly differ."""
    sampled = min(change.new.size // _SAMPLE_COUNT, _SAMPLE_PERIOD)
    # An odd period does not meet the same columns in every row.
    period = _SAMPLE_RUN * sampled + 1 if sampled > 1 else _SAMPLE_RUN
    count_C = counts.count_classes(change.new, classes_of(change.spec), _SAMPLE_RUN, period)
    return count_C * (change.new.size / count_C.sum())


class ContextModel:
    """The tables of a group of tensors: the level and the step table of each class. See `PackedModel`."""

    codec: ClassVar[str] = "context"
    needs_old: ClassVar[bool] = True
    block_fields: ClassVar[int] = 3

    def __init__(self, level_C: np.ndarray, table_C: np.ndarray, freq_TS: np.ndarray) -> None:
        self.level_C = level_C
        self.table_C = table_C
        self.tables = Tables.of(freq_TS)
        self._counts: dict[str, np.ndarray] = {}  # for encoding: `_class_counts` by tensor

    @classmethod
    def group(cls, change: Change) -> Hashable:
        """Return the dtype; tensors of different density may share a group, since each block has a level."""
        return change.spec.dtype

    @classmethod
    def fit(cls, changes: Sequence[Change]) -> Self:
        """See `PackedModel.fit`."""
        total_C = np.zeros(_CLASS_COUNT)
        step_CS = np.zeros((_CLASS_COUNT, tables.SYMBOLS), np.int64)
        seen = {}
        for change in changes:
            count_C = seen[change.spec.name] = _class_counts(change)
            class_count = count_C.size
            total_C[:class_count] += count_C
            step_CS[:class_count] += counts.count_steps(change.new, change.index_K, change.step_K, classes_of(change.spec))
        changed_C = step_CS.sum(axis=1)
        # Totals may be samples and count new values, so a class can seem to have fewer elements than changed.
        probability_C = ((changed_C + 0.1) / (np.maximum(total_C, changed_C) + 0.2)).clip(max=1 - 2**-4)
        level_C = np.rint(8 * np.log2(-np.log2(1 - probability_C) * (1 << 20))).clip(0, LEVELS).astype(np.int64)
        level_C[changed_C == 0] = np.minimum(level_C[changed_C == 0], level_C[changed_C > 0].min())
        level_C[(changed_C == 0) & (total_C == 0)] = 0  # costs no byte in the table
        table_C, count_TS = _merge(step_CS)
        model = cls(level_C, table_C, np.stack([tables.fit(count_S) for count_S in count_TS]))
        model._counts = seen
        return model

    @classmethod
    def read(cls, cursor: tables.Cursor) -> Self:
        """See `PackedModel.read`."""
        level_C, table_C = np.zeros(_CLASS_COUNT, np.int64), np.zeros(_CLASS_COUNT, np.int64)
        first = cursor.byte()
        count = cursor.byte() + 1
        if first + count > _CLASS_COUNT:
            raise CorruptDataError("Payload tables have classes beyond 255.")
        level_C[first : first + count] = cursor.bytes(count)
        table_count = cursor.byte()
        table_C[first : first + count] = cursor.bytes(count)
        if not 1 <= table_count <= _STEP_TABLES or table_C.max() >= table_count or level_C.max() > LEVELS:
            raise CorruptDataError("Payload tables name a level or a step table that does not exist.")
        return cls(level_C, table_C, np.stack([cursor.table() for _ in range(table_count)]))

    def to_bytes(self) -> bytes:
        """See `PackedModel.to_bytes`."""
        used = np.flatnonzero((self.level_C > 0) | (self.table_C > 0))
        first, last = (int(used[0]), int(used[-1])) if used.size else (0, 0)
        encoded = bytearray([first, last - first])
        encoded += self.level_C[first : last + 1].astype(np.uint8).tobytes()
        encoded.append(len(self.tables.freq_TS))
        encoded += self.table_C[first : last + 1].astype(np.uint8).tobytes()
        return bytes(encoded) + b"".join(tables.to_bytes(freq_S) for freq_S in self.tables.freq_TS)

    def for_encoding(self, change: Change) -> Context:
        """See `PackedModel.for_encoding`. The level of a block is that of the tensor until the coder finds a better one."""
        count_C = self._counts[change.spec.name]
        level_C, changed_B = self.level_C[: count_C.size], np.diff(change.blocks.bound_B)
        expected = count_C @ -np.expm1(HAZARD[level_C] * (-np.log(2) / (1 << 20)))
        level = min(max(round(8 * math.log2(change.index_K.size / expected)), -LEVELS), LEVELS)
        level_B = np.where(changed_B > 0, level, 0).astype(np.int32)
        rate = change.index_K.size / float(count_C @ hazards(level_C, np.array([level]))[0])
        return Context(change.new, classes_of(change.spec), self.level_C, level_B, self.table_C, rate)

    def for_decoding(self, spec: TensorSpec, old_N: np.ndarray | None, row_BF: np.ndarray) -> Context:
        """See `PackedModel.for_decoding`.

        Raises:
            StageError: `old_N` is None.
        """
        if old_N is None:
            raise StageError("This delta is coded by `context` and needs the old weights; decode it with `old`.")
        return Context(old_N, classes_of(spec), self.level_C, row_BF[:, 2], self.table_C)


def _merge(step_CS: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the step table of each class, int64[C], and each table's counts, int64[T, S].

    Neighbouring classes share a table until it has enough changes.
    """
    count_C = step_CS.sum(axis=1)
    enough = max(_STEP_TABLE_CHANGES, int(count_C.sum()) // (_STEP_TABLES - 1))
    table_C = np.zeros(len(step_CS), np.int64)
    table, found = 0, 0
    for c in np.flatnonzero(count_C):
        if found >= enough:
            table, found = table + 1, 0
        table_C[c] = table
        found += count_C[c]
    count_TS = np.zeros((table + 1, step_CS.shape[1]), np.int64)
    for c in np.flatnonzero(count_C):
        count_TS[table_C[c]] += step_CS[c]
    return table_C, count_TS
