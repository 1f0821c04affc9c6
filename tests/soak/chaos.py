"""Troubles of a soak in which nothing is safe: processes, clocks, writers, the channel itself, a disk."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from tests.soak.settings import Soak

_STALL_S = 2.0
_TOGETHER_S = 3.0  # that two writers run
_DAY_S = 86400


class Cast(Protocol):
    """See `tests.soak.run.Cast`."""

    disk: Path

    def start(self, name: str) -> None: ...
    def kill(self, name: str) -> None: ...
    def may_kill(self, name: str) -> bool: ...
    def save(self) -> None: ...
    def restore(self) -> None: ...

    @property
    def names(self) -> list[str]: ...
    @property
    def pids(self) -> list[int]: ...


@contextlib.contextmanager
def small_disk(folder: Path, size: int) -> Iterator[None]:
    """A small disk of its own, if this is root and may mount one."""
    folder.mkdir(parents=True)
    options = ["-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    mounted = os.getuid() == 0 and not subprocess.run(["mount", *options], capture_output=True).returncode
    try:
        yield
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


class Troubles:
    """What else can go wrong.

    Attributes:
        all: Each, by name; tells whether it came about.
    """

    def __init__(self, soak: Soak, cast: Cast) -> None:
        self._soak, self._cast = soak, cast
        self._chance = random.Random(soak.seed + 1)
        self._began = time.monotonic()
        self._saved = self._restored = False
        self.all: dict[str, Callable[[], bool]] = {
            "publisher killed": lambda: self._kill("publisher"),
            "replica killed": lambda: self._kill(self._chance.choice(cast.names[1:])),
            "second writer": self._second_writer,
            "restored": self._restore,
            "clock moved": self._move_clock,
        }
        if os.path.ismount(cast.disk):
            self.all["disk full"] = self._fill

    def _kill(self, name: str) -> bool:
        may = self._cast.may_kill(name)
        if may:
            self._cast.kill(name)  # the next look starts it again
        return may

    def _second_writer(self) -> bool:
        """It opens the channel while the other one writes, and is killed; the other one has ended by then, or does."""
        self._cast.start("publisher")
        time.sleep(self._chance.uniform(0.5, _TOGETHER_S))
        return self._kill("publisher")

    def _restore(self) -> bool:
        """Take a backup the first time; once, in the second half, put it back."""
        if not self._saved:
            self._saved = True
            self._still(self._cast.save)
            return False
        due = not self._restored and time.monotonic() - self._began > self._soak.seconds / 2
        if due:
            self._restored = True
            self._kill("publisher")
            self._cast.restore()
        return due

    def _still(self, action: Callable[[], object]) -> None:
        """Do it while nobody writes."""
        with contextlib.ExitStack() as stack:
            for pid in self._cast.pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
                    stack.callback(_go_on, pid)
            action()

    def _move_clock(self) -> bool:
        """Of one of them, by a day, for a while."""
        clock = self._soak.clock(self._chance.choice(self._cast.names))
        clock.write_text(str(self._chance.choice((-_DAY_S, _DAY_S))))
        time.sleep(self._chance.uniform(0.1, 2 * _STALL_S))
        clock.unlink()
        return True

    def _fill(self) -> bool:
        """Take all the room that is left, for a while."""
        filler = self._cast.disk / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 16))
        time.sleep(self._chance.uniform(0.1, _STALL_S))
        filler.unlink()
        return True


def _go_on(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
