"""A real vLLM that follows the adapter of a PEFT model while it is trained."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import threading
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3Config, TrainerCallback

from deltasync import Publisher
from deltasync.opening.adapter_base import FILE, AdapterBase
from deltasync.serve import heartbeat
from deltasync.tensors.bits import bits_of
from tests.integration.expected_tokens import NEARLY, greedy, shortfall
from tests.integration.trainers import make_trainer, run_id
from tests.integration.vllm_server import PATIENCE_S, Server, save_model, serving
from trl_callback import DeltaSyncCallback, adapter, gather
from vllm_plugin.adapter_files import linked

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

LORA = LoraConfig(
    r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False
)
STEPS = 3


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("vllm"), Qwen3Config, intermediate_size=192, head_dim=32)


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[Server]:
    """Nothing but `--adapter` makes it follow; vLLM's own routes are there to load what it is compared
    with.
    """
    scratch = checkpoint.parent / "scratch"
    scratch.mkdir()
    environ = {"TMPDIR": str(scratch), "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    environ["DELTASYNC_ADAPTER"] = "policy"
    with serving(checkpoint, "--enable-lora", "--max-loras", "4", **environ) as server:
        yield server
    assert not list(scratch.glob("deltasync-adapter-*"))


def loaded(server: Server, name: str) -> tuple[dict[str, torch.Tensor], bytes]:
    """The tensors and the config of a version, as vLLM's workers read them."""
    (path,) = {each["root"] for each in server.json("/v1/models")["data"] if each["id"] == name}
    with linked(path) as folder:
        tensors = load_file(folder / "adapter_model.safetensors")
        return tensors, (folder / "adapter_config.json").read_bytes()


def sha256(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    return {name: hashlib.sha256(bits_of(tensor).tobytes()).hexdigest() for name, tensor in tensors.items()}


class Comparer(TrainerCallback):
    """After each step: the server serves the trainer's adapter, and makes the tokens that it makes."""

    def __init__(self, server: Server, checkpoint: Path) -> None:
        self.server, self.checkpoint = server, checkpoint
        self.tokens: list[list[int]] = []

    def on_train_begin(self, *_: Any, model: Any = None, **__: Any) -> None:
        self.compare(model)

    def on_step_end(self, *_: Any, model: Any = None, **__: Any) -> None:
        self.compare(model)

    def compare(self, model: PeftModel) -> None:
        version = len(self.tokens) + 1
        self.server.wait(lambda status: status["version"] == version)
        own = self.checkpoint.parent / f"own-v{version}"
        model.save_pretrained(own)  # in float32, of which vLLM makes bfloat16
        saved = {
            name: tensor.bfloat16() for name, tensor in load_file(own / "adapter_model.safetensors").items()
        }
        tensors, config = loaded(self.server, f"policy-v{version}")
        assert sha256(tensors) == sha256(saved)
        assert json.loads(config) == json.loads((own / "adapter_config.json").read_bytes())
        assert self.server.json("/deltasync/digest") == {"version": version, "sha256": sha256(saved)}

        with self.server.open("/v1/load_lora_adapter", {"lora_name": own.name, "lora_path": str(own)}):
            pass
        tokens = greedy(self.server, f"policy-v{version}")
        assert tokens == greedy(self.server, "policy") == greedy(self.server, own.name)
        merged = dict(gather.stream_of(model))
        assert shortfall(self.checkpoint, merged, tokens) < NEARLY
        self.tokens.append(tokens)


def test_the_server_follows_a_trainer_bit_for_bit_and_token_for_token(
    server: Server, checkpoint: Path, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32), LORA)
    sync = DeltaSyncCallback(server.channel, adapter_only=True)
    comparer = Comparer(server, checkpoint)
    make_trainer(model, tmp_path, sync, comparer, max_steps=STEPS, learning_rate=1e-2).train()

    assert [record.version for record in sync.history] == list(range(1, STEPS + 2))
    assert len({tuple(tokens) for tokens in comparer.tokens}) == STEPS + 1
    assert shortfall(checkpoint, server.weights, comparer.tokens[-1]) > 2 * NEARLY
    newest = STEPS + 1
    status = server.status()
    assert status["adapters"] == ["policy", *(f"policy-v{version}" for version in range(newest, 0, -1))]
    (base,) = status["base_models"]
    assert (status["state"], status["error"], status["version"]) == ("serving", None, newest)
    assert [commit["version"] for commit in status["commits"]] == list(range(1, newest + 1))
    assert [commit["anchor"] for commit in status["commits"]] == [True] + [False] * STEPS
    assert greedy(server, f"policy-v{newest - 1}") == comparer.tokens[-2]
    request = {"model": "policy", "prompt": [5], "max_tokens": 1}
    for name, made_by in (("policy", newest), ("policy-v1", 1), (base, None)):
        with server.open("/v1/completions", request | {"model": name}) as reply:
            assert reply.headers.get("x-deltasync-versions") == (made_by and f"{made_by}..{made_by}")
            assert json.load(reply)["model"] == ("policy" if made_by else base)
    demand = {"x-deltasync-version": f">={newest}", "x-deltasync-timeout": "5"}
    with server.open("/v1/completions", request, **demand) as reply:
        assert reply.headers["x-deltasync-versions"] == f"{newest}..{newest}"
    for name, headers, said in (
        ("policy-v99", {}, "policy-v99 is not served here. Name policy, the newest version, or one"),
        ("policy-v1", demand, f"Version >={newest} was asked for, and this server serves version 1."),
        (base, demand, "No version makes this reply."),
    ):
        with pytest.raises(urllib.error.HTTPError, match="409") as caught:
            server.open("/v1/completions", request | {"model": name}, **headers)
        with caught.value as error:
            assert said in json.load(error)["error"]["message"]
    beats = heartbeat.read_all(server.store, run_id(server.channel))
    assert [(beat.replica_id, beat.version) for beat in beats] == [("test-server", newest)]
    with server.open("/metrics") as reply:
        assert f"deltasync_served_version {newest}.0" in reply.read().decode()


