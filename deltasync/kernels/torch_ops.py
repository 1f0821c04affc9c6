"""Preparing, swapping and comparing in torch operations: any device, and the fallback where no kernel of its own exists.

torch adds and multiplies int64 modulo 2**64, so signed arithmetic gives the same bits as the reference's unsigned one;
only shifts need a mask. The fingerprint's sum leaves the device as one number.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from deltasync.fingerprint import MASK
from deltasync.kernels import reference
from deltasync.types import index_dtype


def _as_signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


_INDEX_STEP, _VALUE_STEP, _MIX_1, _MIX_2 = (
    _as_signed(int(c)) for c in (reference.INDEX_STEP, reference.VALUE_STEP, reference.MIX_1, reference.MIX_2)
)


def _shift(z: torch.Tensor, by: int) -> torch.Tensor:
    """Logical right shift of int64."""
    return (z >> by) & ((1 << (64 - by)) - 1)


def _widened(bits_K: torch.Tensor) -> torch.Tensor:
    """A signed view of bit patterns as int64 of the unsigned ones."""
    width = 8 * bits_K.element_size()
    return bits_K.to(torch.int64) & ((1 << width) - 1 if width < 64 else -1)


def cell_hash(key: int, index_K: torch.Tensor, bits_K: torch.Tensor) -> torch.Tensor:
    """As `reference.cell_hash`, int64; `bits_K` is a signed view of the bit patterns."""
    z = _as_signed(key) + index_K.to(torch.int64) * _INDEX_STEP + _widened(bits_K) * _VALUE_STEP
    z = (z ^ _shift(z, 30)) * _MIX_1
    z = (z ^ _shift(z, 27)) * _MIX_2
    return z ^ _shift(z, 31)


def prepare(
    key: int, dest: torch.Tensor, dest_index_K: torch.Tensor, data_K: torch.Tensor, absolute: bool, index_K: torch.Tensor
) -> tuple[torch.Tensor, int, int]:
    """As `reference.prepare`, on signed views; all tensors on the device of `dest`."""
    old_K = dest[dest_index_K]
    new_K = data_K.clone() if absolute else old_K + data_K
    added = (cell_hash(key, index_K, new_K) - cell_hash(key, index_K, old_K)).sum()
    return new_K, int(added) & MASK, int(_checksum(dest_index_K, old_K)) & MASK


def swap(writes: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> int:
    """As `reference.swap`, on signed views."""
    held = [dest[dest_index_K] for dest, dest_index_K, _ in writes]
    check = 0
    for (dest, dest_index_K, value_K), old_K in zip(writes, held, strict=True):
        dest[dest_index_K] = value_K
        value_K.copy_(old_K)
        check += int(_checksum(dest_index_K, old_K))
    return check & MASK


def _checksum(dest_index_K: torch.Tensor, bits_K: torch.Tensor) -> torch.Tensor:
    return ((2 * dest_index_K.to(torch.int64) + 1) * _widened(bits_K)).sum()


def warm_up(device: torch.device, dtype: torch.dtype) -> None:
    """Nothing to compile."""


class Diff:
    """As `gpu_diff.Diff`, tensor by tensor."""

    def __init__(self, device: torch.device) -> None:
        self.drop()

    def drop(self) -> None:
        """Forget what was added and not finished."""
        self._found: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def add(self, name: str, shadow_N: torch.Tensor, new_N: torch.Tensor, expected: int) -> None:
        """Compare a tensor with its shadow, which is mutated and then holds the new bits."""
        if new_N.dtype == torch.float32:
            new_N = new_N.to(torch.bfloat16).view(torch.int16)
        index_K = torch.nonzero(shadow_N != new_N).reshape(-1)
        new_K = new_N[index_K]
        step_K = new_K - shadow_N[index_K]
        shadow_N[index_K] = new_K
        index = torch.int32 if index_dtype(shadow_N.numel()) == np.int32 else torch.int64
        self._found[name] = index_K.to(index), step_K

    def finish(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """By name, of the tensors that changed, `reference.diff` of the shadow before and after."""
        found = {name: (at.cpu().numpy(), step.cpu().numpy()) for name, (at, step) in self._found.items() if at.numel()}
        self.drop()
        return {name: (at_K, step_K.view(f"u{step_K.itemsize}")) for name, (at_K, step_K) in found.items()}
