"""A replica is killed, by SIGKILL, at every named step; then another one goes on from what it left in the
node's cache.
"""

from __future__ import annotations

import dataclasses
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path
from unittest import mock

import pytest
import torch

from deltasync import Publisher, Replica
from deltasync.channel.documents import Record, sha256_hex
from deltasync.publish.pending import Pending
from deltasync.stores.cache import CachedStore
from deltasync.stores.local import LocalStore
from deltasync.tensors.bits import bits_of
from tests.builders import in_parts
from tests.kills import steps
from tests.kills.test_publisher import weights
from tests.processes import in_a_process

VERSIONS = 6
WRONG = 7  # a version whose record promises other bits than its delta gives
COPIED = "half of the tensors are copied"  # only those of full weights are
QUICK = (
    "the cache has a file under its temporary name",
    "half of the values are exchanged",
    "half of a rollback",
)


@dataclasses.dataclass(frozen=True)
class Follower:
    """A process that goes from a version, or from nothing, to another one, and kills itself at a step, if
    that is named.
    """

    folder: Path
    first: int | None
    last: int
    step: str | None

    def run(self, told: Connection) -> None:
        torch.set_num_threads(1)
        replica = Replica(
            CachedStore(LocalStore(str(self.folder / "channel")), self.folder / "cache", 1 << 20)
        )
        if self.first is not None:
            replica.sync(self.first)
        with steps.patched(lambda step: os.kill(os.getpid(), signal.SIGKILL) if step == self.step else None):
            replica.sync(self.last)
        told.send(digest(replica.state_dict()))


def digest(tensors: dict[str, torch.Tensor]) -> str:
    return sha256_hex(b"".join(name.encode() + bits_of(tensors[name]).tobytes() for name in sorted(tensors)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a channel of versions in parts, which go through the cache; the last one is wrong."""
    original = Pending.record

    def record(self: Pending, *arguments: object, **keywords: object) -> Record:
        return dataclasses.replace(original(self, *arguments, **keywords), fingerprint="0" * 16)  # type: ignore[arg-type]

    with in_parts(), Publisher(f"file://{tmp_path}/channel") as publisher:
        for step in range(1, WRONG + 1):
            with mock.patch.object(Pending, "record", record if step == WRONG else original):
                publisher.publish(weights(step).items(), step=step).wait(60)
    return tmp_path


@pytest.mark.parametrize(
    "step",
    [
        *QUICK,
        *(pytest.param(step, marks=pytest.mark.slow) for step in steps.STEPS if step not in (*QUICK, COPIED)),
    ],
)
def test_a_replica_that_is_killed_leaves_nothing_wrong(folder: Path, step: str) -> None:
    last = WRONG if "rollback" in step else VERSIONS
    killed, _ = in_a_process(Follower(folder, 1, last, step).run)
    assert killed == -signal.SIGKILL
    ended, told = in_a_process(Follower(folder, None, VERSIONS, None).run)
    assert (ended, told) == (0, digest(weights(VERSIONS)))
