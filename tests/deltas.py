"""Deltas between the bits of two models, built without the kernels that are tested, and their payloads."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from deltasync import codec
from deltasync.codec.base import Encoded
from deltasync.kernels import reference
from deltasync.tensors import Changed, Delta, Layout, Sparse, TensorSpec, fingerprint

Specs = Mapping[str, TensorSpec]
Bits = Mapping[str, np.ndarray]

KINDS = ("steps", "values", "whole")
"""How a delta may say what a tensor becomes: by steps, by new bits of what changed, by new bits of every element."""


def between(layout: Layout, old: Bits, new: Bits, kinds: Mapping[str, str] | str = "steps") -> Delta:
    """The changes from `old` to `new`, tensors missing in `new` have none; `kinds` by name, or one for all."""
    found: tuple[dict[int, Sparse], dict[int, Sparse]] = {}, {}
    for width, vector in layout.vectors.items():
        parts: tuple[list[tuple[np.ndarray, np.ndarray]], ...] = [], []
        first = 0
        for spec in vector.specs:
            if spec.name in new:
                kind = kinds if isinstance(kinds, str) else kinds.get(spec.name, "steps")
                index_K, data_K = reference.diff(old[spec.name], new[spec.name])
                if kind == "whole":
                    index_K = np.arange(spec.element_count)
                if kind != "steps":
                    data_K = new[spec.name][index_K]
                if index_K.size:
                    parts[kind != "steps"].append((index_K.astype(np.int64) + first, data_K))
            first += spec.element_count
        for part, into in zip(parts, found, strict=True):
            if part:
                at_K, data_K = (np.concatenate(arrays) for arrays in zip(*part, strict=True))
                into[width] = Sparse(at_K.astype(vector.index_dtype), data_K)
    return Delta(layout, *found)


def digests(new: Bits) -> dict[str, int]:
    """The fingerprint of each tensor."""
    return {name: reference.fingerprint(fingerprint.tensor_key(name), bits_N) for name, bits_N in new.items()}


def changed(layout: Layout, old: Bits, new: Bits, kinds: Mapping[str, str] | str = "steps") -> Changed:
    """The changes from `old` to `new` as a version has them."""
    return Changed(between(layout, old, new, kinds), digests(new))


def encode(codec_name: str, specs: Specs, old: Bits, new: Bits, version: int = 8, base_version: int = 7) -> Encoded:
    """A payload that leads from `old` to `new`."""
    delta = between(Layout(specs), old, new)
    return codec.get(codec_name).encode(delta, lambda name: (new[name], 0), digests(new), version, base_version)


def decode(data: bytes, specs: Specs, old: Bits | None = None, wanted: codec.Wanted | None = None) -> Changed:
    """The changes of a payload file."""
    payload = codec.open_payload(data)
    return Changed(
        *codec.get(payload.codec).decode(payload, Layout(specs), None if old is None else old.__getitem__, wanted)
    )


def applied(delta: Delta, old: Bits) -> dict[str, np.ndarray]:
    """The bits after a delta."""
    found = {name: bits_N.copy() for name, bits_N in old.items()}
    for name, bits_N in found.items():
        delta.apply(name, bits_N)
    return found


def check(delta: Delta) -> None:
    """Assert that a delta is what its docstring says."""
    taken: dict[int, list[np.ndarray]] = {}
    for of in (delta.steps, delta.known):
        for width, (at_K, data_K) in of.items():
            vector = delta.layout.vectors[width]
            assert (at_K.dtype, data_K.dtype) == (vector.index_dtype, np.dtype(f"u{width}"))
            assert at_K.shape == data_K.shape and at_K.ndim == 1
            if at_K.size:
                assert at_K[0] >= 0 and at_K[-1] < vector.element_count and (at_K[1:] > at_K[:-1]).all()
            taken.setdefault(width, []).append(at_K)
    for arrays in taken.values():
        at_K = np.concatenate(arrays)
        assert np.unique(at_K).size == at_K.size, "an element occurs once"
