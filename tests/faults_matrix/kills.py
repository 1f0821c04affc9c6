"""A process is killed, by SIGKILL, at every named step; then another one goes on where it was."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import shutil
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from safetensors.torch import save_file

from deltasync import Publisher, Replica
from deltasync.channel.documents import sha256_hex
from deltasync.stores.cache import CachedStore
from deltasync.stores.local import LocalStore
from deltasync.tensors.bits import bits_of
from tests.builders import in_parts
from tests.faults_matrix import steps
from tests.faults_matrix.matrix import REPEATS, Lab, Seen, publish, row, weights, wrong_promise
from tests.integration import test_kill_publisher as publishing
from tests.integration.test_kill_publisher import Warned
from tests.processes import in_a_process

_CACHE_BYTES = 1 << 20
_VERSIONS = 6
_ENDS_WRONG = 7  # a version whose record promises other bits than its delta gives


def _kill_publisher(name: str, lab: Lab) -> Seen:
    """`tests/integration/test_kill_publisher.py`, each time with other weights."""
    base = lab.folder
    (base / "base").mkdir()
    save_file(publishing.weights(0), base / "base" / "model.safetensors")
    killed, resumed = publishing.CASES[name]
    start = publishing.template(base, name)
    rehearsal = base / "rehearsal"
    if start.exists():
        shutil.copytree(start, rehearsal)
    points, _ = publishing.process(killed, rehearsal)
    assert len(points) >= publishing.LEAST_POINTS[name]
    slowest_s, heard = 0.0, ""
    for number, point in enumerate(points):
        for time_ in range(REPEATS):
            later = [
                dataclasses.replace(each, steps=tuple(step + 100 * time_ for step in each.steps))
                for each in (killed, resumed)
            ]
            root = base / f"{number} {time_}"
            took_s, said = publishing.survives(start, root, later[0], later[1], point)
            slowest_s, heard = max(slowest_s, took_s), heard or next(iter(said), "")
            shutil.rmtree(root)
    return Seen(heard or "(nothing: there was nothing to repair)", slowest_s, len(points) * REPEATS)


for _name, _which in {
    "a new channel": "the publisher is killed at each step of the first two versions of a new channel",
    "a new channel by reference": "the publisher is killed at each step of a new channel that starts from a checkpoint",
    "a new channel with a lease": "the publisher is killed at each step of a new channel where the store does not decide",
    "a log that was sealed": "the publisher is killed at each step of an opening of a log that was sealed",
    "a log with a lease": "the publisher is killed at each step of an opening where the store does not decide",
    "sweeps": "the publisher is killed while it writes anchors and compactions, forgets and prunes",
}.items():
    row("Publish", _which, noticed="opening finds the end of the log", back="restart with resume=True", slow=True)(
        functools.partial(_kill_publisher, _name)
    )


@dataclasses.dataclass(frozen=True)
class Follower:
    """A process that goes from one version to the newest, behind a cache that outlives it.

    Attributes:
        first: The version it starts from; None to start from nothing.
        step: The step at which it kills itself, None to get there and tell what it has.
        last: The version that it goes to.
    """

    folder: Path
    first: int | None
    last: int
    step: str | None

    def run(self, told: Connection) -> None:
        torch.set_num_threads(1)
        said = Warned()
        logging.getLogger("deltasync").addHandler(said)
        replica = Replica(CachedStore(LocalStore(str(self.folder / "channel")), self.folder / "cache", _CACHE_BYTES))
        if self.first is not None:
            replica.sync(self.first)
        with steps.patched(self._reach):
            replica.sync(self.last)
        told.send((digest(replica.state_dict()), said.messages))

    def _reach(self, step: str) -> None:
        if step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def digest(tensors: dict[str, torch.Tensor]) -> str:
    """sha256 of all bits."""
    return sha256_hex(b"".join(name.encode() + bits_of(tensors[name]).tobytes() for name in sorted(tensors)))


def _follow(follower: Follower) -> tuple[str, list[str]] | None:
    """What it has in the end; None if it was killed."""
    exitcode, told = in_a_process(follower.run)
    assert exitcode == (0 if follower.step is None else -signal.SIGKILL), f"{follower}: {exitcode}"
    return told


def _kill_replica(step: str, lab: Lab) -> Seen:
    with in_parts(), Publisher(f"file://{lab.folder}/channel") as publisher:  # which go through the cache
        for seed in range(1, _VERSIONS + 1):
            publish(publisher, seed)
        if "rollback" in step:
            with wrong_promise():
                publish(publisher, _ENDS_WRONG)
    last = _ENDS_WRONG if "rollback" in step else _VERSIONS
    slowest_s, heard = 0.0, ""
    for time_ in range(REPEATS):
        first = 1 + time_ % 5
        shutil.rmtree(lab.folder / "cache", ignore_errors=True)  # so that there is something to fetch
        assert _follow(Follower(lab.folder, first, last, step)) is None
        before = time.monotonic()
        found = _follow(Follower(lab.folder, None, _VERSIONS, None))
        slowest_s = max(slowest_s, time.monotonic() - before)
        assert found is not None and found[0] == digest(weights(_VERSIONS))
        heard = heard or next(iter(found[1]), "")
    return Seen(heard or "(nothing: its memory is gone, and nothing else was touched)", slowest_s, REPEATS)


for _step in steps.STEPS:
    _part = "Stage" if _step in steps.STAGE else "Commit"
    row(_part, f"a replica is killed when {_step}", noticed="its process ends", back="restart", slow=True)(
        functools.partial(_kill_replica, _step)
    )
