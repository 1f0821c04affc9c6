"""Real deltas: some tensors of every version of two GRPO runs on SmolLM2-135M (docs/benchmarks/corpus.md).

`layers.npz.xz` holds the gate and value projections and the norms of layer 15, and every 192nd row of the
embeddings. `tests/corpus/make.py` wrote it. The weights are under the Apache License 2.0.
"""

from __future__ import annotations

import functools
import io
import json
import lzma
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from deltasync.tensors import TensorSpec

FILE = Path(__file__).with_name("layers.npz.xz")
RUNS = ("1e-6", "3e-6")
"""By learning rate."""

Bits = dict[str, np.ndarray]


@functools.cache
def _arrays() -> dict[str, np.ndarray]:
    with np.load(io.BytesIO(lzma.decompress(FILE.read_bytes()))) as found:
        return dict(found)


@functools.cache
def specs() -> dict[str, TensorSpec]:
    """The tensors, all bfloat16."""
    shapes = json.loads(bytes(_arrays()["shapes"]))
    return {name: TensorSpec(name, "bfloat16", tuple(shape)) for name, shape in shapes.items()}


def states(run: str) -> Iterator[np.ndarray]:
    """The bits of all tensors, one after the other, at the start of a run and after each step; new arrays."""
    arrays = _arrays()
    bits_N = unplaned(arrays["start"])
    yield bits_N.copy()
    at_K = np.cumsum(unplaned(arrays[f"{run} gaps"]).astype(np.int64) + 1) - 1
    step_K = unplaned(arrays[f"{run} steps"])
    step_K = (step_K >> 1) ^ -(step_K & 1)
    for number in range(int(at_K[-1]) // bits_N.size + 1):
        here_K = slice(*np.searchsorted(at_K, [number * bits_N.size, (number + 1) * bits_N.size]))
        bits_N[at_K[here_K] - number * bits_N.size] += step_K[here_K]
        yield bits_N.copy()


def by_tensor(bits_N: np.ndarray) -> Bits:
    """The bits of each tensor, flat, as views."""
    ends = np.cumsum([spec.element_count for spec in specs().values()])[:-1]
    return dict(zip(specs(), np.split(bits_N, ends), strict=True))


def planed(values_N: np.ndarray) -> np.ndarray:
    """uint16 values as their low bytes, then their high bytes, which compress better."""
    return np.concatenate([values_N & 0xFF, values_N >> 8]).astype(np.uint8)


def unplaned(planes_M: np.ndarray) -> np.ndarray:
    """The values of `planed`."""
    low_N, high_N = np.split(planes_M.astype(np.uint16), 2)
    return low_N | high_N << np.uint16(8)
