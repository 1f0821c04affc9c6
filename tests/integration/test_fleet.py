"""What replicas live through: they start late, fall far behind, are killed, lose the store, and share a node's cache."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from deltasync import Publisher, Replica, open_store
from deltasync.channel import keys
from deltasync.config import Retention
from deltasync.errors import TransientStoreError
from deltasync.stores import Store
from deltasync.stores.cache import CachedStore
from tests.conftest import assert_same_bits
from tests.faults import FaultyStore

Weights = dict[str, torch.Tensor]

ROOT = Path(__file__).parents[2]
CACHE_BYTES = 1 << 28


def weights(elements: int = 1 << 16) -> Weights:
    random = torch.Generator().manual_seed(0)
    w = torch.randn(elements, generator=random).to(torch.bfloat16)
    return {"w": w, "v": torch.arange(50), "n": torch.ones(7, dtype=torch.bfloat16)}


def trained(state: Weights, version: int) -> Weights:
    """Two of the three tensors changed, by what depends on the version only."""
    random = torch.Generator().manual_seed(version)
    state = {name: tensor.clone() for name, tensor in state.items()}
    index = torch.randint(0, state["w"].numel(), (9,), generator=random)
    state["w"].view(torch.int16)[index] += 1 + version % 5
    state["v"][version % 50] += version
    return state


def publish(publisher: Publisher, states: list[Weights], count: int) -> None:
    """Publish so many further versions; version N has the weights `states[N - 1]`."""
    for _ in range(count):
        states.append(trained(states[-1], len(states) + 1) if states else weights())
        publisher.publish(states[-1].items()).wait(60)


def reads(store: FaultyStore) -> list[str]:
    return [key for operation, key in store.calls if operation == "read"]


def files(read: list[str]) -> list[str]:
    """Those that a cache holds: what records name by digest."""
    return [key for key in read if key.startswith((keys.PARTS, keys.ANCHORS))]


@pytest.fixture
def in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The publisher puts nothing into its records, as if versions were large."""
    monkeypatch.setattr("deltasync.publish.encode.INLINE_BYTES", 0)


@pytest.fixture
def store(memory_url: str) -> FaultyStore:
    return FaultyStore(open_store(memory_url))


@pytest.fixture
def cached(store: FaultyStore, tmp_path: Path) -> Store:
    return CachedStore(store, tmp_path / "cache", CACHE_BYTES)


class TestWithoutStore:
    @pytest.mark.usefixtures("in_parts")
    def test_what_came_before_it_went_is_not_downloaded_again(self, store: FaultyStore, cached: Store) -> None:
        states: list[Weights] = []
        with Publisher(store.inner, retention=Retention(compact_every=0)) as publisher:
            publish(publisher, states, 40)
        replica, failures = Replica(cached), 0
        while replica.version != 40:
            # Requests enough for a plan and for a few files, then none.
            store.heal()
            many = len(store.calls) + 47
            store.tamper("", lambda data, many=many: data if len(store.calls) <= many else _fail())  # type: ignore[misc]
            try:
                replica.sync()
            except TransientStoreError:
                failures += 1
            assert failures < 40
        assert_same_bits(replica.state_dict(), states[-1])
        assert failures >= 3


def _fail() -> bytes:
    raise TransientStoreError("gone, says the test")


_CHILD = """
import sys, time
from safetensors.torch import save_file
from deltasync import Replica, open_store
from deltasync.following.poll import Prefetch
from deltasync.live import LiveMemory
from deltasync.stores.cache import CachedStore
from tests.faults import FaultyStore

url, directory, limit, saved = sys.argv[1:]

def begin():
    global store, replica
    store = FaultyStore(open_store(url))
    replica = Replica(CachedStore(store, directory, int(limit)))

def follow(version):
    while replica.version != version:
        replica.sync()
        time.sleep(0.002)

def hang(*arguments):
    print("hangs", flush=True)
    time.sleep(1000)

def hang_half_way(memory, staged, done):
    exchange(memory, staged, done)
    hang()

exchange = LiveMemory._exchange
Prefetch.expect = lambda *_: False  # what is fetched at a guess is fetched by each
begin()
print("ready", flush=True)
for line in sys.stdin:
    store.calls.clear()
    exec(line)
    print("done", *(key for operation, key in store.calls if operation == "read"), flush=True)
save_file(replica.state_dict(), saved)
"""


class Process:
    """A replica in a process of its own, behind the node's cache; it does what lines of Python say."""

    def __init__(self, url: str, folder: Path, name: str) -> None:
        self._saved = folder / f"{name}.safetensors"
        arguments = [url, str(folder / "cache"), str(CACHE_BYTES), str(self._saved)]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _CHILD, *arguments],
            cwd=ROOT,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def says(self) -> list[str]:
        """The words of its next line."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"it ended with {self._process.wait(10)}"
        return line.split()

    def tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def done(self) -> list[str]:
        """Once it has done what it was told last: which keys it read from the store meanwhile."""
        word, *keys = self.says()
        assert word == "done"
        return keys

    def end(self) -> Weights:
        """Its weights, after which it is gone."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.wait(60) == 0
        return load_file(self._saved)

    def kill(self) -> None:
        os.kill(self._process.pid, signal.SIGKILL)
        self._process.wait(60)

    def close(self) -> None:
        with self._process as process:
            process.kill()


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[list[Process]]:
    """Four, following `tmp_path / "channel"`."""
    with contextlib.ExitStack() as stack:
        started = []
        for number in range(4):
            started.append(Process(f"file://{tmp_path}/channel", tmp_path, f"replica-{number}"))
            stack.callback(started[-1].close)
        for process in started:
            assert process.says() == ["ready"]
        yield started


@pytest.mark.usefixtures("in_parts")
def test_four_processes_of_a_node_download_once_and_two_are_killed_at_a_commit(
    processes: list[Process], tmp_path: Path
) -> None:
    states: list[Weights] = []
    with Publisher(f"file://{tmp_path}/channel") as publisher:
        publish(publisher, states, 3)
        for process in processes:
            process.tell("follow(20)")
        for _ in range(17):
            publish(publisher, states, 1)
            time.sleep(0.02)
        downloaded = files([key for process in processes for key in process.done()])
        assert len(downloaded) == len(set(downloaded))
        assert sum(key.startswith(keys.PARTS) for key in downloaded) == 19
        publish(publisher, states, 3)

    staged, committing, restarted, live = processes
    staged.tell("LiveMemory.commit = hang; follow(23)")
    assert staged.says() == ["hangs"]
    staged.kill()
    committing.tell("LiveMemory._exchange = hang_half_way; follow(23)")
    assert committing.says() == ["hangs"]
    committing.kill()
    restarted.tell("begin(); follow(23)")
    live.tell("follow(23)")
    again = files([key for process in (restarted, live) for key in process.done()])
    assert len(again) == len(set(again)) and not set(again) & set(downloaded)
    for process in (restarted, live):
        assert_same_bits(process.end(), states[-1])