def test_a_request_keeps_the_version_that_it_began_with(server: Server, checkpoint: Path) -> None:
    first = server.status()["version"]
    tensors, text = loaded(server, f"policy-v{first}")
    config = {"adapter_config.json": text}
    undisturbed = greedy(server, f"policy-v{first}", 900)
    found: list[list[int]] = []
    request = threading.Thread(target=lambda: found.append(greedy(server, "policy", 900)))
    request.start()
    server.wait_for_requests(1)
    with Publisher(server.channel, resume=True, model_files=config) as publisher:
        for version in range(first + 1, first + 4):
            for tensor in tensors.values():
                tensor += 0.05 * torch.randn(tensor.shape, generator=server.rng).to(tensor.dtype)
            assert publisher.publish(tensors.items()).wait(PATIENCE_S).version == version
            server.wait(lambda status, version=version: status["version"] == version)
    assert request.is_alive()
    assert f"policy-v{first}" in server.status()["adapters"]
    request.join()
    assert found == [undisturbed]
    assert greedy(server, "policy", 900) != undisturbed
    # those that requests used stay, and the one between that none used goes
    server.wait(lambda status: f"policy-v{first + 1}" not in status["adapters"])
    assert server.status()["adapters"][:4] == [
        "policy",
        *(f"policy-v{version}" for version in (first + 3, first + 2, first)),
    ]


