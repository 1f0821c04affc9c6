"""Ctrl-C inside `publish`, at any line of our own code: no hang, and every version that follows is what was published."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import deltasync
from deltasync import Publisher, Replica
from deltasync.errors import ConfigError
from tests.conftest import assert_same_bits

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
        if not frame.f_code.co_filename.startswith(ROOT) or threading.current_thread() is not threading.main_thread():
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


def test_what_was_accepted_before_an_interrupt_becomes_visible(memory_url: str) -> None:
    publisher = Publisher(memory_url)
    publisher.publish(weights(0)).wait(PATIENCE_S)
    accepted = publisher.publish(weights(1))
    with Interrupts(60), pytest.raises(KeyboardInterrupt):
        publisher.publish(weights(2))
    publisher.close()
    accepted.wait(PATIENCE_S)
    replica = Replica(memory_url)
    replica.sync(accepted.version)
    assert_same_bits(replica.state_dict(), weights(1))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_is_told_to_make_its_own(memory_url: str) -> None:
    publisher = Publisher(memory_url)
    publisher.publish(weights(0)).wait(PATIENCE_S)
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            publisher.publish(weights(1))
        except ConfigError as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert (
        os.read(read, 1000).decode().startswith(f"This publisher belongs to process {os.getpid()}, of which this one is a")
    )
    publisher.publish(weights(1)).wait(PATIENCE_S)
    publisher.close()
