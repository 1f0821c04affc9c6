"""Fuzz every reader, one after the other: `python -m tests.fuzz.run [SECONDS] [TARGET ...]`; `make fuzz`
calls it.

Starts from the kept corpus and the seeds, and ends with status 1 if an input breaks a reader. That input is
kept as `tests/fuzz/corpus/TARGET/crash-<sha1>`: repair the reader, and it stays as a test. The corpus is
replaced by the smallest set of inputs that reaches as far, and of these by the shorter ones.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.fuzz import seeds

CORPUS = Path(__file__).parent / "corpus"
_KEPT_BYTES = 1 << 16  # of each target
INTERPRETED = ("raw", "packed", "context")
"""Their decoders run in Python, so that coverage is seen in them."""


def _fuzz(target: str, folder: Path, environment: dict[str, str], *options: str) -> int:
    command = [sys.executable, "-W", "ignore", "-m", "tests.fuzz.fuzz", target, str(folder), *options]
    return subprocess.run([*command, f"-max_len={1 << 16}", "-rss_limit_mb=4096"], env=environment).returncode


def run(target: str, seconds: float, work: Path) -> bool:
    """Whether the reader withstood."""
    folder = work / target
    folder.mkdir(parents=True)
    for path in (*(CORPUS / target).iterdir(), *(work / "seeds" / target).iterdir()):
        shutil.copy(path, folder)
    environment = os.environ | ({"DELTASYNC_SIMD": "none"} if target in INTERPRETED else {})
    print(f"{target}: {seconds:g} s", flush=True)
    if _fuzz(
        target,
        folder,
        environment,
        f"-max_total_time={seconds:g}",
        "-print_final_stats=1",
        f"-artifact_prefix={work}/",
    ):
        noted = Path(f"{folder}.last").read_bytes()
        data = noted[8 : 8 + int.from_bytes(noted[:8], "little")]
        crash = CORPUS / target / f"crash-{hashlib.sha1(data).hexdigest()}"
        crash.write_bytes(data)
        print(f"{target}: broken by {crash}", flush=True)
        return False
    smallest = work / f"{target}.smallest"
    smallest.mkdir()
    if _fuzz(target, smallest, environment, str(folder), "-merge=1") == 0:
        for kept in (CORPUS / target).iterdir():
            if not kept.name.startswith("crash-"):
                kept.unlink()
        left = _KEPT_BYTES
        for path in sorted(smallest.iterdir(), key=lambda path: path.stat().st_size):
            left -= path.stat().st_size
            if left >= 0:
                shutil.copy(path, CORPUS / target)
    return True


def main() -> None:
    seconds, *targets = sys.argv[1:] or ["600"]
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        seeds.main(work / "seeds")
        sys.exit(not all([run(target, float(seconds), work) for target in targets or seeds.SEEDS]))


if __name__ == "__main__":
    main()
