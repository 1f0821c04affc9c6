"""A delta in a device's memory: detection leaves it there, and the device's encoder reads it.

For each element width there are ascending positions and their steps, as in `Sparse`, and an index over
*blocks*. A block is a run of at most `BLOCK` positions of one tensor; the blocks are in the order of the
vector and cover what the rank holds, those without changes too. Positions are stored by their lower 32 bits:
a gap between neighbours is a difference modulo 2**32, and a whole position is `base_B[b] + ((low_K[k] -
base_B[b]) mod 2**32)` for the block b with `bound_B[b] <= k < bound_B[b + 1]`. That takes 4 bytes and the
element's width for each change, in vectors of any size.

The old bits that `context` needs are those of the shadow less the steps: a job is encoded after its delta was
applied. `DeviceBits` says where the shadow has them.

Shape suffixes: K changed elements, B blocks, N held elements (with gaps), R runs, T tensors of one width.
Signed dtypes hold unsigned bits, because torch has few operations on unsigned ones.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from deltasync.errors import CorruptDataError
from deltasync.tensors.delta import Delta, Sparse

BLOCK = 4096
"""Most elements of a block, a power of two."""

_CROSSING = 1 << 23
"""Changes that cross to the host at once."""


@dataclasses.dataclass(frozen=True, eq=False)
class DeviceSparse:
    """Steps of one vector on a device.

    Attributes:
        low_K: The lower 32 bits of ascending positions in the vector, int32[K].
        step_K: New minus old bits modulo 2**(8 width), as signed integers of that width, [K].
        base_B: Position of the first element of each block, ascending, int64[B]. None of what a decoder has
            made of a model that is held as a whole, which is staged where it is and by nothing but `count_T`.
        bound_B: Number of changes before each block, and of all, int64[B + 1]; None as `base_B`.
        count_T: Number of changes of each tensor of the vector, int64[T]; on the host.
        most: The most changes of a block.
    """

    low_K: torch.Tensor
    step_K: torch.Tensor
    base_B: torch.Tensor | None
    bound_B: torch.Tensor | None
    count_T: np.ndarray
    most: int = BLOCK

    @property
    def changed(self) -> int:
        """K."""
        return self.low_K.numel()

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self.low_K.nbytes + self.step_K.nbytes + sum(each.nbytes for each in self.index)

    @property
    def index(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`base_B` and `bound_B`."""
        assert self.base_B is not None is not self.bound_B, "a decoder's steps of a whole model have no index"
        return self.base_B, self.bound_B

    def positions(self, low: int = 0, high: int | None = None) -> torch.Tensor:
        """Return whole positions of the changes from number `low` on and below `high`, int64; a new array."""
        found_K = self.low_K[low:high]
        return self._whole(found_K, torch.arange(low, low + found_K.numel(), device=found_K.device))

    def positions_of(self, number_N: torch.Tensor) -> torch.Tensor:
        """Return whole positions of the changes with these numbers, int64; a new array."""
        return self._whole(self.low_K[number_N], number_N)

    def _whole(self, low_N: torch.Tensor, number_N: torch.Tensor) -> torch.Tensor:
        base_B, bound_B = self.index
        base_N = base_B[torch.searchsorted(bound_B, number_N, right=True) - 1]
        return base_N + ((low_N.to(torch.int64) - base_N) & 0xFFFFFFFF)

    def count_below(self, limit_N: torch.Tensor) -> torch.Tensor:
        """Return how many positions are below each limit, int64 on the device: `layout.count_below` for many
        limits.

        As many small launches for any number of limits.
        """
        base_B, bound_B = self.index
        if not base_B.numel():
            return torch.zeros_like(limit_N)
        block_N = (torch.searchsorted(base_B, limit_N, right=True) - 1).clamp_(min=0)
        base_N = base_B[block_N]
        wanted_N = limit_N - base_N
        return search(
            *(self.low_K, bound_B[block_N], bound_B[block_N + 1], self.most),
            lambda found_NP: ((found_NP - base_N[:, None]) & 0xFFFFFFFF) < wanted_N[:, None],
        )

    def host(self, index: np.dtype) -> Sparse:
        """Copy everything to the host, into new arrays of K elements; positions get this dtype."""
        at_K = np.empty(self.changed, index)
        for low in range(0, self.changed, _CROSSING):
            at_K[low : low + _CROSSING] = self.positions(low, low + _CROSSING).cpu().numpy()
        step_K = self.step_K.cpu().numpy()
        return Sparse(at_K, step_K.view(f"u{step_K.itemsize}"))


