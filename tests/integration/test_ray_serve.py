"""Ray Serve LLM with two replicas on CPUs, from the file that `deploy/ray` has: `make test-ray`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from deltasync import Publisher
from demo.run import free_port
from tests.integration.vllm_server import save_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.vllm,
    pytest.mark.skipif(
        shutil.which("haproxy") is None, reason="no HAProxy, which Ray needs to serve vLLM's own app"
    ),
]
pytest.importorskip("ray", reason="Ray is not installed: make test-ray")

_FILE = Path(__file__).parents[2] / "deploy" / "ray" / "serve.yaml"
_SERVE = """
import json, sys
import ray
from ray import serve
from ray.serve.llm import build_openai_app
arguments, port, folder = json.loads(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
ray.init(num_cpus=8, include_dashboard=False, object_store_memory=100 << 20, _temp_dir=folder)
serve.start(http_options={"host": "127.0.0.1", "port": port})
serve.run(build_openai_app(arguments))
print("SERVING", flush=True)
sys.stdin.read()
serve.shutdown()
ray.shutdown()
"""


class Served:
    """An application of Ray's that follows a channel.

    Attributes:
        channel: Its URL.
        weights: What the replicas have loaded.
    """

    def __init__(self, folder: Path, *, native: bool) -> None:
        checkpoint = save_model(folder)
        self.channel, self._port = f"file://{folder}/channel", free_port()
        self.weights = load_file(checkpoint / "model.safetensors")
        (application,) = yaml.safe_load(_FILE.read_text())["applications"]
        (config,) = application["args"]["llm_configs"]
        config["model_loading_config"] = {"model_id": "policy", "model_source": str(checkpoint)}
        config["accelerator_config"] = {"kind": "cpu"}
        del config["accelerator_type"]
        config["engine_kwargs"] |= {"max_model_len": 512, "enforce_eager": True, "max_num_seqs": 8}
        variables = {
            "DELTASYNC_CHANNEL": self.channel,
            "DELTASYNC_POLL_INTERVAL_S": "0.1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
        }
        config["runtime_env"]["env_vars"] |= variables
        environ = os.environ | variables | {"RAY_USAGE_STATS_ENABLED": "0"}
        if native:
            environ |= {"RAY_SERVE_ENABLE_HA_PROXY": "1", "RAY_SERVE_LLM_ENABLE_DIRECT_STREAMING": "1"}
        self._log = (folder / "ray.log").open("w")
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-W",
                "ignore",
                "-c",
                _SERVE,
                json.dumps(application["args"]),
                str(self._port),
                f"/tmp/{os.getpid()}",
            ],
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        assert self._process.stdout is not None
        assert any("SERVING" in line for line in self._process.stdout), (folder / "ray.log").read_text()[
            -4000:
        ]

    def ask(self, path: str, body: dict[str, Any] | None = None) -> tuple[int, dict[str, str], str]:
        """Status, headers and body of an answer."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}{path}", data, headers={"content-type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, dict(answer.headers), answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, dict(error.headers), error.read().decode()

    def complete(self) -> tuple[int, dict[str, str], str]:
        return self.ask(
            "/v1/completions", {"model": "policy", "prompt": "1 2", "max_tokens": 4, "temperature": 0}
        )

    def close(self) -> None:
        self._process.communicate(timeout=120)
        self._log.close()


@pytest.fixture
def served(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Served]:
    found = Served(tmp_path, native=request.param)
    try:
        yield found
    finally:
        found.close()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("served", [True], indirect=True)
def test_two_replicas_follow(served: Served, tmp_path: Path) -> None:
    assert served.complete()[0] == 503  # nothing is published
    with Publisher(served.channel) as publisher:
        for _ in range(3):
            changed = {name: (0.05 * torch.randn(w.shape)).to(w.dtype) for name, w in served.weights.items()}
            served.weights = {name: w + changed[name] for name, w in served.weights.items()}
            version = publisher.publish(served.weights).wait(60).version
        digest = publisher.digest
    states: dict[str, dict[str, Any]] = {}
    until = time.monotonic() + 60
    while time.monotonic() < until and not (
        len(states) == 2
        and all(state["version"] == version and state["sha256"] == digest for state in states.values())
    ):
        state = json.loads(served.ask("/deltasync/status")[2])
        states[state["replica_id"]] = state
        time.sleep(0.2)
    assert [state["sha256"] for state in states.values()] == [digest] * 2, states
    heartbeats = {path.stem for path in (tmp_path / "channel" / "replicas").iterdir()}
    assert heartbeats == set(states)  # each under a name of its own
    for _ in range(4):
        code, headers, _ = served.complete()
        assert (code, headers["x-deltasync-versions"]) == (200, f"{version}..{version}")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("served", [False], indirect=True)
def test_replicas_that_would_never_follow_answer_nothing(served: Served) -> None:
    code, _, said = served.complete()
    assert code >= 400
    assert "would never follow" in said and "RAY_SERVE_LLM_ENABLE_DIRECT_STREAMING=1" in said
