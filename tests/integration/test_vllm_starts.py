"""Ways of starting vLLM with a channel: each follows, or says in one sentence why not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from deltasync.errors import DeltaSyncError
from demo.processes import get_json
from demo.run import free_port
from tests.integration.vllm_server import PATIENCE_S, Server, save_model, serve, start

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("vllm"))


@pytest.mark.slow
def test_a_list_of_plugins_without_deltasync_ends_the_start(checkpoint: Path, tmp_path: Path) -> None:
    log, port = tmp_path / "server.log", free_port()
    with (
        start(
            checkpoint, f"file://{tmp_path}/channel", port, log, VLLM_PLUGINS="lora_filesystem_resolver"
        ) as child,
        pytest.raises(DeltaSyncError, match="ended with exit code 1"),
    ):
        child.wait_until(lambda: get_json(f"http://127.0.0.1:{port}/v1/models"), 2 * PATIENCE_S, "to start")
    assert (
        "because VLLM_PLUGINS leaves deltasync out: add it, or leave VLLM_PLUGINS unset." in log.read_text()
    )


def followed(checkpoint: Path, port: int, channel: str) -> Server:
    weights = {name: tensor.float() for name, tensor in load_file(checkpoint / "model.safetensors").items()}
    return Server(f"http://127.0.0.1:{port}", channel, weights)


@pytest.mark.slow
def test_a_node_without_an_api_server_is_followed_by_the_one_that_has_it(
    checkpoint: Path, tmp_path: Path
) -> None:
    channel, port, rpc = f"file://{tmp_path}/channel", free_port(), free_port()
    server = followed(checkpoint, port, channel)
    common = [
        "--data-parallel-size",
        "2",
        "--data-parallel-size-local",
        "1",
        "--data-parallel-address",
        "127.0.0.1",
    ]
    common += ["--data-parallel-rpc-port", str(rpc)]
    head = ("--port", str(port), *common)
    environ: dict[str, Any] = {"DELTASYNC_CHANNEL": channel}
    with (
        serve(checkpoint, tmp_path / "head.log", *head, **environ) as child,
        serve(
            checkpoint,
            tmp_path / "headless.log",
            *common,
            "--headless",
            "--data-parallel-start-rank",
            "1",
            **environ,
        ),
    ):
        child.wait_until(lambda: get_json(f"{server.url}/deltasync/status"), 2 * PATIENCE_S, "to start")
        server.assert_serves(server.publish())
        server.step()
        server.assert_serves(server.publish())
        assert server.status()["state"] == "serving"
        assert server.publisher is not None
        server.publisher.close()
