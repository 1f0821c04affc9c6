"""How small a delta can be: what its indices and steps cost an ideal coder, given what reader and writer both
know.

An index set costs log2 of the number of sets of that size, in each class of elements that a context
distinguishes: log2 C(N, K), summed over the classes. The steps cost their empirical entropy in each class.
Both are bounds for coders that know the class counts and step frequencies for free; `Bound.model_bits` is
about what these would cost, half a log2 of the sample for each number. All figures are bits per changed
element.

A context is a function of the old weights and of earlier deltas alone. bf16 bit patterns only.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

_EXPONENT_SHIFT, _EXPONENT_MASK = 7, 0xFF  # of bfloat16
_MAX_AGE = 15


@dataclasses.dataclass(frozen=True, slots=True)
class Bound:
    """The bits per changed element that an ideal coder needs."""

    context: str  # what the coder knows of each element
    index_bits: float  # bits for which elements changed
    step_bits: float  # bits for how much they changed
    model_bits: float  # bits for the class counts and frequencies, which are not in the other two

    @property
    def total_bits(self) -> float:
        """Bits for indices and steps."""
        return self.index_bits + self.step_bits


def bounds(old_N: np.ndarray, new_N: np.ndarray, history_N: np.ndarray | None = None) -> list[Bound]:
    """Return the bounds given nothing, given the old exponent, and given more.

    Bit patterns are bfloat16, uint16; at least one differs. `history_N` is that of `simulate.update_history`;
    without it the contexts that need it are omitted.
    """
    exponent_N = (old_N >> _EXPONENT_SHIFT) & _EXPONENT_MASK
    contexts: dict[str, tuple[np.ndarray, int]] = {
        "none": (np.zeros(old_N.size, np.uint8), 1),
        "exponent": (exponent_N, 1 << 8),
        "exponent, sign": (old_N >> _EXPONENT_SHIFT, 1 << 9),
        "exponent, 1 mantissa bit": ((old_N >> 6) & 0x1FF, 1 << 9),
        "exponent, 3 mantissa bits": ((old_N >> 4) & 0x7FF, 1 << 11),
        "exponent, mantissa": (old_N & 0x7FFF, 1 << 15),
    }
    if history_N is not None:
        before_N = (history_N != 0).astype(np.uint16)
        last_N = (np.abs(history_N) == 1).astype(np.uint16)
        aged_N = np.clip(history_N, -_MAX_AGE, _MAX_AGE).astype(np.int16) + _MAX_AGE
        contexts["exponent, changed in the step before"] = (exponent_N * np.uint16(2) + last_N, 1 << 9)
        contexts["exponent, changed before"] = (exponent_N * np.uint16(2) + before_N, 1 << 9)
        contexts["exponent, age and direction of the last change"] = (
            exponent_N * np.uint16(32) + aged_N.view(np.uint16),
            1 << 13,
        )
    changed_N = old_N != new_N
    _, step_K = np.unique((new_N - old_N)[changed_N], return_inverse=True)
    if not step_K.size:
        raise ValueError("Nothing changed, so there is nothing to divide by.")
    return [_bound(name, class_N, count, changed_N, step_K) for name, (class_N, count) in contexts.items()]


def _bound(
    name: str, class_N: np.ndarray, class_count: int, changed_N: np.ndarray, step_K: np.ndarray
) -> Bound:
    class_K = class_N[changed_N]
    size_C = np.bincount(class_N, minlength=class_count)
    changed_C = np.bincount(class_K, minlength=class_count)
    mixed = np.flatnonzero((changed_C > 0) & (changed_C < size_C))
    index_bits = sum(_log2_choose(int(size_C[c]), int(changed_C[c])) for c in mixed)
    cells, seen = np.unique(class_K.astype(np.int64) * (step_K.max() + 1) + step_K, return_counts=True)
    step_bits = -float((seen * np.log2(seen / changed_C[cells // (step_K.max() + 1)])).sum())
    used = np.flatnonzero(changed_C)
    model_bits = float((np.log2(size_C[mixed] + 1) / 2).sum())
    model_bits += float(
        (np.log2(changed_C[cells // (step_K.max() + 1)]) / 2).sum() - (np.log2(changed_C[used]) / 2).sum()
    )
    return Bound(name, index_bits / step_K.size, step_bits / step_K.size + 0.0, model_bits / step_K.size)


def _log2_choose(n: int, k: int) -> float:
    return (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)) / math.log(2)
