"""kill -9 of a publisher at each step of a publish, then another process resumes the channel.

Each case is a process of its own, which kills itself during or after one write to the store (after one is
before the next), while a replica follows. The next process publishes other weights than the killed one was
about to, so that a version whose number was used again for other content would show.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shutil
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file

from deltasync import Publisher, Replica, open_store, ops
from deltasync.channel import keys
from deltasync.channel.documents import VersionId
from deltasync.channel.reading import ChannelReader
from deltasync.config import Retention
from deltasync.errors import NotPublishedError
from deltasync.publish.log import HeadWriter
from deltasync.stores.local import LocalStore
from tests.conftest import assert_same_bits
from tests.processes import PATIENCE_S, in_a_process
from tests.waiting import wait_until

Weights = dict[str, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Point:
    """A write to the store: the `number`-th with this operation and key.

    `moment` is `during` it or `after` it.
    """

    moment: str
    operation: str
    key: str
    number: int

    def __str__(self) -> str:
        return f"{self.moment} {self.operation} {self.key} {self.number}"


class KillingStore(LocalStore):
    """A directory that kills its process at one point, and notes the others that it passes.

    Args:
        root: The directory.
        kill: The point.
    """

    def __init__(self, root: Path, kill: Point | None) -> None:
        super().__init__(str(root))
        self.passed: list[Point] = []
        self._kill = kill
        self._lock = threading.RLock()
        self._doing = threading.local()

    def create(self, key: str, data: bytes) -> None:
        with self._step("create", key):
            super().create(key, data)

    def put(self, key: str, data: bytes) -> None:
        with self._step("put", key):
            super().put(key, data)

    def delete(self, *names: str) -> None:
        for key in names:
            with self._step("delete", key):
                super().delete(key)

    @contextlib.contextmanager
    def _temporary(self, key: str, data: bytes) -> Iterator[tuple[int, str, str]]:
        """The object is written and synced under another name when this yields."""
        with super()._temporary(key, data) as names:
            self._at("during", *self._doing.now)
            yield names

    @contextlib.contextmanager
    def _step(self, operation: str, key: str) -> Iterator[None]:
        self._doing.now = operation, re.sub(r"\b([0-9]{6})-[0-9a-f]{8}\b", r"\1", key)
        yield
        self._at("after", *self._doing.now)

    def _at(self, moment: str, operation: str, key: str) -> None:
        point = Point(moment, operation, key, 1)
        with self._lock:
            before = sum(dataclasses.replace(each, number=1) == point for each in self.passed)
            point = dataclasses.replace(point, number=1 + before)
            self.passed.append(point)
            if point == self._kill:
                os.kill(os.getpid(), signal.SIGKILL)


def weights(step: int) -> Weights:
    """What the trainer has at a step; 0 is the checkpoint that it started from."""
    w = torch.randn(40, 50, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    if step:
        changed = torch.randint(0, w.numel(), (20,), generator=torch.Generator().manual_seed(step))
        w.view(-1).view(torch.int16)[changed] += 1
    return {"w": w, "step": torch.tensor(step)}


@dataclasses.dataclass(frozen=True)
class Trainer:
    """How a process publishes.

    Attributes:
        steps: The steps to publish, one after the other.
        by_reference: Start the channel from a reference.
        parts: Store payloads beside the records.
        sweeps: Write anchors, compaction and gc all the time.
    """

    steps: tuple[int, ...]
    by_reference: bool = False
    parts: bool = False
    sweeps: bool = False

    def open(self, store: LocalStore) -> Publisher:
        return Publisher(
            store,
            resume=True,
            initial=Path(store.url.removeprefix("file://")).parent / "base" if self.by_reference else None,
            anchor_every=3 if self.sweeps else None,
            retention=Retention(compact_every=2, keep_last=2, grace_s=0.0) if self.sweeps else Retention(),
        )

    def run(self, root: Path, kill: Point | None, passed: Connection) -> None:
        torch.set_num_threads(1)
        store = KillingStore(root, kill)
        with self._patched(), self.open(store) as publisher:
            for step in self.steps:
                publisher.publish(weights(step).items(), step=step).wait(PATIENCE_S)
                queue: Any = publisher._uploader
                for thread in (queue._worker, queue.finisher.maintenance._workers):
                    thread.submit(int).result(PATIENCE_S)  # in an order that is the same every time
        passed.send(store.passed)

    @contextlib.contextmanager
    def _patched(self) -> Iterator[None]:
        """One write after the other, in an order that is the same every time; and no long waits."""
        follow = HeadWriter.follow

        def follow_and_wait(head: HeadWriter) -> None:
            follow(head)
            head.workers.submit(int).result(PATIENCE_S)

        with (
            mock.patch("deltasync.ops.compactor._LEAST_BETWEEN", 1),
            mock.patch.object(HeadWriter, "follow", follow_and_wait),
            mock.patch("deltasync.publish.encode.INLINE_BYTES", 0)
            if self.parts
            else contextlib.nullcontext(),
        ):
            yield


def process(trainer: Trainer, root: Path, kill: Point | None = None) -> list[Point]:
    """Publish in a process of its own. Returns the points that it passed; nothing if it was killed."""
    exitcode, told = in_a_process(trainer.run, root, kill)
    assert exitcode == (0 if kill is None else -signal.SIGKILL), f"{kill}: {exitcode}"
    return told or []


def records(root: Path) -> dict[str, bytes]:
    """All records that are there, by key."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted((root / "versions").rglob("*.safetensors"))
    }


def history(root: Path) -> list[VersionId]:
    """The versions that lead to the newest one, oldest first, as a new reader finds them."""
    reader = ChannelReader(open_store(f"file://{root}"))
    with contextlib.suppress(NotPublishedError):
        return list(reader.versions())[::-1]
    return []


