"""Messages between the ranks of one sharded trainer, within `publish` (`Peers`) and about uploads (`Signals`).

`publish` runs on all ranks at the same time and uses collectives. They carry a few kilobytes; only the weights of an anchor
are collected by the first rank, tensor by tensor. Uploads run in threads, whose collectives would mix with those of the
trainer; there the ranks write to the key-value store of torch.distributed instead.
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
"""The elements of a flat checkpoint tensor that a rank holds: index of the first one, and of the one behind the last."""


class Peers:
    """All ranks that publish together. Each method is called on all of them, in the same order; a single rank asks nobody.

    All methods raise PublishError if a rank does not answer in time.

    Args:
        group: A process group of any backend; all of its ranks make a `Peers`. Messages go through a gloo group.
        timeout_s: How long to wait for a rank that is behind, or dead.

    Attributes:
        rank: This process's rank. Rank 0, the first, writes records.
        signals: Connects the uploads of the ranks.
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
        """Return the values of all ranks, by rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        self._together(lambda: dist.all_gather_object(values, value, group=self._group))
        return values

    def first(self, action: Callable[[], _Value]) -> _Value:
        """Run an action on the first rank and return its result at all ranks.

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
        """Return the sums of numbers over all ranks, modulo 2**64, if no rank has an error.

        Raises:
            BaseException: `error`, or a `DeltaSyncError` with the message of another rank's error.
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
        """Run an action on each rank and return its result at this one. Raises as `agree` if it fails at any rank."""
        value, problem = attempt(action)
        self.agree(problem)
        return value  # type: ignore[return-value]

    def collect(self, held: np.ndarray, ranges: Sequence[Range]) -> np.ndarray:
        """Return one tensor's flat bit patterns at the first rank, by the ranges of all ranks; at the others `held`."""
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
    """Messages between the uploads of the ranks.

    The first rank writes a log of jobs that begin and jobs that end. The `others` follow it: they upload their part of a job
    when it begins, and answer with its files. So a job that still waits can be replaced on all ranks at once.

    Args:
        store: Key-value store that all ranks share, on a connection that nobody else uses; None for a single rank.
        rank: This process's rank.
        size: Number of ranks.
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
        """First rank: say that a job's upload begins, and into which folder its parts go."""
        self._say({"begin": serial, "folder": folder})

    def collect(self, serial: int) -> list[File]:
        """First rank: wait for the files that the other ranks stored for a job.

        Raises:
            StoreError: a rank could not store its part, or did not answer in time.
        """
        files, keys = [], [f"part/{serial}/{rank}" for rank in self.others]
        for rank, key in zip(self.others, keys, strict=True):
            try:
                answer = json.loads(self._wait(key))
            except RuntimeError as error:  # DistError, and of a FileStore just this
                raise StoreError(f"Rank {rank} did not store its part within {self.timeout_s:g} s: {error}") from error
            if "error" in answer:
                raise StoreError(f"Rank {rank} could not store its part: {answer['error']}")
            files += msgspec.convert(answer["files"], list[File])
        for key in self._spent + keys:  # all ranks have answered, so they have read what was said before
            self._store.delete_key(key)
        self._spent = [f"seen/{serial}/{rank}" for rank in self.others]
        return files

    def end(self, serial: int, error: Exception | None, digest: str, payload_bytes: int) -> None:
        """First rank: say that a job has ended. Never raises; if this fails, the other ranks time out."""
        described = None if error is None else _described(error)
        try:
            self._say({"end": serial, "error": described, "digest": digest, "payload_bytes": payload_bytes})
            self._ended = serial
        except RuntimeError:
            logger.exception("The other ranks could not be told how an upload ended.")

    def wait_until_seen(self) -> None:
        """First rank: wait until the others have read the log, because the store may end with this process."""
        if self._ended is None:
            return
        try:
            for rank in self.others:
                self._wait(f"seen/{self._ended}/{rank}")
        except RuntimeError as error:
            logger.warning("Not all ranks say that they know how their uploads ended: %s", error)

    def next_line(self) -> dict[str, Any]:
        """Other ranks: wait for the next line of the log, `begin` or `end` with a job's serial and their arguments.

        Raises:
            torch.distributed.DistNetworkError: the store is gone.
            RuntimeError: nothing was said in time.
        """
        line: dict[str, Any] = json.loads(self._wait(f"log/{self._line}"))
        self._line += 1
        return line

    def answer(self, serial: int, files: Sequence[File], error: Exception | None) -> None:
        """Other ranks: say that this rank's part of a job is stored, or why not."""
        answer = {"files": msgspec.to_builtins(files)} if error is None else {"error": str(error)}
        self._set(f"part/{serial}/{self.rank}", answer)

    def seen(self, serial: int) -> None:
        """Other ranks: confirm that this rank has read how a job ended."""
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
    """Return the result of an action or its exception, so that the other ranks hear of it before this one raises."""
    try:
        return action(), None
    except BaseException as error:  # noqa: BLE001 - raised by `Peers.agree`
        return None, error
