"""The base model of an adapter. The trainer publishes its fingerprints, and a server compares its own base
with them.

Weights are compared in bfloat16, because trainer or server may hold more bits than the other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Annotated

import msgspec
import numpy as np
import torch

from deltasync.channel.documents import Fingerprint
from deltasync.errors import UNREADABLE_JSON, CorruptDataError, describe, get_logger
from deltasync.kernels import native
from deltasync.opening.checkpoint import Checkpoint
from deltasync.publish.ranges import Tensor, TensorRange
from deltasync.tensors import fingerprint
from deltasync.tensors.bits import bits_of, cast, is_wrapper

logger = get_logger(__name__)

FILE = "adapter_base.json"  # the companion file of an adapter's anchors


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AdapterBase:
    """A base model.

    Attributes:
        name: The directory or Hub model that the trainer loaded; shown to people only. Empty if unknown.
        tensors: Fingerprint in bfloat16 of each tensor of floats that is not quantized, by its name in a
            checkpoint.
    """

    name: Annotated[str, msgspec.Meta(max_length=4096)]
    tensors: dict[str, Fingerprint]

    @classmethod
    def of(cls, name: str, tensors: Iterable[tuple[str, Tensor]]) -> AdapterBase:
        """Read the tensors of a base model; warn of those that are quantized, which no server can compare.

        Of a `TensorRange` the fingerprint is that of its elements: the processes' own have to be `summed`.
        """
        found, quantized = dict[str, str | None](), list[str]()
        for key, given in tensors:
            tensor, start = (given.held, given.start) if isinstance(given, TensorRange) else (given, 0)
            found[key] = _fingerprint(key, tensor, start)
            if is_wrapper(tensor) or (tensor.element_size() == 1 and tensor.dtype is not torch.bool):
                quantized.append(key)
        if quantized:
            logger.warning(
                "%d of the base model's %d tensors are quantized, so servers cannot compare them with their "
                "own: %s.",
                *(len(quantized), len(found), ", ".join(quantized[:3])),
            )
        return cls(name=name, tensors={key: digest for key, digest in found.items() if digest is not None})

    def summed(self, agree: Callable[[None, list[int]], np.ndarray]) -> AdapterBase:
        """Return the base whose parts several processes hold, all of which call this. `agree` returns sums of
        numbers over all of them, modulo 2**64.
        """
        sums = agree(None, [int(digest, 16) for digest in self.tensors.values()]).tolist()
        return dataclasses.replace(
            self, tensors=dict(zip(self.tensors, map(fingerprint.to_hex, sums), strict=True))
        )

    @classmethod
    def decode(cls, data: bytes) -> AdapterBase:
        """Parse the file. Raise CorruptDataError if it is not valid."""
        try:
            return msgspec.json.decode(data, type=cls)
        except UNREADABLE_JSON as error:
            raise CorruptDataError(f"{FILE} is not valid: {error}.") from error

    def encode(self) -> bytes:
        """Return the content of the file."""
        return msgspec.json.encode(self) + b"\n"

    def compare(self, checkpoint: Checkpoint) -> tuple[list[str], list[str]]:
        """Return the tensors that differ in a checkpoint, and those that it lacks or holds quantized."""
        common = [name for name in self.tensors if name in checkpoint.files]
        found = {name: _fingerprint(name, tensor) for name, tensor in checkpoint.tensors(common)}
        different = [name for name in common if found[name] not in (None, self.tensors[name])]
        return different, [name for name in self.tensors if found.get(name) is None]


describe(AdapterBase)


def _fingerprint(name: str, tensor: torch.Tensor, start: int = 0) -> str | None:
    # A wrapper subclass, such as torchao's, has the dtype of its values and no bits of its own.
    if not tensor.is_floating_point() or tensor.element_size() < 2 or is_wrapper(tensor):
        return None
    return fingerprint.to_hex(
        native.fingerprint(fingerprint.tensor_key(name), bits_of(cast(tensor, "bfloat16")), start)
    )
