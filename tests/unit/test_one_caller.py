"""One method of a publisher runs at a time, and one step of a replica: other calls are refused, and change
nothing.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from deltasync import Publisher, Replica, open_store
from deltasync.channel import keys
from deltasync.errors import ConfigError
from deltasync.threads import OneCaller
from tests import builders
from tests.builders import Weights, assert_holds
from tests.faults import FaultyStore

PATIENCE_S = 60.0
CALLS: dict[str, Callable[[Publisher, Weights], object]] = {
    "publish": lambda publisher, weights: publisher.publish(weights, step=99),
    "flush": lambda publisher, _: publisher.flush(),
    "close": lambda publisher, _: publisher.close(),
}


def others(publisher: Publisher, weights: Weights) -> list[str]:
    """What each method of a publisher says while another one runs."""
    said = []
    for call in CALLS.values():
        with pytest.raises(ConfigError) as refused:
            call(publisher, weights)
        said.append(str(refused.value))
    return said


@pytest.mark.parametrize("is_first", [True, False])
def test_a_stream_that_calls_its_publisher_is_refused_and_the_version_is_what_it_gave(
    memory_url: str, is_first: bool
) -> None:
    weights, other = builders.weights(), builders.trained(builders.weights(), 9)
    publisher = Publisher(memory_url)
    if not is_first:
        builders.publish(publisher, other)
    said = []

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights.items():
            said.extend(others(publisher, other))
            yield name, tensor

    assert publisher.publish(stream()).wait(PATIENCE_S).version == (1 if is_first else 2)
    assert len(said) == len(CALLS) * len(weights)
    assert all("was called inside of its publish(). Nothing was done." in each for each in said)
    publisher.publish(other).wait(PATIENCE_S)
    assert_holds(memory_url, other)
    publisher.close()


@pytest.mark.parametrize("call", CALLS)
def test_an_error_of_a_nested_call_ends_the_publish_as_any_error_of_its_stream_does(
    memory_url: str, call: str
) -> None:
    weights = builders.weights()
    with Publisher(memory_url) as publisher:
        builders.publish(publisher, weights)
        with pytest.raises(ConfigError, match=f"^{call}\\(\\) of a publisher was called inside"):
            publisher.publish(lambda: [*weights.items(), CALLS[call](publisher, weights)])  # type: ignore[list-item]
        assert builders.publish(publisher, builders.trained(weights, 1)).version == 2


def test_methods_are_refused_while_another_thread_publishes(memory_url: str) -> None:
    weights, said = builders.weights(), []
    publisher, begun, may_end = Publisher(memory_url), threading.Event(), threading.Event()

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        begun.set()
        assert may_end.wait(PATIENCE_S)
        yield from weights.items()

    thread = threading.Thread(target=lambda: publisher.publish(stream()).wait(PATIENCE_S), name="trainer")
    thread.start()
    try:
        assert begun.wait(PATIENCE_S)
        said = others(publisher, weights)
        with pytest.raises(ConfigError, match="close"), publisher:
            pass
        with pytest.raises(ZeroDivisionError), publisher:
            print(1 // 0)
    finally:
        may_end.set()
        thread.join()
    assert all("while thread 'trainer' is in its publish(). Nothing was done." in each for each in said)
    assert_holds(memory_url, weights)
    publisher.publish(builders.trained(weights, 1)).wait(PATIENCE_S)
    publisher.close()
    assert_holds(memory_url, builders.trained(weights, 1), 2)


def test_a_receipt_is_waited_for_in_any_thread_while_others_publish(memory_url: str) -> None:
    store = FaultyStore(open_store(memory_url))
    gate, weights = store.hold_at("put", keys.ANCHORS), builders.weights()
    with Publisher(store) as publisher:
        receipt, versions = publisher.publish(weights), []
        waiting = threading.Thread(target=lambda: versions.append(receipt.wait(PATIENCE_S).version))
        waiting.start()
        publisher.publish(builders.trained(weights, 1))
        gate.opened.set()
        waiting.join()
        assert versions == [1]


def test_threads_that_publish_at_once_leave_a_channel_of_whole_versions(memory_url: str) -> None:
    states = {
        thread: {f"t{n}": torch.full((40, 40), 10.0 * thread) for n in range(5)} for thread in range(1, 4)
    }
    publisher, counts = Publisher(memory_url), {"done": 0, "refused": 0}
    interval_s = sys.getswitchinterval()

    def train(thread: int) -> None:
        for step in range(40):
            for tensor in states[thread].values():
                tensor += 1
            try:
                publisher.publish(states[thread], step=step)
                counts["done"] += 1
            except ConfigError:
                counts["refused"] += 1

    threads = [threading.Thread(target=train, args=(thread,)) for thread in states]
    try:
        sys.setswitchinterval(1e-5)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval_s)
    publisher.publish(states[1])
    publisher.close()
    assert counts["done"] and sum(counts.values()) == 120
    for version in range(1, publisher.version + 1):
        replica = Replica(memory_url)
        replica.sync(version)
        assert (
            len({float(value) for tensor in replica.state_dict().values() for value in tensor.flatten()}) == 1
        )


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="this system has no such signal")
def test_a_signal_handler_that_publishes_is_refused_inside_of_publish_and_served_elsewhere(
    memory_url: str,
) -> None:
    weights, told = builders.weights(), []
    publisher = Publisher(memory_url)

    def handle(*_: object) -> None:
        try:
            told.append(publisher.publish(weights).version)
        except ConfigError:
            told.append(0)

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for item in weights.items():
            signal.raise_signal(signal.SIGUSR1)
            yield item

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        builders.publish(publisher, weights)
        weights = builders.trained(weights, 1)
        assert publisher.publish(stream()).wait(PATIENCE_S).version == 2
        assert told == [0] * len(weights)
        signal.raise_signal(signal.SIGUSR1)
        assert told[-1] == 3
    finally:
        signal.signal(signal.SIGUSR1, before)
    publisher.close()
    assert_holds(memory_url, weights, 3)


class Interrupted(Exception):
    """Ends a call where nothing is caught."""


def test_a_call_that_an_interrupt_ended_before_it_could_say_so_is_forgotten() -> None:
    calls, kept = OneCaller("publisher"), []

    def begin_only(name: str) -> None:
        calls(name).__enter__()
        raise Interrupted  # where `end` was to follow

    for name in ("publish", "flush"):
        try:
            begin_only(name)
        except Interrupted as error:
            kept.append(error)  # and with it the frame
    closing = calls("close")
    closing.__enter__()
    with pytest.raises(ConfigError, match=r"publish\(\) of a publisher was called inside of its close\(\)"):
        begin_only("publish")
    closing.__exit__()
    with calls("publish"):
        pass


def test_a_replica_that_is_called_inside_of_its_own_step_refuses(memory_url: str) -> None:
    class Calling:
        """The store calls the replica, as a signal handler may while a request is under way."""

        def __init__(self) -> None:
            self.said: list[str] = []
            self.replica: Replica | None = None

        def __call__(self, *_: Any) -> None:
            if self.replica is not None:
                replica, self.replica = self.replica, None
                for call in (replica.sync, replica.poll, lambda: replica.load("/nowhere")):
                    with pytest.raises(ConfigError) as refused:
                        call()
                    self.said.append(str(refused.value))

    weights, calling = builders.weights(), Calling()
    store = FaultyStore(open_store(memory_url))
    with Publisher(memory_url) as publisher:
        builders.publish(publisher, weights)
        replica = Replica(store)
        replica.sync()
        builders.publish(publisher, builders.trained(weights, 1))
    calling.replica = replica
    before = signal.signal(signal.SIGUSR1, calling)
    commit = type(replica._target).commit

    def interrupted(target: Any, staged: Any) -> Any:
        signal.raise_signal(signal.SIGUSR1)
        return commit(target, staged)

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(replica._target), "commit", interrupted)
            assert replica.sync() == 2
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert len(calling.said) == 3 and all("inside of one of its own calls" in each for each in calling.said)
    assert replica.audit()
