"""The Spaces: their files lint and agree, and their entrypoints start what the image would, with the image's
command.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

from demo.processes import Child, get_json
from tests.integration.vllm_server import PATIENCE_S, Server, digests, one_thread, save_model

ROOT = Path(__file__).parents[2]
SPACES = {"vllm": ROOT / "deploy" / "spaces" / "vllm", "wordle": ROOT / "examples" / "wordle"}
BIN = Path(sys.executable).parent
TOKEN = "token-of-this-space"
PORT = 7860


def image(name: str) -> dict[str, str]:
    """The last of each instruction of a Dockerfile."""
    text = re.sub(r"\\\n", "", (SPACES[name] / "Dockerfile").read_text())
    return dict(line.split(" ", 1) for line in text.splitlines() if line and not line.startswith("#"))


def command(name: str) -> list[str]:
    """What the image starts, with the folder of this checkout instead of the image's."""
    words: list[str] = json.loads(image(name)["ENTRYPOINT"])
    return [word.replace(image(name)["WORKDIR"], str(SPACES[name])) for word in words]


def environ(**variables: str) -> dict[str, str]:
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    # The image installs the environment; here it is found in the examples.
    packages = f"{ROOT}{os.pathsep}{ROOT / 'examples'}"
    kept = {name: value for name, value in os.environ.items() if name not in ("MODEL", "PORT")}
    return kept | {"PATH": path, "PYTHONPATH": packages} | variables


@pytest.mark.parametrize("name", SPACES)
def test_files_of_a_space_lint_and_agree(name: str) -> None:
    folder = SPACES[name]
    for linter, file in (("hadolint", "Dockerfile"), ("shellcheck", "entrypoint.sh")):
        done = subprocess.run([BIN / linter, folder / file], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
    header = yaml.safe_load((folder / "README.md").read_text().split("---")[1])
    assert (header["sdk"], header["app_port"]) == ("docker", PORT)
    instructions = image(name)
    assert instructions["EXPOSE"] == str(PORT)
    assert instructions["USER"] == "1000"
    assert "HOME=" in instructions["ENV"]
    assert command(name) == ["sh", str(folder / "entrypoint.sh")]


@pytest.mark.parametrize("missing", ["DELTASYNC_CHANNEL", "MODEL", "DELTASYNC_HTTP_TOKEN"])
def test_replica_says_what_is_not_set(missing: str) -> None:
    given = {
        "DELTASYNC_CHANNEL": "file:///nowhere",
        "MODEL": "a/model",
        "DELTASYNC_HTTP_TOKEN": TOKEN,
        missing: "",
    }
    done = subprocess.run(command("vllm"), env=environ(**given), capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert f"{missing}: Set the" in done.stderr


def request(path: str, body: object = None, token: str | None = TOKEN) -> tuple[int, Any]:
    headers = {"Content-Type": "application/json"} | (
        {} if token is None else {"Authorization": f"Bearer {token}"}
    )
    data = None if body is None else json.dumps(body).encode()
    try:
        asked = urllib.request.Request(f"http://127.0.0.1:{PORT}{path}", data, headers)
        with urllib.request.urlopen(asked, timeout=PATIENCE_S) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, None


@pytest.fixture
def port_is_free() -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", PORT))
        except OSError:
            pytest.skip(f"port {PORT}, which a Space listens on, is taken")


def test_environment_plays_and_wants_the_token(tmp_path: Path, port_is_free: None) -> None:
    done = subprocess.run(command("wordle"), env=environ(), capture_output=True, text=True, timeout=60)
    assert done.returncode != 0 and "Set the secret DELTASYNC_ENVIRONMENT_TOKEN" in done.stderr
    given = {"DELTASYNC_ENVIRONMENT_TOKEN": TOKEN, "WORDS": "full", "SESSIONS": "1"}
    with Child("The Space", command("wordle"), environ(**given), tmp_path / "log") as space:
        space.wait_until(lambda: get_json(f"http://127.0.0.1:{PORT}/health"), PATIENCE_S, "to start")
        assert request("/reset", {"seed": 7}, None)[0] == request("/reset", {"seed": 7}, "other")[0] == 401
        status, reply = request("/reset", {"seed": 7})
        assert status == 200
        step = {"action": {"guess": "slate"}, "episode_id": reply["observation"]["episode_id"]}
        assert request("/step", step)[0] == 200
        assert request("/reset", {"seed": 8})[0] == 503  # one session


def test_environment_needs_nothing_but_what_its_image_installs() -> None:
    installed = set(re.findall(r'"(\w+)>=', (SPACES["wordle"] / "Dockerfile").read_text()))
    required = {
        re.split("[<>=~ ]", line)[0] for line in requires("deltasync") or [] if "extra ==" not in line
    }
    others = {name.lower().replace("-", "_") for name in required} - installed
    code = f"import sys, wordle.__main__; print(*[n for n in {others!r} if n in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ(), capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [] and {"torch"} < others


@pytest.mark.slow
@pytest.mark.vllm
def test_replica_follows_and_wants_the_token(tmp_path: Path, port_is_free: None) -> None:
    checkpoint, channel = save_model(tmp_path), f"file://{tmp_path}/channel"
    given = {
        "MODEL": str(checkpoint),
        "DELTASYNC_CHANNEL": channel,
        "DELTASYNC_HTTP_TOKEN": TOKEN,
        "SPACE_ID": "user/replica",
        "VLLM_ARGUMENTS": "--enforce-eager --max-model-len 1024 --max-num-seqs 8",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    weights = {name: tensor.float() for name, tensor in load_file(checkpoint / "model.safetensors").items()}
    server = Server(f"http://127.0.0.1:{PORT}", channel, weights, TOKEN)
    with one_thread(), Child("The Space", command("vllm"), environ(**given), tmp_path / "log") as space:
        space.wait_until(lambda: get_json(f"{server.url}/deltasync/status"), 2 * PATIENCE_S, "to start")
        for _ in range(2):
            server.step()
            server.assert_serves(server.publish())
        assert server.publisher is not None
        server.publisher.close()
        prompt = {"model": str(checkpoint), "prompt": [5, 6, 7], "max_tokens": 4}
        assert (
            request("/v1/completions", prompt, None)[0]
            == request("/deltasync/digest", None, "other")[0]
            == 401
        )
        assert request("/v1/completions", prompt)[0] == 200
        assert request("/deltasync/digest")[1]["sha256"] == digests(weights)
    assert "user-replica" in {key.key for key in server.store.list("replicas/")}.pop()
    assert TOKEN not in (tmp_path / "log").read_text(errors="replace")
