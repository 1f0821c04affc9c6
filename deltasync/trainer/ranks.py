"""Messages between the ranks of a sharded trainer: agreement within `publish`, and between their uploads.

Messages, a few kilobytes, go through the key-value store of torch.distributed to the first rank and back,
below a prefix of each publisher. No process group is made, so the ranks may belong to any others. Only the
weights of an anchor are collected by the first rank through gloo, tensor by tensor. A rank is lost when its
process says nothing for a while, says that it ends, or is seen dead on the same host; not when it takes long.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import os
import threading
import time
import uuid
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from deltasync.errors import ConfigError, PublishError, StoreError, error_of, get_logger
from deltasync.publish.agreement import Alone, Numbers, attempt
from deltasync.publish.ranges import Range
from deltasync.threads import daemon

logger = get_logger(__name__)

_Value = TypeVar("_Value")

BEAT_S = 1.0
SILENCE_S = 60.0
"""A rank whose process has said nothing for so long is lost, or for the timeout, if that is shorter."""

SAID_AFTER_S = 10.0
"""Who is waited for is logged after so long, and then every minute."""

_LOOK_S = 0.2  # from one look for signs of life to the next
_GAVE_UP = b" has given up. "  # in a sign of life
ENDED = "has ended its process"

WAY_ON = "This publisher can publish no more: end all ranks, start them again, and open the channel with resume=True."


class Ranks(Alone):
    """All ranks that publish together. Every rank of a group makes one, at the same time; see `connected`.

    `first`, `share`, `agree`, `all` and `collect` are called on all ranks, in the same order. They raise
    PublishError if a rank is lost or does not come; then this publisher can publish no more. `say` to
    `wait_until_seen` are for the threads that upload: the first rank writes a log of versions that begin and
    end, which the `others` follow and answer.

    Args:
        group: A process group of any backend, which is asked for its store only.
        timeout_s: How long to wait for a rank that lives, but does not come.

    Attributes:
        rank: This process's rank. Rank 0, the first, writes records.
        others: All ranks but the first.
        name: Random, the same at all ranks.
        moved_s: Tells the other ranks when the uploads of this one last advanced.

    Raises:
        PublishError: a rank did not come in time; names it.
    """

    keeps = False

    def __init__(self, group: dist.ProcessGroup, timeout_s: float) -> None:
        self._timeout_s, self._lost = timeout_s, ""
        self._store: Any = None
        self._weights: dist.ProcessGroupGloo | None = None  # carries full weights
        self._number = self._line = self._beats = 0
        self._ended: int | None = None  # the newest version that ended
        self._is_visible = False  # that one
        self._spent: list[str] = []  # keys that all have read once they answer
        self._hosts: dict[int, str] = {}
        self._ending, self._lock = threading.Event(), threading.Lock()
        self._is_inside, self._is_leaving, self._is_stopped = True, False, False
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.others = range(1, self.size)
        self._group_store = cast("Any", group.get_group_store())
        self._global = [dist.get_global_rank(group, rank) for rank in range(self.size)]
        # One connection for all threads, none of which blocks on it. Those of others may wait on the group's
        # for long.
        connection = self._group_store.clone()
        self.name = self._meet(PrefixStore("deltasync", connection))
        self._prefix = f"deltasync/{self.name}"
        self._store = PrefixStore(self._prefix, connection)
        pid = _process(str(os.getpid()))
        self._store.set(f"host/{self.rank}", f"{_host()} {pid}" if pid else "")
        self._beat()
        self._thread = daemon("heartbeat", self._run)
        self._thread.start()
        _open.add(self)

    def close(self, how: str = "has closed its publisher") -> None:
        """Tell the others that this rank answers no more. No thread is left."""
        self.end(how)
        self._lost = self._lost or f"Rank {self.rank} {how}."
        self._weights = self._store = None

    def end(self, how: str) -> None:
        """Tell the others that this rank answers no more, and why."""
        _open.discard(self)
        if self._store is None or self._ending.is_set():
            return
        self._ending.set()
        with self._lock, contextlib.suppress(RuntimeError):
            self._store.set(f"alive/{self.rank}", f"end:{self._gave_up() or how}")
        self._thread.join()

    def stop(self) -> None:
        """End all waits for other ranks, and tell these that the process ends."""
        self._is_stopped = True
        self.end(ENDED)

    def leave(self) -> None:
        """Tell the others that this rank calls no more method; its uploads go on."""
        self._is_leaving = True
        if self._store is not None:
            self._beat()

    def state(self, rank: int) -> bytes:
        """Return what a rank says of itself: the place of its main thread, and `moved_s`; nothing if that is
        not known.
        """
        store = self._store
        with contextlib.suppress(RuntimeError):
            if store is not None and _has(store, f"alive/{rank}"):
                return bytes(store.get(f"alive/{rank}")).partition(b" ")[2]
        return b""

    # Called by all ranks together.

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Tell the others meanwhile that this rank is in a method of its publisher, however long that
        takes.
        """
        self.enter(True)
        try:
            yield
        finally:
            self.enter(False)

    def enter(self, is_inside: bool) -> None:
        """Tell the others whether this rank is in a method of its publisher, or trains."""
        self._is_inside = is_inside
        if self._store is not None:
            self._beat()

    def first(
        self,
        action: Callable[[], _Value],
        kind: Any = Any,
        *,
        problem: BaseException | None = None,
        same: str | None = None,
    ) -> _Value:
        """Run an action on the first rank and return its result at all ranks. `kind` is its type, as msgspec
        takes it.

        `problem` is what has failed at this rank before; `same` is what has to be equal at all ranks.

        Raises:
            BaseException: what the action raises, or `problem`; a `DeltaSyncError` with the same message at
                the others.
            PublishError: `same` differs.
        """

        def given() -> tuple[str | None, _Value | None]:
            if problem is not None:
                raise problem
            return same, None if self.rank else action()

        found = self.share(given, tuple[str | None, kind | None])
        for rank, (other, _) in enumerate(found):
            if other != found[0][0]:
                raise PublishError(
                    f"Rank {rank} publishes {other}, and rank 0 publishes {found[0][0]}. Nothing was "
                    "published."
                )
        return found[0][1]  # type: ignore[return-value]

    def share(self, action: Callable[[], _Value], kind: Any) -> list[_Value]:
        """Run an action on each rank and return the results of all of them, by rank. Raises as `agree`."""
        value, problem = attempt(action)
        answer = self._agreed(value, problem, lambda said: _encoded([*map(msgspec.Raw, said)]))
        return msgspec.msgpack.decode(answer, type=list[kind])

    def agree(self, problem: BaseException | None, numbers: Numbers = ()) -> np.ndarray:
        """Return the sums of numbers over all ranks, modulo 2**64, if no rank has a problem: uint64.

        Raises:
            BaseException: `problem`, or a `DeltaSyncError` with the message of another rank's.
        """
        values = np.asarray(numbers, np.uint64)

        def add(said: Iterable[bytes]) -> bytes:
            total = np.zeros_like(values)
            for each in said:
                total += np.frombuffer(msgspec.msgpack.decode(each, type=bytes), np.uint64)
            return _encoded(total.tobytes())

        answer = self._agreed(values.tobytes(), problem, add)
        return np.frombuffer(msgspec.msgpack.decode(answer, type=bytes), np.uint64)

    def all(self, action: Callable[[], _Value]) -> _Value:
        """Run an action on each rank and return its result at this one. Raises as `agree` if it fails at any
        rank.
        """
        value, problem = attempt(action)
        self.agree(problem)
        return value  # type: ignore[return-value]

    def collect(self, held: np.ndarray, ranges: Sequence[Range], out_N: np.ndarray | None) -> None:
        """Write one tensor's flat bit patterns, of the ranges of all ranks, into `out_N` at the first
        rank.
        """
        if self._weights is None:
            self.agree(None)  # all ranks are here now, and connect
            # By a connection of its own, which may wait.
            store = PrefixStore(f"{self._prefix}/weights", self._group_store.clone())
            timeout = datetime.timedelta(seconds=self._timeout_s)
            self._weights = self._together(
                lambda: dist.ProcessGroupGloo(store, self.rank, self.size, timeout)
            )
        gloo: Any = self._weights
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

    # Called by the threads that upload.

    def say(self, **line: Any) -> None:
        """First rank: add a line to the log that the others follow: a version, by its `serial`, begins or
        ends.

        Raises:
            RuntimeError: the store of torch.distributed is gone.
        """
        self._store.set(f"log/{self._line}", _encoded(line))
        self._spent.append(f"log/{self._line}")
        self._line += 1
        if "error" in line:
            self._ended, self._is_visible = line["serial"], line["error"] is None
            self._spent += [f"seen/{self._ended}/{rank}" for rank in self.others]

    def next_line(self) -> dict[str, Any]:
        """Other ranks: wait for the next line of the log.

        Raises:
            PublishError: the first rank is lost.
        """
        (line,) = self._wait(
            {0: f"log/{self._line}"}, "say what becomes of a version", bounded=False, outlasts=True
        )
        self._line += 1
        return msgspec.msgpack.decode(line, type=dict[str, Any])

    def answer(self, what: str, serial: int, value: object, problem: BaseException | None = None) -> None:
        """Other ranks: tell the first one what became of this rank's part of a version, or of something
        beside it.
        """
        with contextlib.suppress(RuntimeError):  # the first rank's process has ended, and with it the store
            said = (None, value) if problem is None else (described(problem), None)
            self._store.set(f"{what}/{serial}/{self.rank}", _encoded(said))

    def answers(self, what: str, serial: int, kind: Any) -> list[Any]:
        """First rank: wait for the answers of the others, of this type.

        Raises:
            StoreError: a rank could not do its part, or is lost.
        """
        answers, keys = [], {rank: f"{what}/{serial}/{rank}" for rank in self.others}
        for rank, key in keys.items():
            try:
                (said,) = self._wait({rank: key}, f"store its {what}", bounded=False)
            except PublishError as error:
                raise StoreError(f"Rank {rank} did not store its {what}: {error}") from error
            failure, answer = msgspec.msgpack.decode(said, type=tuple[tuple[str, str] | None, msgspec.Raw])
            if failure is not None:
                raise StoreError(f"Rank {rank} could not store its {what}: {failure[1]}")
            answers.append(msgspec.msgpack.decode(answer, type=kind))
        if what == "part":  # which answers the newest line, so all have read the log
            self._spent, spent = [], self._spent
            keys |= enumerate(spent, start=self.size)
        for key in keys.values():
            self._store.delete_key(key)
        return answers

    def wait_until_seen(self) -> None:
        """First rank: wait until the others have read the log, because the store may end with this
        process.
        """
        if self._ended is not None and self._store is not None:
            keys = {rank: f"seen/{self._ended}/{rank}" for rank in self.others}
            try:
                self._wait(
                    keys, "read what became of the last version", bounded=False, outlasts=self._is_visible
                )
            except PublishError as error:
                logger.warning("Not all ranks say that they know how their uploads ended: %s", error)

    # How messages travel.

    def _agreed(
        self, value: object, problem: BaseException | None, combine: Callable[[Iterable[bytes]], bytes]
    ) -> bytes:
        """Return what the first rank makes of the values of all ranks, one after the other, if none has a
        problem; raise that at all of them.
        """
        encoded: bytes | None = b""
        if problem is None:
            encoded, problem = attempt(lambda: _encoded(value))

        def decide(said: Iterable[bytes]) -> bytes:
            failed: tuple[str, str] | None = None

            def values() -> Iterator[bytes]:
                nonlocal failed
                for rank, each in enumerate(said):
                    failure, value = msgspec.msgpack.decode(each, type=tuple[tuple[str, str] | None, bytes])
                    if failure is not None:
                        failed = failure[0], f"Rank {rank} failed: {failure[1]}"
                        return
                    yield value

            answer = combine(values())
            return _encoded((failed, b"" if failed else answer))

        said = _encoded((None if problem is None else described(problem), encoded or b""))
        failure, answer = msgspec.msgpack.decode(
            self._exchange(said, decide), type=tuple[tuple[str, str] | None, bytes]
        )
        if problem is not None:
            raise problem
        if failure is not None:
            raise error_of(*failure, PublishError)
        return answer

    def _exchange(self, value: bytes, combine: Callable[[Iterable[bytes]], bytes]) -> bytes:
        """Send a value to the first rank, which combines those of all ranks, and return the result.

        They are compressed until `combine` takes them: of a trillion parameters 256 ranks say 245 MB at once.
        """
        if self._lost:
            raise PublishError(self._lost)
        self._number, number = self._number + 1, self._number
        keys, value = {rank: f"to/{number}/{rank}" for rank in self.others}, zlib.compress(value, 1)
        try:
            if self.rank:
                self._store.set(keys[self.rank], value)
                (result,) = self._wait({0: f"from/{number}"}, "publish")
            else:
                values = [value, *self._wait(keys, "publish")]
                result = zlib.compress(combine(map(zlib.decompress, values)), 1)
                self._store.set(f"from/{number}", result)
                # Which all have read: they went on.
                for key in [*keys.values(), *([f"from/{number - 1}"] if number else [])]:
                    self._store.delete_key(key)
        except (PublishError, RuntimeError) as error:
            self._lose(str(error) if isinstance(error, PublishError) else _gone(error))
            raise PublishError(self._lost) from error
        return zlib.decompress(result)

    def _together(self, action: Callable[[], _Value]) -> _Value:
        if self._lost:
            raise PublishError(self._lost)
        try:
            return action()
        except (RuntimeError, ValueError) as error:
            # gloo's; what was under way on other ranks cannot be known any more
            self._lose(
                f"Rank {self.rank} lost the other ranks while full weights were collected: {error} {WAY_ON}"
            )
            raise PublishError(self._lost) from error

    def _lose(self, why: str) -> None:
        """Publish no more, and tell those who wait for this rank's next call; its uploads go on."""
        self._lost = why
        self._beat()

    def _meet(self, store: Any) -> str:
        """Agree with all ranks on a name for this publisher, however many of them have failed to open
        before.
        """
        if self.rank:
            own = uuid.uuid4().hex
            store.set(f"ask/{self.rank}", own)
            try:
                self._come(store, {0: f"go/{own}"})
            except PublishError:
                store.delete_key(f"ask/{self.rank}")
                raise
            name = str(store.get(f"go/{own}").decode())
            store.delete_key(f"go/{own}")
            return name
        name, keys = uuid.uuid4().hex, {rank: f"ask/{rank}" for rank in self.others}
        self._come(store, keys)
        for key in keys.values():
            asked = store.get(key).decode()
            store.delete_key(key)
            store.set(f"go/{asked}", name)
        return name

    def _come(self, store: Any, keys: Mapping[int, str]) -> None:
        """Wait until these ranks have come to open their publishers."""
        left = None
        for missing, waited_s in _missing(store, keys, "open its publisher"):
            left = left or PrefixStore(_LEFT, _world_store().clone())
            ended = [rank for rank in missing if waited_s > 0.5 and _has(left, str(self._global[rank]))]
            if ended and not any(_has(store, missing[rank]) for rank in ended):
                raise PublishError(
                    f"{ranks_of(ended)} ended the process before opening the publisher. Look for the error "
                    "of that rank."
                )
            if waited_s > self._timeout_s:
                raise PublishError(
                    f"{ranks_of(missing)} did not open the publisher within {self._timeout_s:g} s. Make it "
                    "on all ranks of "
                    "the group, and look for the error of the rank that did not."
                )

    def _wait(
        self, keys: Mapping[int, str], what: str, *, bounded: bool = True, outlasts: bool = False
    ) -> list[bytes]:
        """Wait for one key of each of these ranks and return their values.

        `what` says what they have to do. With `bounded` a rank that lives has to be in a method of its
        publisher within the timeout. What `outlasts` a loss also comes from a rank that has given up, whose
        uploads go on, and from the others when one is lost.

        Raises:
            PublishError: a rank is lost, or does not come.
        """
        store, seen = self._store, dict[int, tuple[bytes, float]]()
        try:
            for missing, waited_s in _missing(store, keys, what):
                if self._is_stopped:
                    raise PublishError("This process ends.")
                ended = {
                    rank: how for rank in missing if (how := self._end_of(rank, seen, bounded, outlasts))
                }
                waits_on = outlasts and len(ended) < len(missing)
                # its last words may have been this
                if ended and not waits_on and not any(_has(store, missing[rank]) for rank in ended):
                    rank, how = next(iter(ended.items()))
                    raise PublishError(f"Rank {rank} {how}. {WAY_ON}")
                outside = [rank for rank in missing if rank in seen and b" in " not in seen[rank][0]]
                if bounded and outside and waited_s > self._timeout_s:
                    raise PublishError(
                        f"{ranks_of(outside)} lives, but did not {what} within {self._timeout_s:g} s. All "
                        "ranks call the "
                        f"same methods of their publishers, in the same order. {WAY_ON}"
                    )
            return [store.get(key) for key in keys.values()]
        except RuntimeError as error:  # of torch's store
            raise PublishError(_gone(error)) from error

    def _end_of(
        self, rank: int, seen: dict[int, tuple[bytes, float]], by_method: bool, by_upload: bool
    ) -> str:
        """How a rank was lost, empty if it lives; `seen` is what it said last, and when.

        With `by_method` it has to call one, which a rank does not that has come to the end of its script. A rank
        that has given up does no more than what it does `by_upload`.
        """
        store = self._store
        value = store.get(f"alive/{rank}") if _has(store, f"alive/{rank}") else b""
        if value.startswith(b"end:"):
            return str(value[4:].decode())
        if _GAVE_UP in value and not by_upload:
            return str(value[value.index(_GAVE_UP) + 1 :].decode())
        if by_method and b" leaving " in value:
            return ENDED
        if value:
            if rank not in self._hosts:
                self._hosts[rank] = store.get(f"host/{rank}").decode()
            host, _, pid = self._hosts[rank].partition(" ")
            if host and host == _host() and _process(pid.split()[0]) != pid:
                return "has died"
        if rank not in seen or seen[rank][0] != value:
            seen[rank] = value, time.monotonic()
        elif (silent_s := time.monotonic() - seen[rank][1]) > min(SILENCE_S, self._timeout_s):
            return f"has said nothing for {silent_s:.0f} s, so its process died or hangs"
        return ""

    def _run(self) -> None:
        while not self._ending.wait(BEAT_S):
            self._beat()

    def _beat(self) -> None:
        with self._lock, contextlib.suppress(RuntimeError):  # the store is gone; who waits for it finds out
            if not self._ending.is_set():
                self._beats += 1
                where = "leaving" if self._is_leaving else "in" if self._is_inside else "out"
                said = f"{self._beats} {where} {self.moved_s():.3f} {self._gave_up()}"
                self._store.set(f"alive/{self.rank}", said.rstrip())

    def _gave_up(self) -> str:
        """Why this rank publishes no more, empty if it does."""
        return f"has given up. {self._lost.replace(WAY_ON, '').strip(' .')}" if self._lost else ""


