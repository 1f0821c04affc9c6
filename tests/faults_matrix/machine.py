"""The machine fails: its disk is full, or its memory is short."""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import subprocess
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from unittest import mock

import pytest
import torch

from deltasync import Publisher, Replica, maintenance, open_store
from deltasync.channel.reading import ChannelReader
from deltasync.errors import PublishLostError, PublishPendingError, StageError
from deltasync.stores.cache import CachedStore
from tests.builders import in_parts
from tests.conftest import assert_same_bits
from tests.faults_matrix import steps
from tests.faults_matrix.matrix import (
    PATIENCE_S,
    Lab,
    Seen,
    assert_holds,
    expecting,
    listening,
    publish,
    row,
    timed,
)
from tests.processes import in_a_process

_DISK_BYTES = 1 << 20
_LARGE = 16_000_000  # elements
_MARGINS_MB = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)


@contextlib.contextmanager
def _small_disk(lab: Lab) -> Iterator[Path]:
    """A disk of its own, of 1 MiB. Needs root."""
    disk = lab.folder / "disk"
    disk.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "tmpfs", str(disk)]
    if os.getuid() != 0 or subprocess.run(["mount", *options], capture_output=True).returncode:
        pytest.skip("only root can mount a small disk")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def _fill(disk: Path) -> Path:
    """Take all the room that is left."""
    filler = disk / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)
    return filler


@row(
    "A full disk",
    "the channel's disk is full (file://)",
    noticed="the failed write, after all retries",
    back="room on the disk; the next publish stores both versions",
)
def _store_full(lab: Lab) -> Seen:
    with _small_disk(lab) as disk:
        url = f"file://{disk}/channel"
        replica, publisher = Replica(url), Publisher(url, retries=2, retry_delay_s=0.001)
        publish(publisher, 1)
        replica.sync()
        filler = _fill(disk)
        with expecting(PublishPendingError) as said:
            publish(publisher, 2)
        replica.sync()
        assert_holds(replica, 1)
        filler.unlink()
        with timed() as took:
            assert publish(publisher, 3) == replica.sync() == 3
        assert_holds(replica, 3)
        publisher.close()
        assert [path for path in disk.rglob("*.tmp")] == []
        assert maintenance.check(ChannelReader(open_store(url)), read_data=True).problems == []
        return Seen(said[0], took[0])


@row("A full disk", "the disk of a replica's cache is full", noticed="the failed write", back="the store, in the same sync")
def _cache_full(lab: Lab) -> Seen:
    url = f"file://{lab.folder}/channel"
    with _small_disk(lab) as disk, Publisher(url) as publisher:
        replica = Replica(CachedStore(open_store(url), disk / "cache", _DISK_BYTES))
        publish(publisher, 1)
        replica.sync()
        _fill(disk)
        with in_parts():
            publish(publisher, 2)
        with listening() as warned, timed() as took:
            assert replica.sync() == 2
        assert_holds(replica, 2)
        return Seen(warned.one("No space left"), took[0])


def _out_of_memory(step: str, lab: Lab) -> Seen:
    url = f"file://{lab.folder}/channel"
    copied = step == "half of the tensors are copied"  # which full weights are
    with Publisher(url, anchor_every=2 if copied else None) as publisher:
        for seed in (1, 2, 3):
            publish(publisher, seed)
    replica = Replica(url)
    replica.sync(1)
    if copied:
        store = open_store(url)
        store.delete(*(info.key for slot, info in ChannelReader(store).slots() if slot.version == 2))

    def tell(reached: str) -> None:
        if reached == step:
            raise MemoryError("Unable to allocate 1.16 GiB for an array (by the test)")

    with steps.patched(tell), expecting(StageError) as said:
        replica.sync()
    assert replica.version == 1
    assert_holds(replica, 1)
    with timed() as took:
        assert replica.sync() == 3
    assert_holds(replica, 3)
    return Seen(said[0], took[0])


for _step in ("a tensor is decoded", "a tensor is translated", "half of the tensors are copied"):
    row("Short memory", f"a replica has no memory left when {_step}", noticed="the failed allocation", back="the next sync")(
        functools.partial(_out_of_memory, _step)
    )


def _large(seed: int) -> dict[str, torch.Tensor]:
    w = torch.zeros(_LARGE, dtype=torch.bfloat16)
    w.view(torch.int16)[seed * 1000 : _LARGE // (1 + seed)] += seed
    return {"w": w}


@contextlib.contextmanager
def _at_most(margin_mb: int) -> Iterator[None]:
    """This process may take so much more address space than it has."""
    with open("/proc/self/statm") as file:
        taken = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + (margin_mb << 20), resource.RLIM_INFINITY))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def _short_of_memory(url: str, told: Connection) -> None:
    """Syncs with more and more memory to spare; tells the errors, and how long the slowest sync after one took."""
    torch.set_num_threads(1)
    replica, errors, slowest_s = Replica(url), [], 0.0
    for margin_mb in _MARGINS_MB:
        replica.sync(1)
        try:
            with _at_most(margin_mb):
                replica.sync()
        except StageError as error:
            errors.append(f"StageError: {error}")
            assert replica.version == 1
            assert_same_bits(replica.state_dict(), _large(1))
        with timed() as took:
            assert replica.sync() == 2
        slowest_s = max(slowest_s, took[0])
        assert_same_bits(replica.state_dict(), _large(2))
    told.send((errors, slowest_s))


@row(
    "Short memory",
    "a replica may take only so many MiB more (RLIMIT_AS, from 1 to 64)",
    noticed="the failed allocation",
    back="the next sync, when there is memory",
    slow=True,
)
def _limited(lab: Lab) -> Seen:
    url = f"file://{lab.folder}/channel"
    with Publisher(url) as publisher:
        for seed in (1, 2):
            publisher.publish(_large(seed).items()).wait(PATIENCE_S)
    exitcode, told = in_a_process(_short_of_memory, url)
    assert exitcode == 0
    errors, slowest_s = told
    return Seen(errors[0], slowest_s, len(errors))


@row("Short memory", "the trainer has no memory left to encode", noticed="the failed allocation", back="the next publish")
def _encoding(lab: Lab) -> Seen:
    url = f"file://{lab.folder}/channel"
    with Publisher(url) as publisher:
        publish(publisher, 1)
        failing = mock.patch(
            "deltasync.publish.encode.encode", side_effect=MemoryError("Unable to allocate 1.16 GiB (by the test)")
        )
        with failing, expecting(PublishLostError) as said:
            publish(publisher, 2)
        replica = Replica(url)
        with timed() as took:
            assert publish(publisher, 3) == replica.sync() == 2
    assert_holds(replica, 3)
    return Seen(said[0], took[0])
