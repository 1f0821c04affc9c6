"""Try out what this machine can do at a channel's URL, for people who set up a trainer or a replica."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import secrets
import statistics
import time
from collections.abc import Callable, Generator, Iterator
from importlib import metadata
from typing import Literal

from deltasync.channel import heartbeat, keys
from deltasync.channel.reading import ChannelReader
from deltasync.errors import CorruptDataError, DeltaSyncError, NotPublishedError, StoreError
from deltasync.maintenance import quota
from deltasync.stores.base import Store
from deltasync.stores.probe import decides

CHANGED_FRACTION = 0.01
BITS_PER_CHANGED = 9.93
"""What `packed` takes at 1 % changed, see docs/benchmarks.md."""

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


_ADVICE = {
    "list": "Check the URL, the credentials, and that they allow to list.",
    "write": "A replica works without, but nobody sees its heartbeat. A publisher needs it.",
    "read": "Allow to read objects.",
    "clock": "",
    "create": "",
    "speed": "",
    "delete": "Publishing works without, but nothing is pruned, and the object just stored stays.",
}
"""The checks of a store, in order, and what to do if one fails; each builds on those before it."""


def examine(reader: ChannelReader, *, parameters: float) -> Iterator[Finding]:
    """Try out the store, look at the channel and at what is installed here. Yields each finding as it is made.

    An object of 8 MiB and some small ones are stored under `probe/`, by names that nobody else uses, and deleted again. The
    channel need not exist. Transfer times are calculated for a model of so many parameters.
    """
    with contextlib.closing(_try_store(reader.store, parameters)) as findings:
        for check, advice in _ADVICE.items():
            try:
                finding = next(findings)
            except DeltaSyncError as error:
                yield Finding(check, "warning" if check == "delete" else "failure", str(error), advice)
                break
            yield finding
    if check != "list":  # it can be listed
        yield from _channel(reader)
    if reader.store.url.startswith("hf:"):
        yield from _quotas()
    yield from _installed()
    yield _kernels()
    yield _gpu()


def _try_store(store: Store, parameters: float) -> Generator[Finding, None, None]:
    """Make the checks of `_ADVICE`. Raises DeltaSyncError when one fails; what was stored is deleted in any case."""
    next(iter(store.list(keys.VERSIONS)), None)
    yield Finding("list", "ok", "Objects can be listed.")
    key, small, blob = keys.probe(f"doctor-{secrets.token_hex(8)}"), os.urandom(16), os.urandom(_BLOB_BYTES)

    def read(wanted: bytes) -> None:
        if store.read(key, len(wanted)) != wanted:
            raise CorruptDataError("The store gave other bytes than were stored.")

    stored = True
    try:
        began_s = time.time()
        store.put(key, small)
        ended_s = time.time()
        yield Finding("write", "ok", "Objects can be stored.")

        read(small)
        seconds = [_timed(lambda: read(small)) for _ in range(_READS)]
        round_trip_s = statistics.median(seconds)
        found = f"A small read takes {round_trip_s * 1e3:.0f} ms ({min(seconds) * 1e3:.0f} to {max(seconds) * 1e3:.0f})."
        if round_trip_s < _LATE_S:
            yield Finding("read", "ok", found)
        else:
            yield Finding("read", "warning", found, "Each version takes two such times: choose a bucket that is nearer.")

        yield _clock(next((info.modified_s for info in store.list(key)), 0.0), began_s, ended_s)

        if decides(store, f"{key}-create"):
            yield Finding("create", "ok", "What exists is not created again: the store keeps two publishers apart.")
        else:
            found = "What exists can be created again: a lease keeps two publishers apart, not the store."
            yield Finding("create", "warning", found, "EpochDocument a channel takes half a minute here.")

        up_s, down_s = _timed(lambda: store.put(key, blob)), _timed(lambda: read(blob))
        up, down = (f"{8 * _BLOB_BYTES / seconds / 1e6:,.0f} Mbit/s" for seconds in (up_s, down_s))
        version_bytes = parameters * CHANGED_FRACTION * BITS_PER_CHANGED / 8
        takes_s = version_bytes / _BLOB_BYTES * (up_s + down_s) + 2 * round_trip_s
        found = (
            f"One connection stores {up} and reads {down}. A version of {parameters / 1e9:g} billion parameters "
            f"with {CHANGED_FRACTION:.0%} changed ({version_bytes / 1e6:,.1f} MB) would take {takes_s:.1f} s to a replica."
        )
        yield Finding("speed", "ok", found)

        stored = False
        store.delete(key)
        yield Finding("delete", "ok", "Objects can be deleted.")
    finally:
        if stored:
            with contextlib.suppress(StoreError):
                store.delete(key)


def _clock(stored_s: float, began_s: float, ended_s: float) -> Finding:
    """Leases and `prune` use the store's clock; lag and the age of heartbeats are measured by this machine's."""
    if not stored_s:
        return Finding("clock", "ok", "The store does not tell when an object was stored.")
    off_s = min(0.0, stored_s + 1 - began_s) + max(0.0, stored_s - ended_s)  # stores tell whole seconds
    if abs(off_s) <= _CLOCK_S:
        return Finding("clock", "ok", "This machine's clock and the store's agree.")
    found = f"This machine's clock is {abs(off_s):,.0f} s {'behind' if off_s > 0 else 'ahead of'} the store's."
    return Finding("clock", "warning", found, "Correct it; lag and the age of heartbeats are wrong otherwise.")


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


def _quotas() -> Iterator[Finding]:
    """How many replicas one account of the Hub serves beside a trainer."""
    *rows, last = quota.sentences()
    for row in rows:
        yield Finding("quota", "ok", row)
    yield Finding("quota", "ok", last, quota.ADVICE)


def _installed() -> Iterator[Finding]:
    """Compare vLLM and TRL with the versions that deltasync's own requirements allow."""
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


def _kernels() -> Finding:
    from deltasync.kernels import compiled, cpu  # noqa: F401 - says where its kernels are kept

    if compiled.uncached:
        return Finding("kernels", "warning", f"Each process compiles them anew: {compiled.uncached[0]}.", compiled.CURE)
    return Finding("kernels", "ok", "Compiled kernels are kept on disk.")


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
