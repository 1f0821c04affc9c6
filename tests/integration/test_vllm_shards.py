"""A real vLLM whose weights are spread over two workers."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen2Config, Qwen2ForCausalLM

from deltasync.demo import model as demo_model
from deltasync.demo.processes import get_json
from deltasync.demo.run import free_port
from tests.integration.vllm_server import PATIENCE_S, Server, complete, digests, one_thread, start

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Biases, one key and value head that both workers copy, tied embeddings of a vocabulary that they pad."""
    path = tmp_path_factory.mktemp("vllm") / "model"
    torch.manual_seed(0)
    tokenizer = demo_model.build_tokenizer()
    config = Qwen2Config(
        vocab_size=71,
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=1,
        max_position_embeddings=1024,
        initializer_range=0.15,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[Server]:
    channel = f"file://{checkpoint.parent}/channel"
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    weights = {name: tensor.float() for name, tensor in load_file(checkpoint / "model.safetensors").items()}
    assert "lm_head.weight" not in weights
    cores = sorted(os.sched_getaffinity(0))[-2:]
    arguments = ["--tensor-parallel-size", "2"]
    bind = "|".join(map(str, cores))
    log = checkpoint.parent / "server.log"
    with (
        one_thread(),
        start(checkpoint, channel, port, log, *arguments, cores=cores, VLLM_CPU_OMP_THREADS_BIND=bind) as child,
    ):
        child.wait_until(lambda: get_json(f"{url}/deltasync/status"), 2 * PATIENCE_S, "to start")
        server = Server(url, channel, weights)
        yield server
        if server.publisher is not None:
            server.publisher.close()


def test_the_anchor_is_recognised_over_both_workers(server: Server) -> None:
    version = server.publish()
    server.assert_serves(version)
    assert server.status()["commits"] == []


def test_both_workers_commit_every_version_while_a_request_is_generated(server: Server) -> None:
    complete(server.url, 5)
    lengths: list[int] = []
    asking = threading.Thread(target=lambda: lengths.append(len(complete(server.url, 600))))
    asking.start()
    for _ in range(5):
        server.step()
        server.assert_serves(server.publish())
    asking.join()
    assert lengths == [600]
    commits = server.status()["commits"]
    assert [commit["version"] for commit in commits] == [2, 3, 4, 5, 6]
    assert all(commit["changed"] > 0 for commit in commits)


def test_a_tensor_that_changed_completely_is_committed_by_both(server: Server) -> None:
    server.weights["model.norm.weight"] *= 3.0
    server.weights["model.layers.1.mlp.down_proj.weight"] *= -1.5
    server.weights["model.layers.0.self_attn.k_proj.bias"] += 1.0
    server.assert_serves(server.publish())


def test_bits_that_one_worker_got_wrong_are_rolled_back_by_both_and_the_next_anchor_heals(server: Server) -> None:
    # A version that promises what it does not give.
    version = server.status()["version"]
    before = {name: tensor.clone() for name, tensor in server.weights.items()}
    server.step()
    with server.publishing_a_wrong_fingerprint():
        server.publish()
    status = server.wait(lambda status: "did not give the published bits" in (status["error"] or ""))
    assert status["version"] == version
    assert get_json(f"{server.url}/deltasync/digest") == {"version": version, "sha256": digests(before)}
    assert len(complete(server.url, 5)) == 5
    server.publish_anchor()
    assert server.status()["commits"][-1]["anchor"]
