"""Threads that run one at a time and change hands only at seams: a wait, a lock, a look at the clock, a
store's call.

Each simulated thread is a thread of the interpreter that holds the baton, or waits for it. At a seam the seed
decides who goes on. If nobody can, the clock jumps to the next time at which somebody wants to wake up.
`shown` has what the product sees of it.
"""

from __future__ import annotations

import _thread
import contextlib
import gc
import hashlib
import queue
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

EPOCH_S = 1_800_000_000.0
_LOOK_S = 1e-6  # a look at the clock takes time, so that a loop that only looks at it ends
_MOST_LOOKS = 200_000  # at one moment, without a wait: nobody would ever go on


class Killed(BaseException):
    """Ends the threads of a process that was killed; no product code catches it for good."""


class Stuck(AssertionError):
    """Nobody can go on, or somebody runs on without a wait."""


class Process:
    """A group of threads with clocks of its own, which may be suspended or killed.

    Attributes:
        ahead_s: Seconds by which its clock of the day is ahead.
        drift: Seconds by which that clock gains in one second.
        drawn: Random bytes that it drew. A copy of the process draws `copied` again, and then its own.
        slept_s: Seconds for which its machine was suspended, which `time.monotonic` does not count.
        suspended_until_s: Its threads do not run before.
        held_s: For how long it was suspended, and will be.
        refused_until_s: Stores refuse its credentials until then.
        killed: Its threads never run again.
    """

    def __init__(self, name: str) -> None:
        self.name, self.ahead_s, self.drift, self.slept_s = name, 0.0, 0.0, 0.0
        self.drawn, self.copied = list[bytes](), deque[bytes]()
        self.suspended_until_s = self.held_s = self.refused_until_s = 0.0
        self.killed = self._sleeps = False

    def suspend(self, now_s: float, seconds: float, whole_machine: bool) -> None:
        """Do not run for so long, unless it stands still already; with the whole machine, `time.monotonic`
        does too.
        """
        if now_s >= self.suspended_until_s:
            self.suspended_until_s, self._sleeps = now_s + seconds, whole_machine
            self._hold(seconds)

    def resume(self, now_s: float) -> None:
        """Run on."""
        self._hold(-max(0.0, self.suspended_until_s - now_s))
        self.suspended_until_s = 0.0

    def _hold(self, seconds: float) -> None:
        self.held_s += seconds
        self.slept_s += seconds if self._sleeps else 0.0


class Thread:
    """A thread of the simulation, with the interface of `threading.Thread`."""

    def __init__(
        self,
        target: Callable[..., object] | None = None,
        name: str | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        daemon: bool | None = None,
        group: None = None,
        process: Process | None = None,
    ) -> None:
        self.scheduler = Scheduler.current
        assert self.scheduler is not None
        self.process = process or self.scheduler.running.process
        self.number = next(self.scheduler.numbers)
        self.name, self.daemon = name or f"thread-{self.number}", True
        self.ident = self.native_id = None
        self.real = 0  # the identity of the thread that runs it
        self._target, self._args, self._kwargs = target, args, kwargs or {}
        self.baton = _thread.allocate_lock()
        self.baton.acquire()
        self.ready: Callable[[], bool] | None = None  # what it waits for
        self.until_s: float | None = None  # and how long
        self.started = self.begun = self.ended = self.interrupted = self.interruptible = False
        self.error: BaseException | None = None

    def __hash__(self) -> int:
        return self.number  # so that sets of threads have one order

    def start(self) -> None:
        if self.started:
            raise RuntimeError("threads can only be started once")
        self.started, self.ident = True, self.number
        self.scheduler.threads.append(self)

    def go_on(self) -> None:
        """Let it run, in a thread of the interpreter that is made when it first does."""
        if self.begun:
            self.baton.release()
        else:
            self.begun = True
            _thread.start_new_thread(self._run, ())

    def _run(self) -> None:
        self.real = _thread.get_ident()
        try:
            if not self.process.killed and self._target is not None:
                self._target(*self._args, **self._kwargs)
        except Killed:
            pass
        except BaseException as error:  # noqa: BLE001 - the world says what it means
            self.error = error
            self.scheduler.failed.append((self, error))
        # what they hold ends here, and not beside another thread
        self._target, self._args, self._kwargs = None, (), {}
        self.ended = True
        self.scheduler.leave(self)

    def join(self, timeout: float | None = None) -> None:
        self.scheduler.wait(lambda: self.ended, timeout, f"join {self.name}")

    def is_alive(self) -> bool:
        return self.started and not self.ended

    def can_run(self, now_s: float) -> bool:
        if self.process.killed:
            return True  # to unwind
        if self.process.suspended_until_s > now_s:
            return False
        return self.ready is None or self.ready() or (self.until_s is not None and self.until_s <= now_s)

    def wakes_s(self) -> float | None:
        held_s = self.process.suspended_until_s
        if self.ready is None or self.ready():
            return held_s
        return None if self.until_s is None else max(self.until_s, held_s)


