"""`deploy/jobs`: the command of the guide starts the job on the local Hub, and the script trains."""

from __future__ import annotations

import hashlib
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from deltasync import Replica
from deltasync.clouds.hub import HubStore
from deltasync.tensors.bits import bits_of
from demo.model import build_checkpoint
from demo.processes import Child
from demo.run import free_port
from tests.hub.fixtures import HubServer
from tests.integration.vllm_server import serving
from tests.servers.haproxy import require_haproxy

ROOT = Path(__file__).parents[2]


def test_the_command_of_the_guide_starts_the_job(hub: HubServer, tmp_path: Path) -> None:
    guide = (ROOT / "docs/guides/deploy.md").read_text()
    found = re.search(r"^hf jobs uv run (?:.*\\\n)*.*", guide, re.MULTILINE)
    assert found is not None
    words = shlex.split(found[0].replace("\\\n", ""))
    tokens = {"REPLICA_TOKEN": "a token", "DELTASYNC_ENVIRONMENT_TOKEN": "another"}
    command = [str(Path(sys.executable).parent / words[0]), *words[1:]]
    shutil.copytree(ROOT / "deploy", tmp_path / "deploy")
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist" / "deltasync-0.1.0-cp311-abi3-manylinux_2_34_x86_64.whl").write_bytes(
        b"bytes of a wheel"
    )
    done = subprocess.run(
        command, cwd=tmp_path, env=hub.env | tokens, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    (job,) = hub.ask("GET", "/_jobs")
    script, *arguments = words[words.index("deploy/jobs/train.py") :]
    at = words.index("--with")
    # Script and folders went to a bucket, which the job sees as directories.
    volumes = {volume["mountPath"]: volume for volume in job["volumes"]}
    (mounted,) = volumes.keys() - {"/deploy", "/dist"}
    assert job["command"] == ["uv", "run", *words[at : at + 4], f"{mounted}/train.py", *arguments]

    def stored(mount: str, name: str) -> bytes:
        return HubStore(f"hf://buckets/{volumes[mount]['source']}/{volumes[mount]['path']}").read(
            name, 1 << 30
        )

    assert stored(mounted, "train.py") == (ROOT / script).read_bytes()
    for word in (words[at + 1], f"{words[-1]}/router.py"):  # the wheel and the router, as the job names them
        mount, name = word.rsplit("/", 1)
        assert stored(mount, name) == (tmp_path / mount[1:] / name).read_bytes()
    assert job["secrets"] == {"HF_TOKEN": hub.env["HF_TOKEN"], **tokens}
    assert (job["flavor"], job["timeoutSeconds"]) == ("l4x1", 4 * 3600)


@pytest.mark.trl
# of torch, while TRL imports it
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")
def test_its_options_and_those_of_trl_and_the_callback_go_together(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    monkeypatch.setattr(sys, "argv", ["train.py", "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "deploy/jobs/train.py"), run_name="__main__")
    assert ended.value.code == 0
    assert {"--servers", "--replicas", "--max_behind", "--learning_rate"} <= set(
        capsys.readouterr().out.split()
    )


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.trl
def test_the_script_trains(tmp_path: Path) -> None:
    require_haproxy()
    (tmp_path / "vllm").mkdir()
    checkpoint = tmp_path / "vllm" / "model"
    build_checkpoint(checkpoint, 0, task="wordle")
    environment_port = free_port()
    env = os.environ | {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'examples'}",
        "REPLICA_TOKEN": "replica's",
        "DELTASYNC_ENVIRONMENT_TOKEN": "environment's",
        "OMP_NUM_THREADS": "1",
        "CI": "1",
    }
    wordle = [sys.executable, "-m", "wordle", "--port", str(environment_port)]
    with (
        serving(
            checkpoint, token="status", DELTASYNC_HTTP_TOKEN="status", VLLM_API_KEY="replica's"
        ) as server,
        Child("The environment", wordle, env, tmp_path / "wordle.log"),
    ):
        command = [
            sys.executable,
            ROOT / "deploy/jobs/train.py",
            "--model",
            checkpoint,
            "--channel",
            server.channel,
        ]
        command += ["--servers", server.url, "--router_port", str(free_port())]
        command += ["--environment", f"http://127.0.0.1:{environment_port}"]
        command += ["--use_cpu", "--bf16", "false", "--gradient_checkpointing", "false"]
        # The tiny model does not know these prompts, all its rewards are alike: what changes its weights is
        # their decay.
        command += [
            "--max_steps",
            "3",
            "--max_completion_length",
            "64",
            "--learning_rate",
            "1e-2",
            "--weight_decay",
            "1",
        ]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stderr[-3000:]
        replica = Replica(server.channel)
        assert replica.sync() >= 4  # the first weights, and those after each step
        server.wait(lambda status: status["version"] == replica.version)
        live = server.json("/deltasync/digest")["sha256"]
        published = {
            name: hashlib.sha256(bits_of(w).tobytes()).hexdigest() for name, w in replica.state_dict().items()
        }
        assert live == published
        first = load_file(checkpoint / "model.safetensors")
        assert any(not torch.equal(first[name], weight) for name, weight in replica.state_dict().items())
