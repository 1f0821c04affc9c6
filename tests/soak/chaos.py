"""Troubles of a soak in which nothing is safe: processes, writers, the channel itself, its disk."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from tests.soak.settings import Soak

_DISK_BYTES = 64 << 20
_STALL_S = 2.0
_TOGETHER_S = 3.0  # that two writers run


class Cast(Protocol):
    """See `tests.soak.run.Cast`."""

    channel: Path

    def start(self, name: str) -> None: ...
    def kill(self, name: str) -> None: ...

    @property
    def names(self) -> list[str]: ...
    @property
    def pids(self) -> dict[str, int]: ...


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """A small disk of its own for the channel, if this is root and may mount one."""
    folder.mkdir(parents=True)
    options = ["-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "tmpfs", str(folder)]
    mounted = os.getuid() == 0 and not subprocess.run(["mount", *options], capture_output=True).returncode
    try:
        yield
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


class Troubles:
    """What else can go wrong.

    Attributes:
        all: Each, by name.
    """

    def __init__(self, soak: Soak, cast: Cast) -> None:
        self._soak, self._cast = soak, cast
        self._chance = random.Random(soak.seed + 1)
        self._backup = soak.folder / "backup"
        self._began = time.monotonic()
        self._restored = False
        self.all: dict[str, Callable[[], None]] = {
            "publisher killed": lambda: self._kill("publisher"),
            "replica killed": lambda: self._kill(self._chance.choice(cast.names[1:])),
            "second writer": self._second_writer,
            "restored": self._restore,
        }
        if os.path.ismount(cast.channel.parent):
            self.all["disk full"] = self._fill

    def _kill(self, name: str) -> None:
        if name in self._cast.pids:
            self._cast.kill(name)  # the next look starts it again

    def _second_writer(self) -> None:
        """It opens the channel while the other one writes, and is killed; the other one has ended by then, or does."""
        self._cast.start("publisher")
        time.sleep(self._chance.uniform(0.5, _TOGETHER_S))
        self._kill("publisher")

    def _restore(self) -> None:
        """Take a backup the first time; once, in the second half, put it back."""
        if not self._backup.exists():
            self._still(lambda: shutil.copytree(self._cast.channel, self._backup))
        elif not self._restored and time.monotonic() - self._began > self._soak.seconds / 2:
            self._restored = True
            self._kill("publisher")
            shutil.rmtree(self._cast.channel)
            shutil.copytree(self._backup, self._cast.channel)

    def _still(self, action: Callable[[], object]) -> None:
        """Do it while nobody writes."""
        pids = list(self._cast.pids.values())
        with contextlib.ExitStack() as stack:
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
                stack.callback(os.kill, pid, signal.SIGCONT)
            action()

    def _fill(self) -> None:
        """Take all the room that is left, for a while."""
        filler = self._cast.channel.parent / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 16))
        time.sleep(self._chance.uniform(0.1, _STALL_S))
        filler.unlink()
