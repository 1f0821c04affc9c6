"""ENCODE where the shadow is: payloads of a delta on a device, which are decoded again there and compared."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from deltasync.channel import payloads
from deltasync.channel.documents import Record
from deltasync.codec.base import Encoded
from deltasync.errors import CorruptDataError
from deltasync.gpu.codec import BitAddresses, DeviceCodec
from deltasync.gpu.delta import DeviceDelta
from deltasync.gpu.devices import beside_captures
from deltasync.kernels.backend import accelerator
from deltasync.publish.encode import record_of
from deltasync.tensors import Layout
from deltasync.tensors.delta import Piece


class DeviceCoder:
    """Encodes and proves deltas of a model on a device, on its stream of staging. Needs triton.

    Args:
        layout: The model.
        device: The device.
    """

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self._layout, self._there = layout, accelerator(device)
        self._codec = DeviceCodec(layout, device, self._there.send, self._check_room)

    def _check_room(self, size_bytes: int) -> None:
        """Check that so many bytes can be allocated, and what training had reserved at its peak once more.

        Raises:
            StageError: that would leave too few free.
        """
        device, again = self._there.device, 0
        if device.type == "cuda":
            again = torch.cuda.max_memory_reserved(device) - torch.cuda.memory_reserved(device)
        self._there.check_room(size_bytes + again)

    def payloads(
        self,
        codec_name: str,
        delta: DeviceDelta,
        digests: Mapping[int, np.ndarray],
        version: int,
        pieces: Sequence[Piece],
    ) -> Iterator[tuple[Encoded, bytes]]:
        """Yield the payloads that lead to a version from the one before, and their bytes. At the end, while
        they are on their way, all are proven at once.

        Raises:
            CorruptDataError: a payload does not decode to what was encoded.
            StageError: the device has too little memory; nothing is held there.
        """
        stored = list[tuple[str, bytes]]()
        for encoded in self.encode(codec_name, delta, digests, version, pieces):
            stored.append((f"Payload {len(stored) + 1} of version {version}", encoded.to_bytes()))
            yield encoded, stored[-1][1]
        self.prove(record_of(codec_name, version, version - 1, delta.changed), delta, digests, stored)

    def encode(
        self,
        codec_name: str,
        delta: DeviceDelta,
        digests: Mapping[int, np.ndarray],
        version: int,
        pieces: Sequence[Piece],
    ) -> Iterator[Encoded]:
        """Yield the payloads that lead to a version from the one before; see `DeviceCodec.encode`."""
        found = self._codec.encode(codec_name, delta, digests, version, version - 1, pieces)
        while True:
            with self.after(delta.ready):
                encoded = next(found, None)
            if encoded is None:
                return
            yield encoded

    def prove(
        self,
        record: Record,
        delta: DeviceDelta,
        digests: Mapping[int, np.ndarray],
        stored: Sequence[tuple[str, bytes]],
    ) -> None:
        """Decode payloads, with their names, as a reader of the record does, and compare them with what was
        encoded.

        Raises:
            CorruptDataError: they differ.
        """
        with self.after(delta.ready):
            places = {
                width: BitAddresses.of(self._layout.vectors[width], bits)
                for width, bits in delta.bits.items()
            }
            opened = [payload for _, payload in payloads.opened(record, stored)]
            found, told = self._codec.decode(opened, places, delta)
            right = found.steps.keys() == delta.steps.keys()
            for width, steps in delta.steps.items() if right else ():
                of = found.steps[width]
                right = (
                    right
                    and np.array_equal(of.count_T, steps.count_T)
                    and np.array_equal(told[width], digests[width][steps.count_T > 0])
                    and torch.equal(of.low_K, steps.low_K)
                    and torch.equal(of.step_K.view(steps.step_K.dtype), steps.step_K)
                )
        if not right:
            raise CorruptDataError(
                f"The payloads to version {record.version} decode to other bits than were encoded; no record "
                "names them."
            )

    @contextlib.contextmanager
    def after(self, ready: torch.cuda.Event | None) -> Iterator[None]:
        """Work on the stream, behind what has written the delta or the bits. None of it is left behind: after
        an error too, whoever frees what it reads need not wait.
        """
        with beside_captures(), self._there.staging():
            self._there.wait(ready)
            yield
