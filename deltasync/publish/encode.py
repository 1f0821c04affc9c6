"""ENCODE: the changes of one version on their way to its payloads, in groups of tensors."""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future

import numpy as np

from deltasync import codec, fingerprint
from deltasync.channel import payloads
from deltasync.channel.documents import Channel, Delta, File, Record, Reference, Version
from deltasync.channel.record import INLINE_BYTES, Stored
from deltasync.codec.base import Encoded
from deltasync.errors import CorruptDataError, DeltaSyncError
from deltasync.publish.collect import Weights
from deltasync.publish.shadow import Shadow
from deltasync.types import Patch

GROUP_CHANGED = 1 << 20
"""Changed elements that make a group: it is encoded, and stored as a part, while later tensors are still compared."""

Group = list[Patch]


class AbortedError(DeltaSyncError):
    """The stream of a version failed while its first groups were being encoded."""


@dataclasses.dataclass(kw_only=True, eq=False)
class Job:
    """One version on its way to the store.

    Its changes come group by group: as the stream is read, or all at once when the uploader is free for it.

    Attributes:
        serial: Number of the job, the same on all ranks.
        version: The version's number.
        channel: The channel, which may not be stored yet.
        shadow: Holds what is published, until it is `released`.
        full: Whether it is full weights, and its changes do not matter.
        live: Whether its changes come while the stream is read; otherwise they are `patches`.
        step: The trainer's.
        coalesced: Publishes that it covers.
        changed: Elements that differ from the version before, over all ranks.
        patches: Steps against the version before, to fold later ones in while it waits.
        fingerprints: Of whole tensors at this version; complete once all groups are there.
        reference: What it refers to instead of holding the weights.
        weights: Of a sharded trainer: those of this version, for its record or for an anchor beside it.
        ended_s: When its stream had been read, or it began if that was later, by `time.perf_counter`.
        released: Set once it does not need the shadow any more.
        encoded: Bytes of its payloads, and the seconds since `ended_s`.
        uploaded: The digest of its record, once it is visible; or what went wrong.
    """

    serial: int
    version: int
    channel: Channel
    shadow: Shadow
    full: bool = False
    live: bool = False
    step: int | None = None
    coalesced: int = 1
    changed: int = 0
    patches: dict[str, Patch] = dataclasses.field(default_factory=dict)
    fingerprints: Mapping[str, int] = dataclasses.field(default_factory=dict)
    reference: Reference | None = None
    weights: Weights | None = None
    ended_s: float = dataclasses.field(default_factory=time.perf_counter)
    released: threading.Event = dataclasses.field(default_factory=threading.Event)
    encoded: Future[tuple[int, float]] = dataclasses.field(default_factory=Future)
    uploaded: Future[str] = dataclasses.field(default_factory=Future)
    _group: Group = dataclasses.field(default_factory=list)
    _group_changed: int = 0
    _groups: queue.SimpleQueue[tuple[Group, bool] | None] = dataclasses.field(default_factory=queue.SimpleQueue)

    @property
    def kind(self) -> str:
        """Of its record."""
        return "anchor" if self.full else "delta"

    def add(self, patch: Patch) -> None:
        """One more changed tensor."""
        self._group.append(patch)
        self._group_changed += patch.changed
        if self._group_changed >= GROUP_CHANGED:
            self._groups.put((self._group, False))
            self._group, self._group_changed = [], 0

    def end(self) -> None:
        """There are no more."""
        self.ended_s = time.perf_counter()
        self._groups.put((self._group, True))

    def abort(self) -> None:
        """There will be no version."""
        self._groups.put(None)

    def groups(self) -> Iterator[tuple[Group, bool]]:
        """The groups, which may be empty, each with whether it is the last; waits for them.

        Raises:
            AbortedError: see `abort`.
        """
        if not self.live:
            for patch in self.patches.values():
                self.add(patch)
            self.end()
        last = False
        while not last:
            found = self._groups.get()
            if found is None:
                raise AbortedError(f"The stream of version {self.version} failed.")
            group, last = found
            yield group, last

    def drop_weights(self) -> None:
        """Give back what lies on the local disk for it."""
        if self.weights is not None:
            self.weights.close()
            self.weights = None

    def end_encoding(self, payload_bytes: int) -> None:
        """Its payloads have so many bytes."""
        if not self.encoded.done():
            self.encoded.set_result((payload_bytes, time.perf_counter() - self.ended_s))

    def succeed(self, digest: str, payload_bytes: int) -> None:
        """Tell its receipts that it is visible."""
        self.drop_weights()
        self.end_encoding(payload_bytes)
        self.uploaded.set_result(digest)

    def fail(self, error: BaseException) -> None:
        """Tell its receipts what went wrong."""
        self.drop_weights()
        self.released.set()
        for future in (self.encoded, self.uploaded):
            if not future.done():
                future.set_exception(error)


