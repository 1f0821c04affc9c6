"""A real browser for the pages: headless Chromium, started once for each call."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

PATIENCE_S = 120
needs_browser = pytest.mark.skipif(
    shutil.which("chromium") is None, reason="no chromium here (Debian: apt-get install chromium)"
)


def browse(
    address: str, profile: Path, *arguments: str, width: int = 900, height: int = 1600, time_ms: int = 3000
) -> str:
    """What Chromium prints, with `--dump-dom` the page after its first `time_ms` of virtual time."""
    flags = (
        "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    )
    flags += f" --disable-component-update --disable-sync --hide-scrollbars --window-size={width},{height}"
    command = ["chromium", *flags.split(), f"--virtual-time-budget={time_ms}", f"--user-data-dir={profile}"]
    done = subprocess.run(
        [*command, *arguments, address], capture_output=True, text=True, check=False, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
