"""Live weights in checkpoint coordinates, and the only code that writes them.

    staged = memory.stage(changed)      # decoded, translated, on the device; live weights untouched
    memory.commit(staged)               # live weights mutated; `staged` holds the old values
    memory.rollback(staged)             # the old bits again

`segments` says where they lie, `staging` turns changes into exchanges, `exchange` does and undoes them.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from types import MappingProxyType
from typing import Any, Self

import numpy as np
import torch

from deltasync.errors import StageError, undoing
from deltasync.kernels.backend import Backend, backend_of
from deltasync.kernels.table import Writes
from deltasync.live import staging
from deltasync.live.exchange import Copy
from deltasync.live.segments import Prints, Segment, Union, unsigned
from deltasync.live.staging import Held, SegmentTable, Staged, Staging
from deltasync.tensors import (
    Changed,
    Layout,
    Region,
    TensorSpec,
    fingerprint,
    region_size,
)
from deltasync.tensors.bits import signed_view, spec_of


def device_of(live: torch.Tensor) -> Backend:
    """Return the backend of the memory that a tensor lies in."""
    return backend_of(live.device)


class LiveMemory:
    """Live weights in checkpoint coordinates: the whole model or a shard of it.

    `segments` says where each tensor of the table lies, by a list that may be empty. The regions of all
    shards together cover a tensor; two of them are equal or disjoint.

    `ties` has tensors without a place of their own, each with the one that the engine computes with instead.
    They are read there, and never written. So a version in which the two differ does not get its
    fingerprints.

    Attributes:
        regions: Which elements each segment holds, by tensor name.
        parts: The fingerprint of each segment, uint64, in the order of `regions`, as of the last commit or
            `audit`; None until the first `audit`.
    """

    def __init__(
        self,
        specs: Mapping[str, TensorSpec],
        segments: Mapping[str, list[Segment]],
        device_of: Callable[[torch.Tensor], Backend] = device_of,
        ties: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.ties = ties
        segments = {**segments, **{name: segments[other] for name, other in ties.items()}}
        self._specs = specs
        self._layout = Layout(specs)
        self._segments = segments
        self._device_of = device_of
        self._keys = {name: fingerprint.tensor_key(name) for name in specs}
        self.regions = {name: [segment.region() for segment in held] for name, held in segments.items()}
        self._numbers = {name: t for t, name in enumerate(specs)}
        counts = np.array([len(held) for held in segments.values()], np.int64)
        self._first_part = dict(zip(segments, (np.cumsum(counts) - counts).tolist(), strict=True))
        self.parts: np.ndarray | None = None
        self._devices = {device_of(segment.live) for held in segments.values() for segment in held}
        self._held: dict[str, Sequence[Region] | None] = {}

    @classmethod
    def audited(cls, tensors: Mapping[str, torch.Tensor]) -> Self:
        """Return the memory of whole tensors by their names, after an audit."""
        specs = {name: spec_of(name, tensor) for name, tensor in tensors.items()}
        memory = cls(specs, {name: [Segment.whole(tensor)] for name, tensor in tensors.items()})
        memory.audit()
        return memory

    @property
    def known_parts(self) -> np.ndarray:
        """As `parts`, once there was an audit."""
        assert self.parts is not None, "call `audit` first"
        return self.parts

    @functools.cached_property
    def _union(self) -> Union:
        return Union([*self._specs], [self.regions])

    @property
    def fingerprints(self) -> dict[str, int]:
        """Fingerprint of every tensor if this memory holds the whole model, -1 where copies of its regions
        differ.
        """
        return {} if self.parts is None else self._union.of(self.parts).by_name(self._specs)

    def compare(self, staged: Staged, found: Prints | None = None) -> tuple[list[str], int]:
        """Compare the fingerprints after a commit with what its version says.

        Args:
            staged: The version.
            found: The fingerprints over all shards. By default this memory holds the whole model.

        Returns:
            The tensors that have another fingerprint, and the model's fingerprint, -1 if copies of a region
            differ.
        """
        assert staged.digests is not None
        prints = self._union.of(self.known_parts) if found is None else found
        tensor_F, value_F, known_F = staged.digests
        wrong = tensor_F[known_F & ((prints.value_T[tensor_F] != value_F) | ~prints.same_T[tensor_F])]
        names = [*self._specs] if wrong.size else []
        return [names[t] for t in wrong.tolist()], prints.total

    def gather(self, name: str) -> np.ndarray:
        """Return a host copy of a tensor's bit patterns, flat and unsigned; zeros outside of `regions`."""
        flat_N = np.zeros(self._specs[name].element_count, self._specs[name].bits_dtype)
        for segment in self._place(name):
            segment.source(signed_view(flat_N)).copy_(segment.live)
        return flat_N

    def bits(self, name: str) -> np.ndarray:
        """Return the same as `gather`, as a view of live memory where possible. Do not write to it."""
        segments = self._place(name)
        if len(segments) == 1 and self._device_of(live := segments[0].live).is_host:
            is_whole = live.numel() == self._specs[name].element_count
            if is_whole and live.is_contiguous() and live.stride() == segments[0].stride:
                return unsigned(segments[0].flat())
        return self.gather(name)

    def _place(self, name: str) -> list[Segment]:
        if name not in self._segments:
            raise StageError(f"{name} has no addressable place in live memory.")
        return self._segments[name]

    def held(self, name: str) -> Sequence[Region] | None:
        """Return which elements of a tensor live memory holds, as `codec.Wanted`: None for all."""
        if name not in self._segments:
            return None  # `stage` refuses it
        if name not in self._held:
            whole = self._specs[name].element_count
            is_whole = any(region_size(region) == whole for region in self.regions[name])
            self._held[name] = None if is_whole else self.regions[name]
        return self._held[name]

    @functools.cached_property
    def wanted(self) -> Callable[[str], Sequence[Region] | None] | None:
        """`held`, as decoding wants it; None if every tensor is held whole."""
        return None if all(self.held(name) is None for name in self._specs) else self.held

    def audit(self, names: Set[str] | None = None) -> None:
        """Recompute the fingerprints of all segments, or of those of these tensors, from every bit of live
        memory.
        """
        self.parts = self._read_parts(names)
        _ = self._union  # made here, because `compare` is called in a commit's pause

    def is_intact(self, names: Set[str] | None = None) -> bool:
        """Whether the fingerprints of all segments, or of those of these tensors, are still `parts`, by every
        bit of live memory. Changes nothing.
        """
        return bool((self._read_parts(names) == self.known_parts).all())

    def _read_parts(self, names: Set[str] | None = None) -> np.ndarray:
        """Return the fingerprints of all segments: as they are in live memory, or, of other tensors than
        `names`, as they are known.
        """
        self._check_places(self._specs)
        if names is None:
            part_P = np.zeros(sum(map(len, self._segments.values())), np.uint64)
            wanted = {*range(part_P.size)}
        else:
            part_P = self.known_parts.copy()
            wanted = {part for name in names for part, _ in self._parts_of(name)}
        for places in itertools.chain(*self._places.values(), *self._tied.values()):
            if parts := places.lines.keys() & wanted:
                with places.device.staging():
                    part_M, value_M = places.fingerprints(parts)
                    part_P[part_M] = 0
                    np.add.at(part_P, part_M, value_M)
        return part_P

    def _check_places(self, names: Mapping[str, object]) -> None:
        if missing := names.keys() - self._segments.keys():
            self._place(min(missing))

    def _parts_of(self, name: str) -> list[tuple[int, Segment]]:
        return [*enumerate(self._place(name), self._first_part[name])]

    @functools.cached_property
    def _places(self) -> dict[int, list[SegmentTable]]:
        return self._placed(self._segments.keys() - self.ties)

    @functools.cached_property
    def _tied(self) -> dict[int, list[SegmentTable]]:
        """Those of ties, which are only read."""
        return self._placed(self.ties.keys())

    def _placed(self, names: Set[str]) -> dict[int, list[SegmentTable]]:
        """Return where the segments of these tensors lie, by width."""
        found = dict[int, list[SegmentTable]]()
        for width, vector in self._layout.vectors.items():
            by_device: dict[Backend, list[Held]] = {}
            for name, first, key in zip(
                vector.names, vector.first_T.tolist(), vector.key_T.tolist(), strict=False
            ):
                for part, segment in self._parts_of(name) if name in names else ():
                    if segment.live.numel():
                        by_device.setdefault(self._device_of(segment.live), []).append(
                            Held(part, key, first, segment)
                        )
            found[width] = [SegmentTable(device, vector.first_T, held) for device, held in by_device.items()]
        return found

    @functools.cached_property
    def decoder(self) -> Any:
        """The decoder of payloads into `Changed` on the device where all segments lie; None where `codec` does, on
        the host.
        """
        if len(self._devices) != 1:
            return None
        (device,) = self._devices
        return device.decoder(self._layout, self._segments)

    def warm_up(self) -> None:
        """Compile the kernels that an accelerator needs, so that neither staging nor a commit waits for them."""
        for places in itertools.chain(*self._places.values()):
            places.device.warm_up(places.table.dtype)

    def read(self, name: str) -> list[bytes]:
        """Return the bits of each segment of a tensor, in the order of its region's dimensions."""
        held = (
            (each.live, sorted(range(each.live.ndim), key=lambda dim: -each.stride[dim]))
            for each in self._place(name)
        )
        return [live.permute(order).contiguous().cpu().numpy().tobytes() for live, order in held]

    def differs(self, name: str, flat_N: torch.Tensor) -> bool:
        """Whether any bit in live memory differs from those of a whole tensor, a signed view on any
        device.
        """
        return any(staging.differs(self._device_of(held.live), held, flat_N) for held in self._place(name))

    def stage(self, changed: Changed) -> Staged:
        """Translate changes into writes and put them on the device. Live weights are untouched.

        A delta on a device stays there: nothing of its size crosses to the host.

        Raises:
            StageError: a tensor has no place in live memory, or its device has too little memory.
        """
        self._check_places(changed.fingerprints)
        staged = Staged(fingerprints=dict(changed.fingerprints))
        near = {device: device.near(changed.delta) for device in self._devices}
        for width in changed.delta.steps:
            for places in self._places[width]:
                swap = places.swap(near[places.device], width)
                staged.swaps += [] if swap is None else [swap]
        self._finish(staged)
        return staged

    def _finish(self, staged: Staged) -> None:
        """Set the fingerprints that the version has, and have the commit read tied tensors again afterwards."""
        for name, other in self.ties.items():
            if other in staged.fingerprints:
                staged.fingerprints.setdefault(name, None)
        staged.digests = staging.digests_of(self._numbers, staged.fingerprints)
        changed = {
            part for name in self.ties if name in staged.fingerprints for part, _ in self._parts_of(name)
        }
        for places in itertools.chain(*self._tied.values()):
            if parts := places.lines.keys() & changed:
                staged.readouts.append(places.readout([*parts]))

    def stage_weights(self, weights: Iterable[tuple[str, np.ndarray, int | None]]) -> Staged:
        """Translate whole tensors into writes: name, unsigned bit patterns of shape N, and the fingerprint or
        None.

        Raises:
            StageError: as `stage`.
            FormatError, ChainError, StoreError: from fetching and decoding; live weights are untouched.
        """
        devices, staged = dict[Backend, Staging](), Staged()
        by_width = {
            (each.device, width): each for width, of_width in self._places.items() for each in of_width
        }
        for name, bits_N, expected in weights:
            for part, segment in self._parts_of(name) if name not in self.ties else ():
                device = self._device_of(segment.live)
                if segment.live.numel():
                    if device not in devices:
                        devices[device] = device.weights() or Staging(device)
                    devices[device].whole(by_width[device, bits_N.itemsize], part, bits_N)
            staged.fingerprints[name] = expected
        for each in devices.values():
            each.finish(staged)
        self._finish(staged)
        return staged

    def commit(self, staged: Staged) -> Staged:
        """Write a staged version into live memory and update `parts`. Returns `staged`, which now holds the
        old values.

        After return the new bits are live; compare their fingerprints with the staged ones before serving
        them. If it raised, the old bits are live again, unless it raised CommitError.

        Raises:
            CommitError: the write failed and so did undoing it.
            StageError: live memory was written since this was staged.
        """
        began = time.perf_counter()
        done: list[Writes | Copy] = []
        try:
            self._exchange(staged, done)
            for copy in staged.copies:
                copy.exchange()
                done.append(copy)
            self._synchronize()
            staged.scatter_s = time.perf_counter() - began
            part_P = self._parts_after(staged)
        except BaseException:
            self._bring_back(done)
            raise
        staged.before_P, self.parts = self.parts, part_P
        return staged

    def _exchange(self, staged: Staged, done: list[Writes | Copy]) -> None:
        """Exchange scattered values on every device, and note each exchange in `done`."""
        for swap in staged.swaps:
            swap.exchange()
            done.append(swap)
        if any(swap.found() != swap.check for swap in staged.swaps):
            raise StageError("Live memory was written by someone else since this version was staged.")

    def _parts_after(self, staged: Staged) -> np.ndarray:
        """Return the fingerprints of all segments, once all of `staged` is written."""
        part_P = self.known_parts.copy()
        for swap in staged.swaps:
            np.add.at(part_P, *swap.gains)
        for part_M, value_M in [read() for read in staged.readouts]:
            part_P[part_M] = 0
            np.add.at(part_P, part_M, value_M)
        return part_P

    def rollback(self, committed: Staged) -> None:
        """Write the old values of the last commit back.

        Raises:
            CommitError: that failed.
        """
        self._bring_back((*committed.swaps, *committed.copies))
        self.parts = committed.before_P

    def _bring_back(self, exchanged: Sequence[Writes | Copy]) -> None:
        with undoing():
            for each in exchanged:
                each.exchange()
            self._synchronize()

    def _synchronize(self) -> None:
        for device in self._devices:
            device.synchronize()
