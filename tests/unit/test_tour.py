"""`python -m deltasync` alone: what README shows."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
_NUMBERS = re.compile(r"\d[\d,.]*")


def test_the_tour_prints_what_the_readme_shows() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "deltasync"], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    shown = (ROOT / "README.md").read_text().split("python -m deltasync\n```\n\n```\n")[1].split("```")[0]
    lines, expected = done.stdout.splitlines(), shown.splitlines()
    assert lines[0].startswith("channel    file://")
    assert [_NUMBERS.sub("N", line) for line in lines[1:]] == [
        _NUMBERS.sub("N", line) for line in expected[1:]
    ]
