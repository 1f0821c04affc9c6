"""The classes of a group of blocks and their tables.

The class of an element follows from a field of its old bits, (bits >> shift) & mask (`_FIELDS`): the exponent. A class is
the elements whose field is from `first` to `last`; its level q says that about one in 2**(q / 8) changes. In bytes:

    number of classes less one
    first, last and level of each class, ascending and without overlap; an element of no class does not change
    the table of gaps and that of steps of each class, by descending level, equal ones ascending (`tables`)
"""

from __future__ import annotations

import numpy as np

from deltasync.codec import tables
from deltasync.errors import CorruptDataError
from deltasync.kernels import native
from deltasync.kernels.rans import LEVELS, Classes, Costs, ratios

_FIELDS = {
    "bfloat16": (7, 0xFF),
    "float16": (10, 0x1F),
    "float32": (23, 0xFF),
    "float64": (55, 0xFF),  # the upper 8 bits of the exponent
    "float8_e4m3fn": (3, 0x0F),
    "float8_e5m2": (2, 0x1F),
}

COSTS: Costs = 300.0, 12.0, 4e-5


def field(dtype: str) -> tuple[int, int]:
    """Return shift and mask of the field of a dtype; integers have one class."""
    return _FIELDS.get(dtype, (0, 0))


class Model:
    """The classes of a group, by descending level.

    Attributes:
        classes: Which elements are of which class.
        level_C: Their levels, int64.
        ratio_CC: See `native.encode`.
    """

    def __init__(self, first_C: np.ndarray, last_C: np.ndarray, level_C: np.ndarray) -> None:
        order = np.argsort(-level_C, kind="stable")
        self._rows = np.stack((first_C, last_C, level_C), axis=1)
        first_C, last_C, level_C = first_C[order], last_C[order], level_C[order]
        self.level_C = level_C
        self.classes = Classes(first_C.astype(np.uint8), (last_C - first_C).astype(np.uint8))
        self.ratio_CC = ratios(level_C)

    @classmethod
    def read(cls, data: bytes, count: int) -> tuple[list[Model], np.ndarray]:
        """Read the classes of so many groups and no more, and the slots of all their tables, int64[T, 256]."""
        parsed, models = tables.Parsed(data), []
        for _ in range(count):
            classes = int(parsed.bytes(1)[0]) + 1
            first_C, last_C, level_C = parsed.bytes(3 * classes).reshape(-1, 3).astype(np.int64).T
            if (first_C > last_C).any() or (first_C[1:] <= last_C[:-1]).any() or level_C.max() > LEVELS:
                raise CorruptDataError(
                    "Payload tables have classes that are not ascending, or of a level that does not exist."
                )
            models.append(cls(first_C, last_C, level_C))
            parsed.skip(2 * classes)
        parsed.finish()
        return models, parsed.freq_TS()

    def to_bytes(self, freq_TS: np.ndarray) -> bytes:
        """Return the bytes of a group, with the slots of its tables."""
        return self.head() + tables.all_bytes(freq_TS)[0].tobytes()

    def head(self) -> bytes:
        """Return the bytes before those of the tables."""
        return bytes([len(self._rows) - 1]) + self._rows.astype(np.uint8).tobytes()


def groups(
    element_RE: np.ndarray, value_V: np.ndarray, step_RVS: np.ndarray, bound_P: np.ndarray | None = None
) -> tuple[np.ndarray, list[Model]]:
    """Return the first run of each group, and its classes: those in which changes take the fewest bits.

    Args:
        element_RE: See `kernels.native.groups`.
        value_V: See there.
        step_RVS: See there; symbols that no step has may be left out.
        bound_P: See there; None for one payload.
    """
    bound_P = np.array([0, len(element_RE)]) if bound_P is None else bound_P
    first_G, found = native.groups(bound_P, element_RE, value_V, step_RVS, COSTS)
    return first_G, [Model(*each) for each in found]