def test_requests_end_at_the_version_that_makes_their_own_too_old(server: Server, checkpoint: Path) -> None:
    first = server.status()["version"]
    tensors, text = loaded(server, f"policy-v{first}")
    ended = re.compile(r"^deltasync_ended_choices_total (\S+)$", re.MULTILINE)

    def ended_choices() -> float:
        with server.open("/metrics") as reply:
            return float(ended.findall(reply.read().decode())[0])

    before = ended_choices()
    found: dict[int | None, list[tuple[str, list[list[int]]]]] = {}

    def ask(lag: int | None) -> None:
        headers = {} if lag is None else {"x-deltasync-max-lag": str(lag)}
        body = {
            "model": "policy",
            "prompt": [[5, 6, 7], [8, 9]],
            "n": 2,
            "max_tokens": 900,
            "ignore_eos": True,
        }
        with server.open("/v1/completions", body | {"temperature": 1.0}, **headers) as reply:
            reasons = [each["finish_reason"] for each in json.load(reply)["choices"]]
            assert reply.headers["x-deltasync-versions"] == f"{first}..{first}"
            found[lag] = list(zip(reasons, json.loads(reply.headers["x-deltasync-spans"]), strict=True))

    asking = {lag: threading.Thread(target=ask, args=(lag,)) for lag in (None, 0, 1)}
    with Publisher(server.channel, resume=True, model_files={"adapter_config.json": text}) as publisher:

        def publish() -> None:
            for tensor in tensors.values():
                tensor += 0.05 * torch.randn(tensor.shape, generator=server.rng).to(tensor.dtype)
            version = publisher.publish(tensors.items()).wait(PATIENCE_S).version
            server.wait(lambda status: status["version"] == version)

        for thread in asking.values():
            thread.start()
        server.wait_for_requests(8)
        publish()
        asking[0].join()
        publish()
        asking[1].join()
        for lag in (0, 1):
            with pytest.raises(urllib.error.HTTPError, match="409") as caught:
                request = {"model": f"policy-v{first}", "prompt": [5], "max_tokens": 1}
                server.open("/v1/completions", request, x_deltasync_max_lag=str(lag))
            with caught.value as error:
                assert (
                    f"policy-v{first} is older than version {first + 2}"
                    in json.load(error)["error"]["message"]
                )
        publish()
        asking[None].join()
    assert found[None] == [("length", [[first, 900]])] * 4
    for lag in (0, 1):
        assert [reason for reason, _ in found[lag]] == ["abort"] * 4
        assert all(len(spans) <= 1 and sum(count for _, count in spans) < 900 for _, spans in found[lag])
    assert ended_choices() - before == 8


def test_an_adapter_of_another_base_leaves_the_one_before(server: Server, checkpoint: Path) -> None:
    status, before = server.status(), greedy(server, "policy")
    tensors, text = loaded(server, f"policy-v{status['version']}")
    config = {"adapter_config.json": text}
    last = max(server.weights)
    other = server.weights | {last: server.weights[last] + 1}
    for name, weights in (("another-model", other), ("this-model", server.weights)):
        files = config | {FILE: AdapterBase.of(name, weights.items()).encode()}
        with Publisher(server.channel, resume=True, model_files=files) as publisher:
            version = publisher.publish(tensors.items()).wait(PATIENCE_S).version
        if weights is other:
            failed = server.wait(lambda status: status["state"] == "failed")
            assert (
                f"was trained on another-model, and {checkpoint}, which is served here, has other"
                in failed["error"]
            )
            assert f"weights: {last}." in failed["error"]
            assert (failed["version"], failed["newest_version"]) == (status["version"], version)
        else:
            server.wait(lambda status, version=version: status["version"] == version)
        assert greedy(server, "policy") == before


def test_an_adapter_that_vllm_cannot_load_leaves_the_one_before(server: Server, checkpoint: Path) -> None:
    status = server.status()
    before = greedy(server, "policy")
    tensors, text = loaded(server, f"policy-v{status['version']}")
    config = json.loads(text) | {"r": 64}
    with Publisher(
        server.channel,
        resume=True,
        anchor_every=1,
        model_files={"adapter_config.json": json.dumps(config).encode()},
    ) as publisher:
        version = publisher.publish(tensors.items()).wait(PATIENCE_S).version
        failed = server.wait(lambda status: status["state"] == "failed")
        assert "vLLM did not load policy-v" in failed["error"]
        assert "64" in failed["error"]
        assert (failed["version"], failed["newest_version"]) == (status["version"], version)
        assert greedy(server, "policy") == before
    config["r"] = LORA.r
    with Publisher(
        server.channel,
        resume=True,
        anchor_every=1,
        model_files={"adapter_config.json": json.dumps(config).encode()},
    ) as publisher:
        publisher.publish(tensors.items()).wait(PATIENCE_S)
    server.wait(lambda status: status["version"] == version + 1)
    assert greedy(server, "policy") == before


