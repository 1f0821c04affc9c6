"""`raw`: flat indices and absolute values, for any reader of safetensors.

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

from deltasync.codec.base import Encoded, OldBits, Payload, Wanted, spec_for, take
from deltasync.errors import CorruptDataError
from deltasync.tensors import Patch, TensorSpec, index_dtype
from deltasync.tensors.bits import tensor_of


class RawEncoder:
    """Collects and encodes the patches of one delta."""

    def __init__(self) -> None:
        self._rows: dict[str, dict[str, Any]] = {}
        self._arrays: dict[str, torch.Tensor] = {}
        self._element_count = 0
        self._changed = 0

    def add(
        self, spec: TensorSpec, index_K: np.ndarray, step_K: np.ndarray, new: np.ndarray, fingerprint: str, start: int = 0
    ) -> None:
        """See `BlockEncoder.add`."""
        values = TensorSpec(spec.name, spec.dtype, (index_K.size,))
        self._arrays[f"{spec.name}.indices"] = torch.from_numpy(index_K.astype(index_dtype(spec.element_count)))
        self._arrays[f"{spec.name}.values"] = tensor_of(new[index_K - start], values)
        self._rows[spec.name] = {"changed": index_K.size, "fingerprint": fingerprint}
        self._element_count += spec.element_count
        self._changed += index_K.size

    def finish(self, version: int, base_version: int) -> Encoded:
        """See `BlockEncoder.finish`."""
        unchanged = 1 - self._changed / self._element_count if self._element_count else 1.0
        blog = {
            "sparse": "true",
            "model_version": str(version),
            "sparsity": str(unchanged),
            "changed_params": json.dumps(list(self._rows)),
        }
        return Encoded.of(RawCodec.name, version, base_version, self._rows, self._arrays, blog)


class RawCodec:
    """The codec `raw`. Decoding needs no old weights."""

    name = "raw"
    needs_old = False

    def encoder(self) -> RawEncoder:
        """Return a new encoder for one delta."""
        return RawEncoder()

    def decode(
        self,
        payload: Payload,
        specs: Mapping[str, TensorSpec],
        old: OldBits | None = None,
        wanted: Wanted | None = None,
    ) -> Iterator[Patch]:
        """See `BlockCodec.decode`; `old` and `wanted` are ignored."""
        for name, row in payload.patches.items():
            spec = spec_for(specs, name, row["changed"])
            dtype = index_dtype(spec.element_count)
            index_K = take(payload, f"{name}.indices", dtype.name, row["changed"]).view(dtype)
            # Compared, since differences may overflow.
            if index_K[0] < 0 or index_K[-1] >= spec.element_count or (index_K[1:] <= index_K[:-1]).any():
                raise CorruptDataError(f"Payload indices of {name!r} are not ascending inside the tensor.")
            data_K = take(payload, f"{name}.values", spec.dtype, row["changed"])
            yield Patch(name, index_K, data_K, absolute=True)
