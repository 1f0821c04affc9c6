"""Tensors: their specs, layout, bits and fingerprints, and the deltas that change them. No I/O."""

from __future__ import annotations

from deltasync.tensors.delta import Changed, Delta, Sparse
from deltasync.tensors.layout import Fingerprints, Layout, Vector, bounds, count_below
from deltasync.tensors.specs import (
    ITEM_BYTES,
    SAFETENSORS_DTYPES,
    Region,
    TensorSpec,
    check_specs,
    index_dtype,
    region_end,
    region_size,
    weight_bytes,
    weight_elements,
)

__all__ = [
    "ITEM_BYTES",
    "SAFETENSORS_DTYPES",
    "Changed",
    "Delta",
    "Fingerprints",
    "Layout",
    "Region",
    "Sparse",
    "TensorSpec",
    "Vector",
    "bits",
    "bounds",
    "check_specs",
    "count_below",
    "delta",
    "fingerprint",
    "index_dtype",
    "layout",
    "region_end",
    "region_size",
    "weight_bytes",
    "weight_elements",
]
