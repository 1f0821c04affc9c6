"""What to run, and what everything that is run agrees on."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deltasync.config import Retention

ELEMENTS = 200_000
FAULT_RATE = 0.01
RETENTION = Retention(compact_every=8, keep_last=64, grace_s=10.0)
CACHE_BYTES = 4 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Soak:
    """What to run.

    Attributes:
        folder: For everything that it writes.
        seconds, versions: It ends after both, or long after the time that the versions should take.
        rate: Versions per second.
        replicas: How many.
        warm_up_s: What is flat is flat from then on.
        sample_s: Between two looks at the processes.
        trouble_s: Between two times that the store is away or a process is stopped, on average.
        seed: Seed of everything random.
        chaos: Processes are also killed and started again, second writers come and go, the channel is restored from a
            backup once, and its disk is filled where a small one can be mounted.
    """

    folder: Path
    seconds: float = 0.0
    versions: int = 0
    rate: float = 2.0
    replicas: int = 2
    warm_up_s: float = 600.0
    sample_s: float = 5.0
    trouble_s: float = 20.0
    seed: int = 0
    chaos: bool = False

    @property
    def away(self) -> Path:
        """The store does not answer while this file is there."""
        return self.folder / "away"

    def clock(self, name: str) -> Path:
        """The clock of one of the processes is off by the seconds in this file while it is there."""
        return self.folder / f"clock of {name}"


def tell(path: Path, numbers: dict[str, Any]) -> None:
    """Replace a file that another process reads."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(numbers))
    temporary.replace(path)


def told(path: Path) -> dict[str, Any]:
    """What was told there last; nothing yet if the file is not there."""
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    return found


def note(path: Path, entry: object) -> None:
    """Add a line to a file that several processes write and read, any of which may be killed."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        os.write(file, json.dumps(entry).encode() + b"\n")
    finally:
        os.close(file)


def noted(path: Path) -> list[Any]:
    """The lines of such a file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def digest_of(sha256: Mapping[str, str]) -> str:
    """One digest for those of all tensors."""
    return hashlib.sha256(json.dumps(sorted(sha256.items())).encode()).hexdigest()