_WAYS = 8


def search(
    value_K: torch.Tensor,
    low_N: torch.Tensor,
    high_N: torch.Tensor,
    most: int,
    is_below: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Return the number of the first value in each range that is not below what is wanted there, or its end;
    int64[N].

    Args:
        value_K: Values of integers.
        low_N: Number of the first value of each range.
        high_N: The one behind its last.
        most: Values of the largest range.
        is_below: Returns whether values, int64[N, P], are below what is wanted in their range. Those that are
            come first.
    """
    part_P = torch.arange(1, _WAYS + 1, device=low_N.device)
    while most > 0 and value_K.numel():
        step_N1 = ((high_N - low_N + (_WAYS - 1)) // _WAYS).clamp_(min=1)[:, None]
        number_NP = low_N[:, None] + step_N1 * part_P - 1
        found_NP = value_K[number_NP.clamp(max=value_K.numel() - 1)].to(torch.int64)
        below_N = ((number_NP < high_N[:, None]) & is_below(found_NP)).sum(dim=1)
        low_N = low_N + step_N1[:, 0] * below_N
        low_N, high_N = torch.minimum(low_N, high_N), torch.minimum(low_N + step_N1[:, 0] - 1, high_N)
        most = -(-most // _WAYS) - 1
    return low_N


def joined(parts: Sequence[DeviceSparse], count_T: np.ndarray) -> DeviceSparse:
    """Join the changes of different tensors of one vector, given in any order. `count_T` counts those of all
    its tensors.
    """
    if len(parts) == 1:
        return dataclasses.replace(parts[0], count_T=count_T)
    ordered = sorted(parts, key=lambda part: int(part.index[0][0]))
    before = [0, *itertools.accumulate(part.changed for part in ordered)]
    bounds = [part.index[1][:-1] + first for part, first in zip(ordered, before[:-1], strict=True)]
    return DeviceSparse(
        torch.cat([part.low_K for part in ordered]),
        torch.cat([part.step_K for part in ordered]),
        torch.cat([part.index[0] for part in ordered]),
        torch.cat([*bounds, bounds[0].new_tensor(before[-1:])]),
        count_T,
    )


@dataclasses.dataclass(frozen=True, eq=False)
class DeviceBits:
    """The shadow's bits of one vector on a device.

    Attributes:
        bits_N: One buffer, as signed integers of the width, [N]. Runs begin at multiples of `ALIGNED`
            elements, so there are gaps between them, with any contents.
        run_T3: The held run of each tensor of the vector: position of the first element in the vector, number
            of elements, and place of the first one in `bits_N`; int64[T, 3], on the host. Nothing may be held
            of a tensor.
    """

    bits_N: torch.Tensor
    run_T3: np.ndarray


ALIGNED = 64
"""Elements."""


@dataclasses.dataclass(eq=False)
class DeviceDelta(Delta):
    """Changes of a model on one device.

    Attributes:
        steps: By width; widths without changes are absent.
        bits: The shadow's bits by width, which has taken the steps once `ready` has passed. They stay until
            the job that has this delta is released.
        ready: Recorded after the steps were applied to the shadow; a stream that reads `steps` or `bits`
            waits for it. None where the device is the host, under Triton's interpreter.
        is_spare: Whether nobody but who stages it has `steps`, as of a decoder; see `Arrived`.
    """

    steps: Mapping[int, DeviceSparse]  # type: ignore[assignment]
    bits: Mapping[int, DeviceBits] = dataclasses.field(default_factory=dict)
    ready: Any = None  # torch.cuda.Event | None
    is_spare: bool = False

    def _count_T(self) -> dict[int, np.ndarray]:
        return {width: steps.count_T for width, steps in self.steps.items()}

    def host(self) -> Delta:
        """Copy everything to the host: for merging with another delta, and for an encoder that runs there.

        Raises:
            CorruptDataError: a step is missing there, or is of another tensor.
        """
        if self.ready is not None:
            self.ready.synchronize()
        vectors, found = self.layout.vectors, dict[int, Sparse]()
        for width, steps in self.steps.items():
            found[width] = steps.host(vectors[width].index_dtype)
            if (vectors[width].count(found[width].at_K) != steps.count_T).any():
                raise CorruptDataError(
                    "A version's changes on the host are not those on its device: memory has failed. Publish "
                    "again."
                )
        return Delta(self.layout, found)
