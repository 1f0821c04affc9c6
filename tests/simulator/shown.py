"""What the product sees of the machine: threads, clocks, chance and names, all of the scheduler.

A real one is not to be reached beside it. `load_product` refuses a module that keeps one when it is imported,
because the simulation cannot replace that; a call of one from the product's code, while the simulation runs,
is a violation.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import importlib
import itertools
import os
import pkgutil
import queue
import random
import secrets
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import _base as futures
from types import FunctionType, ModuleType
from typing import Any

from deltasync.gpu import devices
from tests.simulator.scheduler import (
    EPOCH_S,
    Condition,
    Event,
    Lock,
    Queue,
    Scheduler,
    Semaphore,
    Stuck,
    Thread,
)

_PRODUCT = ("deltasync",)
_LIBRARIES = ("concurrent.futures._base", "concurrent.futures.thread")
_REAL: dict[ModuleType, tuple[str, ...]] = {
    time: (
        "time",
        "time_ns",
        "monotonic",
        "monotonic_ns",
        "perf_counter",
        "perf_counter_ns",
        "clock_gettime",
        "sleep",
    ),
    os: ("urandom", "getrandom", "getpid"),
    uuid: ("uuid1", "uuid4"),
    secrets: ("token_bytes", "token_hex", "token_urlsafe", "randbelow", "choice"),
    random: ("SystemRandom",),
    socket: ("gethostname",),
    threading: (
        "Thread",
        "Timer",
        "Lock",
        "RLock",
        "Condition",
        "Event",
        "Semaphore",
        "BoundedSemaphore",
        "Barrier",
    ),
    queue: ("SimpleQueue", "Queue"),
}
"""Functions of this machine, by their module: never called by the product's code in a simulation."""
_PURE = (
    "local",
    "TIMEOUT_MAX",
    "_register_atexit",
    "strftime",
    "gmtime",
    "localtime",
    "struct_time",
    "UUID",
    "timedelta",
)


class _Seen:
    """What the product sees as a module: what is simulated of it, and what depends on no machine."""

    _real: ModuleType

    def __getattr__(self, name: str) -> Any:
        if name not in _PURE and hasattr(self._real, name):
            raise Stuck(f"the product uses {self._real.__name__}.{name}, which is not simulated")
        return getattr(self._real, name)


class Threading(_Seen):
    """What the product sees as the module `threading`."""

    _real = threading

    def __init__(self, scheduler: Scheduler, quiet: bool = False) -> None:
        self._scheduler = scheduler
        self.Thread, self.Condition, self.Event = Thread, Condition, Event
        self.Semaphore = self.BoundedSemaphore = Semaphore
        self.Lock, self.RLock = lambda: Lock(quiet=quiet), lambda: Lock(again=True, quiet=quiet)

    def current_thread(self) -> Thread:
        return self._scheduler.running

    def main_thread(self) -> Thread:
        return self._scheduler.driver

    def get_ident(self) -> int:
        return self._scheduler.running.number

    def enumerate(self) -> list[Thread]:
        return [*self._scheduler.threads]


class Clock(_Seen):
    """What the product sees as the module `time`."""

    _real, CLOCK_BOOTTIME = time, 7

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.sleep = scheduler.sleep

    def monotonic(self) -> float:
        return self._scheduler.look() - self._scheduler.running.process.slept_s

    perf_counter = monotonic

    def time(self) -> float:
        now_s, process = self._scheduler.look(), self._scheduler.running.process
        return EPOCH_S + now_s * (1.0 + process.drift) + process.ahead_s

    def clock_gettime(self, clock: int) -> float:
        return self._scheduler.look()


class _Datetime(_Seen):
    """What `documents` sees as the module `datetime`."""

    _real, UTC = datetime, datetime.UTC

    def __init__(self, clock: Clock) -> None:
        class Now(datetime.datetime):
            @classmethod
            def now(cls, tz: Any = None) -> Any:
                return datetime.datetime.fromtimestamp(clock.time(), tz)

        self.datetime = Now


class _Uuid(_Seen):
    _real = uuid

    def __init__(self, scheduler: Scheduler) -> None:
        self._random = scheduler.random

    def uuid4(self) -> uuid.UUID:
        return uuid.UUID(int=self._random.getrandbits(128), version=4)


class _Secrets(_Seen):
    _real = secrets

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def token_hex(self, size: int = 32) -> str:
        """Draw: a copied process what it drew before, too."""
        process = self._scheduler.running.process
        drawn = process.copied.popleft() if process.copied else self._scheduler.random.randbytes(size)
        process.drawn.append(drawn)
        return drawn.hex()

    token_urlsafe = token_hex


