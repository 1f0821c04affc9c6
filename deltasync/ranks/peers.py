"""Messages between the ranks of one sharded trainer, within `publish` (`Peers`) and about uploads (`Signals`).

`publish` runs on all ranks at the same time. Their messages, a few kilobytes, go through the key-value store of
torch.distributed to the first rank and back (`mailbox`), as does what the threads say that upload. Only the weights of an
anchor are collected by the first rank through gloo, tensor by tensor.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from deltasync.channel.documents import File
from deltasync.errors import PublishError, StoreError, error_of, get_logger
from deltasync.ranks.mailbox import BEAT_S, WAY_ON, Mailbox
from deltasync.tensors.fingerprint import MASK

logger = get_logger(__name__)

_Value = TypeVar("_Value")

Range = tuple[int, int]
"""The elements of a flat checkpoint tensor that a rank holds: index of the first one, and of the one behind the last."""


class Peers:
    """All ranks that publish together. Each method is called on all of them, in the same order; a single rank asks nobody.

    All methods raise PublishError if a rank is lost or does not come; then this publisher can publish no more.

    Args:
        group: A process group of any backend; all of its ranks make a `Peers`. It is asked for its store only.
        timeout_s: How long to wait for a rank that does not come.

    Attributes:
        rank: This process's rank. Rank 0, the first, writes records.
        signals: Connects the uploads of the ranks.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, timeout_s: float = 0.0) -> None:
        self.rank, self.size = 0, 1
        self._lost: str | None = None
        self._mailbox: Mailbox | None = None
        self._weights: dist.ProcessGroupGloo | None = None  # carries full weights
        self._number, self._timeout_s = 0, timeout_s
        if group is not None:
            mailbox = Mailbox(group, timeout_s)
            self.rank, self.size = mailbox.rank, mailbox.size
            if self.size > 1:
                self._mailbox, self._store = mailbox, mailbox.connect()
            else:
                mailbox.end("is alone")
        self.signals = Signals(self._mailbox, self.rank, self.size)

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Tell the others meanwhile that this rank is in a method of its publisher, however long that takes."""
        mailbox = self._mailbox
        if mailbox is None:
            yield
            return
        mailbox.inside(True)
        try:
            yield
        finally:
            mailbox.inside(False)

    def leave(self) -> None:
        """Tell the others that this rank has opened its publisher, and trains."""
        if self._mailbox is not None:
            self._mailbox.inside(False)

    def close(self, how: str = "has closed its publisher") -> None:
        """End all of it: this rank answers no more."""
        self._weights = None
        if self._mailbox is not None:
            self._lost = self._lost or f"Rank {self.rank} {how}."
            self._mailbox.end(how)
            self._store = self._mailbox = None
            self.signals.close()

    def share(self, value: _Value, kind: Any) -> list[_Value]:
        """Return the values of all ranks, by rank. `kind` is their type, as msgspec takes it."""
        if self.size == 1:
            return [value]
        found = self._exchange(zlib.compress(_encoded(value), 1), _encoded)
        return [msgspec.msgpack.decode(zlib.decompress(each), type=kind) for each in _BYTES.decode(found)]

    def first(
        self,
        action: Callable[[], _Value],
        kind: Any = Any,
        *,
        problem: BaseException | None = None,
        same: str | None = None,
    ) -> _Value:
        """Run an action on the first rank and return its result at all ranks. `kind` is its type, as msgspec takes it.

        `problem` is what has failed at this rank before; `same` is what has to be equal at all ranks.

        Raises:
            BaseException: what the action raises, or `problem`; a `DeltaSyncError` with the same message at the others.
            PublishError: `same` differs.
        """
        value: _Value | None = None
        encoded: bytes | None = None
        if self.rank == 0 and problem is None:
            value, problem = attempt(action)
        if self.size > 1:
            if problem is None:
                encoded, problem = attempt(lambda: _encoded(value))

            def decide(said: list[bytes]) -> bytes:
                found = [_SAID.decode(each) for each in said]
                for rank, (failure, other) in enumerate(found):
                    if failure is not None:
                        return _encoded((rank, *failure))
                    if other != found[0][1]:
                        message = (
                            f"Rank {rank} publishes {other}, and rank 0 publishes {found[0][1]}. Nothing was published."
                        )
                        return _encoded((-1, PublishError.__name__, message))
                return _encoded((None, encoded))

            said = _encoded((None if problem is None else _described(problem), same))
            failed, *answer = _ANSWER.decode(self._exchange(said, decide))
            if problem is None and failed is not None:
                message = str(answer[1])
                raise error_of(answer[0], message if failed < 0 else f"Rank {failed} failed: {message}", PublishError)
            if self.rank and problem is None:
                return msgspec.msgpack.decode(answer[0], type=kind)
        if problem is not None:
            raise problem
        return value  # type: ignore[return-value]

    def agree(self, error: BaseException | None, *numbers: int) -> list[int]:
        """Return the sums of numbers over all ranks, modulo 2**64, if no rank has an error.

        Raises:
            BaseException: `error`, or a `DeltaSyncError` with the message of another rank's error.
        """
        values = np.array([value & MASK for value in numbers], np.uint64)
        if self.size > 1:
            own = _without_zeros(values) if error is None else b"-" + json.dumps([self.rank, *_described(error)]).encode()
            answer = self._exchange(own, functools.partial(_sum, values.size))
            if error is None and answer[:1] == b"-":
                rank, kind, message = json.loads(answer[1:])
                raise error_of(kind, f"Rank {rank} failed, so nothing was published: {message}", PublishError)
            values = _with_zeros(answer, values.size) if error is None else values
        if error is not None:
            raise error
        return values.tolist()

    def all(self, action: Callable[[], _Value]) -> _Value:
        """Run an action on each rank and return its result at this one. Raises as `agree` if it fails at any rank."""
        value, problem = attempt(action)
        self.agree(problem)
        return value  # type: ignore[return-value]

    def collect(self, held: np.ndarray, ranges: Sequence[Range], out_N: np.ndarray | None) -> None:
        """Write one tensor's flat bit patterns, of the ranges of all ranks, into `out_N` at the first rank."""
        gloo = self._gloo()
        if self.rank:
            if held.size:
                self._together(lambda: gloo.send([_bytes_of(held)], 0, 0).wait())
            return
        assert out_N is not None
        for rank, (start, stop) in enumerate(ranges):
            if rank == 0:
                out_N[start:stop] = held
            elif stop > start:
                part = _bytes_of(out_N[start:stop])
                self._together(lambda part=part, rank=rank: gloo.recv([part], rank, 0).wait())  # type: ignore[misc]

    def _gloo(self) -> Any:
        """The connections that full weights go through. They belong to no process group that torch knows."""
        if self._weights is None:
            assert self._mailbox is not None
            self.agree(None)  # all ranks are here now, and connect
            store, timeout = self._mailbox.connect_apart(), datetime.timedelta(seconds=self._timeout_s)

            def connect() -> None:
                self._weights = dist.ProcessGroupGloo(PrefixStore("weights", store), self.rank, self.size, timeout)

            self._together(connect)
        return self._weights

    def _exchange(self, value: bytes, combine: Callable[[list[bytes]], bytes]) -> bytes:
        """Send a value to the first rank, which combines those of all ranks, and return the result."""
        if self._lost is not None:
            raise PublishError(self._lost)
        assert self._mailbox is not None
        self._number, number = self._number + 1, self._number
        keys = {rank: f"to/{number}/{rank}" for rank in range(1, self.size)}
        try:
            if self.rank:
                self._store.set(keys[self.rank], value)
                (result,) = self._mailbox.wait(self._store, {0: f"from/{number}"}, "publish")
                return result
            values = self._mailbox.wait(self._store, keys, "publish")
            result = combine([value, *values])
            self._store.set(f"from/{number}", result)
            for key in [*keys.values(), *([f"from/{number - 1}"] if number else [])]:  # which all have read: they went on
                self._store.delete_key(key)
        except PublishError as error:
            self._lose(str(error))
            raise
        except RuntimeError as error:  # of torch's store
            self._lose(f"The store of torch.distributed is gone, and with it the process that held it: {error} {WAY_ON}")
            raise PublishError(self._lost) from error
        return result

    def _together(self, action: Callable[[], object]) -> None:
        if self._lost is not None:
            raise PublishError(self._lost)
        try:
            action()
        except (RuntimeError, ValueError) as error:  # gloo's; what was under way on other ranks cannot be known any more
            self._lose(f"Rank {self.rank} lost the other ranks while full weights were collected: {error} {WAY_ON}")
            raise PublishError(self._lost) from error

    def _lose(self, why: str) -> None:
        """Publish no more, and tell those who wait for this rank."""
        self._lost = why
        if self._mailbox is not None:
            self._mailbox.end(f"has given up. {why.replace(WAY_ON, '').strip()}")


