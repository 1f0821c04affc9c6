"""`raw`: flat indices and new values, for any reader of safetensors. Decoding turns the values into steps.

A changed tensor has the entries `{name}.indices` (int32; int64 from 2**31 elements on) and `{name}.values` in
the served dtype. The metadata has

    patches       JSON: {tensor name: {"changed": K, "fingerprint": 16 hex digits after the delta}}

and the fields of the public TRL blog format (huggingface.co/blog/delta-weight-sync): `sparse`,
`model_version`, `sparsity`, `changed_params`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import torch

from deltasync.codec.base import Encoded, NewBits, OldBits, Payload, Wanted, old_bits, take
from deltasync.errors import CorruptDataError, StageError
from deltasync.tensors import Delta, Layout, TensorSpec, index_dtype
from deltasync.tensors.bits import tensor_of
from deltasync.tensors.delta import joined, of_tensor
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
            arrays[f"{name}.values"] = tensor_of(
                bits_N[index_K - start], TensorSpec(name, spec.dtype, (changed,))
            )
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
        rows = _rows(payload)
        deltas = [_decoded(payload, layout, name, row["changed"], old) for name, row in rows.items()]
        return joined([Delta(layout, {}), *deltas]), {
            name: int(row["fingerprint"], 16) for name, row in rows.items()
        }


def _rows(payload: Payload) -> Mapping[str, Mapping[str, Any]]:
    """Return the table of patches.

    Raises:
        CorruptDataError: it is malformed, or its counts do not add up.
    """
    try:
        rows: dict[str, Any] = json.loads(payload.metadata["patches"])
        complete = all(
            type(row["changed"]) is int
            and row["changed"] > 0
            and re.fullmatch("[0-9a-f]{16}", row["fingerprint"])
            for row in rows.values()
        )
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptDataError(f"Payload header cannot be read: {error!r}.") from error
    if not complete:
        raise CorruptDataError(
            "Payload header has a patch without changed elements, or without a fingerprint."
        )
    if (counted := sum(row["changed"] for row in rows.values())) != payload.changed:
        raise CorruptDataError(
            f"Payload has patches with {counted} changes, and should have {payload.changed}."
        )
    return rows


def _decoded(payload: Payload, layout: Layout, name: str, changed: int, old: OldBits) -> Delta:
    spec = layout.specs.get(name)
    if spec is None or changed > spec.element_count:
        raise CorruptDataError(
            f"Payload changes {changed} elements of {name!r}, which the channel does not have."
        )
    dtype = index_dtype(spec.element_count)
    index_K = take(payload, f"{name}.indices", dtype.name, changed).view(dtype)
    # Compared, since differences may overflow.
    if index_K[0] < 0 or index_K[-1] >= spec.element_count or (index_K[1:] <= index_K[:-1]).any():
        raise CorruptDataError(f"Payload indices of {name!r} are not ascending inside the tensor.")
    value_K = take(payload, f"{name}.values", spec.dtype, changed)
    first, last = int(index_K[0]), int(index_K[-1]) + 1
    old_K = old_bits(old, spec)[first:last][index_K - dtype.type(first)]
    return of_tensor(layout, name, index_K, value_K - old_K)
