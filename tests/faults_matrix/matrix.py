"""The fault matrix: rows by name, each a function that brings a fault about, asserts what comes of it, and tells of it.

A row proves that nothing was lost and that no bit was wrong; what it returns are the facts that the table shows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from deltasync import Publisher, Replica
from deltasync.channel.documents import Record
from deltasync.publish.pending import Pending
from tests.builders import settle
from tests.conftest import assert_same_bits
from tests.integration.test_kill_publisher import Warned
from tests.processes import PATIENCE_S

Weights = dict[str, torch.Tensor]

REPEATS = int(os.environ.get("FAULT_REPEATS", "1"))
"""How often each process is killed at each step."""


@dataclasses.dataclass(frozen=True)
class Seen:
    """What came of a fault.

    Attributes:
        said: The message, as it was logged or raised.
        recovered_s: From the end of the fault, or from the restart, until the newest version is served with the right bits.
        times: How often it was brought about.
    """

    said: str
    recovered_s: float
    times: int = 1


@dataclasses.dataclass
class Lab:
    """What a row works with.

    Attributes:
        folder: For its files.
        request: For fixtures, such as a store's service.
    """

    folder: Path
    request: pytest.FixtureRequest


@dataclasses.dataclass(frozen=True)
class Row:
    """One fault.

    Attributes:
        part: Heading under which it stands.
        fault: What goes wrong.
        noticed: By what.
        back: What brings everything back.
        run: Does it.
        marks: Marks of its test.
    """

    part: str
    fault: str
    noticed: str
    back: str
    run: Callable[[Lab], Seen]
    marks: tuple[pytest.MarkDecorator, ...] = ()


ROWS: list[Row] = []


def row(part: str, fault: str, *, noticed: str, back: str, slow: bool = False, vllm: bool = False) -> Callable[..., object]:
    """Make a function a row."""
    marks = (pytest.mark.slow,) * (slow or vllm) + (pytest.mark.vllm,) * vllm

    def add(run: Callable[[Lab], Seen]) -> Callable[[Lab], Seen]:
        assert all(fault != other.fault for other in ROWS), fault
        ROWS.append(Row(part, fault, noticed, back, run, marks))
        return run

    return add


@contextlib.contextmanager
def listening() -> Iterator[Warned]:
    """Collect what deltasync logs meanwhile."""
    said, logger = Warned(), logging.getLogger("deltasync")
    logger.addHandler(said)
    try:
        yield said
    finally:
        logger.removeHandler(said)


@contextlib.contextmanager
def expecting(*errors: type[BaseException]) -> Iterator[list[str]]:
    """One of these errors; then the list holds its class and sentence."""
    told: list[str] = []
    with pytest.raises(errors) as failure:
        yield told
    told.append(f"{type(failure.value).__name__}: {failure.value}")


def weights(seed: int, count: int = 4000) -> Weights:
    """A model of three tensors, the same for the same seed; between two of them few elements differ."""
    w = torch.randn(count // 40, 40, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    v = w.flatten()[:400].clone()
    if seed:
        random = torch.Generator().manual_seed(seed)
        w.view(-1).view(torch.int16)[torch.randint(0, w.numel(), (20,), generator=random)] += 1
        v.view(torch.int16)[torch.randint(0, v.numel(), (9,), generator=random)] += 3
    return {"w": w, "v": v, "step": torch.tensor(seed)}


def publish(publisher: Publisher, seed: int) -> int:
    """Publish that model, and wait for it and for what follows it: head, anchors, compactions."""
    try:
        return publisher.publish(weights(seed).items(), step=seed).wait(PATIENCE_S).version
    finally:
        settle(publisher)


@contextlib.contextmanager
def wrong_promise() -> Iterator[None]:
    """Versions that are published meanwhile promise a fingerprint that their deltas do not give."""
    original = Pending.record

    def record(self: Pending, *arguments: Any, **keywords: Any) -> Record:
        return dataclasses.replace(original(self, *arguments, **keywords), fingerprint="0" * 16)

    with mock.patch.object(Pending, "record", record):
        yield


def assert_holds(replica: Replica, seed: int) -> None:
    """The replica has the bits of that model."""
    assert_same_bits(replica.state_dict(), weights(seed))


@contextlib.contextmanager
def timed() -> Iterator[list[float]]:
    """Seconds that the block takes."""
    took: list[float] = []
    before = time.perf_counter()
    yield took
    took.append(time.perf_counter() - before)
