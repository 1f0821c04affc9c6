"""Where a shadow goes: to the device where the tensors are, if that has room, or to the host."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from deltasync import kernels
from deltasync.errors import get_logger
from deltasync.kernels.backend import accelerator
from deltasync.publish.ranges import Range
from deltasync.tensors import Layout

logger = get_logger(__name__)


def held_bytes(layout: Layout, ranges: Mapping[str, Range]) -> int:
    """Return the bytes of these ranges."""
    return sum(layout.specs[name].item_bytes * (stop - start) for name, (start, stop) in ranges.items())


def choose(
    wanted: str, layout: Layout, ranges: Mapping[str, Range], devices: Collection[torch.device]
) -> torch.device | None:
    """Return the device where the shadow of tensors on `devices` goes, None for the host; and say so in the
    log.
    """
    device, why = None, "it was chosen"
    if wanted != "host":
        why = f"the tensors are on {', '.join(map(str, devices)) or 'no device'}"
        if len(devices) == 1 and kernels.compares(of := next(iter(devices))):
            room, needed = accelerator(of).room(layout, ranges)
            if wanted == "device" or needed <= room:
                device = of
            else:
                why = f"{of} has room for {room} bytes, and it needs {needed}"
    place = "host" if device is None else device
    logger.info("shadow place=%s why=%r bytes=%d", place, why, held_bytes(layout, ranges))
    return device
