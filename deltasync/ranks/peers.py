"""The ranks of one sharded trainer: what they agree on within `publish`, and how they hear of uploads between.

`publish` runs on all ranks at the same time and uses collectives. They carry a few kilobytes; only the weights of an anchor
are collected by the first rank, tensor by tensor. Uploads run in threads, where collectives would meet those of the trainer;
there the ranks write to the key-value store of torch.distributed instead (`Signals`).
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from deltasync.channel.documents import File
from deltasync.errors import PublishError, StoreError, error_of, get_logger
from deltasync.tensors.fingerprint import MASK

logger = get_logger(__name__)

_Value = TypeVar("_Value")

Range = tuple[int, int]
"""Elements of a flat checkpoint tensor that a rank holds: the first one, and the one behind the last."""


class Peers:
    """All ranks that publish together; methods are called on all of them, in the same order. One that is alone asks nobody.

    All raise `PublishError` if a rank does not answer in time.

    Args:
        group: A process group of any backend, whose ranks all make one of these; their messages go through a gloo group.
        timeout_s: How long to wait for a rank that is behind, or dead.

    Attributes:
        rank: This process's rank. The first, 0, writes records.
        signals: Connects their uploads.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, timeout_s: float = 0.0) -> None:
        self.rank, self.size = 0, 1
        self._lost: str | None = None
        store = None
        if group is not None:
            self._group = dist.new_group(
                dist.get_process_group_ranks(group),
                timeout=datetime.timedelta(seconds=timeout_s),
                backend="gloo",
                use_local_synchronization=True,
                group_desc="deltasync",
            )
            self.rank, self.size = self._group.rank(), self._group.size()
            # A connection of its own: waiting on one that others use would hold them up.
            store = PrefixStore("deltasync", self._group.get_group_store().clone())
        self.signals = Signals(store, self.rank, self.size, timeout_s)

    def share(self, value: _Value) -> list[_Value]:
        """What each rank gave, by rank."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        self._together(lambda: dist.all_gather_object(found, value, group=self._group))
        return found

    def first(self, action: Callable[[], _Value]) -> _Value:
        """What the first rank gets by an action, which it alone takes.

        Raises:
            BaseException: what the action raises; a `DeltaSyncError` with the same message at the others.
        """
        value, problem = attempt(action) if self.rank == 0 else (None, None)
        value, failure = self.share((value, None if problem is None else _described(problem)))[0]
        if problem is not None:
            raise problem
        if failure is not None:
            raise error_of(failure[0], f"Rank 0 failed: {failure[1]}", PublishError)
        return value  # type: ignore[return-value]

    def agree(self, error: BaseException | None, *numbers: int) -> list[int]:
        """Sums of numbers over all ranks, modulo 2**64, unless one failed.

        Raises:
            BaseException: `error`, or a `DeltaSyncError` with the message of another rank's.
        """
        sums = [value & MASK for value in (error is not None, *numbers)]
        if self.size > 1:
            vector = torch.from_numpy(np.array(sums, np.uint64).view(np.int64))
            self._together(lambda: dist.all_reduce(vector, group=self._group))
            sums = vector.numpy().view(np.uint64).tolist()
        if sums[0]:
            failures = self.share(None if error is None else _described(error))
            if error is not None:
                raise error
            rank, (kind, message) = next((rank, failure) for rank, failure in enumerate(failures) if failure is not None)
            raise error_of(kind, f"Rank {rank} failed, so nothing was published: {message}", PublishError)
        return sums[1:]

    def all(self, action: Callable[[], _Value]) -> _Value:
        """What an action, which each rank takes, gives at this one; raises as `agree` if it fails at one."""
        value, problem = attempt(action)
        self.agree(problem)
        return value  # type: ignore[return-value]

    def collect(self, held: np.ndarray, ranges: Sequence[Range]) -> np.ndarray:
        """One tensor's bit patterns, flat, at the first rank; nothing useful at the others. The ranges are of each rank."""
        if self.rank:
            if held.size:
                self._together(lambda: dist.send(_bytes_of(held), group_dst=0, group=self._group))
            return held
        whole_N = np.empty(sum(stop - start for start, stop in ranges), held.dtype)
        for rank, (start, stop) in enumerate(ranges):
            if rank == 0:
                whole_N[start:stop] = held
            elif stop > start:
                part = _bytes_of(whole_N[start:stop])
                self._together(lambda part=part, rank=rank: dist.recv(part, group_src=rank, group=self._group))  # type: ignore[misc]
        return whole_N

    def _together(self, action: Callable[[], object]) -> None:
        if self._lost is not None:
            raise PublishError(self._lost)
        try:
            action()
        except (RuntimeError, ValueError) as error:  # gloo's; what was under way on other ranks cannot be known any more
            self._lost = f"Rank {self.rank} lost the other ranks, and can publish no more: {error}"
            raise PublishError(self._lost) from error


