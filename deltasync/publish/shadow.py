"""The shadow: the bits that were published last, of the ranges that this rank holds.

It is in one place: on the accelerator where the tensors are, if that has room, or on the host. Publishing
compares a stream with it, which only reads, and applies the difference once all ranks have agreed on the
version.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch

from deltasync.codec.base import Encoded
from deltasync.errors import CorruptDataError, get_logger
from deltasync.kernels.backend import accelerator
from deltasync.publish.detect import Difference, HostShadow, copied
from deltasync.publish.placement import choose, held_bytes
from deltasync.publish.ranges import Range, TensorRange
from deltasync.tensors import Delta, Fingerprints, Layout, TensorSpec
from deltasync.tensors.bits import bits_of, signed_view

logger = get_logger(__name__)

AUDITED_IN = 128
"""Versions in which all bits are compared with their fingerprints once."""


class Shadow:
    """Published bits of the ranges that this rank holds. One thread compares and applies; others may read
    snapshots.

    Args:
        specs: The whole tensors.
        ranges: The range that is held of each.
        memory: The unsigned bit patterns of each range, on the host; or what has them, there or on a device.
        place: `auto`, `device` or `host`: where bits that are on the host go when the first stream is
            compared with them.

    Attributes:
        layout: The whole tensors.
        ranges: The range that is held of each.
        lock: Held while the bits change.
        told: Called with each step that the bits take, while the lock is held (`Snapshot`).
        with_nan: Tensors with a NaN in what was taken, until `warn_of_nan`.
    """

    def __init__(
        self,
        specs: Mapping[str, TensorSpec],
        ranges: Mapping[str, Range],
        memory: Mapping[str, np.ndarray] | HostShadow,
        place: str = "host",
    ) -> None:
        self.layout = Layout(specs)
        self.ranges = dict(ranges)
        self.with_nan: list[str] = []
        self.lock = threading.RLock()
        self._memory = HostShadow(self.layout, self.ranges, memory) if isinstance(memory, Mapping) else memory
        self._place, self._is_settled = place, self._memory.device is not None
        self.told: list[Callable[[Delta], None]] = []
        self._planned: list[str] = []  # names of the tensors that are compared
        self._next, self._due = 0, 0.0  # of the audit: number of the next tensor, and elements that are due

    @property
    def bits(self) -> Mapping[str, np.ndarray]:
        """The bits of each range on the host: of a shadow there, a view; else a copy, made when it is asked
        for.
        """
        return self._memory.bits

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """The whole tensors by name."""
        return self.layout.specs

    @functools.cached_property
    def fingerprints(self) -> Fingerprints:
        """The share of each range in the fingerprint of its tensor; computed when it is first asked for."""
        found, self.with_nan = self._memory.fingerprints()
        return found

    def forget_fingerprints(self) -> None:
        """Let the fingerprints be computed from the bits when they are asked for again."""
        with self.lock:
            vars(self).pop("fingerprints", None)

    def audit(self) -> None:
        """Compare the next bits with their fingerprints: a share of all, so that a pass takes `AUDITED_IN`
        calls.

        A tensor is compared whole, once the shares of the calls before have added up to its size.

        Raises:
            CorruptDataError: memory has damaged bits, or fingerprints are of others.
        """
        names, sizes = [*self.specs], [stop - start for start, stop in self.ranges.values()]
        self._due += sum(sizes) / AUDITED_IN
        due: list[str] = []
        while len(due) < len(names) and self._due >= sizes[self._next]:
            due.append(names[self._next])
            self._due -= sizes[self._next]
            self._next = (self._next + 1) % len(names)
        wrong = [
            n
            for n, digest in zip(due, self._memory.digests(due), strict=True)
            if digest != self.fingerprints[n]
        ]
        if wrong:
            raise CorruptDataError(
                f"The last published bits of {', '.join(wrong[:5])}, which the trainer keeps in memory, do "
                "not have their "
                "fingerprints: memory has failed. Versions since may be unreadable; the next one has full "
                "weights."
            )

    def warn_of_nan(self, version: int) -> None:
        """Warn of NaN in what was taken last, once."""
        nan, self.with_nan = self.with_nan, []
        if nan:
            logger.warning(
                "Version %d is published as it is, but has NaN in %d tensors: %s. Replicas will produce "
                "garbage.",
                *(version, len(nan), ", ".join(nan[:5])),
            )

    @classmethod
    def of(
        cls,
        specs: Mapping[str, TensorSpec],
        parts: Mapping[str, TensorRange],
        place: str = "host",
        devices: Collection[torch.device] = (),
        *,
        keep: bool = False,
    ) -> Shadow:
        """Return a shadow with the bits of these parts of the tensors of `specs`, in its place if these are
        on `devices`.

        With `keep` the parts are on the host, in the served dtype, and their memory may become the shadow's.
        """
        layout, ranges = Layout(specs), {name: (part.start, part.stop) for name, part in parts.items()}
        device = choose(place, layout, ranges, devices)
        if device is None:
            held = {
                n: bits_of(part.held if keep else copied(part.held, specs[n].dtype))
                for n, part in parts.items()
            }
            memory = HostShadow(layout, ranges, held)
        else:
            memory = accelerator(device).shadow(layout, ranges)
            for name, part in parts.items():
                memory.set(name, part.held)
            memory.is_settled()
        shadow = cls(specs, ranges, memory, place)
        shadow._is_settled = True
        return shadow

    def compare(self, held: Sequence[torch.Tensor], names: Sequence[str] | None) -> Difference:
        """Compare the ranges of tensors that stay until the next call with the bits. Nothing is mutated.

        With None for the names, the tensors are those of the last call, which has returned, but for their
        addresses and bits: the caller has looked (`Source`).

        Raises:
            torch.OutOfMemoryError: the device has no memory for what differs, and the bits have to stay
                there.
        """
        self.settle({tensor.device for tensor in held if tensor.numel()} if not self._is_settled else ())
        if names is not None:
            self._plan(names, held)
        try:
            return self._memory.compare(held)
        except torch.OutOfMemoryError as error:
            if self._place != "auto":
                raise
            logger.warning(
                "The shadow moves to the host, where weights are compared from now on: %s",
                str(error).partition("\n")[0],
            )
            self._become(HostShadow(self.layout, self.ranges, dict(self.bits.items())))
            self._plan(self._planned, held)
            return self._memory.compare(held)

    def compare_each(self, parts: Iterable[tuple[str, torch.Tensor]]) -> Difference:
        """Compare ranges of tensors as they come; each may be gone when the next one is asked for. Raises as
        `compare`.
        """
        parts = iter(parts)
        first = list(itertools.islice(parts, 1))
        self.settle({held.device for _, held in first if held.numel()})
        return self._memory.compare_each(itertools.chain(first, parts))

    def apply(self, difference: Difference) -> None:
        """Take over a difference, which all ranks have agreed on.

        If this raises, or is interrupted, the bits are not known any more.
        """
        with self.lock:
            before = vars(self).pop("fingerprints", None)  # not known until the bits are
            deltas = [piece.host() for piece in difference.pieces] if self.told else []
            self._memory.apply(difference)
            if before is not None:
                self.fingerprints = before.with_gains(difference.gains)
            vectors = self.layout.vectors
            found = (
                vectors[width].names[t]
                for width, above_T in difference.new_nan_counts.items()
                for t in np.flatnonzero(above_T).tolist()
            )
            self.with_nan = [*dict.fromkeys([*self.with_nan, *found])]
            for tell in self.told:
                for delta in deltas:
                    tell(delta)

    def gains(self, delta: Delta) -> Mapping[int, np.ndarray] | None:
        """Return what steps that the bits have taken add to the fingerprints, as `Difference.gains`; None on
        a device.

        Raises:
            CorruptDataError: they are of elements that are not held.
        """
        return self._memory.gains(delta)

    def encode(
        self, codec_name: str, delta: Delta, digests: Mapping[int, np.ndarray], version: int, most: int
    ) -> Iterator[tuple[Encoded, bytes]] | None:
        """Return the payloads of a delta that the bits have taken, of about `most` changes each, with their
        bytes, made and proven on the device of both; None where the host does that.

        `digests` are the fingerprints after it, by width.
        """
        return self._memory.encode(codec_name, delta, digests, version, most)

    @property
    def size_bytes(self) -> dict[str, int]:
        """Memory of the bits, on the `host` and on the `device`; one of them is 0."""
        place = "host" if self._memory.device is None else "device"
        return {"host": 0, "device": 0, place: held_bytes(self.layout, self.ranges)}

    def settle(self, devices: Collection[torch.device]) -> None:
        """Move the bits to where the tensors of a first stream are, if they are to go there; once."""
        if self._is_settled:
            return
        device = choose(self._place, self.layout, self.ranges, devices)
        if device is not None:
            memory = accelerator(device).shadow(self.layout, self.ranges)
            for name, bits_N in self.bits.items():
                memory.view(name).copy_(signed_view(bits_N.reshape(-1)))
            memory.is_settled()
            self._become(memory)
        self._is_settled = True

    def _plan(self, names: Sequence[str], held: Sequence[torch.Tensor]) -> None:
        self._planned = [*names]
        self._memory.plan(self._planned, held)

    def _become(self, memory: HostShadow) -> None:
        with self.lock:
            self._memory = memory
