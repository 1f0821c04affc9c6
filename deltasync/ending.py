"""The end of the process: uploads are finished first, whether the script ends, raises, or the process gets
SIGTERM.

SIGTERM raises `SystemExit` in the main thread, so that `finally` and `with` blocks run. Python drops an
exception in a destructor and in callbacks of weak references and of the garbage collector; then it is raised
again a moment later. A function that is `uninterrupted` returns first.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, ParamSpec, Protocol, TypeVar, runtime_checkable

from deltasync.threads import daemon

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")

UNINTERRUPTED_S = 5.0
"""How long an `uninterrupted` function may go on after SIGTERM; it is interrupted then."""

_AGAIN_S = 0.02  # until SIGTERM is told again


class Finishing(Protocol):
    """Work that has to end before the process does."""

    def finish(self) -> None:
        """End the work. It may be called again."""


@runtime_checkable
class Shared(Protocol):
    """Such work of which other processes do a part."""

    def leave(self) -> None:
        """Tell them that the end has begun; called for all work before any of it is finished."""


class Terminated(SystemExit):
    """SIGTERM came."""


# and who made it
_finishing: weakref.WeakKeyDictionary[Finishing, threading.Thread] = weakref.WeakKeyDictionary()
_process = os.getpid()
_is_ending = False
_asked_s: float | None = None  # when SIGTERM came, until it is told
_handled = 0  # how often
_repeating = 0  # threads that send it again
_uninterrupted: set[CodeType] = set()


def finish_at_exit(work: Finishing) -> None:
    """Call its `finish` before the process ends: at the end of the script, after an exception, or on
    SIGTERM.
    """
    global _process
    if _process != os.getpid():  # a fork, which has none of the threads
        _finishing.clear()
        _process = os.getpid()
    _finishing[work] = threading.current_thread()
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _terminate)


def uninterrupted(function: Callable[_Given, _Result]) -> Callable[_Given, _Result]:
    """Have SIGTERM wait until this function has returned, but no longer than `UNINTERRUPTED_S`."""
    # which a handler finds in the stack, however the function was left before
    _uninterrupted.add(function.__code__)

    @functools.wraps(function)
    def call(*given: _Given.args, **named: _Given.kwargs) -> _Result:
        try:
            return function(*given, **named)
        finally:
            if _asked_s is not None and threading.current_thread() is threading.main_thread():
                _tell()

    return call


def _terminate(number: int, frame: FrameType | None) -> None:
    """End as after an exception; a forked child ends at once, as it would without us."""
    global _asked_s, _handled
    _handled += 1
    if os.getpid() != _process:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    if _is_ending:
        return  # what is left to do is bounded
    if _repeating and _asked_s is None:
        return  # it was told meanwhile
    _asked_s = time.monotonic() if _asked_s is None else _asked_s
    if time.monotonic() - _asked_s < UNINTERRUPTED_S and _is_uninterrupted(frame):
        _repeat_later()
        return
    _tell()


def _is_uninterrupted(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code not in _uninterrupted:
        frame = frame.f_back
    return frame is not None


def _tell() -> None:
    global _asked_s
    _asked_s = None
    if not isinstance(sys.unraisablehook, _Hook):
        sys.unraisablehook = _Hook(sys.unraisablehook)
    raise Terminated(128 + signal.SIGTERM)


class _Hook:
    """Is called with what Python drops; `others` with all but `Terminated`."""

    def __init__(self, others: Callable[[Any], object]) -> None:
        self._others = others

    def __call__(self, dropped: Any) -> None:
        global _asked_s
        error: BaseException | None = dropped.exc_value
        while error is not None and not isinstance(error, Terminated):
            error = error.__context__
        if error is None or _is_ending:
            self._others(dropped)
            return
        _asked_s = time.monotonic() - UNINTERRUPTED_S
        _repeat_later()


def _repeat_later() -> None:
    """Have SIGTERM come again, to the main thread, until it is handled there.

    One that comes while that thread waits for the interpreter's lock is not handled before a call in which it
    waits next; another one ends that wait.
    """

    def repeat() -> None:
        global _repeating
        time.sleep(_AGAIN_S)
        if _asked_s is None or _is_ending:
            return
        _repeating, before = _repeating + 1, _handled
        while _handled == before and not _is_ending:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
            time.sleep(_AGAIN_S)
        _repeating -= 1

    with contextlib.suppress(RuntimeError):  # no thread can start any more: the interpreter is ending
        daemon("watch", repeat).start()


def _finish(of: Callable[[threading.Thread], bool]) -> None:
    global _is_ending
    if os.getpid() != _process:
        return
    _is_ending = True
    works = [work for work, maker in [*_finishing.items()] if of(maker)]
    for work in works:
        if isinstance(work, Shared):
            work.leave()
    for work in works:
        work.finish()


def _has_ended(maker: threading.Thread) -> bool:
    """Whether a thread publishes no more while the interpreter waits for threads: it is the main one, or not
    waited for.
    """
    return maker is threading.main_thread() or maker.daemon or not maker.is_alive()


# Before the threads of `concurrent.futures`, which stores may use, are ended: what is registered last runs
# first.
threading._register_atexit(_finish, _has_ended)  # type: ignore[attr-defined]
# And what threads have published that the interpreter has waited for.
atexit.register(_finish, lambda maker: True)
