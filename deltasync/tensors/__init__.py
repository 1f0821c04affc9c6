"""What a tensor is here: its spec, its bits, their fingerprint, and the patches that change them. No I/O."""

from __future__ import annotations

from deltasync.tensors.specs import ITEM_BYTES, SAFETENSORS_DTYPES, Patch, TensorSpec, check_specs, index_dtype, weight_bytes

__all__ = [
    "ITEM_BYTES",
    "SAFETENSORS_DTYPES",
    "Patch",
    "TensorSpec",
    "bits",
    "check_specs",
    "fingerprint",
    "fold",
    "index_dtype",
    "weight_bytes",
]
