"""Segments: where parts of checkpoint tensors lie in live memory.

A replica on the host has one segment per tensor; in vLLM, each copy that its loader makes into a fused,
stacked or sliced parameter is one (`deltasync.serve.load_plan`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from deltasync.errors import ApplyError, StageError
from deltasync.tensors import Region, TensorSpec, fingerprint
from deltasync.tensors.bits import SIGNED, int_view, signed_view


@dataclasses.dataclass(frozen=True, slots=True)
class Segment:
    """A part of a checkpoint tensor and its place in live memory.

    Attributes:
        live: Signed-integer view of the live memory, any stride; writing to it writes the weights.
        stride, offset: Where the same elements lie in the flat checkpoint tensor. Their shape is
            `live.shape`.
    """

    live: torch.Tensor
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def whole(cls, tensor: torch.Tensor) -> Segment:
        """Return the segment of a whole tensor in its own memory, with any strides."""
        live = tensor.detach()
        if live.is_contiguous():
            return cls(int_view(live), (1,), 0)
        strides = torch.empty(live.shape, device="meta").stride()
        return cls(live.view(SIGNED[live.element_size()]), strides, 0)

    @property
    def place(self) -> tuple[object, ...]:
        """A key that is equal for two segments of the same elements in the same memory."""
        return self.live.data_ptr(), self.live.shape, self.live.stride(), self.stride, self.offset

    def region(self) -> Region:
        """Return which elements of the checkpoint tensor it holds."""
        dims: list[tuple[int, int]] = []
        for stride, size in sorted(zip(self.stride, self.live.shape, strict=True), reverse=True):
            if size == 1:
                continue
            if dims and dims[-1][1] == size * stride:
                dims[-1] = dims[-1][0] * size, stride
            else:
                dims.append((size, stride))
        return self.offset, tuple(dims)

    def layout(self) -> tuple[tuple[int, int, int], ...]:
        """Return (live stride, size, checkpoint stride) of each dimension, the largest live stride first.

        Dimensions that continue each other in both memories are joined. A position in `flat()` divided by the
        live strides in this order gives the coordinates.

        Raises:
            StageError: the live memory overlaps itself, so that a position has no unique coordinates.
        """
        dims: list[tuple[int, int, int]] = []
        for live_stride, size, stride in sorted(
            zip(self.live.stride(), self.live.shape, self.stride, strict=True), reverse=True
        ):
            if size == 1:
                continue
            if dims and (dims[-1][0], dims[-1][2]) == (size * live_stride, size * stride):
                dims[-1] = live_stride, dims[-1][1] * size, stride
            else:
                dims.append((live_stride, size, stride))
        for at, (live_stride, _, _) in enumerate(dims):
            if live_stride <= sum((size - 1) * inner for inner, size, _ in dims[at + 1 :]):
                raise StageError("A weight overlaps itself in live memory.")
        return tuple(dims)

    def pieces(self, most_elements: int, dim: int = 0) -> Iterator[Segment]:
        """Cut the segment into few pieces of at most so many elements, along the dimensions from `dim` on."""
        if self.live.numel() <= most_elements:
            yield self
            return
        size, stride = self.live.shape[dim], self.stride[dim]
        step = max(1, most_elements * size // self.live.numel())
        for first in range(0, size, step):
            part = self.live.narrow(dim, first, min(step, size - first))
            yield from Segment(part, self.stride, self.offset + first * stride).pieces(most_elements, dim + 1)

    def source(self, flat_N: torch.Tensor) -> torch.Tensor:
        """Return the segment's view of a flat checkpoint tensor."""
        return flat_N.as_strided(self.live.shape, self.stride, self.offset)

    def flat(self) -> torch.Tensor:
        """Return the live memory from the segment's first to its last element, gaps included, shape
        [span].
        """
        span = 1 + sum(
            (size - 1) * stride for size, stride in zip(self.live.shape, self.live.stride(), strict=True)
        )
        return self.live.as_strided((span if self.live.numel() else 0,), (1,))


class Prints(NamedTuple):
    """The fingerprints of all tensors of a model.

    Attributes:
        value_T: The fingerprints, uint64; any value where copies differ.
        same_T: Whether all copies of each of the tensor's regions are equal.
    """

    value_T: np.ndarray
    same_T: np.ndarray

    @property
    def total(self) -> int:
        """The model's fingerprint, -1 if copies differ."""
        return int(self.value_T.sum(dtype=np.uint64)) if self.same_T.all() else -1

    def by_name(self, names: Iterable[str]) -> dict[str, int]:
        """Return them by the names of all tensors, -1 where copies differ."""
        found = zip(names, self.value_T.tolist(), self.same_T.tolist(), strict=True)
        return {name: value if same else -1 for name, value, same in found}


class Union:
    """The fingerprints of tensors, from those of the segments that one or several shards hold.

    A tensor's is the sum over its distinct regions.

    Args:
        names: The tensors.
        regions: The regions of each shard's segments, by tensor name; segments are numbered in this order.
    """

    def __init__(self, names: Sequence[str], regions: Sequence[Mapping[str, list[Region]]]) -> None:
        number = {name: t for t, name in enumerate(names)}
        first: dict[tuple[int, Region], int] = {}
        first_P, tensor_P = list[int](), list[int]()
        for held in regions:
            for name, of_tensor in held.items():
                for region in of_tensor:
                    tensor_P.append(number[name])
                    first_P.append(first.setdefault((number[name], region), len(first_P)))
        self._count = len(names)
        self._first_P, self._tensor_P = np.array(first_P, np.int64), np.array(tensor_P, np.int64)
        self._distinct = np.flatnonzero(self._first_P == np.arange(self._first_P.size))

    def of(self, part_P: np.ndarray) -> Prints:
        """Return the fingerprints of all tensors, from those of all segments, uint64."""
        value_T, same_T = np.zeros(self._count, np.uint64), np.ones(self._count, bool)
        np.add.at(value_T, self._tensor_P[self._distinct], part_P[self._distinct])
        same_T[self._tensor_P[part_P != part_P[self._first_P]]] = False
        return Prints(value_T, same_T)


def model_fingerprint(fingerprints: Mapping[str, int]) -> int:
    """Return a model's fingerprint from those of its tensors; -1 if one of them is -1."""
    return -1 if -1 in fingerprints.values() else sum(fingerprints.values()) & fingerprint.MASK


def unsigned(view: torch.Tensor) -> np.ndarray:
    """Return the unsigned bit patterns of a signed view on the host. They share its memory."""
    array: np.ndarray = view.numpy()
    return array.view(f"u{array.itemsize}")


def assemble(spec: TensorSpec, regions: list[list[Region]], shards: list[list[bytes]]) -> np.ndarray:
    """Return a tensor's bits, flat and unsigned, from the bits of the segments of all shards.

    Raises:
        ApplyError: two copies of the same elements differ.
    """
    flat_N = np.zeros(spec.element_count, spec.bits_dtype)
    view = signed_view(flat_N)
    seen: dict[Region, bytes] = {}
    for held, data in zip(regions, shards, strict=True):
        for region, bits in zip(held, data, strict=True):
            if seen.setdefault(region, bits) != bits:
                raise ApplyError(f"Two shards hold different copies of the same elements of {spec}.")
            offset, dims = region
            source = torch.frombuffer(bytearray(bits), dtype=view.dtype) if bits else view[:0]
            shape = [size for size, _ in dims]
            view.as_strided(shape, [stride for _, stride in dims], offset).copy_(source.reshape(shape))
    return flat_N
