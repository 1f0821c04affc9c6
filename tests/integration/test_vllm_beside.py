"""What else a real vLLM does while it follows: adapters, guesses of the next tokens, pauses of other clients,
sleep.
"""

from __future__ import annotations

import json
import time
import urllib.error
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, Qwen3Config

from tests.integration.expected_tokens import NEARLY, greedy, shortfall
from tests.integration.vllm_server import Server, Weights, digests, save_model, serving

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

RANK, ALPHA, TARGETS = 8, 16, ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("vllm"), Qwen3Config, intermediate_size=192, head_dim=32)


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[Server]:
    """Serves an adapter too, and has the next tokens guessed from the text so far."""
    folder = checkpoint.parent / "adapter"
    arguments = ["--enable-lora", "--max-lora-rank", str(RANK), "--lora-modules", f"adapter={folder}"]
    arguments += [
        "--speculative-config",
        json.dumps({"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}),
    ]
    save_adapter(folder)
    with serving(checkpoint, *arguments) as server:
        server.assert_serves(server.publish())
        yield server


def adapter(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A and B of one weight, in bfloat16."""
    random = torch.Generator().manual_seed(sum(name.encode()))
    sizes = {"q_proj": (128, 128), "o_proj": (128, 128), "gate_proj": (128, 192), "down_proj": (192, 128)}
    columns, rows = sizes[name.rpartition(".")[2]]
    a, b = torch.randn(RANK, columns, generator=random), torch.randn(rows, RANK, generator=random)
    return (0.1 * a).to(torch.bfloat16), (0.1 * b).to(torch.bfloat16)


def adapted_names() -> list[str]:
    return [f"model.layers.{layer}.{target}" for layer in range(2) for target in TARGETS]


def save_adapter(folder: Path) -> None:
    """As peft saves one."""
    folder.mkdir()
    tensors = {}
    for name in adapted_names():
        a, b = adapter(name)
        tensors |= {f"base_model.model.{name}.lora_A.weight": a, f"base_model.model.{name}.lora_B.weight": b}
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA, "bias": "none"}
    config["target_modules"] = [target.rpartition(".")[2] for target in TARGETS]
    (folder / "adapter_config.json").write_text(json.dumps(config))


def adapted(weights: Weights) -> Weights:
    """Weights with the adapter merged into them."""
    merged = dict(weights)
    for name in adapted_names():
        a, b = adapter(name)
        merged[f"{name}.weight"] = weights[f"{name}.weight"] + ALPHA / RANK * b.float() @ a.float()
    return merged


def test_commits_reach_the_layers_beneath_an_adapter(server: Server, checkpoint: Path) -> None:
    status = server.status()
    assert (status["twinned_tensors"], status["patched_tensors"]) == (0, len(server.weights))
    assert status["commits"] == []
    for _ in range(2):
        old = {name: tensor.clone() for name, tensor in server.weights.items()}
        server.step(0.05)
        server.assert_serves(server.publish())
        tokens, with_adapter = greedy(server), greedy(server, "adapter")
        assert shortfall(checkpoint, server.weights, tokens) < NEARLY
        assert shortfall(checkpoint, old, tokens) > 2 * NEARLY
        assert shortfall(checkpoint, adapted(server.weights), with_adapter) < NEARLY
        assert shortfall(checkpoint, server.weights, with_adapter) > 2 * NEARLY
        assert shortfall(checkpoint, adapted(old), with_adapter) > 2 * NEARLY


def drafted_tokens(server: Server, what: str = "draft") -> float:
    with server.open("/metrics") as reply:
        lines = reply.read().decode().splitlines()
    (drafted,) = [line for line in lines if line.startswith(f"vllm:spec_decode_num_{what}_tokens_total{{")]
    return float(drafted.rpartition(" ")[2])


def test_tokens_were_guessed_meanwhile(server: Server) -> None:
    assert drafted_tokens(server) > 0


@pytest.mark.parametrize("mode", ["keep", "abort", "wait"])
def test_a_pause_of_another_client_outlasts_a_commit(server: Server, mode: str) -> None:
    with server.open(f"/pause?mode={mode}", {}):
        pass
    for _ in range(2):
        server.step()
        server.assert_serves(server.publish())
        assert server.json("/is_paused") == {"is_paused": True}
    with server.open("/resume", {}):
        pass
    server.step()
    server.assert_serves(server.publish())
    assert server.json("/is_paused") == {"is_paused": False}
    assert len(greedy(server)) == 40


def test_nothing_is_touched_while_vllm_sleeps(server: Server, checkpoint: Path) -> None:
    version, commits = server.status()["version"], len(server.status()["commits"])
    before = digests(server.weights)
    with server.open("/sleep?level=1", {}):
        pass
    status = server.wait(lambda status: status["state"] == "sleeping")
    assert "vLLM sleeps" in status["error"]
    server.step(0.05)
    published = server.publish()
    time.sleep(0.5)  # ten looks at the channel
    status = server.status()
    assert (status["state"], status["version"], len(status["commits"])) == ("sleeping", version, commits)
    with pytest.raises(urllib.error.HTTPError, match="503") as caught:
        server.json("/deltasync/digest")
    with caught.value:
        assert json.load(caught.value)["error"].count("vLLM sleeps.") == 1
    assert server.json("/is_sleeping") == {"is_sleeping": True}
    with server.open("/wake_up", {}):
        pass
    server.assert_serves(published)
    assert before != digests(server.weights)
    assert shortfall(checkpoint, server.weights, greedy(server)) < NEARLY


def test_after_a_sleep_that_gives_up_weights_the_bits_are_the_published_ones(server: Server) -> None:
    with server.open("/sleep?level=2", {}):
        pass
    server.wait(lambda status: status["state"] == "sleeping")
    version = server.status()["version"]
    with server.open("/wake_up", {}):
        pass
    server.wait(lambda status: status["state"] == "serving")
    server.assert_serves(version)


def test_a_draft_model_keeps_its_own_weights(tmp_path: Path) -> None:
    draft = save_model(tmp_path, Qwen3Config, intermediate_size=192, head_dim=32, num_hidden_layers=1)
    target = save_model(tmp_path / "target", Qwen3Config, intermediate_size=192, head_dim=32)
    guess = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3}
    with serving(target, "--speculative-config", json.dumps(guess)) as server:
        server.assert_serves(server.publish())
        assert server.status()["patched_tensors"] == len(server.weights)
        for _ in range(2):
            server.step(0.05)
            server.assert_serves(server.publish())
            assert shortfall(target, server.weights, greedy(server)) < NEARLY
        assert drafted_tokens(server) > 0


def save_bigram(folder: Path, layers: int, *names: str) -> dict[str, torch.Tensor]:
    """A Llama whose layers add nothing, so that each token follows from the last. Returns its tensors with
    such names.
    """
    path = (
        save_model(folder, LlamaConfig, intermediate_size=192, num_hidden_layers=layers) / "model.safetensors"
    )
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    return {
        name: tensor for name, tensor in tensors.items() if not names or any(part in name for part in names)
    }


def test_an_eagle_head_that_is_trained_too_keeps_being_accepted(tmp_path: Path) -> None:
    """Each version changes signs before the head, in the model and in its draft: with old ones the draft only
    guesses.
    """
    own = save_bigram(tmp_path / "draft", 1, "self_attn", "mlp", "post_attention_layernorm")
    head = {name.removeprefix("model."): tensor for name, tensor in own.items()}
    head["fc.weight"] = torch.cat([torch.eye(128), torch.zeros(128, 128)], 1).to(torch.bfloat16)
    save_file(head, tmp_path / "draft" / "model" / "model.safetensors", {"format": "pt"})
    save_file(save_bigram(tmp_path, 2), tmp_path / "model" / "model.safetensors", {"format": "pt"})
    guess = {"method": "eagle", "model": str(tmp_path / "draft" / "model"), "num_speculative_tokens": 2}
    rng, accepted = torch.Generator().manual_seed(0), []
    with serving(tmp_path / "model", "--speculative-config", json.dumps(guess)) as server:
        server.weights |= {f"draft.{name}": tensor.float() for name, tensor in head.items()}
        for _ in range(20):
            signs = torch.randint(2, (128,), generator=rng) * 2.0 - 1
            server.weights["model.norm.weight"].copy_(signs)
            server.weights["draft.fc.weight"][:, :128] = signs.diag()
            server.assert_serves(server.publish())
            before = [drafted_tokens(server, what) for what in ("accepted", "draft")]
            greedy(server)
            now = [drafted_tokens(server, what) for what in ("accepted", "draft")]
            accepted.append((now[0] - before[0]) / (now[1] - before[1]))
        status = server.status()
    assert (
        status["draft"] == "EagleLlamaForCausalLM, which drafts tokens, is followed as a part of the model."
    )
    assert (status["patched_tensors"], status["ignored_tensors"]) == (len(server.weights), 0)
    assert min(accepted) > 0.9


def test_quantized_layers_have_twins(tmp_path: Path) -> None:
    model = save_model(tmp_path, Qwen3Config, intermediate_size=192, head_dim=32)
    with serving(model, "--quantization", "fp8_per_channel") as server:
        server.assert_serves(server.publish())
        assert server.status()["twinned_tensors"] == 14
        before = greedy(server)
        server.step(0.05)
        server.assert_serves(server.publish())
        tokens = greedy(server)
        assert tokens != before
        version = server.status()["version"]
        server.step(0.05)
        server.publish_wrong_bits()
        assert server.status()["version"] == version
        assert greedy(server) == tokens