class Signals:
    """What the uploads of the ranks tell each other.

    The first rank writes a log: a job has begun, a job has ended. The `others` follow it: they upload their part of a job
    when it has begun, and answer with its files; so a job that still waits can be replaced on all ranks at once.

    Args:
        store: Key-value store that all ranks share, on a connection that nobody else uses; None for one that is alone.
        timeout_s: How long to wait for an answer, or for the next line of the log.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout_s: float) -> None:
        self.rank = rank
        self.timeout_s = timeout_s
        self.others = range(1, size)
        self._store = store
        self._line = 0
        self._ended: int | None = None
        self._spent: list[str] = []

    def begin(self, serial: int, folder: str) -> None:
        """First rank: a job's upload begins; its parts go into this folder."""
        self._say({"begin": serial, "folder": folder})

    def collect(self, serial: int) -> list[File]:
        """First rank: the files that the other ranks stored for a job.

        Raises:
            StoreError: a rank could not store its part, or did not answer in time.
        """
        files = []
        for rank in self.others:
            try:
                answer = json.loads(self._wait(f"part/{serial}/{rank}"))
            except RuntimeError as error:  # DistError, and of a FileStore just this
                raise StoreError(f"Rank {rank} did not store its part within {self.timeout_s:g} s: {error}") from error
            if "error" in answer:
                raise StoreError(f"Rank {rank} could not store its part: {answer['error']}")
            files += msgspec.convert(answer["files"], list[File])
        answers = [f"part/{serial}/{rank}" for rank in self.others]
        for key in self._spent + answers:  # all ranks have answered: what was said before is of no use any more
            self._store.delete_key(key)
        self._spent = [f"seen/{serial}/{rank}" for rank in self.others]
        return files

    def end(self, serial: int, error: Exception | None, digest: str, payload_bytes: int) -> None:
        """First rank: a job has ended. Never raises; the other ranks give up waiting in the end."""
        described = None if error is None else _described(error)
        try:
            self._say({"end": serial, "error": described, "digest": digest, "payload_bytes": payload_bytes})
            self._ended = serial
        except RuntimeError:
            logger.exception("The other ranks could not be told how an upload ended.")

    def wait_until_seen(self) -> None:
        """First rank: wait until the others have read the log, since the store may end with this process."""
        if self._ended is None:
            return
        try:
            for rank in self.others:
                self._wait(f"seen/{self._ended}/{rank}")
        except RuntimeError as error:
            logger.warning("Not all ranks say that they know how their uploads ended: %s", error)

    def next_line(self) -> dict[str, Any]:
        """Other ranks: the next line of the log: `begin` or `end` with a job's serial, and what goes with them.

        Raises:
            torch.distributed.DistNetworkError: the store is gone.
            RuntimeError: nothing was said in time.
        """
        line: dict[str, Any] = json.loads(self._wait(f"log/{self._line}"))
        self._line += 1
        return line

    def answer(self, serial: int, files: Sequence[File], error: Exception | None) -> None:
        """Other ranks: this rank's part of a job is stored, or not."""
        told = {"files": msgspec.to_builtins(files)} if error is None else {"error": str(error)}
        self._set(f"part/{serial}/{self.rank}", told)

    def seen(self, serial: int) -> None:
        """Other ranks: it is known here how a job ended."""
        self._set(f"seen/{serial}/{self.rank}", True)

    def _say(self, line: dict[str, Any]) -> None:
        if self.others:
            self._set(f"log/{self._line}", line)
            self._spent.append(f"log/{self._line}")
            self._line += 1

    def _set(self, key: str, value: object) -> None:
        self._store.set(key, json.dumps(value))

    def _wait(self, key: str) -> bytes:
        self._store.wait([key], datetime.timedelta(seconds=self.timeout_s))
        return self._store.get(key)


def _described(error: BaseException) -> tuple[str, str]:
    return type(error).__name__, str(error)


def _bytes_of(bits: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(bits.view(np.uint8))


def attempt(action: Callable[[], _Value]) -> tuple[_Value | None, BaseException | None]:
    """What it gives, or what it raises: for the other ranks to hear of it before this one leaves."""
    try:
        return action(), None
    except BaseException as error:  # noqa: BLE001 - raised by `Peers.agree`
        return None, error
