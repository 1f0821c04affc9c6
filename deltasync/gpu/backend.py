"""An accelerator behind the seam of `kernels.backend`: what live memory, decoding and the shadow ask of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from deltasync.errors import StageError, get_logger
from deltasync.gpu.delta import DeviceDelta, search
from deltasync.gpu.devices import Device
from deltasync.gpu.staging import DeviceStaging
from deltasync.kernels import compares, segment_kernels
from deltasync.kernels.backend import Arrived
from deltasync.kernels.table import SegmentKernels, Table
from deltasync.tensors import Changed, Layout, count_below

if TYPE_CHECKING:
    from deltasync.codec.base import Payload
    from deltasync.gpu.shadow import DeviceShadow
    from deltasync.live import Segment


logger = get_logger(__name__)


class Accelerator(Device):
    """See `Backend`."""

    @property
    def kernels(self) -> SegmentKernels:
        """The kernels for this device."""
        return segment_kernels(self.device)

    @property
    def decodes(self) -> bool:
        """Whether payloads can be decoded on it."""
        return compares(self.device)

    def near(self, delta: Any) -> Any:
        """See `Backend.near`."""
        is_there = isinstance(delta, DeviceDelta) and all(
            steps.low_K.device == self.device for steps in delta.steps.values()
        )
        return delta if is_there else delta.host()

    def arrived(self, delta: Any, width: int, table: Table, edge_L: np.ndarray | None) -> Arrived:
        """See `Backend.arrived`. Of a delta on the device, nothing of its size crosses to the host."""
        if not isinstance(delta, DeviceDelta):
            at_K, step_K = delta.steps[width]
            low_K, there_K = table.crossed((at_K, torch.int32), (step_K, table.dtype))
            return Arrived(low_K, there_K, _searched(table, at_K, low_K), True)
        self.wait(delta.ready)
        steps = delta.steps[width]
        if edge_L is not None:
            below_L = np.append(0, np.cumsum(steps.count_T))[edge_L]
        else:
            below_L = steps.count_below(table.limit_there_L).cpu().numpy()
        low_K, there_K = steps.low_K.view(torch.int32), steps.step_K.view(table.dtype)
        return Arrived(low_K, there_K, below_L, delta.is_spare)

    def decoder(
        self, layout: Layout, segments: Mapping[str, Sequence[Segment]]
    ) -> Callable[[Iterable[Payload]], Changed | None] | None:
        """See `Backend.decoder`. Words and tables cross, and nothing else of the payloads."""
        if not self.decodes:
            return None
        from deltasync.gpu.codec import DeviceCodec
        from deltasync.gpu.held import HeldTiles

        try:
            places = {width: HeldTiles(vector, segments) for width, vector in layout.vectors.items()}
        except StageError as error:
            logger.info("Versions are decoded on the host, which takes longer: %s", error)
            return None
        coder = DeviceCodec(layout, self.device, self.send, self.check_room)

        def decode(opened: Iterable[Payload]) -> Changed | None:
            try:
                with self.staging():
                    return coder.changed(opened, places)
            except (StageError, torch.OutOfMemoryError) as error:
                logger.warning("A version is decoded on the host, which takes longer: %s", error)
                return None

        return decode

    def room(self, layout: Layout, ranges: Mapping[str, tuple[int, int]]) -> tuple[int, int]:
        """Return the bytes that a shadow may take here, and those that one of these ranges takes."""
        from deltasync.gpu.shadow import needed_bytes, room_bytes

        return room_bytes(self.device), needed_bytes(layout, ranges)

    def shadow(self, layout: Layout, ranges: Mapping[str, tuple[int, int]]) -> DeviceShadow:
        """Return the memory of a shadow of these ranges, with any bits: `publish.detect.HostShadow` here."""
        from deltasync.gpu.shadow import DeviceShadow

        return DeviceShadow(layout, ranges, self.device)

    def warm_up(self, dtype: torch.dtype) -> None:
        """See `Backend.warm_up`."""
        super().warm_up(dtype)
        if self.decodes:
            from deltasync.gpu.codec import warm_up

            warm_up(self, dtype.itemsize)

    def weights(self) -> DeviceStaging:
        """See `Backend.weights`."""
        return DeviceStaging(self)


def _searched(table: Table, at_K: np.ndarray, low_K: torch.Tensor) -> np.ndarray:
    """Return how many positions on the host are below each limit, whose lower halves are on the device and
    searched there.

    Halves ascend from one multiple of 2**32 to the next. A search through the host's memory would take 10 ms.
    """
    limit_L = table.limit_L
    turn = count_below(at_K, np.arange(int(limit_L[-1] >> 32) + 1, dtype=np.int64) << 32)
    edges = np.append(turn, at_K.size)
    low_L, high_L, wanted_L = table.sent(
        edges[limit_L >> 32], edges[(limit_L >> 32) + 1], limit_L & 0xFFFFFFFF
    )
    found_L = search(
        low_K, low_L, high_L, at_K.size, lambda found_LP: (found_LP & 0xFFFFFFFF) < wanted_L[:, None]
    )
    below: np.ndarray = found_L.cpu().numpy()
    return below
