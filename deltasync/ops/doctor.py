"""Test whether this machine can publish to and follow a channel's URL, for people who set up a trainer or a
replica.
"""

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

from deltasync.channel import keys
from deltasync.channel.reading import ChannelReader
from deltasync.errors import CorruptDataError, DeltaSyncError, NotPublishedError, StoreError
from deltasync.ops.joins import check_join
from deltasync.ops.scan import local_store
from deltasync.serve import heartbeat
from deltasync.stores.base import Store
from deltasync.stores.retries import decides

CHANGED_FRACTION = 0.01
BITS_PER_CHANGED = 9.93  # bits per changed element of `packed` at 1 % changed, see docs/benchmarks/sizes.md

_BLOB_BYTES = 8 << 20
_READS = 7
_LATE_S = 0.3
_CLOCK_S = 5.0


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    check: str  # name of the check
    # at a failure trainer or replica cannot work, at a warning they work worse
    state: Literal["ok", "warning", "failure"]
    found: str  # the finding in one sentence
    advice: str = ""  # the cure; empty if none is needed


_ADVICE = {
    "list": "Check the URL, the credentials, and that they may list objects.",
    "write": "A publisher needs this right. A replica works without it, but nobody sees its heartbeat.",
    "read": "Give the credentials the right to read objects.",
    "clock": "",
    "create": "",
    "speed": "",
    "delete": "Publishing works without this right, but no garbage is collected, and the test object stays.",
}
"""The checks of a store in order, each with its cure. Each check needs those before it."""


def examine(reader: ChannelReader, *, parameters: float) -> Iterator[Finding]:
    """Test the store, the channel and the installed packages. Yields each finding as it is made.

    An object of 8 MiB and some small ones are stored under `probe/` with unique names, and deleted again. The
    channel need not exist. Transfer times are calculated for a model with this number of parameters.
    """
    with contextlib.closing(_try_store(reader.store, parameters)) as findings:
        for check, advice in _ADVICE.items():
            try:
                finding = next(findings)
            except DeltaSyncError as error:
                yield Finding(check, "warning" if check == "delete" else "failure", str(error), advice)
                break
            yield finding
    if check != "list":  # the store can be listed
        yield from _unfinished(reader.store)
        yield from _channel(reader)
    yield from _installed()
    yield _kernels()
    yield _gpu()