def _sum(count: int, messages: list[bytes]) -> bytes:
    """Add up the numbers of all ranks, or return the first error."""
    failed = [message for message in messages if message[:1] == b"-"]
    return failed[0] if failed else _without_zeros(sum(_with_zeros(message, count) for message in messages))  # type: ignore[arg-type]


def _without_zeros(values: np.ndarray) -> bytes:
    """Return the message that has these uint64: a bit for each, and 8 bytes for each that is not 0."""
    some = values != 0
    return b"+" + np.packbits(some).tobytes() + values[some].tobytes()


def _with_zeros(message: bytes, count: int) -> np.ndarray:
    """Return the numbers of a message, uint64[count]."""
    end = 1 + -(-count // 8)
    some = np.unpackbits(np.frombuffer(message[1:end], np.uint8), count=count).astype(np.bool_)
    values = np.zeros(count, np.uint64)
    values[some] = np.frombuffer(message[end:], np.uint64)
    return values


class Signals:
    """Messages between the uploads of the ranks.

    The first rank writes a log of jobs that begin and jobs that end. The `others` follow it: they upload their part of a job
    when it begins, and answer with its files. So a job that still waits can be replaced on all ranks at once.

    Args:
        mailbox: The mailbox of all ranks; None for a single rank.
        rank: This process's rank.
        size: Number of ranks.
    """

    def __init__(self, mailbox: Mailbox | None, rank: int, size: int) -> None:
        self.rank = rank
        self.others = range(1, size)
        self._mailbox = mailbox
        self._store: Any = None if mailbox is None else mailbox.connect()
        self._line = 0
        self._ended: int | None = None
        self._spent: list[str] = []

    def close(self) -> None:
        """Leave the store; nothing is said any more."""
        self._store = self._mailbox = self._ended = None

    def wait_for(self, event: threading.Event) -> None:
        """Other ranks: wait for what the first rank decides, as long as it lives.

        Raises:
            PublishError: it is lost.
        """
        assert self._mailbox is not None
        store, seen = None, dict[int, tuple[bytes, float]]()
        while not event.wait(BEAT_S):
            store = store or self._mailbox.connect()
            self._mailbox.check(store, 0, seen)

    def begin(self, serial: int, folder: str, base: int | None) -> None:
        """First rank: say that a job's upload begins, and into which folder its parts go.

        With `base`, the version with full weights, each rank compacts the steps since then once the job has ended well.
        """
        self._say({"begin": serial, "folder": folder, "base": base})

    def collect(self, serial: int) -> list[File]:
        """First rank: wait for the files that the other ranks stored for a job.

        Raises:
            StoreError: a rank could not store its part, or is lost.
        """
        answers = self._answers(f"part/{serial}", "store its part of a version", list[File])
        # All ranks have answered, so they have read what was said before.
        for key in self._spent:
            self._store.delete_key(key)
        self._spent = [f"seen/{serial}/{rank}" for rank in self.others]
        return [file for files in answers for file in files]

    def compacted(self, serial: int, kind: type[_Value]) -> list[_Value]:
        """First rank: wait for the other ranks' parts of the compaction to a job's version, each of this type.

        Raises:
            StoreError: a rank could not store its parts, or is lost.
        """
        return self._answers(f"compacted/{serial}", "store its part of a compaction", kind)

    def _answers(self, key: str, what: str, kind: Any) -> list[Any]:
        answers = []
        for rank in self.others:
            try:
                answer = json.loads(self._wait(rank, f"{key}/{rank}", what))
            except (PublishError, RuntimeError) as error:
                raise StoreError(f"Rank {rank} did not {what}: {error}") from error
            if "error" in answer:
                _, message = answer["error"]
                raise StoreError(f"Rank {rank} could not {what}: {message}")
            answers.append(msgspec.convert(answer["value"], kind))
        for rank in self.others:
            self._store.delete_key(f"{key}/{rank}")
        return answers

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
                self._wait(rank, f"seen/{self._ended}/{rank}", "read what became of the last version")
        except (PublishError, RuntimeError) as error:
            logger.warning("Not all ranks say that they know how their uploads ended: %s", error)

    def next_line(self) -> dict[str, Any]:
        """Other ranks: wait for the next line of the log, `begin` or `end` with a job's serial and their arguments.

        Raises:
            PublishError: the first rank is lost.
        """
        line: dict[str, Any] = json.loads(self._wait(0, f"log/{self._line}", "say what becomes of a version"))
        self._line += 1
        return line

    def answer(self, serial: int, files: Sequence[File], error: Exception | None) -> None:
        """Other ranks: say that this rank's part of a job is stored, or why not."""
        self._answer(f"part/{serial}", files, error)

    def answer_compaction(self, serial: int, parts: object, error: BaseException | None) -> None:
        """Other ranks: say which parts of the compaction to a job's version are stored, or why not."""
        self._answer(f"compacted/{serial}", parts, error)

    def _answer(self, key: str, value: object, error: BaseException | None) -> None:
        found = {"value": msgspec.to_builtins(value)} if error is None else {"error": _described(error)}
        with contextlib.suppress(RuntimeError):  # the first rank's process has ended, and with it the store
            self._set(f"{key}/{self.rank}", found)

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

    def _wait(self, rank: int, key: str, what: str) -> bytes:
        assert self._mailbox is not None
        try:
            return self._mailbox.wait(self._store, {rank: key}, what, bounded=False)[0]
        except RuntimeError as error:  # of torch's store
            raise PublishError(f"The store of torch.distributed is gone: {error} {WAY_ON}") from error


_BYTES = msgspec.msgpack.Decoder(list[bytes])
_SAID = msgspec.msgpack.Decoder(tuple[tuple[str, str] | None, str | None])
_ANSWER = msgspec.msgpack.Decoder(list[Any])


def _encoded(value: object) -> bytes:
    return msgspec.msgpack.encode(value)


def _described(error: BaseException) -> tuple[str, str]:
    return type(error).__name__, str(error).encode(errors="replace").decode()


def _bytes_of(bits: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(bits.view(np.uint8))


def attempt(action: Callable[[], _Value]) -> tuple[_Value | None, BaseException | None]:
    """Return the result of an action or its exception, so that the other ranks hear of it before this one raises."""
    try:
        return action(), None
    except BaseException as error:  # noqa: BLE001 - raised by `Peers.agree`
        return None, error
