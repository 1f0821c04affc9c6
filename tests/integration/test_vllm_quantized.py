"""A real vLLM whose two workers quantize weights to FP8 while they load them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config

from demo.processes import get_json
from demo.run import free_port
from tests.integration.expected_tokens import greedy
from tests.integration.vllm_server import PATIENCE_S, Server, save_model, serving, start

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

FP8 = "--quantization", "fp8_per_channel", "--tensor-parallel-size", "2"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    fields = {"intermediate_size": 192, "head_dim": 32}
    checkpoint = save_model(tmp_path / "vllm", Qwen3Config, **fields)
    with serving(checkpoint, *FP8) as server:
        yield server


def test_ten_versions_and_a_rollback_end_where_a_fresh_server_begins(server: Server, tmp_path: Path) -> None:
    """A layer that workers divide has one scale in both."""
    server.assert_serves(server.publish())
    assert server.status()["twinned_tensors"] == 14
    assert server.status()["reloaded_tensors"] == 0
    asking = threading.Thread(target=lambda: greedy(server, token_count=300))
    asking.start()
    for _ in range(9):
        for tensor in server.weights.values():
            tensor += 0.01 * torch.randn(tensor.shape, generator=server.rng)
        server.assert_serves(server.publish())
    asking.join()
    server.publish_anchor()
    commits = server.status()["commits"]
    assert len(commits) >= 9 and not any(commit["reload_s"] for commit in commits)
    expected, digest = greedy(server, token_count=40), server.json("/deltasync/digest")
    (folder,) = sorted((tmp_path / "vllm" / "channel" / "anchors").iterdir())[-1:]
    for file in (tmp_path / "vllm" / "model").iterdir():
        if file.name != "model.safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    port = free_port()
    with start(folder, server.channel, port, tmp_path / "fresh.log", *FP8) as child:
        fresh = Server(f"http://127.0.0.1:{port}", server.channel, server.weights)
        child.wait_until(lambda: get_json(f"{fresh.url}/deltasync/status"), 2 * PATIENCE_S, "to start")
        fresh.wait(lambda status: status["state"] == "serving")
        assert fresh.json("/deltasync/digest") == digest
        assert len(digest["made"]) == 2
        assert greedy(fresh, token_count=40) == expected
    server.weights["model.layers.0.mlp.down_proj.weight"] *= 1.5
    assert server.publish_wrong_bits()["version"] == digest["version"]
    assert server.json("/deltasync/digest") == digest
    assert greedy(server, token_count=40) == expected