class Scheduler:
    """Decides by a seed which thread goes on.

    Attributes:
        random: Everything that is decided by chance.
        now_s: Seconds since the start.
        threads: Those that were started and have not ended.
        failed: Threads that an exception ended, with it.
        trace: Lines, if they are kept; `digest` is of all of them in any case.
    """

    current: Scheduler | None = None

    def __init__(self, seed: int, keep_trace: bool = False) -> None:
        self.random = random.Random(seed)
        self.now_s, self.switches, self._looks = 0.0, 0, 0
        self.numbers = iter(range(1, 1 << 60))
        self.threads: list[Thread] = []
        self.failed: list[tuple[Thread, BaseException]] = []
        self.trace: list[str] | None = [] if keep_trace else None
        self._hash = hashlib.sha256()
        self.stuck: str | None = None
        self.seed = seed

    @property
    def digest(self) -> str:
        """Digest of the trace."""
        return self._hash.hexdigest()

    def say(self, line: str) -> None:
        """Add a line to the trace."""
        line = f"{self.now_s:.6f} {self.running.process.name}/{self.running.name} {line}"
        self._hash.update(f"{line}\n".encode())
        if self.trace is not None:
            self.trace.append(line)

    # --- seams ---

    def wait(self, ready: Callable[[], bool], timeout_s: float | None, what: str) -> bool:
        """Wait until `ready()`, or for so long; return whether it is."""
        me = self.running
        if not ready():
            me.ready, me.until_s = ready, None if timeout_s is None else self.now_s + max(0.0, timeout_s)
            self._switch(what)
            me.ready, me.until_s = None, None
        return ready()

    def sleep(self, seconds: float) -> None:
        """Let so much time pass."""
        me = self.running
        me.ready, me.until_s = (lambda: False), self.now_s + max(0.0, seconds)
        self._switch("sleep")
        me.ready, me.until_s = None, None

    def maybe_switch(self, what: str) -> None:
        """Let another thread go on, now and then."""
        self._check()
        if self.random.random() < 0.05:
            self._switch(what)

    def look(self) -> float:
        """Look at the clock."""
        self._check()
        self._looks += 1
        if self._looks > _MOST_LOOKS:
            raise Stuck(f"{self.running.name} looks at the clock all the time")
        self.now_s += _LOOK_S
        return self.now_s

    def _check(self) -> None:
        me = self.running
        if me.process.killed:
            raise Killed
        if me.interrupted and me.interruptible:
            me.interrupted = False
            raise KeyboardInterrupt

    def _switch(self, what: str) -> None:
        me = self.running
        self._check()
        chosen = self._choose()
        if chosen is None:
            raise Stuck(self.stuck)
        if chosen is not me:
            self.say(f"{what} -> {chosen.process.name}/{chosen.name}")
            self._give(chosen)
            me.baton.acquire()
        self._looks = 0
        self._check()

    def leave(self, thread: Thread) -> None:
        """End a thread: another one goes on."""
        self.threads.remove(thread)
        chosen = self._choose()
        self._give(self.driver if chosen is None else chosen)

    def _give(self, chosen: Thread) -> None:
        self.switches += 1
        self.running = chosen
        chosen.go_on()

    def _choose(self) -> Thread | None:
        able = [thread for thread in self.threads if thread.can_run(self.now_s)]
        if not able:
            times = [time_s for thread in self.threads if (time_s := thread.wakes_s()) is not None]
            if not times:
                self.stuck = (
                    "; ".join(f"{thread.process.name}/{thread.name}" for thread in self.threads)
                    + " wait for ever"
                )
                return None
            self.now_s = max(self.now_s, min(times))
            able = [thread for thread in self.threads if thread.can_run(self.now_s)]
        return able[self.random.randrange(len(able))]

    # --- the simulation ---

    @contextlib.contextmanager
    def installed(self, shown: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
        """Replace attributes of modules for the length of a `with` block, whose thread is the driver."""
        assert Scheduler.current is None
        Scheduler.current = self
        self.driver = self.running = Thread(name="driver", process=Process("driver"))
        self.driver.started, self.driver.begun, self.driver.ident = True, True, 0
        self.threads.append(self.driver)
        collects = gc.isenabled()
        gc.disable()
        with contextlib.ExitStack() as stack:
            for module, name, value in shown:
                before = getattr(module, name)
                setattr(module, name, value)
                stack.callback(setattr, module, name, before)
            try:
                yield
            finally:
                self._end()
        if collects:
            gc.enable()
        Scheduler.current = None

    def _end(self) -> None:
        """Kill what still runs, so that no thread of the interpreter stays."""
        for thread in self.threads:
            if thread is not self.driver:
                thread.process.killed = True
        for _ in range(10_000):
            rest = [thread for thread in self.threads if thread is not self.driver]
            if not rest:
                return
            self.driver.ready = lambda: len(self.threads) == 1
            chosen = rest[0]
            self._give(chosen)
            self.driver.baton.acquire()
        raise Stuck("threads of killed processes do not end")


class Lock:
    """`threading.Lock`, and `RLock` if `again`; a `quiet` one is no seam while it is free."""

    def __init__(self, again: bool = False, quiet: bool = False) -> None:
        self._again, self._quiet, self._owner, self._count = again, quiet, None, 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        scheduler = Scheduler.current
        if scheduler is None:  # a destructor, after the simulation
            return True
        me = scheduler.running
        if self._again and self._owner is me:
            self._count += 1
            return True
        if self._owner is None and not self._quiet:
            scheduler.maybe_switch("lock")
        if self._owner is not None:
            if not blocking:
                return False
            if not scheduler.wait(lambda: self._free(), None if timeout < 0 else timeout, "lock"):
                return False
        self._owner, self._count = me, 1
        return True

    def _free(self) -> bool:
        return self._owner is None

    def release(self) -> None:
        if Scheduler.current is None:
            return
        if self._owner is None:
            raise RuntimeError("release unlocked lock")
        self._count -= 1
        if not self._count:
            self._owner = None

    def locked(self) -> bool:
        return self._owner is not None

    def _is_owned(self) -> bool:
        return Scheduler.current is not None and self._owner is Scheduler.current.running

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Condition:
    """`threading.Condition`."""

    def __init__(self, lock: Lock | None = None) -> None:
        self._lock = Lock(again=True) if lock is None else lock
        self.acquire, self.release = self._lock.acquire, self._lock.release
        self._waiting: deque[list[bool]] = deque()

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        scheduler = Scheduler.current
        assert scheduler is not None
        woken = [False]
        self._waiting.append(woken)
        count, self._lock._count, self._lock._owner = self._lock._count, 0, None
        try:
            found = scheduler.wait(lambda: woken[0], timeout, "condition")
        finally:
            if woken in self._waiting:
                self._waiting.remove(woken)
            me = scheduler.running
            if not me.process.killed:
                scheduler.wait(self._lock._free, None, "lock")
            self._lock._owner, self._lock._count = me, count
        return found

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        scheduler = Scheduler.current
        assert scheduler is not None
        end_s = None if timeout is None else scheduler.now_s + timeout
        while not (found := predicate()):
            left_s = None if end_s is None else end_s - scheduler.now_s
            if left_s is not None and left_s <= 0:
                break
            self.wait(left_s)
        return found

    def notify(self, n: int = 1) -> None:
        for _ in range(min(n, len(self._waiting))):
            self._waiting.popleft()[0] = True

    def notify_all(self) -> None:
        self.notify(len(self._waiting))


class Event:
    """`threading.Event`."""

    def __init__(self) -> None:
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        scheduler = Scheduler.current
        assert scheduler is not None
        return scheduler.wait(self.is_set, timeout, "event")


class Semaphore:
    """`threading.Semaphore`."""

    def __init__(self, value: int = 1) -> None:
        self._value = value

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        scheduler = Scheduler.current
        assert scheduler is not None
        if self._value <= 0 and (
            not blocking or timeout == 0 or not scheduler.wait(lambda: self._value > 0, timeout, "semaphore")
        ):
            return False
        self._value -= 1
        return True

    def release(self, n: int = 1) -> None:
        self._value += n


class Queue:
    """`queue.SimpleQueue`."""

    def __init__(self) -> None:
        self._items: deque[Any] = deque()

    def put(self, item: Any) -> None:
        self._items.append(item)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        scheduler = Scheduler.current
        assert scheduler is not None
        if not self._items and not (block and scheduler.wait(lambda: bool(self._items), timeout, "queue")):
            raise queue.Empty
        return self._items.popleft()

    def get_nowait(self) -> Any:
        return self.get(block=False)

    def empty(self) -> bool:
        return not self._items
