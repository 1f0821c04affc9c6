"""Bytes of every encoding for steps and compactions of a run. Each payload is decoded, and must give the new
bits.

Sizes only: `benchmarks.codec` measures speeds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from benchmarks.codec import bounds, measure
from benchmarks.corpus.runs import by_tensor
from deltasync.tensors import TensorSpec

COMPACTIONS = (8, 32, 64)  # steps


def spans(steps: int) -> list[tuple[int, int]]:
    """Return what is encoded of a run, as steps before and after: the first, middle and last step, and
    compactions.

    The middle of each compaction is the middle step. A run that is too short has none.
    """
    middle = steps // 2
    found = [(0, 1), (middle, middle + 1), (steps - 1, steps)]
    found += [
        (middle - length // 2, middle - length // 2 + length) for length in COMPACTIONS if length <= steps
    ]
    return list(dict.fromkeys(found))


def step_sizes(specs: Mapping[str, TensorSpec], old_N: np.ndarray, new_N: np.ndarray) -> dict[str, int]:
    """Return the payload bytes of the two small codecs, for a step that is not encoded otherwise."""
    old, new = by_tensor(specs, old_N), by_tensor(specs, new_N)
    found = {name: encode for name, _, (encode, _) in measure.encodings(specs)}
    return {name: len(found[name](old, new)) for name in ("packed", "context")}


def span_sizes(
    specs: Mapping[str, TensorSpec], old_N: np.ndarray, new_N: np.ndarray, history_N: np.ndarray | None
) -> dict[str, Any]:
    """Return the bytes of every encoding of the change, and the bounds; `history_N` is None for a
    compaction.
    """
    old, new = by_tensor(specs, old_N), by_tensor(specs, new_N)
    changed = int((old_N != new_N).sum())
    found: dict[str, Any] = {
        "changed": changed,
        "changed_fraction": changed / old_N.size,
        "encodings": [],
        "bounds": [],
    }
    for name, systems, (encode, apply) in measure.encodings(specs):
        payload = encode(old, new)
        live = {tensor: bits.copy() for tensor, bits in old.items()}
        apply(payload, live)
        if any(not np.array_equal(live[tensor], new[tensor]) for tensor in new):
            raise AssertionError(f"{name} did not reproduce the bits")
        bits = 8 * len(payload) / changed
        found["encodings"].append(
            {"name": name, "systems": systems, "payload_bytes": len(payload), "bits_per_changed": bits}
        )
    for bound in bounds.bounds(old_N, new_N, history_N):
        found["bounds"].append(dataclasses.asdict(bound) | {"total_bits": bound.total_bits})
    return found
