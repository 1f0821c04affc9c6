"""The agreement of the processes of a trainer. Here for one process, which has the whole model and asks nobody;
`deltasync.trainer.agreement` has the form for many.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from deltasync.errors import PublishError
from deltasync.publish.detect import Difference
from deltasync.publish.pending import Pending
from deltasync.publish.ranges import Range, Stream, TensorRange
from deltasync.publish.shadow import Shadow
from deltasync.publish.snapshot import Weights
from deltasync.stores import Store
from deltasync.tensors import Fingerprints, TensorSpec

Numbers = Sequence[int] | np.ndarray

_Value = TypeVar("_Value")


def attempt(action: Callable[[], _Value]) -> tuple[_Value | None, BaseException | None]:
    """Return the result of an action or its exception, which `Alone.agree` or another of its methods
    raises.
    """
    try:
        return action(), None
    except BaseException as error:  # noqa: BLE001 - it is raised once all processes know of it
        return None, error


class Alone:
    """One process: what it has decided all have agreed on.

    Attributes:
        rank: This process among those that publish together.
        size: How many there are.
        keeps: Whether a version may wait while the one before it is pending.
        moved_s: Tells other processes when the uploads of this one last advanced.
    """

    rank, size = 0, 1
    keeps = True
    moved_s: Callable[[], float] = float

    def close(self, how: str = "") -> None:
        """Tell the others that this process answers no more, and why."""

    def stop(self) -> None:
        """End all waits for others: the process ends."""

    def leave(self) -> None:
        """Tell the others that this process publishes no more; its uploads go on."""

    def enter(self, is_inside: bool) -> None:
        """Tell the others whether this process is in a method of its publisher, or trains."""

    def inside(self) -> contextlib.AbstractContextManager[None]:
        """Tell the others meanwhile that this process is in a method of its publisher."""
        return contextlib.nullcontext()

    # Within a method that all call.

    def first(
        self,
        action: Callable[[], _Value],
        kind: Any = Any,
        *,
        problem: BaseException | None = None,
        same: str | None = None,
    ) -> _Value:
        """Run an action in the first process and return its result in all. Raises as `agree`.

        `kind` is the result's type, as msgspec takes it; `problem` is what has failed here before; `same` is
        what has to be equal in all.
        """
        self.agree(problem)
        return action()

    def share(self, action: Callable[[], _Value], kind: Any) -> list[_Value]:
        """Run an action in each process and return all results. Raises as `agree`."""
        return [action()]

    def all(self, action: Callable[[], _Value]) -> _Value:
        """Run an action in each process and return its result here. Raises as `agree`."""
        return action()

    def agree(self, problem: BaseException | None, numbers: Numbers = ()) -> np.ndarray:
        """Return the sums of numbers, each less than 2**64, over all processes, modulo 2**64: uint64.

        Raises:
            BaseException: `problem`, what has failed in one of them.
        """
        if problem is not None:
            raise problem
        return np.asarray(numbers, np.uint64)

    def prove_writes(self, store: Store) -> None:
        """Prove that the first process reads what the others store."""

    def check_step(self, step: int | None) -> None:
        """Check that a publish names what others are compared by."""

    def forget(self) -> None:
        """Forget the fingerprints of whole tensors: the next publish shares all of them."""

    def totals(
        self, shadow: Shadow, found: Difference, changed: int, *, needed: bool
    ) -> tuple[int, Fingerprints | None]:
        """Return changed elements of all processes, and the fingerprints of the whole tensors after a
        difference.

        Without `needed` the uploader may compute them, so that the trainer does not wait: None.
        """
        return changed, shadow.fingerprints.with_gains(found.gains) if needed else None

    def collects(self, wanted: bool) -> bool:
        """Whether full weights that are wanted are collected while the trainer waits."""
        return False

    def weights(
        self,
        shadow: Shadow,
        specs: Mapping[str, TensorSpec],
        held: Sequence[Mapping[str, Range]],
        fingerprints: Mapping[str, int],
    ) -> Weights | None:
        """Collect the full weights for the first process, of the ranges that each one holds."""
        return None

    # In the thread that uploads.

    def say(self, **line: Any) -> None:
        """Tell the others of a version, by its `serial`, that it begins, so that they store their parts."""

    def answers(self, what: str, serial: int, kind: type[_Value]) -> list[_Value]:
        """Return what the others answer of a version: the parts that they stored, say."""
        return list[_Value]()

    def answer(self, what: str, serial: int, value: object, problem: BaseException | None = None) -> None:
        """Tell the first process what became of this one's part of a version."""

    def ended(self, job: Pending, error: Exception | None, digest: str, payload_bytes: int) -> None:
        """Tell the others what became of a version."""

    def lost(self, cause: Exception) -> PublishError | None:
        """Note why a version was lost. Return what the next publish is refused with."""
        return None

    def wait_until_seen(self) -> None:
        """Wait until the others know what became of the last version."""


class StreamReader(Protocol):
    """Reads what a process hands over as the ranges that it publishes.

    Attributes:
        specs: The whole tensors, once a stream was read.
        held: The ranges that each process publishes, by name: of this process all, of others those with an
            element.
        devices: Where the tensors of the first stream were.
        are_copies: Whether what `first` returned are copies on the host.
    """

    specs: dict[str, TensorSpec]
    held: list[dict[str, Range]]
    devices: set[torch.device]
    are_copies: bool

    def first(self, stream: Stream) -> dict[str, TensorRange]:
        """Read a first stream; return what this process publishes, by name."""

    def compare(self, shadow: Shadow, stream: Stream) -> Difference:
        """Compare a later stream with the published bits."""
