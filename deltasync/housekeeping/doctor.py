"""What this machine can do at a channel's URL, tried out: for people who set up a trainer or a replica."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import secrets
import statistics
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Literal

from deltasync.channel import heartbeat, keys
from deltasync.channel.reading import ChannelReader
from deltasync.errors import CorruptDataError, DeltaSyncError, NotPublishedError, StoreError
from deltasync.stores.base import Store
from deltasync.stores.probe import decides

CHANGED_FRACTION = 0.01
BITS_PER_CHANGED = 9.84
"""Those of `packed` at 1 % changed, see docs/benchmarks.md."""

_BLOB_BYTES = 8 << 20
_READS = 7
_LATE_S = 0.3
_CLOCK_S = 5.0


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    Attributes:
        check: Its name.
        state: A `failure` keeps a trainer or a replica from working; with a `warning` it works, but not as well.
        found: What was found, in one sentence.
        advice: What to do about it; empty if nothing.
    """

    check: str
    state: Literal["ok", "warning", "failure"]
    found: str
    advice: str = ""


def examine(reader: ChannelReader, *, parameters: float) -> Iterator[Finding]:
    """Try the store out, look at the channel and at what is installed here. Findings come as they are made.

    An object of 8 MiB and some small ones are stored under `probe/`, by names that nobody else uses, and deleted again. The
    channel need not exist. Transfer times are calculated for a model of so many parameters.
    """
    trial = _Trial(reader.store, parameters)
    steps: tuple[tuple[str, Callable[[], Finding], str], ...] = (
        ("list", trial.list, "Check the URL, the credentials, and that they allow to list."),
        ("write", trial.write, "A replica works without, but nobody sees its heartbeat. A publisher needs it."),
        ("read", trial.read, "Allow to read objects."),
        ("clock", trial.clock, ""),
        ("create", trial.create, ""),
        ("speed", trial.speed, ""),
        ("delete", trial.delete, "Publishing works without, but nothing is pruned, and the object just stored stays."),
    )
    reached = False
    try:
        for check, action, advice in steps:
            try:
                finding = action()
            except DeltaSyncError as error:
                yield Finding(check, "warning" if check == "delete" else "failure", str(error), advice)
                break
            yield finding
            reached = True
    finally:
        trial.clean_up()
    if reached:
        yield from _channel(reader)
    yield from _installed()
    yield _gpu()


class _Trial:
    """The store's checks, in order: each builds on those before it. All raise DeltaSyncError."""

    def __init__(self, store: Store, parameters: float) -> None:
        self._store = store
        self._parameters = parameters
        self._key = keys.probe(f"doctor-{secrets.token_hex(8)}")
        self._small = os.urandom(16)
        self._began_s = self._ended_s = 0.0
        self._stored = False

    def list(self) -> Finding:
        next(iter(self._store.list(keys.VERSIONS)), None)
        return Finding("list", "ok", "Objects can be listed.")

    def write(self) -> Finding:
        self._began_s, self._stored = time.time(), True
        self._store.put(self._key, self._small)
        self._ended_s = time.time()
        return Finding("write", "ok", "Objects can be stored.")

    def read(self) -> Finding:
        self._read(self._small)
        seconds = [_timed(lambda: self._read(self._small)) for _ in range(_READS)]
        self._round_trip_s = statistics.median(seconds)
        found = (
            f"A small read takes {self._round_trip_s * 1e3:.0f} ms ({min(seconds) * 1e3:.0f} to {max(seconds) * 1e3:.0f})."
        )
        if self._round_trip_s < _LATE_S:
            return Finding("read", "ok", found)
        return Finding("read", "warning", found, "Each version takes two such times: choose a bucket that is nearer.")

    def clock(self) -> Finding:
        """Leases and `prune` go by the store's clock; lag and the age of heartbeats by this machine's."""
        stored_s = next((info.modified_s for info in self._store.list(self._key)), 0.0)
        # Stores tell whole seconds.
        off_s = min(0.0, stored_s + 1 - self._began_s) + max(0.0, stored_s - self._ended_s)
        if not stored_s:
            return Finding("clock", "ok", "The store does not tell when an object was stored.")
        if abs(off_s) <= _CLOCK_S:
            return Finding("clock", "ok", "This machine's clock and the store's agree.")
        found = f"This machine's clock is {abs(off_s):,.0f} s {'behind' if off_s > 0 else 'ahead of'} the store's."
        return Finding("clock", "warning", found, "Correct it; lag and the age of heartbeats are told wrong otherwise.")

    def create(self) -> Finding:
        if decides(self._store, f"{self._key}-create"):
            return Finding("create", "ok", "What exists is not created again: the store keeps two publishers apart.")
        found = "What exists can be created again: a lease keeps two publishers apart, not the store."
        return Finding("create", "warning", found, "Opening a channel takes half a minute here.")

    def speed(self) -> Finding:
        blob = os.urandom(_BLOB_BYTES)
        up_s = _timed(lambda: self._store.put(self._key, blob))
        down_s = _timed(lambda: self._read(blob))
        up, down = (f"{8 * _BLOB_BYTES / seconds / 1e6:,.0f} Mbit/s" for seconds in (up_s, down_s))
        version_bytes = self._parameters * CHANGED_FRACTION * BITS_PER_CHANGED / 8
        takes_s = version_bytes / _BLOB_BYTES * (up_s + down_s) + 2 * self._round_trip_s
        found = (
            f"One connection stores {up} and reads {down}. A version of {self._parameters / 1e9:g} billion parameters "
            f"with {CHANGED_FRACTION:.0%} changed ({version_bytes / 1e6:,.1f} MB) would take {takes_s:.1f} s to a replica."
        )
        return Finding("speed", "ok", found)

    def delete(self) -> Finding:
        self._stored = False
        self._store.delete(self._key)
        return Finding("delete", "ok", "Objects can be deleted.")

    def clean_up(self) -> None:
        """Delete what a check that failed has left."""
        if self._stored:
            with contextlib.suppress(StoreError):
                self._store.delete(self._key)

    def _read(self, wanted: bytes) -> None:
        if self._store.read(self._key, len(wanted)) != wanted:
            raise CorruptDataError("The store gave other bytes than were stored.")


