"""ENCODE on the device where a delta is: the words of all its payloads, and the proof that they decode. Needs triton."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from deltasync.channel import payloads
from deltasync.channel.documents import Record
from deltasync.codec.base import Encoded
from deltasync.codec.device import Decoder, Encoder, Piece, Places
from deltasync.errors import CorruptDataError
from deltasync.live import accelerator
from deltasync.tensors.device import DeviceDelta


class DeviceCoder:
    """Encodes and proves deltas of a model on the device where the first one is, on a stream of its own.

    Args:
        delta: The first delta.

    Attributes:
        layout: The model.
    """

    def __init__(self, delta: DeviceDelta) -> None:
        self.layout = delta.layout
        self._device = next(iter(delta.bits.values())).bits_N.device
        self._encoder = Encoder(self.layout)
        self._decoder = Decoder(self.layout, self._device, accelerator(self._device).send, self._encoder.tilings)
        self._stream: torch.cuda.Stream | None = None
        if self._device.type == "cuda":
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]  # torch has no annotation

    def encode(
        self, codec_name: str, delta: DeviceDelta, digests: Mapping[int, np.ndarray], version: int, pieces: Sequence[Piece]
    ) -> Iterator[Encoded]:
        """Yield the payloads that lead to a version from the one before; see `Encoder.encode`."""
        found = self._encoder.encode(codec_name, delta, digests, version, version - 1, pieces)
        while True:
            with self._after(delta):
                encoded = next(found, None)
            if encoded is None:
                return
            yield encoded

    def prove(
        self, record: Record, delta: DeviceDelta, digests: Mapping[int, np.ndarray], stored: Sequence[tuple[str, bytes]]
    ) -> None:
        """Decode payloads, with their names, as a reader of the record does, and compare them with what was encoded.

        Raises:
            CorruptDataError: they differ.
        """
        with self._after(delta):
            places = {width: Places.of(self.layout.vectors[width], bits) for width, bits in delta.bits.items()}
            found = payloads.decode_there(record, stored, self._decoder, places, delta)
            right = found.keys() == delta.steps.keys()
            for width, steps in delta.steps.items() if right else ():
                of = found[width]
                right = (
                    right
                    and np.array_equal(of.count_T, steps.count_T)
                    and np.array_equal(of.digest_T.view(np.uint64), digests[width][of.number_T])
                    and torch.equal(of.low_K, steps.low_K)
                    and torch.equal(of.step_K.view(steps.step_K.dtype), steps.step_K)
                )
        if not right:
            raise CorruptDataError(
                f"The payloads to version {record.version} decode to other bits than were encoded; no record names them."
            )

    @contextlib.contextmanager
    def _after(self, delta: DeviceDelta) -> Iterator[None]:
        """Work on the stream, behind what has written the delta."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            if delta.ready is not None:
                self._stream.wait_event(delta.ready)
            yield
