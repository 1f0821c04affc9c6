"""The examples as a user runs them; those that need a vLLM server are run in test_trl_server.py, where there
is one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from deltasync import Replica
from tests.conftest import assert_same_bits
from tests.integration.vllm_server import save_model

ROOT = Path(__file__).parents[2]


def run_example(name: str, *arguments: str, cwd: Path, processes: int = 1) -> str:
    torchrun = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        if processes > 1
        else []
    )
    command = [sys.executable, *torchrun, str(ROOT / "examples" / name), *arguments]
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "CI": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("resumes", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_trainer(tmp_path: Path, resumes: bool) -> None:
    save_model(tmp_path)  # what tiny_model.py makes, but for its training
    url, last = f"file://{tmp_path}/channel", 4
    arguments = [
        "--model",
        "model",
        "--channel",
        url,
        "--use_cpu",
        "--learning_rate",
        "1e-4",
        "--save_steps",
        "4",
    ]
    run_example("trainer.py", *arguments, "--max_steps", "4", cwd=tmp_path)
    replica = Replica(url)
    first = replica.sync()
    if resumes:  # from the checkpoint: the run goes on, though nothing says so on the command line
        last = 6
        resume = [
            "--resume_from_checkpoint",
            "trainer-out/checkpoint-4",
            "--save_steps",
            "6",
            "--max_steps",
            "6",
        ]
        run_example("trainer.py", *arguments, *resume, cwd=tmp_path)
        assert replica.sync() > first
    saved = load_file(tmp_path / "trainer-out" / f"checkpoint-{last}" / "model.safetensors")
    assert_same_bits(
        replica.state_dict(), {name: tensor.to(torch.bfloat16) for name, tensor in saved.items()}
    )


@pytest.mark.parametrize(
    "name",
    [
        "trainer.py",
        pytest.param("grpo.py", marks=pytest.mark.slow),
        pytest.param("async_grpo.py", marks=pytest.mark.slow),
    ],
)
def test_one_command_is_enough(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--alone` makes what the run needs; the last version has the bits that the trainer saved."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    said = run_example(name, "--alone", "--save_steps", "4", cwd=tmp_path)
    replica = Replica(said.splitlines()[-1].removeprefix("The versions: deltasync log "))
    version = replica.sync()
    saved = load_file(next(tmp_path.glob("*/out/checkpoint-4/model.safetensors")))
    assert_same_bits(
        replica.state_dict(), {name: tensor.to(torch.bfloat16) for name, tensor in saved.items()}
    )
    assert name == "trainer.py" or f"The server serves version {version}." in said


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_fsdp2(tmp_path: Path, processes: int) -> None:
    save_model(tmp_path)
    url = f"file://{tmp_path}/channel"
    told = run_example(
        "fsdp2.py", "--model", "model", "--channel", url, "--steps", "3", cwd=tmp_path, processes=processes
    )
    assert [line.split(":")[0] for line in told.splitlines()] == ["version 2", "version 3", "version 4"]
    replica = Replica(url)
    assert replica.sync() == 4
    assert len(list((tmp_path / "channel/anchors").glob("*/config.json"))) == 1


@pytest.mark.parametrize(
    ("name", "processes"),
    [
        ("plain_loop.py", 1),
        pytest.param("accelerate_loop.py", 1, marks=pytest.mark.slow),
        ("accelerate_loop.py", 2),
    ],
)
def test_loops(name: str, processes: int, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/channel"
    run_example(name, url, *(["--cpu"] if "accelerate" in name else []), cwd=tmp_path, processes=processes)
    replica = Replica(url)
    assert 1 <= replica.sync() <= 5  # versions join while an upload lasts
    saved = load_file(tmp_path / "model.safetensors")
    assert_same_bits(
        replica.state_dict(), {name: tensor.to(torch.bfloat16) for name, tensor in saved.items()}
    )
