"""A user's script is checked by mypy --strict against what the three packages say of their types."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

SCRIPT = """
import torch

from deltasync import Publisher, Receipt, Replica, follow
from trl_callback import DeltaSyncCallback, DeltaSyncConfig


def train(model: torch.nn.Module, url: str) -> int:
    with Publisher(url, codec="packed", anchor_every=100) as publisher:
        receipt: Receipt = publisher.publish(model.state_dict().items(), step=7)
        receipt.wait(timeout_s=60)
        return receipt.version


def serve(url: str) -> dict[str, torch.Tensor]:
    replica = Replica(url)
    version: int = replica.sync()
    assert replica.version == version
    return replica.state_dict()


def evaluate(model: torch.nn.Module, url: str) -> int | None:
    with follow(model, url, pin="10", names={"head": "lm_head"}) as following, following.hold() as version:
        return version if version == following.version else None


callback = DeltaSyncCallback("file:///data/run", publish_steps=10)
"""


WRONG = {
    "Replica(7)": "arg-type",
    "Publisher('file:///run', codec=3)": "arg-type",
    "Replica('x').synk()": "attr-defined",
    "follow('x', 'y')": "arg-type",
}


def test_a_strict_script_passes_and_mistakes_in_it_are_found(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT + "".join(f"{line}\n" for line in WRONG))
    options = [
        "--strict",
        "--follow-imports=silent",
        "--no-error-summary",
        "--config-file",
        str(ROOT / "pyproject.toml"),
    ]
    command = [sys.executable, "-m", "mypy", *options, str(script)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    first = SCRIPT.count("\n") + 1
    found = [
        (int(line.split(":")[1]), line.rpartition("[")[2].rstrip("]")) for line in done.stdout.splitlines()
    ]
    assert found == list(enumerate(WRONG.values(), first)), done.stdout + done.stderr
