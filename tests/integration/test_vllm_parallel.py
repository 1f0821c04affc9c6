"""Real vLLM servers whose model is spread over stages, or over workers that share experts."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import Qwen2Config, Qwen3MoeConfig

from tests.integration.expected_tokens import NEARLY, greedy, shortfall
from tests.integration.vllm_server import Server, digests, save_model, serving

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def two_workers(checkpoint: Path, *arguments: str, **environ: str) -> Iterator[Server]:
    cores = sorted(os.sched_getaffinity(0))[-2:]
    environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(str, cores))
    with serving(checkpoint, *arguments, cores=cores, **environ) as server:
        server.assert_serves(server.publish())
        assert server.status()["commits"] == []  # the loaded weights were recognised over all workers
        yield server


def checkpoint_of(server: Server) -> Path:
    return Path(server.channel.removeprefix("file://")).parent / "model"


def commits_while_a_request_is_generated(server: Server, greedy_of: list[dict[str, str]]) -> None:
    greedy(server, token_count=5)
    old, first = {name: tensor.clone() for name, tensor in server.weights.items()}, server.status()["version"]
    lengths: list[int] = []
    asking = [
        threading.Thread(target=lambda: lengths.append(len(greedy(server, token_count=500))))
        for _ in greedy_of
    ]
    for each in asking:
        each.start()
    for size in (2e-5, 2e-5, 0.05):
        server.step(size)
        server.assert_serves(server.publish())
    for each in asking:
        each.join()
    assert lengths == [500] * len(greedy_of)
    commits = server.status()["commits"]
    assert [commit["version"] for commit in commits] == [first + 1, first + 2, first + 3]
    for headers in greedy_of:
        tokens = greedy(server, **headers)
        assert shortfall(checkpoint_of(server), server.weights, tokens) < NEARLY
        assert shortfall(checkpoint_of(server), old, tokens) > 2 * NEARLY


def rolls_back_everywhere(server: Server, greedy_of: list[dict[str, str]]) -> None:
    before, tokens = server.status()["version"], [greedy(server, **headers) for headers in greedy_of]
    weights = digests(server.weights)
    server.step(0.05)
    status = server.publish_wrong_bits()
    assert status["version"] == before
    assert server.json("/deltasync/digest") == {"version": before, "sha256": weights}
    assert [greedy(server, **headers) for headers in greedy_of] == tokens
    server.publish_anchor()
    assert server.status()["commits"][-1]["anchor"]
    for headers in greedy_of:
        assert shortfall(checkpoint_of(server), server.weights, greedy(server, **headers)) < NEARLY


def commits_while_idle(server: Server) -> None:
    first = server.status()["version"]
    for size in (2e-5, 2e-5, 0.05):
        server.step(size)
        server.assert_serves(server.publish())
    commits = server.status()["commits"]
    assert [commit["version"] for commit in commits] == [first + 1, first + 2, first + 3]
    assert all(commit["changed"] for commit in commits)


class TestStages:
    @pytest.fixture(scope="class")
    @classmethod
    def server(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
        """Embeddings that the first and the last stage both have, of a vocabulary that vLLM pads.

        Compiled: without the warm-up of that, the last stage of vLLM for CPU fails at its first request, also
        without a plugin (`assert self.intermediate_tensors is not None`).
        """
        fields = {"vocab_size": 71, "intermediate_size": 192, "tie_word_embeddings": True}
        checkpoint = save_model(tmp_path_factory.mktemp("vllm"), Qwen2Config, **fields)
        yield from two_workers(checkpoint, "--pipeline-parallel-size", "2", "--no-enforce-eager")

    def test_both_commit_every_version(self, server: Server) -> None:
        assert "lm_head.weight" not in server.weights
        commits_while_a_request_is_generated(server, [{}])

    def test_both_roll_back(self, server: Server) -> None:
        rolls_back_everywhere(server, [{}])


# vLLM for CPU ends with a segmentation fault at the first request to workers that share experts, also without
# a plugin. So nothing is generated there.


class TestWorkersThatShareExperts:
    @pytest.fixture(scope="class")
    @classmethod
    def server(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
        sizes = {"intermediate_size": 128, "moe_intermediate_size": 64, "head_dim": 32}
        experts = {"num_experts": 4, "num_experts_per_tok": 2}
        checkpoint = save_model(tmp_path_factory.mktemp("vllm"), Qwen3MoeConfig, **sizes, **experts)
        yield from two_workers(checkpoint, "--tensor-parallel-size", "2", "--enable-expert-parallel")

    def test_both_commit_every_version(self, server: Server) -> None:
        assert server.status()["twinned_tensors"] == 24
        commits_while_idle(server)

    def test_both_roll_back(self, server: Server) -> None:
        rolls_back_everywhere(server, [])
