"""A target that follows numpy arrays of bit patterns, as docs/guides/engines.md describes it."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from deltasync.channel.reading import ChannelReader
from deltasync.errors import ModelMismatchError
from deltasync.following import Commit, Identify, MemoryTarget
from deltasync.live import LiveMemory, Segment


class ArrayTarget(MemoryTarget):
    """Patches arrays in place. Readers hold `lock` while they compute.

    Args:
        reader: The channel.
        arrays: By tensor name: its bit patterns as signed integers of the element's width, in the tensor's
            shape.
    """

    def __init__(self, reader: ChannelReader, arrays: Mapping[str, np.ndarray]) -> None:
        super().__init__(reader)
        self.arrays = arrays
        self.lock = threading.Lock()

    def open(self, identify: Identify) -> None:
        """Map the channel's tensors to the arrays, and find out which version they are."""
        segments = {}
        for name, spec in self.reader.specs.items():
            array = self.arrays.get(name)
            if array is None or array.shape != spec.shape or array.itemsize != spec.bits_dtype.itemsize:
                raise ModelMismatchError(f"{spec} has no array of this shape and width.")
            segments[name] = [Segment(torch.from_numpy(array).reshape(-1), (1,), 0)]
        self.adopt(LiveMemory(self.reader.specs, segments), identify)

    def stage(self, chain: Any) -> Any:
        """Prepare the chain; the arrays are not touched."""
        return self._opened.stage(chain)

    def commit(self, staged: Any) -> Commit:
        """Write while nobody reads."""
        with self.lock:
            return super().commit(staged)
