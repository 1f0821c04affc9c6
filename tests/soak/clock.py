"""A clock that is moved: `time.time` of one process."""

from __future__ import annotations

import time
from pathlib import Path
from unittest import mock


def follow(path: Path) -> None:
    """From now on the time of this process is off by the seconds in a file, while it is there."""
    now = time.time

    def shifted() -> float:
        try:
            return now() + float(path.read_text() or 0)
        except FileNotFoundError:
            return now()

    mock.patch.object(time, "time", shifted).start()
