"""A real vLLM that keeps weights in a layout of its own: expert layers on the CPU, which it packs for its
kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import Qwen3MoeConfig

from demo.processes import get_json
from demo.run import free_port
from tests.integration.expected_tokens import greedy
from tests.integration.vllm_server import PATIENCE_S, Server, digests, save_model, serving, start

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

EXPERTS, LAYERS = 4, 2


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"intermediate_size": 128, "moe_intermediate_size": 64, "head_dim": 32}
    experts = {"num_experts": EXPERTS, "num_experts_per_tok": 2, "num_hidden_layers": LAYERS}
    return save_model(tmp_path_factory.mktemp("vllm"), Qwen3MoeConfig, **sizes, **experts)


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[Server]:
    with serving(checkpoint) as server:
        yield server


def test_packed_experts_have_twins_and_nothing_else_does(server: Server) -> None:
    server.assert_serves(server.publish())
    assert server.status()["twinned_tensors"] == EXPERTS * LAYERS * 3
    assert server.status()["commits"] == []


def test_versions_are_committed(server: Server) -> None:
    before = greedy(server, token_count=60)
    for _ in range(3):
        for tensor in server.weights.values():
            tensor += 0.01 * torch.randn(tensor.shape, generator=server.rng)
        server.assert_serves(server.publish())
    commits = server.status()["commits"]
    assert len(commits) == 3
    assert all(commit["reload_s"] == 0 for commit in commits)
    assert greedy(server, token_count=60) != before


def test_tokens_are_those_of_a_server_that_loaded_the_weights(
    server: Server, checkpoint: Path, tmp_path: Path
) -> None:
    """What the fingerprint cannot see: packed weights that do what the published ones do."""
    server.publish_anchor()
    expected, digest = greedy(server, token_count=60), server.json("/deltasync/digest")
    (folder,) = sorted((checkpoint.parent / "channel" / "anchors").iterdir())[-1:]
    for file in checkpoint.iterdir():
        if file.name != "model.safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with start(folder, server.channel, port, tmp_path / "server.log") as child:
        child.wait_until(lambda: get_json(f"{url}/deltasync/status"), 2 * PATIENCE_S, "to start")
        loaded = Server(url, server.channel, server.weights)
        loaded.wait(lambda status: status["state"] == "serving")
        assert loaded.status()["commits"] == []  # recognised: nothing was patched
        assert greedy(loaded, token_count=60) == expected
        assert loaded.json("/deltasync/digest") == digest
        assert len(digest["mirrored"]) == EXPERTS * LAYERS * 3
        assert len(digest["made"][0]) >= 2 * LAYERS


def test_a_version_without_changes_to_experts_loads_nothing_again(server: Server) -> None:
    server.weights["model.norm.weight"] *= 1.5
    server.assert_serves(server.publish())
    assert server.status()["commits"][-1]["reload_s"] == 0


def test_bits_that_are_not_the_published_ones_are_rolled_back_in_packed_layers_too(server: Server) -> None:
    version, tokens = server.status()["version"], greedy(server, token_count=60)
    before = {name: tensor.clone() for name, tensor in server.weights.items()}
    for tensor in server.weights.values():
        tensor += 0.05 * torch.randn(tensor.shape, generator=server.rng)
    status = server.publish_wrong_bits()
    assert status["version"] == version
    found = server.json("/deltasync/digest")
    assert (found["version"], found["sha256"]) == (version, digests(before))
    assert greedy(server, token_count=60) == tokens
    assert len(greedy(server, token_count=5)) == 5
