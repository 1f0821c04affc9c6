"""The classes of groups of blocks and their tables.

The class of an element follows from a field of its old bits, (bits >> shift) & mask (`_FIELDS`): the
exponent. A class is the elements whose field is from `first` to `last`; its level q says that about one in
2**(q / 8) changes. A group in bytes:

    number of classes less one
    first, last and level of each class, ascending and without overlap; an element of no class does not change
    the table of gaps and that of steps of each class, by descending level, equal ones ascending (`tables`)
"""

from __future__ import annotations

import itertools

import numpy as np

from deltasync.codec import tables
from deltasync.errors import CorruptDataError
from deltasync.kernels.rans import LEVELS, Classes, Costs

_FIELDS = {
    "bfloat16": (7, 0xFF),
    "float16": (10, 0x1F),
    "float32": (23, 0xFF),
    "float64": (55, 0xFF),  # the upper 8 bits of the exponent
    "float8_e4m3fn": (3, 0x0F),
    "float8_e5m2": (2, 0x1F),
}

COSTS: Costs = 300.0, 12.0, 4e-5
"""See `kernels.native.groups`."""


def field(dtype: str) -> tuple[int, int]:
    """Return shift and mask of the field of a dtype; integers have one class."""
    return _FIELDS.get(dtype, (0, 0))


def read(data: bytes, count: int) -> tuple[list[np.ndarray], np.ndarray]:
    """Read the classes of so many groups and no more, as `Classes.of` takes them, and all their tables,
    int64[T, 256].
    """
    parsed, groups = tables.Parsed(data), []
    for _ in range(count):
        classes = int(parsed.bytes(1)[0]) + 1
        line_C3 = parsed.bytes(3 * classes).reshape(-1, 3).astype(np.int64)
        first_C, last_C, level_C = line_C3.T
        if (first_C > last_C).any() or (first_C[1:] <= last_C[:-1]).any() or level_C.max() > LEVELS:
            raise CorruptDataError(
                "Payload tables have classes that are not ascending, or of a level that does not exist."
            )
        groups.append(line_C3)
        parsed.skip(2 * classes)
    parsed.finish()
    return groups, parsed.freq_TS()


def to_bytes(classes: Classes, freq_TS: np.ndarray) -> list[bytes]:
    """Return the bytes of each group, with the slots of the tables of all."""
    table_N, end_T = tables.all_bytes(freq_TS)
    end_L = np.append(0, end_T)[::2].tolist()
    line_L3 = np.stack((classes.low_L, classes.low_L + classes.span_L, classes.level_L), axis=1).astype(
        np.uint8
    )
    found = []
    for low, high in itertools.pairwise(classes.bound_G.tolist()):
        line_C3 = line_L3[low:high][np.argsort(line_L3[low:high, 0])]
        found.append(
            bytes([high - low - 1]) + line_C3.tobytes() + table_N[end_L[low] : end_L[high]].tobytes()
        )
    return found
