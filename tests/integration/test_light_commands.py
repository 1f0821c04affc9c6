"""What only reads documents, and what is refused, loads neither torch nor numpy, so that it answers at
once.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from deltasync import Publisher

SCRIPT = """
import sys
from deltasync.ops.cli import main
for command in " ".join(sys.argv[1:]).split(" + "):
    try:
        main(command.split())
    except SystemExit as ended:
        print("ended:", ended.code or 0, "loaded:", *sorted({"torch", "vllm", "trl"} & set(sys.modules)))
        if ended.code:
            raise
"""


def run(*words: str, script: str = SCRIPT) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def channel(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("light")
    weights = {"w": torch.zeros(1000)}
    with Publisher(folder / "run", anchor_every=3) as publisher:
        for number in range(5):
            weights["w"][number] = 1
            publisher.publish(weights, step=number).wait(timeout_s=60)
    return f"file://{folder}/run"


def test_commands_that_read_documents(channel: str, tmp_path: Path) -> None:
    commands = [
        f"log {channel}",
        f"log {channel} --json",
        f"log {channel} latest",
        f"log {channel} 2 --json",
        f"check {channel}",
        f"watch {channel} --once",
        f"gc {channel} --keep-last 2 --dry-run",
        f"watch {channel} --out {tmp_path}/page.html",
    ]
    done = run(" + ".join(commands))
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("ended:")] == [
        "ended: 0 loaded:"
    ] * len(commands)


def test_a_directory_that_no_demo_made_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    done = run("--out", str(tmp_path), script=SCRIPT.replace("deltasync.ops.cli", "demo.__main__"))
    assert done.returncode == 3 and "choose another directory" in done.stderr
    assert (tmp_path / "thesis.txt").read_text() == "years of work"
    assert done.stdout.splitlines()[-1] == "ended: 3 loaded:"
