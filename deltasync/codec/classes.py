"""The classes of a group of blocks and their tables.

The class of an element follows from a field of its old bits, (bits >> shift) & mask (`_FIELDS`): the exponent. A class is
the elements whose field is from `first` to `last`; its level q says that about one in 2**(q / 8) changes. In bytes:

    number of classes less one
    first, last and level of each class, ascending and without overlap; an element of no class does not change
    the table of gaps and that of steps of each class, by descending level, equal ones ascending (`tables`)
"""

from __future__ import annotations

import itertools

import numpy as np

from deltasync.codec import tables
from deltasync.errors import CorruptDataError
from deltasync.kernels.classes import Classes
from deltasync.kernels.rans import LEVELS, Tables, ratios

_FIELDS = {
    "bfloat16": (7, 0xFF),
    "float16": (10, 0x1F),
    "float32": (23, 0xFF),
    "float64": (55, 0xFF),  # the upper 8 bits of the exponent
    "float8_e4m3fn": (3, 0x0F),
    "float8_e5m2": (2, 0x1F),
}
_GAP_TABLE_BITS = 300
_SYMBOL_BITS = 12  # of a table


def field(dtype: str) -> tuple[int, int]:
    """Return shift and mask of the field of a dtype; integers have one class."""
    return _FIELDS.get(dtype, (0, 0))


class Model:
    """The classes of a group, by descending level."""

    def __init__(self, first_C: np.ndarray, last_C: np.ndarray, level_C: np.ndarray) -> None:
        order = np.argsort(-level_C, kind="stable")
        self._rows = np.stack((first_C, last_C, level_C), axis=1)
        first_C, last_C, level_C = first_C[order], last_C[order], level_C[order]
        self.classes = Classes(first_C.astype(np.uint8), (last_C - first_C).astype(np.uint8))
        self.ratio_CC = ratios(level_C)

    @classmethod
    def fit(cls, element_E: np.ndarray, step_ES: np.ndarray) -> Model:
        """Return the classes in which changes take the fewest bits.

        Args:
            element_E: Elements with each value of the field; estimates.
            step_ES: Symbols of the steps of changed elements, by the value.
        """
        step_ES = step_ES[:, step_ES.any(axis=0)]
        changed_E = step_ES.sum(axis=1)
        element_E = np.maximum(element_E, changed_E)
        value_C = np.flatnonzero(changed_E)
        spans = [(int(value), int(value)) for value in value_C]
        steps = list(step_ES[value_C])
        bits = [float(_bits(element_E[value], steps[c])) for c, value in enumerate(value_C)]

        def join(c: int) -> tuple[float, float]:
            (first, _), (_, last) = spans[c : c + 2]
            joined = float(_bits(element_E[first : last + 1].sum(), steps[c] + steps[c + 1]))
            return joined - bits[c] - bits[c + 1], joined

        pairs = [join(c) for c in range(len(spans) - 1)]
        while pairs and min(pairs)[0] < 0:
            c = pairs.index(min(pairs))
            bits[c : c + 2] = [pairs[c][1]]
            spans[c : c + 2] = [(spans[c][0], spans[c + 1][1])]
            steps[c : c + 2] = [steps[c] + steps[c + 1]]
            del pairs[c]
            for near in (c - 1, c):
                if 0 <= near < len(pairs):
                    pairs[near] = join(near)
        first_C, last_C = np.array(spans, np.int64).T
        mean_C = [element_E[first : last + 1].sum() / changed_E[first : last + 1].sum() for first, last in spans]
        return cls(first_C, last_C, np.rint(8 * np.log2(mean_C)).astype(np.int64).clip(0, LEVELS))

    @classmethod
    def read(cls, cursor: tables.Cursor) -> tuple[Model, np.ndarray]:
        """Read the classes of a group, and the slots of their tables, uint32[2 C, 256]."""
        count = cursor.byte() + 1
        first_C, last_C, level_C = cursor.bytes(3 * count).reshape(-1, 3).astype(np.int64).T
        if (first_C > last_C).any() or (first_C[1:] <= last_C[:-1]).any() or level_C.max() > LEVELS:
            raise CorruptDataError("Payload tables have classes that are not ascending, or of a level that does not exist.")
        return cls(first_C, last_C, level_C), np.stack([cursor.table() for _ in range(2 * count)])

    def to_bytes(self, freq_TS: np.ndarray) -> bytes:
        """Return the bytes that `read` reads."""
        head = bytes([len(self._rows) - 1]) + self._rows.astype(np.uint8).tobytes()
        return head + b"".join(map(tables.to_bytes, freq_TS))

    def tables(self, freq_TS: np.ndarray) -> Tables:
        """Return the tables with these slots."""
        return Tables.of(freq_TS, self.ratio_CC)


def groups(run_R: np.ndarray, element_RE: np.ndarray, step_RES: np.ndarray) -> tuple[list[int], list[Model]]:
    """Return the first block of each group, and its classes.

    Runs of blocks are joined as long as common tables take fewer bits. Arguments are those and the results of
    `kernels.classes.survey`.
    """
    if run_R.size == 2:
        return [0], [Model.fit(element_RE[0], step_RES[0].astype(np.int64))]
    used_S = np.flatnonzero(np.bitwise_or.reduce(step_RES.reshape(-1, step_RES.shape[2])))
    step_RES = step_RES[:, :, used_S].astype(np.int64)
    firsts, found = tables.join_runs(
        zip(run_R[:-1].tolist(), zip(element_RE, step_RES, strict=True), strict=True),
        lambda one, other: (one[0] + other[0], one[1] + other[1]),
        lambda run: _all_bits(*run),
    )
    return firsts, list(itertools.starmap(Model.fit, found))


def _all_bits(element_E: np.ndarray, step_ES: np.ndarray) -> float:
    value_C = np.flatnonzero(step_ES.any(axis=1))
    step_CS = step_ES[value_C]
    return float(_bits(np.maximum(element_E[value_C], step_CS.sum(axis=1)), step_CS).sum())


def _bits(element_C: np.ndarray, step_CS: np.ndarray) -> np.ndarray:
    """Estimate what the changes of classes take, with their tables, but without the extra bits of steps."""
    changed_C = step_CS.sum(axis=-1).astype(np.float64)
    bits_C = _xlogx(element_C) - _xlogx(np.maximum(element_C - changed_C, 0)) - _xlogx(changed_C)  # which change
    bits_C = bits_C + _xlogx(changed_C) - _xlogx(step_CS).sum(axis=-1)  # the steps
    return bits_C + _GAP_TABLE_BITS + _SYMBOL_BITS * (step_CS > 0).sum(axis=-1)


def _xlogx(value: np.ndarray) -> np.ndarray:
    logged: np.ndarray = value * np.log2(np.maximum(value, 1))
    return logged
