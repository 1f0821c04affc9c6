"""The threads of this library: eight names (`NAMES`), one pool (`Workers`), and what is run in it.

docs/reference/threads.md says which thread does what.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from types import FrameType
from typing import Any, Literal, NamedTuple, TypeVar, get_args

from deltasync import limits
from deltasync.errors import ConfigError

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


Name = Literal["follow", "fetch", "upload", "maintenance", "heartbeat", "watch", "reply", "copy"]
NAMES: tuple[str, ...] = get_args(Name)
"""Purposes of threads, whose own names begin with `deltasync-`."""


NO_THREADS = (
    "this process can start no more threads. Its container's limit of processes (pids.max) or the user's "
    "(ulimit -u) is "
    "reached: raise it, or end other processes"
)
NO_FILES = "this process has too many files open: raise its limit (ulimit -n), or close some"


def daemon(name: Name, run: Callable[[], object]) -> threading.Thread:
    """Return a thread that is not started. It does not keep the process from ending."""
    return threading.Thread(target=run, name=f"deltasync-{name}", daemon=True)


def release_after_interrupt(lock: Any) -> None:
    """Release an `RLock` that an interrupt has left this thread holding."""
    while lock._is_owned():
        lock.release()


_CURE = "Start processes with 'spawn' or 'forkserver'"


class Home:
    """The process that an object belongs to; `what` names the object in messages."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._process = os.getpid()
        self.check()

    @property
    def is_here(self) -> bool:
        """Whether this is that process, and not a fork of it."""
        return os.getpid() == self._process

    @property
    def refusal(self) -> str | None:
        """Why a fork of the object's process cannot use it; None in its own process."""
        if self.is_here:
            return None
        return (
            f"This {self._what} belongs to process {self._process}, of which this one is a fork. {_CURE} and "
            "make another "
            "one there, or use it in its own process."
        )

    def check(self) -> None:
        """Refuse to compute in a fork of the object's process (ConfigError)."""
        if (refusal := self.refusal) is not None:
            raise ConfigError(refusal)


class _Call(NamedTuple):
    """A call of one of an object's methods: its name, its thread, and its frame."""

    name: str
    thread: threading.Thread
    frame: FrameType

    @property
    def runs(self) -> bool:
        """Whether it still runs. One that an interrupt has ended may be in the list of `OneCaller` yet."""
        frame = sys._current_frames().get(self.thread.ident or 0)
        while frame is not None and frame is not self.frame:
            frame = frame.f_back
        return frame is not None


class _During(NamedTuple):
    """A context that is the call of a method."""

    calls: OneCaller
    name: str

    def __enter__(self) -> None:
        self.calls.begin(self.name, sys._getframe(1))

    def __exit__(self, *_: object) -> None:
        self.calls.end(sys._getframe(1))


class OneCaller(Home):
    """Lets one call of an object's methods run at a time, in the object's process, and refuses others.

    It takes no lock: a signal handler may come between any two lines of it.
    """

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self._calls: list[_Call] = []  # in the order in which they began

    def __call__(self, name: str) -> _During:
        """Return a context for the call of the method `name`.

        Raises, when it is entered:
            ConfigError: another call runs, in another thread, or in this one, inside of which this call is
                made; or this is a fork of the object's process.
        """
        return _During(self, name)

    def begin(self, name: str, frame: FrameType) -> None:
        """Begin the call of the method `name`, which is in this frame."""
        self.check()
        mine = _Call(name, threading.current_thread(), frame)
        self._calls.append(mine)
        running = next(call for call in [*self._calls] if call is mine or call.runs)
        if running is mine:
            self._remove(call for call in [*self._calls] if not call.runs)  # which an interrupt has ended
        else:
            self._remove([mine])
            inside = running.thread is mine.thread
            where = "inside of its" if inside else f"while thread {running.thread.name!r} is in its"
            cure = (
                "A signal handler, or what is being read, sets a flag; call it once the other call has "
                "returned"
                if inside
                else "Call it from one thread at a time"
            )
            raise ConfigError(
                f"{name}() of a {self._what} was called {where} {running.name}(). Nothing was done. {cure}."
            )

    def end(self, frame: FrameType) -> None:
        """End the call that is in this frame."""
        self._remove(call for call in [*self._calls] if call.frame is frame)

    def _remove(self, calls: Iterable[_Call]) -> None:
        for call in calls:
            with contextlib.suppress(ValueError):
                self._calls.remove(call)