class _Random(_Seen):
    """What the product sees as the module `random`: its generator for all, which is the user's, is not
    there.
    """

    _real = random

    def __init__(self, scheduler: Scheduler) -> None:
        drawn = random.Random(scheduler.seed)
        self.SystemRandom = lambda: drawn


class _Queues(_Seen):
    _real, SimpleQueue, Empty = queue, Queue, queue.Empty


def load_product() -> None:
    """Import all modules of the product that can be imported here, so that each is shown the simulation.

    Raises AssertionError if one keeps a real clock, chance or thread when it is imported.
    """
    for package in _PRODUCT:
        root = importlib.import_module(package)
        for found in pkgutil.walk_packages(root.__path__, f"{package}."):
            if not found.name.endswith("__main__"):
                try:
                    importlib.import_module(found.name)
                except ModuleNotFoundError as error:
                    if error.name != "triton":  # which is beside the environment
                        raise
    kept = [text for name in _product() for text in kept_by(sys.modules[name])]
    assert not kept, (
        f"{', '.join(kept)}, which no simulation can replace: call it by its module, when it is needed."
    )


def _product() -> list[str]:
    return sorted(name for name in sys.modules if name.split(".")[0] in _PRODUCT)


def kept_by(module: ModuleType) -> list[str]:
    """Return what a module keeps of `_REAL`: a name of its own, a default of an argument or of a dataclass's
    field.
    """
    real = {id(getattr(of, name)): f"{of.__name__}.{name}" for of, names in _REAL.items() for name in names}
    found: list[str] = []

    def look(where: str, value: Any) -> None:
        if id(value) in real:
            found.append(f"{where} is {real[id(value)]}")
        if isinstance(value, FunctionType) and value.__module__ == module.__name__:
            for default in (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()):
                look(f"a default of {where}", default)
        if isinstance(value, functools.partial):
            look(f"{where}'s function", value.func)
        if isinstance(value, type) and value.__module__ == module.__name__ and where.count(".") < 12:
            for name, field in vars(value).get("__dataclass_fields__", {}).items():
                look(f"the default of {where}.{name}", field.default_factory)
            for name, inner in vars(value).items():
                if inner is not value:
                    look(f"{where}.{name}", inner)

    for name, value in vars(module).items():
        look(f"{module.__name__}.{name}", value)
    return found


def shown(scheduler: Scheduler) -> Iterator[tuple[Any, str, Any]]:
    """Yield what is replaced for a simulation: a module, the name of an attribute, and its value."""
    clock, seen = Clock(scheduler), Threading(scheduler)
    modules: Mapping[ModuleType, Any] = {
        threading: seen,
        time: clock,
        uuid: _Uuid(scheduler),
        secrets: _Secrets(scheduler),
        datetime: _Datetime(clock),
        queue: _Queues(),
        random: _Random(scheduler),
    }
    yield futures, "_AcquireFutures", contextlib.nullcontext  # which locks in the order of addresses
    numbers = itertools.count()
    # `wait` locks the futures of a set one by one, in the order of their hashes: of addresses, if left alone.
    yield futures.Future, "__hash__", lambda future: vars(future).setdefault("number", next(numbers))
    for name in (*_product(), *_LIBRARIES):
        for attribute, value in [*vars(sys.modules[name]).items()]:
            if isinstance(value, ModuleType) and value in modules:
                yield sys.modules[name], attribute, modules[value]
    # How often it takes its lock depends on addresses: tensors that lie one after the other are one.
    yield devices, "threading", Threading(scheduler, quiet=True)
    for module, names in _REAL.items():
        for name in names:
            if isinstance(value := getattr(module, name), type):
                continue  # a class, that libraries derive from
            yield module, name, _guarded(scheduler, f"{module.__name__}.{name}", value)
    frames = sys._current_frames
    yield (
        sys,
        "_current_frames",
        lambda: {
            thread.number: frame
            for thread in scheduler.threads
            if (frame := frames().get(thread.real)) is not None
        },
    )
    yield os, "getpid", lambda: 4711
    yield socket, "gethostname", lambda: "host"


def _guarded(scheduler: Scheduler, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that libraries may call, and the product's code may not."""

    def call(*arguments: Any, **options: Any) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller.split(".")[0] in _PRODUCT:
            scheduler.failed.append((scheduler.running, Stuck(f"{caller} calls the real {name}")))
        return real(*arguments, **options)

    return call
