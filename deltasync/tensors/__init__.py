"""Tensors: their specs, bits and fingerprints, and the patches that change them. No I/O."""

from __future__ import annotations

from deltasync.tensors.specs import (
    ITEM_BYTES,
    SAFETENSORS_DTYPES,
    Patch,
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
    "Patch",
    "Region",
    "TensorSpec",
    "bits",
    "check_specs",
    "fingerprint",
    "fold",
    "index_dtype",
    "region_end",
    "region_size",
    "weight_bytes",
    "weight_elements",
]