_open: weakref.WeakSet[Ranks] = weakref.WeakSet()

_LEFT = "deltasync/left"


@atexit.register
def _leave_all() -> None:
    """Tell the others that this process ends, after its uploads were finished; also those who wait for it to
    open.
    """
    for ranks in [*_open]:
        ranks.end(ENDED)
    if dist.is_available() and dist.is_initialized():
        with contextlib.suppress(Exception):  # the process that held the store may have ended before
            PrefixStore(_LEFT, _world_store()).set(str(dist.get_rank()), "")


def connected(group: dist.ProcessGroup | None, timeout_s: float, kind: type[Ranks] = Ranks) -> Alone:
    """Return what the ranks of a group agree by; a single process asks nobody.

    Raises:
        ConfigError: this process is not in the group.
        PublishError: a rank did not come in time; names it.
    """
    if group is None:
        return Alone()
    if not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0:
        raise ConfigError(
            f"Rank {dist.get_rank()} is not in the group that it publishes with. Give it a group of its own."
        )
    return Alone() if dist.get_world_size(group) == 1 else kind(group, timeout_s)


def ranks_of(ranks: Any) -> str:
    """Return `Rank 1`, or `Ranks 1, 3`."""
    return f"Rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"


def _missing(store: Any, keys: Mapping[int, str], what: str) -> Iterator[tuple[dict[int, str], float]]:
    """Wait, a little longer each time, until each rank's key is there, and log for whom.

    Yields those that are missing, every `_LOOK_S`, and how long they have been waited for.
    """
    began_s = looked_s = time.monotonic()
    said_s = began_s - 60 + SAID_AFTER_S
    while missing := {rank: key for rank, key in keys.items() if not _has(store, key)}:
        now_s = time.monotonic()
        if now_s - looked_s >= _LOOK_S:
            looked_s = now_s
            yield missing, now_s - began_s
        if now_s - said_s > 60:
            said_s = now_s
            logger.warning(
                "Waiting for %s to %s, since %.0f s.", ranks_of(missing).lower(), what, now_s - began_s
            )
        time.sleep(min(0.1, max(0.0005, (now_s - began_s) / 20)))


def _encoded(value: object) -> bytes:
    return msgspec.msgpack.encode(value)


def described(error: BaseException) -> tuple[str, str]:
    """Return the class and the message of an error, for other ranks."""
    text = str(error) if isinstance(error, Exception) else f"it was ended by {type(error).__name__}"
    return type(error).__name__, (text or type(error).__name__).encode(errors="replace").decode()


def _gone(error: RuntimeError) -> str:
    return f"The store of torch.distributed is gone, and with it the process that held it: {error} {WAY_ON}"


def _bytes_of(bits: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(bits.view(np.uint8))


def _has(store: Any, key: str) -> bool:
    return bool(store.check([key]))


def _world_store() -> Any:
    return cast("Any", dist.group.WORLD).get_group_store()


def _host() -> str:
    """Name of this machine and of its space of process ids; empty where that is not known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _process(pid: str) -> str:
    """A process's id and when it began; empty if it has ended, or where that is not known."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].decode().split()
    except OSError:
        return ""
    return "" if state in "ZX" else f"{pid} {fields[18]}"
