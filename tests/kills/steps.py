"""The named steps of a replica on its way to a version, and how to strike at one of them.

with patched(lambda step: os.kill(os.getpid(), signal.SIGKILL) if step == "staged" else None):
    replica.sync()

Each step is told when it is done or, where it says half, in the middle of it. A step can come many times in
one `sync`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from deltasync.channel import payloads
from deltasync.channel.reading import ChannelReader
from deltasync.following import Cursor, LiveWeights
from deltasync.kernels import host_segments
from deltasync.kernels.table import CHECK, Writes
from deltasync.live import LiveMemory, Staged
from deltasync.live.staging import SegmentTable
from deltasync.stores import cache
from deltasync.stores.cache import CachedStore

Tell = Callable[[str], None]

STAGE = (
    "head is read",
    "a record is read",
    "the way is planned",
    "an object is fetched",
    "the cache has a file under its temporary name",
    "the cache has a file",
    "a tensor is decoded",
    "a tensor is translated",
    "all is staged",
)
COMMIT = (
    "half of the values are exchanged",
    "all values are exchanged",
    "half of the tensors are copied",
    "all is written, nothing confirmed",
    "half of a rollback",
    "a rollback is done",
    "the version is confirmed",
)
STEPS = STAGE + COMMIT


@contextlib.contextmanager
def patched(tell: Tell) -> Iterator[None]:
    """Tell of every step that this process takes."""
    with contextlib.ExitStack() as stack:
        for owner, name, step in (
            (ChannelReader, "head", "head is read"),
            (ChannelReader, "stored", "a record is read"),
            (Cursor, "next", "the way is planned"),
            (CachedStore, "_download", "an object is fetched"),
            (CachedStore, "add", "the cache has a file"),
            (SegmentTable, "swap", "a tensor is translated"),
            (LiveWeights, "stage", "all is staged"),
            (LiveMemory, "_exchange", "all values are exchanged"),
            (LiveWeights, "commit", "all is written, nothing confirmed"),
            (LiveWeights, "rollback", "a rollback is done"),
            (LiveWeights, "confirm", "the version is confirmed"),
        ):
            stack.enter_context(mock.patch.object(owner, name, _after(getattr(owner, name), step, tell)))
        replace = os.replace

        def replace_told(*names: Any, **folders: Any) -> None:
            tell("the cache has a file under its temporary name")
            replace(*names, **folders)

        stack.enter_context(mock.patch.object(cache.os, "replace", replace_told))
        stack.enter_context(mock.patch.object(payloads, "delta", _decoding(payloads.delta, tell)))
        stack.enter_context(mock.patch.object(host_segments, "swap", _swapping(host_segments.swap, tell)))
        stack.enter_context(mock.patch.object(LiveMemory, "commit", _copying(LiveMemory.commit, tell)))
        yield


def _after(original: Callable[..., Any], step: str, tell: Tell) -> Callable[..., Any]:
    def action(*arguments: Any, **keywords: Any) -> Any:
        result = original(*arguments, **keywords)
        tell(step)
        return result

    return action


def _decoding(original: Callable[..., Any], tell: Tell) -> Callable[..., Any]:
    def delta(*arguments: Any, **keywords: Any) -> Any:
        found = original(*arguments, **keywords)
        for _ in found.fingerprints:
            tell("a tensor is decoded")
        return found

    return delta


def _swapping(original: Callable[[Writes], None], tell: Tell) -> Callable[[Writes], None]:
    done: set[int] = set()  # the writes whose values are in memory now

    def swap(of: Writes) -> None:
        nonlocal done
        rows, half = of.row_R, of.row_R.numel() // 2
        of.row_R = rows[:half]
        original(of)
        check = of.sum_3S[CHECK].clone()
        tell("half of a rollback" if id(of) in done else "half of the values are exchanged")
        done ^= {id(of)}
        of.row_R = rows[half:]
        original(of)
        of.sum_3S[CHECK] += check
        of.row_R = rows

    return swap


def _copying(original: Callable[..., Any], tell: Tell) -> Callable[..., Any]:
    class Copies(tuple[Any, ...]):
        told = False

        def __iter__(self) -> Iterator[Any]:
            for number, copy in enumerate(tuple.__iter__(self)):
                if number == len(self) // 2 and not self.told:
                    self.told = True  # not when it is undone
                    tell("half of the tensors are copied")
                yield copy

    def commit(self: LiveMemory, staged: Staged) -> Any:
        staged.copies = Copies(staged.copies)  # type: ignore[assignment]
        return original(self, staged)

    return commit