class Following:
    """A replica that follows all the time and compares every version that it gets with what the trainer
    had.
    """

    def __init__(self, root: Path) -> None:
        self._replica = Replica(f"file://{root}")
        self._end = threading.Event()
        self.served: dict[VersionId, int] = {}

    def sync(self) -> None:
        with contextlib.suppress(NotPublishedError):
            self._replica.sync()
            version = self._replica.identity
            assert version is not None
            if version not in self.served:
                step = int(self._replica.state_dict()["step"])
                assert_same_bits(self._replica.state_dict(), weights(step))
                self.served[version] = step

    def __enter__(self) -> Following:
        self._thread = ThreadPoolExecutor(1)
        self._run = self._thread.submit(self._follow)
        return self

    def _follow(self) -> None:
        while not self._end.wait(0.005):
            self.sync()

    def __exit__(self, *error: object) -> None:
        self._end.set()
        self._thread.shutdown()
        self._run.result()


def survives(template: Path, root: Path, killed: Trainer, resumed: Trainer, kill: Point) -> None:
    """Kill a publisher there, look at the channel, resume it, and look again."""
    if template.exists():
        shutil.copytree(template, root)
    with Following(root) as following:
        before = records(root)
        process(killed, root, kill)
        after, was, began = records(root), history(root), (root / keys.CHANNEL).exists()
        assert all(after[key] == data for key, data in before.items() if key in after)
        assert_sound(root)
        passed, newest = process(resumed, root), history(root)[-1]
        wait_until(lambda: newest in following.served, PATIENCE_S)
    end, found = records(root), history(root)
    writes = [
        p
        for p in passed
        if p.moment == "after" and p.operation != "delete" and p.key.startswith(keys.VERSIONS)
    ]
    published = len(resumed.steps) + (resumed.by_reference and not was)
    assert len(writes) == published + began, f"killed {kill}; then {list(map(str, passed))}"
    # None skipped, none used again: those that were there are as they were, or forgotten, and the others come
    # right after.
    assert newest.version == (was[-1].version if was else 0) + published
    assert all(end[key] == data for key, data in after.items() if key in end)
    assert [version.version for version in found] == list(
        range(newest.version - len(found) + 1, newest.version + 1)
    )
    assert len(found) == newest.version or resumed.sweeps
    assert not was or len(found) <= published or found[-published - 1] == was[-1]
    assert_sound(root)
    assert_nothing_left(root)
    head = ChannelReader(open_store(f"file://{root}")).head()
    assert head is not None and head.newest == newest
    assert following.served[newest] == resumed.steps[-1]


def assert_sound(root: Path) -> None:
    """Nothing is damaged or missing, and every version that leads to the newest has the bits of its step."""
    versions = history(root)
    if not versions:
        return
    reader = ChannelReader(open_store(f"file://{root}"))
    report = ops.check(reader, read_data=True)
    assert [str(problem) for problem in report.problems] == []
    for version in versions:
        record = reader.record(version).record
        replica = Replica(reader.store)
        replica.sync(version.version)
        assert replica.identity == version
        step = 0 if record.reference is not None else record.step
        assert step is not None
        assert_same_bits(replica.state_dict(), weights(step))


def assert_nothing_left(root: Path) -> None:
    """After `gc`, there is no file that no document names, but what the last writer may still name."""
    reader = ChannelReader(open_store(f"file://{root}"))
    ops.gc(reader, grace_s=0.0)
    left = ops.gc(reader, grace_s=0.0, dry_run=True)
    assert (left.objects, left.waiting) == ([], [])


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoint that the trainer started from."""
    folder = tmp_path_factory.mktemp("kill")
    (folder / "base").mkdir()
    save_file(weights(0), folder / "base" / "model.safetensors")
    return folder


def template(base: Path, name: str) -> Path:
    """The channel that a case starts from."""
    root = base / f"template {name}"
    if name.startswith("a new channel"):
        return root
    trainer = dataclasses.replace(CASES[name][0], steps=(1, 2, 3))
    process(trainer, root)
    if name == "a log that was sealed":
        process(
            Trainer((4,)), root, Point("after", "create", "versions/0000000/0000000004.000001.safetensors", 1)
        )
    return root


CASES = {
    "a new channel": (Trainer((1, 2)), Trainer((3, 4))),
    "a new channel by reference": (Trainer((1, 2), by_reference=True), Trainer((3, 4), by_reference=True)),
    "a log that was sealed": (Trainer((5,), parts=True), Trainer((6,), parts=True)),
    "sweeps": (Trainer((4, 5), sweeps=True), Trainer((6, 7), sweeps=True)),
}
LEAST_POINTS = {
    "a new channel": 12,
    "a new channel by reference": 12,
    "a log that was sealed": 14,
    "sweeps": 30,
}


_SLOW = ("a new channel by reference", "sweeps")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=(pytest.mark.slow,) * (name in _SLOW)) for name in CASES]
)
def test_a_publisher_killed_at_any_step_is_resumed(base: Path, name: str) -> None:
    killed, resumed = CASES[name]
    start = template(base, name)
    rehearsal = base / f"rehearsal {name}"
    if start.exists():
        shutil.copytree(start, rehearsal)
    points = process(killed, rehearsal)
    assert len(points) >= LEAST_POINTS[name], [str(point) for point in points]
    with ThreadPoolExecutor(2) as pool:
        runs = {
            point: pool.submit(survives, start, base / f"{name} {number}", killed, resumed, point)
            for number, point in enumerate(points)
        }
    for point, run in runs.items():
        assert run.exception() is None, f"killed {point}: {run.exception()!r}"