class Workers:
    """Up to `count` threads that run actions in order, and end when there have been none for `idle_s`.

    They are daemons. Unlike those of `concurrent.futures` they take actions while the interpreter exits, and
    the process can end while a store hangs. An interrupt of `submit` leaves the action out, or run by the
    next call of `submit` or `start`.
    """

    def __init__(self, count: int, name: Name, idle_s: float = 0.0) -> None:
        self._count, self._name, self._idle_s = count, name, idle_s
        self._actions: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._threads: set[threading.Thread] = set()
        self._idle: set[threading.Thread] = set()
        self.lock = threading.RLock()
        self._added = threading.Condition(self.lock)

    @property
    def busy(self) -> bool:
        """Whether an action runs or waits."""
        with self.lock:
            return bool(self._actions) or any(thread.is_alive() for thread in self._threads - self._idle)

    def submit(self, action: Callable[..., _Result], *arguments: Any) -> Future[_Result]:
        """Run `action` after those that were submitted before; its result or exception is in the future."""
        future: Future[_Result] = Future()
        with self.lock:
            self._actions.append((future, functools.partial(action, *arguments)))
        self.start()
        return future

    def start(self) -> None:
        """Start a thread for actions that wait, if there are not enough.

        Python 3.12 and newer start no thread while the interpreter exits. If none runs, the caller then runs
        the actions.
        """
        with self.lock:
            self._threads = {thread for thread in self._threads if thread.is_alive()}
            self._idle &= self._threads
            if self._idle:
                self._added.notify()
            if len(self._actions) <= len(self._idle) or len(self._threads) >= self._count:
                return
            thread = daemon(self._name, self._work)
            self._threads.add(thread)
            try:
                thread.start()
                return
            except RuntimeError:
                self._threads.discard(thread)
                if self._threads:
                    return
        self._work()

    def drop(self) -> None:
        """Discard the actions that have not begun."""
        with self.lock:
            self._actions.clear()

    def close(self) -> None:
        """Wait until all actions have run. From now on a thread that has nothing to do ends at once."""
        self._idle_s = 0.0
        while self.busy:
            self.start()
            with self.lock:
                threads = [thread for thread in self._threads - self._idle if thread.is_alive()]
            for thread in threads:
                thread.join()

    def _work(self) -> None:
        while True:
            with self.lock:
                if self._idle_s and not self._actions:
                    self._idle.add(threading.current_thread())
                    self._added.wait_for(lambda: self._actions, self._idle_s)
                    self._idle.discard(threading.current_thread())
                if not self._actions:
                    self._threads.discard(threading.current_thread())
                    return
                future, action = self._actions.popleft()
            try:
                future.set_result(action())
            except BaseException as error:  # noqa: BLE001 - raised by the future
                future.set_exception(error)
            del future, action


def ahead(
    action: Callable[[_Item], _Result], items: Sequence[_Item], count: int
) -> Generator[_Result, None, None]:
    """Yield the results of `action` in the order of the items, while threads work on the next `count` items.

    Closing the generator waits for no thread. The garbage collector may close it, in any thread and under any
    lock, even one that those threads need to end.
    """
    if len(items) == 1:
        yield action(items[0])
        return
    workers = Workers(count, "fetch")
    try:
        waiting = deque(workers.submit(action, item) for item in items[:count])
        for at in range(len(items)):
            result = waiting.popleft().result()
            if at + count < len(items):
                waiting.append(workers.submit(action, items[at + count]))
            yield result
    finally:
        workers.drop()


def each(
    items: Sequence[_Item], action: Callable[[_Item], _Result], deadline: float | None
) -> list[_Result | None]:
    """Return the result of `action` for each item, None for those not done by the deadline (`time.monotonic`;
    None: wait).

    The threads are daemons, so that the process can end while a store or a server hangs. Raises the first
    exception of `action`, by the order of items.
    """
    workers = Workers(limits.REQUESTS_AT_ONCE, "fetch")
    futures = [workers.submit(action, item) for item in items]
    wait(
        futures,
        None if deadline is None else max(0.0, deadline - time.monotonic()),
        return_when=FIRST_EXCEPTION,
    )
    workers.drop()
    if failed := [error for future in futures if future.done() and (error := future.exception()) is not None]:
        raise failed[0]
    return [future.result() if future.done() else None for future in futures]


@contextlib.contextmanager
def watched(after_s: float, report: Callable[[], object]) -> Iterator[None]:
    """Call `report`, in a thread, if the block takes longer than `after_s`."""
    timer = threading.Timer(after_s, report)
    timer.daemon, timer.name = True, "deltasync-watch"
    with contextlib.suppress(RuntimeError):  # the interpreter is ending, and starts no more threads
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
