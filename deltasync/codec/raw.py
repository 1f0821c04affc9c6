"""`raw`: flat indices and new values, for any reader of safetensors. Decoding turns the values into steps.

A changed tensor has the entries `{name}.indices` (int32; int64 from 2**31 elements on) and `{name}.values` in the served
dtype. The metadata also has the fields of the public TRL blog format (huggingface.co/blog/delta-weight-sync): `sparse`,
`model_version`, `sparsity`, `changed_params`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from deltasync.codec.base import Encoded, NewBits, OldBits, Payload, Wanted, delta_of, old_bits, spec_for, take
from deltasync.errors import CorruptDataError, StageError
from deltasync.tensors import Delta, Layout, TensorSpec, index_dtype
from deltasync.tensors.bits import tensor_of
from deltasync.tensors.fingerprint import to_hex


class RawCodec:
    """The codec `raw`."""

    name = "raw"
    needs_old = True

    def encode(
        self, delta: Delta, new: NewBits, fingerprints: Mapping[str, int], version: int, base_version: int
    ) -> Encoded:
        """See `VectorCodec.encode`."""
        rows: dict[str, dict[str, Any]] = {}
        arrays: dict[str, torch.Tensor] = {}
        element_count = 0
        for name, changed in delta.counts().items():
            spec, (bits_N, start) = delta.layout.specs[name], new(name)
            index_K = delta.of(name).at_K.astype(index_dtype(spec.element_count))
            arrays[f"{name}.indices"] = torch.from_numpy(index_K)
            arrays[f"{name}.values"] = tensor_of(bits_N[index_K - start], TensorSpec(name, spec.dtype, (changed,)))
            rows[name] = {"changed": changed, "fingerprint": to_hex(fingerprints[name])}
            element_count += spec.element_count
        unchanged = 1 - delta.changed / element_count if element_count else 1.0
        extra = {
            "patches": json.dumps(rows, separators=(",", ":")),
            "sparse": "true",
            "model_version": str(version),
            "sparsity": str(unchanged),
            "changed_params": json.dumps(list(rows)),
        }
        return Encoded.of(self.name, version, base_version, delta.changed, arrays, extra)

    def decode(
        self, payload: Payload, layout: Layout, old: OldBits | None = None, wanted: Wanted | None = None
    ) -> tuple[Delta, dict[str, int]]:
        """See `VectorCodec.decode`; `wanted` is ignored."""
        if old is None:
            raise StageError("Steps follow from new values and the old weights; decode `raw` with `old`.")
        return delta_of(layout, _patches(payload, layout.specs, old)), payload.fingerprints


def _patches(
    payload: Payload, specs: Mapping[str, TensorSpec], old: OldBits
) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    for name, row in payload.patches.items():
        spec = spec_for(specs, name, row["changed"])
        dtype = index_dtype(spec.element_count)
        index_K = take(payload, f"{name}.indices", dtype.name, row["changed"]).view(dtype)
        # Compared, since differences may overflow.
        if index_K[0] < 0 or index_K[-1] >= spec.element_count or (index_K[1:] <= index_K[:-1]).any():
            raise CorruptDataError(f"Payload indices of {name!r} are not ascending inside the tensor.")
        value_K = take(payload, f"{name}.values", spec.dtype, row["changed"])
        first, last = int(index_K[0]), int(index_K[-1]) + 1
        yield name, index_K, value_K - old_bits(old, spec)[first:last][index_K - dtype.type(first)]