def _channel(reader: ChannelReader) -> Iterator[Finding]:
    try:
        reader.channel()
        newest = reader.newest()
        beats = [] if newest is None else heartbeat.read_all(reader.store, newest.record.run_id)
    except NotPublishedError:
        yield Finding("channel", "ok", "There is no channel yet.")
        return
    except DeltaSyncError as error:
        yield Finding("channel", "failure", str(error), "`deltasync check` tells more.")
        return
    if newest is None:
        yield Finding("channel", "ok", "The channel has no version yet.")
        return
    version = newest.version if newest.record.is_version else newest.base
    age_s = time.time() - newest.record.created_s
    yield Finding("channel", "ok", f"The newest version is {version}; the last record was written {age_s:,.0f} s ago.")
    live = [beat for beat in beats if heartbeat.is_live(beat)]
    yield Finding("replicas", "ok", f"{len(live)} of {len(beats)} replicas that are known have a fresh heartbeat.")
    for beat in live:
        if beat.error is not None:
            yield Finding("replicas", "warning", f"{beat.replica_id}: {beat.error}")


def _installed() -> Iterator[Finding]:
    """vLLM and TRL against the versions that deltasync's own requirements allow."""
    from packaging.requirements import Requirement

    for wanted in map(Requirement, metadata.requires("deltasync") or []):
        if wanted.name not in ("vllm", "trl") or wanted.marker is None or not wanted.marker.evaluate({"extra": wanted.name}):
            continue
        found = _version(wanted.name) or _version(f"{wanted.name}-cpu")
        if found is None:
            yield Finding(wanted.name, "ok", "It is not installed here, and not needed on every machine.")
        elif wanted.specifier.contains(found, prereleases=True):
            yield Finding(wanted.name, "ok", f"{found} is installed.")
        else:
            yield Finding(wanted.name, "failure", f"{found} is installed; deltasync works with {wanted.specifier}.")


def _gpu() -> Finding:
    import torch

    if not torch.cuda.is_available():
        return Finding("gpu", "ok", f"PyTorch {torch.__version__} sees none here; the kernels for CPUs are used.")
    name = torch.cuda.get_device_name()
    if importlib.util.find_spec("triton") is None:
        return Finding("gpu", "warning", f"{name}, without Triton.", "Install the triton that belongs to this PyTorch.")
    return Finding("gpu", "ok", f"{name}, with Triton.")


def _timed(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