def _try_store(store: Store, parameters: float) -> Generator[Finding, None, None]:
    """Run the checks of `_ADVICE`. A failed check raises DeltaSyncError. Test objects are deleted in any
    case.
    """
    next(iter(store.list(keys.EPOCHS)), None)  # a short folder, however old the run
    yield Finding("list", "ok", "Objects can be listed.")
    key, small, blob = keys.probe(f"doctor-{secrets.token_hex(8)}"), os.urandom(16), os.urandom(_BLOB_BYTES)

    def read(wanted: bytes) -> None:
        if store.read(key, len(wanted)) != wanted:
            raise CorruptDataError("The store returned other bytes than were stored.")

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
            yield Finding(
                "read", "warning", found, "Each version needs two such reads: choose a nearer bucket."
            )

        yield _clock(next((info.modified_s for info in store.list(key)), 0.0), began_s, ended_s)

        if decides(store, f"{key}-create"):
            yield Finding(
                "create",
                "ok",
                "The store refuses to create an existing object, which fences a second publisher.",
            )
        else:
            lacks = "There are no hard links here, so the" if store.url.startswith("file:") else "The"
            found = f"{lacks} store cannot refuse to create an existing object. A lease fences a second publisher instead."
            yield Finding("create", "warning", found, "Opening a channel takes half a minute here.")

        up_s, down_s = _timed(lambda: store.put(key, blob)), _timed(lambda: read(blob))
        up, down = (f"{8 * _BLOB_BYTES / seconds / 1e6:,.0f} Mbit/s" for seconds in (up_s, down_s))
        version_bytes = parameters * CHANGED_FRACTION * BITS_PER_CHANGED / 8
        takes_s = version_bytes / _BLOB_BYTES * (up_s + down_s) + 2 * round_trip_s
        found = (
            f"One connection stores {up} and reads {down}. A version of {parameters / 1e9:g} billion "
            "parameters "
            f"with {CHANGED_FRACTION:.0%} changed ({version_bytes / 1e6:,.1f} MB) would take {takes_s:.1f} s "
            "to a replica."
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
    """Compare the store's clock, which `gc` and ages of heartbeats use, with this machine's, which measures
    lag.
    """
    if not stored_s:
        return Finding("clock", "ok", "The store has no modification times to compare with.")
    off_s = min(0.0, stored_s + 1 - began_s) + max(0.0, stored_s - ended_s)  # stores give whole seconds
    if abs(off_s) <= _CLOCK_S:
        return Finding("clock", "ok", "This machine's clock and the store's agree.")
    found = (
        f"This machine's clock is {abs(off_s):,.0f} s {'behind' if off_s > 0 else 'ahead of'} the store's."
    )
    return Finding("clock", "warning", found, "Correct it, or lag will be wrong.")


def _unfinished(store: Store) -> Iterator[Finding]:
    """Look for the temporary files of writers that were killed."""
    local = local_store(store)
    try:
        sizes = [] if local is None else [info.bytes for info in local.unfinished()]
    except StoreError as error:
        yield Finding("unfinished", "failure", str(error), _ADVICE["list"])
        return
    if sizes:
        found = f"{len(sizes)} temporary files of {sum(sizes):,} bytes are of writers that were killed, or that write now."
        yield Finding(
            "unfinished", "warning", found, "`deltasync gc` deletes those that are older than its --grace."
        )


def _channel(reader: ChannelReader) -> Iterator[Finding]:
    try:
        version = check_join(reader)
        newest = reader.newest()
        beats = heartbeat.read_all(reader.store, reader.channel().run_id)
    except NotPublishedError:
        found = f"{reader.store.url} holds no channel yet."
        yield Finding(
            "channel", "warning", found, "If a trainer has published, compare this URL with its own."
        )
        return
    except DeltaSyncError as error:
        yield Finding("channel", "failure", str(error), "`deltasync check` shows details.")
        return
    if newest is None:
        yield Finding("channel", "ok", "The channel has no version yet.")
        return
    age_s = time.time() - newest.record.created_s
    yield Finding(
        "channel", "ok", f"The newest version is {version}; the last record was written {age_s:,.0f} s ago."
    )
    live = [beat for beat in beats if heartbeat.is_live(beat)]
    yield Finding("replicas", "ok", f"{len(live)} of {len(beats)} known replicas have a fresh heartbeat.")
    for beat in live:
        if beat.error is not None:
            yield Finding("replicas", "warning", f"{beat.replica_id}: {beat.error}")


def _installed() -> Iterator[Finding]:
    """Compare vLLM and TRL with the versions that deltasync's own requirements allow."""
    from packaging.requirements import Requirement

    for wanted in map(Requirement, metadata.requires("deltasync") or []):
        if (
            wanted.name not in ("vllm", "trl")
            or wanted.marker is None
            or not wanted.marker.evaluate({"extra": wanted.name})
        ):
            continue
        found = _version(wanted.name) or _version(f"{wanted.name}-cpu")
        if found is None:
            yield Finding(wanted.name, "ok", "It is not installed here. Not every machine needs it.")
        elif wanted.specifier.contains(found, prereleases=True):
            yield Finding(wanted.name, "ok", f"{found} is installed.")
        else:
            yield Finding(
                wanted.name, "failure", f"{found} is installed; deltasync needs {wanted.specifier}."
            )


def _kernels() -> Finding:
    from deltasync.kernels import native

    if native.extension() is None:
        return Finding(
            "kernels", "warning", "They run in numpy, which is slow: the extension is missing.", native.CURE
        )
    return Finding("kernels", "ok", f"The extension uses {native.instructions()}.")


def _gpu() -> Finding:
    import torch

    if not torch.cuda.is_available():
        return Finding("gpu", "ok", f"PyTorch {torch.__version__} finds none; the CPU kernels are used.")
    name = torch.cuda.get_device_name()
    if importlib.util.find_spec("triton") is None:
        return Finding(
            "gpu", "warning", f"{name}, without Triton.", "Install the triton that matches this PyTorch."
        )
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
