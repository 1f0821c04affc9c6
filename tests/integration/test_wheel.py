"""The built wheel in a clean environment without vLLM and TRL, as a user gets it."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

CHECK = """
import sys
import deltasync
assert not {'torch', 'numba', 'obstore'} & set(sys.modules)
import torch
from deltasync import Publisher, Replica
weights = {"w": torch.arange(1000, dtype=torch.float32)}
with Publisher("memory://wheel") as publisher:
    publisher.publish(weights.items())
    weights["w"][7] += 1
    publisher.publish(weights.items())
replica = Replica("memory://wheel")
assert replica.sync() in (1, 2)
assert torch.equal(replica.state_dict()["w"], weights["w"].bfloat16())
import vllm_plugin
assert not {"vllm", "trl"} & set(sys.modules)
print("wheel ok")
"""


def run(*command: str | Path, cwd: Path, **environ: str) -> str:
    done = subprocess.run(command, cwd=cwd, env={**os.environ, **environ}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    # Build from a copy: setuptools leaves its build folder beside the sources, and old files in it would join the wheel.
    source = out / "source"
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    for name in tracked.decode().split("\0"):
        if name and (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", out, source, cwd=out)
    return next(out.glob("deltasync-*.whl"))


def test_the_wheel_holds_the_three_packages_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.split("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == {"deltasync", "vllm_plugin", "trl_callback"}
    assert {"deltasync/deploy/spaces/vllm/Dockerfile", "deltasync/deploy/haproxy/replicas.lua"} <= set(names)
    assert {"deltasync/py.typed", "deltasync/dashboard/page.html"} <= set(names)
    assert any(name.endswith("/LICENSE") for name in names)


def test_it_works_without_vllm_and_trl(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    torch = f"torch=={version('torch').split('+')[0]}"  # the build that is tested here, not the newest with CUDA
    run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile", torch, wheel, cwd=tmp_path)
    assert "wheel ok" in run(python, "-c", CHECK, cwd=tmp_path, PYTHONWARNINGS="ignore")
    assert "Commands:" in run(tmp_path / "venv" / "bin" / "deltasync", "--help", cwd=tmp_path)
