"""Whole tensors in host memory that this process has made: until somebody uses them, they are loaded, not
exchanged.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Self

import numpy as np
import torch

from deltasync.errors import FingerprintMismatchError, StageError
from deltasync.kernels import native
from deltasync.live.memory import LiveMemory
from deltasync.live.segments import Segment, unsigned
from deltasync.tensors import Delta, Sparse, TensorSpec, Vector, weight_bytes


class HostMemory(LiveMemory):
    """Live memory over new tensors on the host; `load` and `apply` write them while nobody uses them."""

    @classmethod
    def on_host(cls, specs: Mapping[str, TensorSpec]) -> tuple[Self, dict[str, torch.Tensor]]:
        """Return memory over new host tensors of these specs, with any bits, and the tensors.

        They come from torch: numpy asks for huge pages, which some virtual machines give slowly.

        Raises:
            StageError: this machine has too little memory.
        """
        model_bytes = weight_bytes(specs.values())
        if hasattr(os, "sysconf") and model_bytes > (
            held := os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        ):
            raise StageError(
                f"The channel's tensors have {model_bytes:,} bytes, this machine {held:,} bytes of memory."
            )
        try:
            tensors = {
                name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="cpu")
                for name, spec in specs.items()
            }
        except RuntimeError:  # of torch's allocator, where the system promises no more than it has
            raise StageError(
                f"The channel's tensors have {model_bytes:,} bytes, more than this machine has left."
            ) from None
        segments = {name: [Segment.whole(tensor)] for name, tensor in tensors.items()}
        return cls(specs, segments), tensors

    def load(self, weights: Iterable[tuple[str, np.ndarray, int]]) -> None:
        """Write full weights, without a second copy.

        `weights` has the name, the unsigned bit patterns of shape N and the fingerprint of each tensor.
        Mutates the live weights and `parts`; if it raises, some of them are written, and `parts` may be
        incomplete.

        Raises:
            FingerprintMismatchError: the bits do not have the fingerprint.
            FormatError, StoreError: from fetching them.
        """
        for name, bits_N, expected in weights:
            (segment,) = self._place(name)
            found = native.take(self._keys[name], bits_N, unsigned(segment.flat()))
            if self.parts is None:
                self.parts = np.zeros(len(self._first_part), np.uint64)
            self.parts[self._first_part[name]] = found
            if found != expected:
                raise FingerprintMismatchError(f"{name} does not have the published bits.")

    def apply(self, delta: Delta) -> None:
        """Apply changes. This cannot be undone.

        Mutates the live weights and `parts`; if it raises, some of them are written.
        """
        for width, steps in delta.steps.items():
            self._add(self._layout.vectors[width], steps)

    def _add(self, vector: Vector, steps: Sparse) -> None:
        changed = np.flatnonzero(vector.count(steps.at_K))
        zero_T = np.zeros(len(vector.specs), np.int64)
        address_T = [self._place(vector.names[t])[0].live.data_ptr() for t in changed.tolist()]
        zero_T[changed] = np.array(address_T, np.int64) - vector.first_T[changed] * vector.width
        gain_T, _ = native.add(vector, zero_T, steps)
        self.known_parts[[self._first_part[vector.names[t]] for t in changed.tolist()]] += gain_T[changed]
