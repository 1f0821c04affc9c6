"""Memory, open files and folders over time, and whether they are flat."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import statistics
import time
from pathlib import Path


@dataclasses.dataclass
class Watch:
    """Samples of processes and folders, by name and kind: the time since the start, and the number."""

    samples: dict[str, list[tuple[float, float]]] = dataclasses.field(default_factory=dict)
    started: float = dataclasses.field(default_factory=time.monotonic)

    def note(self, what: str, value: float) -> None:
        self.samples.setdefault(what, []).append((time.monotonic() - self.started, value))

    def process(self, name: str, pids: list[int]) -> None:
        """Memory that is not shared with files, and open files, of a process with its children."""
        with contextlib.suppress(OSError, StopIteration):
            self.note(f"{name} memory", sum(_anonymous_bytes(pid) for pid in pids))
            self.note(f"{name} open files", sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids))
            self.note(f"{name} threads", sum(len(os.listdir(f"/proc/{pid}/task")) for pid in pids))

    def folder(self, name: str, path: Path) -> None:
        """Files and bytes in a folder."""
        for what, value in zip(("files", "bytes"), _sizes(path), strict=True):
            self.note(f"{name} {what}", value)

    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self.started

    def summary(self, warm_up_s: float) -> dict[str, dict[str, float]]:
        """Of each: median of the first and of the last third after the warm-up, and the most."""
        found = {}
        for what, samples in self.samples.items():
            values = [value for at, value in samples if at >= warm_up_s]
            if len(values) >= 3:
                third = len(values) // 3
                begin, end = statistics.median(values[:third]), statistics.median(values[-third:])
                found[what] = {"begin": begin, "end": end, "most": max(values), "growth": end / begin - 1 if begin else 0.0}
        return found


def _anonymous_bytes(pid: int) -> int:
    with open(f"/proc/{pid}/status") as file:
        line = next(line for line in file if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def _sizes(path: Path) -> tuple[int, int]:
    """Files and bytes."""
    count, size = 0, 0
    for folder, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(OSError):
                count, size = count + 1, size + os.stat(os.path.join(folder, name)).st_size
    return count, size
