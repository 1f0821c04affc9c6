"""Ctrl-C inside `publish`, at any line of our own code: no hang, and every version that follows is what was
published.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import deltasync
from deltasync import Publisher, Receipt, Replica, open_store
from deltasync.channel import keys
from deltasync.errors import PublishError
from deltasync.kernels import native
from tests.builders import assert_holds
from tests.conftest import assert_same_bits
from tests.faults import FaultyStore

ROOT = str(Path(deltasync.__file__).parent)
PATIENCE_S = 60.0
EVERY = 11  # lines from one interrupt to the next, which is prime so that loops are left in different places


class Interrupts:
    """Raises KeyboardInterrupt in the main thread at some lines of deltasync, counted from the first."""

    def __init__(self, *at: int) -> None:
        self.lines, self._at = 0, at

    def __enter__(self) -> Interrupts:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: Any, event: str, argument: Any) -> Callable[..., Any] | None:
        if (
            not frame.f_code.co_filename.startswith(ROOT)
            or threading.current_thread() is not threading.main_thread()
        ):
            return None
        if event == "line":
            self.lines += 1
            if self.lines in self._at:
                raise KeyboardInterrupt
        return self._trace


def weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"t{number}": torch.randn(20, 30, generator=generator).to(torch.bfloat16) for number in range(3)}


def lines_of_a_publish(url: str) -> int:
    with Publisher(url) as publisher:
        publisher.publish(weights(0)).wait(PATIENCE_S)
        with Interrupts() as counted:
            publisher.publish(weights(1))
    return counted.lines


@pytest.mark.parametrize("second", [None, 5, 40], ids=["once", "twice", "twice-later"])
def test_what_follows_an_interrupt_is_what_was_published(second: int | None, memory_url: str) -> None:
    count = lines_of_a_publish(f"{memory_url}-counted")
    assert count > 100
    publisher, replica, version = Publisher(memory_url), Replica(memory_url), 0
    publisher.publish(weights(0)).wait(PATIENCE_S)
    for at in range(1, count, EVERY):
        ends = [at] if second is None else [at, at + second]
        try:
            with Interrupts(*ends):
                publisher.publish(weights(at))
        except KeyboardInterrupt:
            pass
        receipt = publisher.publish(weights(-at), step=at)
        receipt.wait(PATIENCE_S)
        assert receipt.version > version
        version = replica.sync()
        assert version == receipt.version
        assert_same_bits(replica.state_dict(), weights(-at))
    publisher.close()


def test_a_version_that_an_interrupt_kept_from_its_beginning_does_not_stop_the_next_one(
    memory_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher, begun = Publisher(memory_url), list[object]()
    publisher.publish(weights(0)).wait(PATIENCE_S)

    def submit(action: object) -> None:
        begun.append(action)
        if len(begun) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(publisher._uploader._worker, "submit", submit)
    with pytest.raises(KeyboardInterrupt):
        publisher.publish(weights(1))
    monkeypatch.undo()
    receipt = publisher.publish(weights(2))
    receipt.wait(PATIENCE_S)
    publisher.close()
    assert_holds(memory_url, weights(2), receipt.version)


def test_what_was_accepted_before_an_interrupt_becomes_visible(memory_url: str) -> None:
    publisher = Publisher(memory_url)
    publisher.publish(weights(0)).wait(PATIENCE_S)
    accepted = publisher.publish(weights(1))
    with Interrupts(60), pytest.raises(KeyboardInterrupt):
        publisher.publish(weights(2))
    publisher.close()
    accepted.wait(PATIENCE_S)
    assert_holds(memory_url, weights(1), accepted.version)


_FORKS = """
import os, sys, traceback
import torch
import deltasync
from deltasync import Publisher, Replica, follow

torch.set_num_threads(1)
weights = {"w": torch.zeros(2000, 1000, dtype=torch.bfloat16)}
module = torch.nn.Module()
module.w = torch.nn.Parameter(weights["w"].clone(), requires_grad=False)
publisher = Publisher(sys.argv[1])

def publish():
    weights["w"][0] += 1
    return publisher.publish(weights.items()).wait(60).version

publish()
replica, following = Replica(sys.argv[1]), follow(module, sys.argv[1], replica_id="r")
replica.sync()
publish()
replica.sync()
following.wait(2)
publish()
uses = {
    "publish": publish, "flush": publisher.flush, "close": publisher.close,
    "sync": replica.sync, "poll": replica.poll, "audit": replica.audit, "load": lambda: replica.load("/nowhere"),
    "followed sync": following.sync, "wait": lambda: following.wait(9, timeout_s=9),
    "pin": lambda: setattr(following, "pin", 1),
}

def new_replica():
    assert Replica(sys.argv[1]).sync() == 3

def new_publisher():
    with Publisher(sys.argv[1] + "_of_the_child") as other:
        assert other.publish(weights.items()).wait(60).version == 1