def test_an_adapter_of_which_vllm_would_leave_layers_out_is_not_served(tmp_path: Path) -> None:
    checkpoint = save_model(tmp_path / "vllm", Qwen3Config, intermediate_size=192, head_dim=32)
    lora = LoraConfig(r=8, target_modules=["q_proj", "o_proj", "up_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(checkpoint), lora)
    targets = ["qkv_proj", "o_proj"]
    arguments = ("--enable-lora", "--max-lora-rank", "8", "--lora-target-modules", *targets)
    with serving(checkpoint, *arguments, DELTASYNC_ADAPTER="policy") as server:
        with Publisher(server.channel, model_files=adapter.files(model)) as publisher:
            publisher.publish(adapter.tensors(model).items())
        status = server.wait(lambda status: status["state"] == "failed")
        left = ", ".join(f"model.layers.{layer}.mlp.up_proj" for layer in range(2))
        assert f"would leave {left} of the adapter out: its options (--lora-target" in status["error"]
        assert (status["version"], status["adapters"]) == (None, ["policy"])
        assert (status["max_lora_rank"], status["lora_target_modules"]) == (8, targets)


@pytest.fixture
def small_server(tmp_path: Path) -> Iterator[Server]:
    """One that holds one adapter at a time, so that each change of the name reads files again."""
    checkpoint = save_model(tmp_path / "vllm", Qwen3Config, intermediate_size=192, head_dim=32)
    with serving(
        checkpoint,
        *("--enable-lora", "--max-loras", "1", "--max-cpu-loras", "1", "--max-lora-rank", "16"),
        DELTASYNC_ADAPTER="policy",
        TMPDIR=str(tmp_path),
    ) as server:
        yield server


def resident_bytes(server: Server) -> int:
    """The memory of the server and of all that it started."""
    (path,) = {each["root"] for each in server.json("/v1/models")["data"][-1:]}
    process = psutil.Process(int(path.split("/")[2]))
    return sum(each.memory_info().rss for each in (process, *process.children(recursive=True)))


def test_two_hundred_versions_beside_two_names_and_a_cleaner(small_server: Server, tmp_path: Path) -> None:
    server, made, failed = small_server, [], list[str]()
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "vllm" / "model"), LORA)
    tensors = {name: tensor.bfloat16() for name, tensor in adapter.tensors(model).items()}
    is_over = threading.Event()

    def ask(name: str) -> None:
        while not is_over.is_set():
            try:
                made.append(len(greedy(server, name, 4)))
            except urllib.error.HTTPError as error:
                with error:
                    failed.append(f"{name}: {error.code} {error.read()[:200]!r}")

    threads = [threading.Thread(target=ask, args=(name,)) for name in ("policy", "policy-v1")]
    resident = dict[int, int]()
    with Publisher(server.channel, model_files=adapter.files(model)) as publisher:
        for version in range(1, 201):
            for tensor in tensors.values():
                tensor += 1e-3 * torch.randn(tensor.shape, generator=server.rng).to(tensor.dtype)
            publisher.publish(tensors.items()).wait(PATIENCE_S)
            server.wait(lambda status, version=version: status["version"] == version)
            if version == 1:
                for thread in threads:
                    thread.start()
            for folder in tmp_path.glob("deltasync-adapter-*"):
                shutil.rmtree(folder)
            if version in (100, 200):
                resident[version] = resident_bytes(server)
    is_over.set()
    for thread in threads:
        thread.join()
    assert failed == []
    assert len(made) > 100
    assert resident[200] < 1.03 * resident[100]
    assert sha256(loaded(server, "policy-v200")[0]) == sha256(tensors)
