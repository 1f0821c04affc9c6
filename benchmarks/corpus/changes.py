"""What the steps of a run change: how much, where, by how much, in which direction, and what changes again.

Shape suffixes: N elements of the model, K changed elements, T tensors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from deltasync.tensors import TensorSpec

ULPS = (1, 2, 4, 8, 16)
"""Upper ends of the classes by which step sizes are counted; larger ones are counted together."""


class Trace:
    """Follows a run step by step.

    Args:
        specs: The tensors in the order of the bits.
        first_N: The bits of the first version, uint16; not changed.
    """

    def __init__(self, specs: Mapping[str, TensorSpec], first_N: np.ndarray) -> None:
        self._names = list(specs)
        self._count_T = np.array([spec.element_count for spec in specs.values()])
        self._first_T = np.cumsum(self._count_T) - self._count_T
        self._start_N = first_N
        self._old_N = first_N
        self._before_N = first_N.copy()  # bits before the last change
        self._last_N = np.zeros(first_N.size, np.uint8)  # the step that changed it last; 0 for none
        self._grew_N = np.zeros(first_N.size, np.bool_)  # whether this change raised the pattern
        self._changed_T = np.zeros(len(specs), np.int64)  # over all steps
        self._steps = 0

    def add(self, new_N: np.ndarray) -> dict[str, Any]:
        """Take the bits after one more step, which are kept, and return the counts of what it changed."""
        at_K = np.flatnonzero(self._old_N != new_N)
        old_K, new_K = self._old_N[at_K], new_N[at_K]
        ulp_K = (new_K - old_K).view(np.int16)
        grew_K, size_K = ulp_K > 0, np.abs(ulp_K.astype(np.int32))
        last_K = self._last_N[at_K]
        just_K = (last_K == self._steps) & (last_K > 0)
        changed_T = np.diff(np.searchsorted(at_K, self._first_T), append=at_K.size)
        found = {
            "changed": at_K.size,
            "by_kind": _summed(map(kind, self._names), changed_T),
            "by_ulps": np.bincount(np.searchsorted(ULPS, size_K), minlength=len(ULPS) + 1).tolist(),
            "grew": int(grew_K.sum()),  # the pattern, and so the magnitude, unless the sign changed
            "sign_changed": int((((old_K ^ new_K) >> 15) != 0).sum()),
            "changed_before": int((last_K > 0).sum()),
            "changed_in_the_step_before": int(just_K.sum()),
            # as in the step before
            "in_the_same_direction": int((just_K & (grew_K == self._grew_N[at_K])).sum()),
            # to the bits before the last change
            "returned": int(((last_K > 0) & (new_K == self._before_N[at_K])).sum()),
        }
        self._steps += 1
        self._before_N[at_K], self._last_N[at_K], self._grew_N[at_K] = old_K, self._steps, grew_K
        self._changed_T += changed_T
        self._old_N = new_N
        return found

    def total(self) -> dict[str, Any]:
        """Return the counts of the whole run."""
        ever_N = self._last_N > 0
        return {
            "steps": self._steps,
            "ever_changed": int(ever_N.sum()),
            "as_at_the_start": int((ever_N & (self._old_N == self._start_N)).sum()),  # of these, at the end
            "changes_by_layer": _summed(map(layer, self._names), self._changed_T),
            "changes_by_kind": _summed(map(kind, self._names), self._changed_T),
            "elements_by_layer": _summed(map(layer, self._names), self._count_T),
            "elements_by_kind": _summed(map(kind, self._names), self._count_T),
        }

    def history(self) -> np.ndarray:
        """Return the history as `benchmarks.codec.simulate.update_history` has it, int8[N]."""
        age_N = np.minimum(self._steps + 1 - self._last_N.astype(np.int16), 127).astype(np.int8)
        return np.where(self._last_N > 0, np.where(self._grew_N, age_N, -age_N), np.int8(0))


def kind(name: str) -> str:
    """Return what a tensor is, such as `q_proj`."""
    return name.removesuffix(".weight").rpartition(".")[2]


def layer(name: str) -> str:
    """Return the number of a tensor's layer; what it is, if it lies in none."""
    found = re.search(r"\.(\d+)\.", name)
    return found[1] if found else kind(name)


def _summed(names: Any, count_T: np.ndarray) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, count in zip(names, count_T.tolist(), strict=True):
        found[name] = found.get(name, 0) + count
    return found
