"""What only reads documents, and what is refused, loads neither torch nor numpy, so that it answers at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from deltasync import Publisher

SCRIPT = """
import sys
from deltasync.cli import main
try:
    main(sys.argv[1:])
finally:
    print("loaded:", *sorted({"torch", "vllm", "trl"} & set(sys.modules)))
"""


@pytest.fixture(scope="module")
def channel(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("light")
    weights = {"w": torch.zeros(1000)}
    with Publisher(folder / "run", anchor_every=3) as publisher:
        for number in range(5):
            weights["w"][number] = 1
            publisher.publish(weights, step=number).wait(timeout_s=60)
    return f"file://{folder}/run"


@pytest.mark.parametrize(
    "command",
    [
        "log",
        "log --json",
        "log latest",
        "log 2 --json",
        "check",
        "watch --once",
        "gc --keep-last 2 --dry-run",
    ],
)
def test_a_command_that_reads_documents(channel: str, command: str) -> None:
    name, *options = command.split()
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, name, channel, *options], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "loaded:"


def test_a_page(channel: str, tmp_path: Path) -> None:
    words = ["watch", channel, "--out", str(tmp_path / "page.html")]
    done = subprocess.run([sys.executable, "-c", SCRIPT, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "loaded:"


def test_a_directory_that_no_demo_made_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    script = SCRIPT.replace("deltasync.cli", "demo.__main__")
    words = ["--out", str(tmp_path)]
    done = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 3 and "choose another directory" in done.stderr
    assert (tmp_path / "thesis.txt").read_text() == "years of work"
    assert done.stdout.splitlines()[-1] == "loaded:"
