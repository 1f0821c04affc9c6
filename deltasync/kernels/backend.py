"""The seam to the device: a `Backend` works on bits where they are. This one is the host's; `gpu.backend` has
that of an accelerator.

Its verbs: compare, apply and encode (a device's `shadow`), decode (`decoder`), prepare and swap, fingerprint
(`kernels`). Where a verb's maker returns None, the room that asks does the work itself, on the host.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from deltasync.kernels import host_segments
from deltasync.kernels.table import SegmentKernels, Table
from deltasync.tensors import Layout, count_below
from deltasync.tensors.bits import signed_view


class Arrived(NamedTuple):
    """Steps of one width where a table is.

    Attributes:
        low_K: The lower 32 bits of ascending positions in the vector, int32.
        step_K: Steps, as signed integers.
        below_L: How many changes there are below each limit of the table, int64; on the host.
        is_spare: Whether nobody else has the steps, so that they may be mutated.
    """

    low_K: torch.Tensor
    step_K: torch.Tensor
    below_L: np.ndarray
    is_spare: bool


class Backend:
    """The host: its memory, with no accelerator beside.

    Attributes:
        device: The device.
        is_host: Whether it is the host.
    """

    is_host = True

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def kernels(self) -> SegmentKernels:
        """Prepare, swap and fingerprint, over tables of live memory."""
        return host_segments

    def allocate(self, size_bytes: int) -> torch.Tensor:
        """Allocate bytes, inside of `staging`. Raises StageError if too few are free."""
        return torch.empty(size_bytes, dtype=torch.uint8, device=self.device)

    def send(self, pairs: Iterable[tuple[np.ndarray, torch.Tensor]]) -> None:
        """Copy arrays of integers into tensors of as many elements, which keep the lower bits."""
        for host, to in pairs:
            to.view(-1).copy_(torch.from_numpy(host.reshape(-1).astype(f"i{to.element_size()}")))

    def staging(self, wait: bool = True) -> contextlib.AbstractContextManager[None]:
        """Run work inside this context beside the engine's; by default wait for it at the end."""
        return contextlib.nullcontext()

    def synchronize(self) -> None:
        """Wait for everything that the calling thread has launched."""

    def near(self, delta: Any) -> Any:
        """Return a delta where `arrived` takes it from: on the host, or on this device."""
        return delta.host()

    def arrived(self, delta: Any, width: int, table: Table, edge_L: np.ndarray | None) -> Arrived:
        """Return the steps of a delta that is `near`, inside of `staging`.

        `edge_L` are the numbers of the tensors that begin at the limits of the table, if they are those of
        tensors.
        """
        at_K, step_K = delta.steps[width]
        low_K = signed_view(at_K.astype(np.int32, copy=False))
        return Arrived(low_K, signed_view(step_K), count_below(at_K, table.limit_L), False)

    def decoder(self, layout: Layout, segments: Mapping[str, Any]) -> Any:
        """Return a function that decodes payloads of one version into `Changed`, where the old bits are.

        `segments` are those of each tensor, all on this device, as `LiveMemory` has them; of tensors that are
        coded by classes, the tiles that lie there are decoded. None if `codec` decodes; the function returns
        None if it has too little memory for a version, or tiles lie otherwise.
        """
        return None

    def warm_up(self, dtype: torch.dtype) -> None:
        """Compile what staging and commits of signed views of this dtype launch, once per process."""
        self.kernels.warm_up(self, dtype)

    def weights(self) -> Any:
        """Return what collects full weights, as `live.staging.Staging`; None if that does."""
        return None


def backend_of(device: torch.device) -> Backend:
    """Return the backend of a device, made once."""
    return _host(device) if device.type == "cpu" else accelerator(device)


_host = functools.cache(Backend)


@functools.cache
def accelerator(device: torch.device) -> Any:
    """Return the backend of an accelerator, made once; the wing is imported where there is one."""
    return importlib.import_module("deltasync.gpu.backend").Accelerator(device)
