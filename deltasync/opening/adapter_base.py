"""The base model of an adapter. The trainer publishes its fingerprints, and a server compares its own base
with them.

Weights are compared in bfloat16, because trainer or server may hold more bits than the other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Annotated

import msgspec
import torch

from deltasync.channel.documents import Fingerprint
from deltasync.errors import UNREADABLE_JSON, CorruptDataError, describe, get_logger
from deltasync.kernels import native
from deltasync.opening.checkpoint import Checkpoint
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
    def of(cls, name: str, tensors: Iterable[tuple[str, torch.Tensor]]) -> AdapterBase:
        """Read the tensors of a base model; warn of those that are quantized, which no server can compare."""
        found, quantized = dict[str, str | None](), list[str]()
        for key, tensor in tensors:
            found[key] = _fingerprint(key, tensor)
            if is_wrapper(tensor) or (tensor.element_size() == 1 and tensor.dtype is not torch.bool):
                quantized.append(key)
        if quantized:
            logger.warning(
                "%d of the base model's %d tensors are quantized, so servers cannot compare them with their "
                "own: %s.",
                *(len(quantized), len(found), ", ".join(quantized[:3])),
            )
        return cls(name=name, tensors={key: digest for key, digest in found.items() if digest is not None})

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


def _fingerprint(name: str, tensor: torch.Tensor) -> str | None:
    # A wrapper subclass, such as torchao's, has the dtype of its values and no bits of its own.
    if not tensor.is_floating_point() or tensor.element_size() < 2 or is_wrapper(tensor):
        return None
    return fingerprint.to_hex(
        native.fingerprint(fingerprint.tensor_key(name), bits_of(cast(tensor, "bfloat16")))
    )
