"""A process that runs one command for `demo.processes.Child`, and ends all processes that the command
started:

    python -IS supervisor.py < request

It does so when the command has ended, when it gets SIGTERM, SIGINT or SIGHUP, and when its parent is gone,
even by SIGKILL. First the command alone gets SIGTERM, so that it can take down its own children in order;
what is left gets SIGTERM, then SIGKILL. The supervisor ends as the command did: with its exit code, or by the
same signal.

It is a subreaper (Linux only): a descendant that loses its parent, in any session, becomes its child and is
found. It imports nothing of the package and starts in some 30 ms.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

_STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)
_LOOK_S = 0.2  # between two checks that the parent is still there
_STEP_S = 0.02  # between two checks whether what is to end has ended
_KILLED_S = 5.0  # that SIGKILL may take
_NOT_STARTED = 127  # exit code, as a shell's
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def descendants(pid: int) -> list[int]:
    """Return the living descendants of a process, without zombies, the oldest first."""
    parents: dict[int, tuple[int, int]] = {}  # by pid: its parent, and when it began
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{entry}/stat", "rb") as file:
            # After the name, which may hold spaces and parentheses: state, parent, and 18 fields later the
            # start.
            fields = file.read().rpartition(b")")[2].split()
            if fields[0] not in (b"Z", b"X"):
                parents[int(entry)] = int(fields[1]), int(fields[19])
    found = {pid}
    while more := {each for each, (parent, _) in parents.items() if parent in found} - found:
        found |= more
    return sorted(found - {pid}, key=lambda each: (parents[each][1], each))


class _Supervisor:
    """See the module. `cores` may be used by all (None for all cores); `stop_s` is how long to wait after
    each SIGTERM.
    """

    def __init__(
        self, parent: int, command: list[str], env: dict[str, str], cores: list[int] | None, stop_s: float
    ) -> None:
        self._parent = parent
        self._stop_s = stop_s
        self._told_to_stop = False
        self._status: int | None = None
        self._wake, waking = os.pipe()
        os.set_blocking(waking, False)
        signal.set_wakeup_fd(waking, warn_on_full_buffer=False)
        for number in (*_STOPPING, signal.SIGCHLD):
            signal.signal(number, self._on_signal)
        if cores is not None:
            os.sched_setaffinity(0, cores)
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        self._command = _start(command, env)

    def run(self) -> int:
        """Wait until nothing is left; return how the command ended, as `os.waitpid` does."""
        while not (self._ended() or self._told_to_stop or os.getppid() != self._parent):
            if select.select([self._wake], [], [], _LOOK_S)[0]:
                os.read(self._wake, 4096)
        if not self._ended():
            os.kill(self._command, signal.SIGTERM)
            self._wait(self._ended, self._stop_s)
        self._clear(signal.SIGTERM, self._stop_s)
        self._clear(signal.SIGKILL, _KILLED_S)
        if left := self._left():
            _say(f"SIGKILL did not end these processes: {', '.join(map(str, left))}")
        return signal.SIGKILL if self._status is None else self._status

    def _on_signal(self, number: int, _: object) -> None:
        self._told_to_stop |= number != signal.SIGCHLD

    def _ended(self) -> bool:
        """Whether the command has ended; reaps all children that have."""
        with contextlib.suppress(ChildProcessError):
            while (reaped := os.waitpid(-1, os.WNOHANG))[0]:
                if reaped[0] == self._command:
                    self._status = reaped[1]
        return self._status is not None

    def _left(self) -> list[int]:
        """The processes that are left."""
        self._ended()
        return descendants(os.getpid())

    def _clear(self, number: signal.Signals, timeout_s: float) -> None:
        """Send a signal once to each process that is left, and wait for their end."""
        signalled: set[int] = set()

        def cleared() -> bool:
            left = self._left()
            for pid in set(left) - signalled:
                with contextlib.suppress(OSError):  # ended meanwhile, or another user's
                    os.kill(pid, number)
            signalled.update(left)
            return not left

        self._wait(cleared, timeout_s)

    def _wait(self, condition: Callable[[], bool], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition() and time.monotonic() < deadline:
            time.sleep(_STEP_S)


def _start(command: list[str], env: dict[str, str]) -> int:
    """Start the command in a session of its own, with the default signal handlers; return its pid."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOPPING)  # none gets lost between fork and exec
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)  # if the supervisor is killed
            for number in (*_STOPPING, *_IGNORED_BY_PYTHON):
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPPING)
            os.execvpe(command[0], command, env)
        except OSError as error:
            _say(f"{command[0]} cannot be started: {error.strerror}")
        finally:
            os._exit(_NOT_STARTED)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPPING)
    return pid


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _say(text: str) -> None:
    os.write(2, f"{text}\n".encode(errors="replace"))


def _end_as(status: int) -> NoReturn:
    """End in the same way as a process with this status."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the command's own core is enough
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))


def _main() -> None:
    request: dict[str, Any] | None = json.loads(sys.stdin.buffer.read() or b"null")
    if request is None:
        return  # the parent is gone already
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    _end_as(_Supervisor(**request).run())


if __name__ == "__main__":
    _main()