def new_follow():
    copy = torch.nn.Module()
    copy.w = torch.nn.Parameter(torch.zeros_like(weights["w"]), requires_grad=False)
    with follow(copy, sys.argv[1], replica_id="child") as child:
        child.wait(3)
    assert torch.equal(copy.w, weights["w"])

made = {"new replica": new_replica, "new publisher": new_publisher, "new follow": new_follow}
for name, use in {**uses, **made}.items():
    sys.stdout.flush()
    child = os.fork()
    if not child:
        try:
            use()
            print(name, "did it")
        except BaseException as error:
            print(name, type(error).__name__, error)
        following.close()
        sys.stdout.flush()
        os._exit(0)
    print("ended", os.waitpid(child, 0)[1], flush=True)
assert replica.sync() == 3 and following.wait(3) == 3 and publish() == 4
beats = deltasync.serve.heartbeat.read_all(publisher.store, publisher.run_id)
assert {beat.replica_id: beat.state == "stopped" for beat in beats} == {"r": False, "child": True}, beats
following.close()
publisher.close()
"""


def test_a_forked_child_is_told_what_to_do_in_one_sentence(tmp_path: Path) -> None:
    """Its parent's objects are refused, for they have threads that a fork lacks; objects that it makes itself
    work.
    """
    command = [sys.executable, "-W", "ignore", "-c", _FORKS, f"file://{tmp_path}/channel"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    said, ended = lines[::2], lines[1::2]
    refused, made = said[:-3], said[-3:]
    assert len(refused) == 10 and set(ended) == {"ended 0"}, done.stdout
    for line in refused:
        assert "ConfigError" in line and "of which this one is a fork" in line and "'spawn'" in line
    assert made == ["new replica did it", "new publisher did it", "new follow did it"]


@pytest.mark.parametrize("comes", ["before", "after"])
@pytest.mark.parametrize("kind", [KeyboardInterrupt, MemoryError])
def test_what_stops_while_the_shadow_takes_a_difference_is_followed_by_full_weights(
    kind: type[BaseException], comes: str, memory_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Publisher(memory_url) as publisher:
        publisher.publish(weights(0)).wait(PATIENCE_S)
        add = native.add

        def stopped(*arguments: Any) -> Any:
            if comes == "after":
                add(*arguments)
            raise kind

        with monkeypatch.context() as patched, pytest.raises(kind):
            patched.setattr(native, "add", stopped)
            publisher.publish(weights(1))
        receipt = publisher.publish(weights(2)).wait(PATIENCE_S)
        assert (receipt.version, receipt.kind) == (2, "anchor")
        receipt = publisher.publish(weights(3)).wait(PATIENCE_S)
        assert (receipt.version, receipt.kind) == (3, "delta")
    for version, wanted in ((2, weights(2)), (3, weights(3))):
        assert_holds(memory_url, wanted, version)


@pytest.mark.parametrize("comes", ["before", "after"])
@pytest.mark.parametrize("published", [1, 3], ids=["checked", "known"])
@pytest.mark.parametrize("kind", [KeyboardInterrupt, MemoryError])
def test_what_stops_while_a_stream_is_compared_is_followed_by_a_delta(
    kind: type[BaseException], published: int, comes: str, memory_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the third publish on, names and traits of the tensors are known, and so is the table of them."""
    compare, held = native.compare, weights(0)
    with Publisher(memory_url) as publisher:

        def publish(seed: int) -> Receipt:
            for name, tensor in weights(seed).items():
                held[name].copy_(tensor)
            return publisher.publish(held)

        def stopped(*arguments: Any) -> Any:
            if comes == "after":
                compare(*arguments)
            raise kind

        for seed in range(published):
            publish(seed).wait(PATIENCE_S)
        with monkeypatch.context() as patched, pytest.raises(kind):
            patched.setattr(native, "compare", stopped)
            publish(3)
        for seed in (4, 5, 6):
            receipt = publish(seed).wait(PATIENCE_S)
            assert (receipt.version, receipt.kind) == (published + seed - 3, "delta")
            assert_holds(memory_url, weights(seed))


def test_a_waiting_version_is_lost_if_the_shadow_is(memory_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be encoded from bits that nobody knows."""
    store = FaultyStore(open_store(memory_url))
    with Publisher(store) as publisher:
        publisher.publish(weights(0)).wait(PATIENCE_S)
        gate = store.hold_at("create", keys.VERSIONS)
        first = publisher.publish(weights(1))
        assert gate.entered.wait(PATIENCE_S)
        waiting = publisher.publish(weights(2))

        def stopped(*_: Any) -> Any:
            raise KeyboardInterrupt

        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(native, "add", stopped)
            publisher.publish(weights(3))
        last = publisher.publish(weights(4))
        gate.opened.set()
        with pytest.raises(PublishError):
            waiting.wait(PATIENCE_S)
        assert (first.wait(PATIENCE_S).version, last.wait(PATIENCE_S).version, last.kind) == (2, 3, "anchor")
    assert_holds(store, weights(4), 3)
