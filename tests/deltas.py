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


def between(layout: Layout, old: Bits, new: Bits) -> Delta:
    """The changes from `old` to `new`; tensors missing in `new` have none."""
    found: dict[int, Sparse] = {}
    for width, vector in layout.vectors.items():
        parts: list[tuple[np.ndarray, np.ndarray]] = []
        first = 0
        for spec in vector.specs:
            if spec.name in new:
                index_K, step_K = reference.diff(old[spec.name], new[spec.name])
                if index_K.size:
                    parts.append((index_K.astype(np.int64) + first, step_K))
            first += spec.element_count
        if parts:
            at_K, step_K = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
            found[width] = Sparse(at_K.astype(vector.index_dtype), step_K)
    return Delta(layout, found)


def digests(new: Bits) -> dict[str, int]:
    """The fingerprint of each tensor."""
    return {name: reference.fingerprint(fingerprint.tensor_key(name), bits_N) for name, bits_N in new.items()}


def changed(layout: Layout, old: Bits, new: Bits) -> Changed:
    """The changes from `old` to `new` as a version has them."""
    return Changed(between(layout, old, new), digests(new))


def encode(
    codec_name: str, specs: Specs, old: Bits, new: Bits, version: int = 8, base_version: int = 7
) -> Encoded:
    """A payload that leads from `old` to `new`."""
    delta = between(Layout(specs), old, new)
    return codec.get(codec_name).encode(
        delta, lambda name: (new[name], 0), digests(new), version, base_version
    )


def decode(data: bytes, specs: Specs, old: Bits | None = None, wanted: codec.Wanted | None = None) -> Changed:
    """The changes of a payload file."""
    payload = codec.open_payload(data)
    return Changed(
        *codec.get(payload.codec).decode(
            payload, Layout(specs), None if old is None else old.__getitem__, wanted
        )
    )


def applied(delta: Delta, old: Bits) -> dict[str, np.ndarray]:
    """The bits after a delta."""
    found = {name: bits_N.copy() for name, bits_N in old.items()}
    for name, bits_N in found.items():
        delta.apply(name, bits_N)
    return found


def check(delta: Delta) -> None:
    """Assert that a delta is what its docstring says."""
    for width, (at_K, step_K) in delta.steps.items():
        vector = delta.layout.vectors[width]
        assert (at_K.dtype, step_K.dtype) == (vector.index_dtype, np.dtype(f"u{width}"))
        assert at_K.shape == step_K.shape and at_K.ndim == 1
        if at_K.size:
            assert at_K[0] >= 0 and at_K[-1] < vector.element_count and (at_K[1:] > at_K[:-1]).all()
