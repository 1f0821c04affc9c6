"""The identity of one life of a replica, which a copy of its process must not share."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import socket
import time
from pathlib import Path

_SUSPENDED_S = 1.0  # jump of the clock that counts suspension against the one that does not
_READ_S = 0.2  # a reading of the clocks that takes longer is no comparison: others had the processor
_SET_S = 5.0  # the same of the wall clock, which may also be set


class Life:
    """Identifies one life of a replica: from its start until its process is copied, suspended or restored
    from a snapshot.

    Random numbers that were drawn before a snapshot are the same in all that is restored from it, and so are
    names, ports and process numbers. Therefore `check` looks for the traces of it, and `renew` is called by
    who meets a copy.

    Args:
        boot: The first identity, eight hexadecimal digits; drawn by default.

    Attributes:
        boot: The identity now.
        past: Those before.
    """

    def __init__(self, boot: str | None = None) -> None:
        self.boot = secrets.token_hex(4) if boot is None else boot
        self.past: list[str] = []
        self._place, self._clocks = _place(), _clocks()

    def check(self) -> bool:
        """Renew the identity if the process was copied, suspended or restored since the last call; return
        whether it was.
        """
        place, clocks = _place(), _clocks()
        jumps = [abs(now_s - before_s) for now_s, before_s in zip(clocks, self._clocks, strict=True)]
        is_new = place != self._place or jumps[0] > _SUSPENDED_S or jumps[1] > _SET_S
        self._place, self._clocks = place, clocks
        if is_new:
            self.renew()
        return is_new

    def renew(self) -> None:
        """Draw another identity."""
        self.past.append(self.boot)
        self.boot = secrets.token_hex(4)
        while self.boot in self.past:  # the source of random numbers was copied too
            self.boot = hashlib.sha256(f"{self.boot} {len(self.past)}".encode()).hexdigest()[:8]


def _place() -> tuple[object, ...]:
    """Return where this process runs, as far as a system says: its number and start, the host's name and
    start.
    """
    found: list[object] = [os.getpid(), socket.gethostname()]
    with contextlib.suppress(OSError, IndexError):
        found.append(Path("/proc/sys/kernel/random/boot_id").read_text())
        # clock ticks at its start
        found.append(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return tuple(found)


def _clocks() -> tuple[float, float]:
    """Return by how much the clock that counts suspension, and the wall clock, are ahead of one that counts
    none.
    """
    while True:
        before_s = time.monotonic()
        boot_s = time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else before_s
        wall_s = time.time()
        if time.monotonic() - before_s < _READ_S:
            return boot_s - before_s, wall_s - before_s