@dataclasses.dataclass(frozen=True, slots=True)
class Payloads:
    """What one rank encoded of a version.

    Attributes:
        files: Its parts, which are being stored.
        inline: What goes into the record.
        bytes: Of all payloads.
        patches: All steps, if they were asked for.
    """

    files: list[Future[File]]
    inline: Encoded | None
    bytes: int
    patches: dict[str, Patch]


class Encoder:
    """Payloads of one codec, of what a shadow holds now.

    Args:
        codec_name: Which.
        shadow: Its bits do not change while something is encoded.
    """

    def __init__(self, codec_name: str, shadow: Shadow) -> None:
        self._codec = codec.get(codec_name)
        self._shadow = shadow

    def payloads(self, job: Job, put: Callable[[int, bytes], Future[File]], inline: bool, keep: bool = False) -> Payloads:
        """Encode and prove a job group by group, and store its parts meanwhile.

        Args:
            job: A delta.
            put: Stores a part, by its number from 1 on.
            inline: Whether the last group may go into the record.
            keep: Whether to return the patches.

        Raises:
            AbortedError: the stream failed.
            CorruptDataError: a payload does not decode to what was encoded.
        """
        files: list[Future[File]] = []
        kept: dict[str, Patch] = {}
        in_record: Encoded | None = None
        payload_bytes, base_version = 0, job.version - 1
        for group, last in job.groups():
            if not group:
                continue
            encoded = self.encode(group, job.fingerprints, job.version, base_version)
            data = encoded.to_bytes()
            payload_bytes += len(data)
            if inline and last and len(data) <= INLINE_BYTES:
                in_record = encoded
            else:
                files.append(put(len(files) + 1, data))
            self.prove(data, group, job.fingerprints, job.version, base_version)
            kept |= {patch.name: patch for patch in group} if keep else {}
        return Payloads(files, in_record, payload_bytes, kept)

    def encode(self, patches: Group, fingerprints: Mapping[str, int], version: int, base_version: int) -> Encoded:
        """The payload of these steps, which lead to the shadow.

        Args:
            patches: Of this rank's ranges.
            fingerprints: Of the whole tensors after them.
            version: Number of the version that they lead to.
            base_version: Where they start.
        """
        encoder, shadow = self._codec.encoder(), self._shadow
        for patch in patches:
            assert patch.index_K is not None
            digest = fingerprint.to_hex(fingerprints[patch.name])
            new, (start, _) = shadow.bits[patch.name], shadow.ranges[patch.name]
            encoder.add(shadow.specs[patch.name], patch.index_K, patch.data, new, digest, start)
        return encoder.finish(version, base_version)

    def prove(self, data: bytes, patches: Group, fingerprints: Mapping[str, int], version: int, base_version: int) -> None:
        """Decode a payload as a reader does, and hold it to what was encoded.

        Raises:
            CorruptDataError: it is anything else.
        """
        left = {patch.name: patch for patch in patches}
        record = Record(
            run_id="-",
            kind="delta",
            version=version,
            epoch="-",
            created_at="-",
            base=Version(base_version, "-", "-"),
            delta=Delta(codec=self._codec.name, changed=sum(patch.changed for patch in patches)),
        )
        name = f"The payload of version {version}"
        decoded = payloads.decode(
            Stored("-", "-", len(data), record), iter([(name, data)]), self._shadow.specs, self._old(left)
        )
        for found, digest in decoded:
            patch = left.pop(found.name, None)
            if patch is None or digest != fingerprints[patch.name] or not self._same(found, patch):
                raise CorruptDataError(
                    f"{name} decodes to other bits of {found.name} than were encoded; nothing was published."
                )
        if left:
            raise CorruptDataError(f"{name} lacks {', '.join(sorted(left)[:5])}; nothing was published.")

    def _same(self, found: Patch, patch: Patch) -> bool:
        new, (start, _) = self._shadow.bits[patch.name], self._shadow.ranges[patch.name]
        if found.index_K is None:
            return np.array_equal(found.data, new)
        assert patch.index_K is not None
        expected = new[patch.index_K - start] if found.absolute else patch.data
        return np.array_equal(found.index_K, patch.index_K) and np.array_equal(found.data, expected)

    def _old(self, patches: Mapping[str, Patch]) -> codec.OldBits:
        """The bits before the steps."""

        def old(name: str) -> np.ndarray:
            bits_N, index_K = self._shadow.bits[name].copy(), patches[name].index_K
            assert index_K is not None
            bits_N[index_K] -= patches[name].data
            return bits_N

        return old
