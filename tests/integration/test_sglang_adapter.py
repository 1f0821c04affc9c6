"""A real SGLang server, which computes on CPUs, follows an adapter's channel; see `make test-sglang`."""

from __future__ import annotations

import contextlib
import json
import threading
import urllib.error
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, set_peft_model_state_dict
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3Config

from deltasync import Publisher
from deltasync.opening.adapter_base import FILE, AdapterBase
from demo.processes import Child
from tests import sglang_server
from tests.integration.expected_tokens import NEARLY
from tests.integration.test_sglang import PROMPT, generate, made, serving, versions
from tests.integration.vllm_server import PATIENCE_S, Server, save_model
from trl_callback import adapter

pytestmark = pytest.mark.skipif(sglang_server.missing() is not None, reason=str(sglang_server.missing()))

# by which SGLang scales otherwise, and of modules that it fuses some
LORA = LoraConfig(
    r=8,
    lora_alpha=4,
    use_rslora=True,
    target_modules=["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    task_type="CAUSAL_LM",
    init_lora_weights=False,
)
OPTIONS = (
    *("--enable-lora", "--lora-backend", "torch_native", "--max-lora-rank", "16"),
    *("--lora-target-modules", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    *("--max-loras-per-batch", "3", "--enable-metrics"),
)


class Run:
    """A trainer of an adapter, and a server that follows it."""

    def __init__(self, checkpoint: Path, server: Server, child: Child) -> None:
        self.server, self.child = server, child
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        self.peft: PeftModel = get_peft_model(model, LORA)
        base = load_file(checkpoint / "model.safetensors")
        self.files = adapter.files(self.peft) | {FILE: AdapterBase.of("base", base.items()).encode()}
        self.publisher = Publisher(server.channel, model_files=self.files)
        self.tensors = {name: tensor.bfloat16() for name, tensor in adapter.tensors(self.peft).items()}
        self.by_version: dict[int, dict[str, torch.Tensor]] = {}

    def publish(self, size: float = 0.1) -> int:
        """The next version, once it is served."""
        for name, tensor in self.tensors.items():
            noise = torch.randn(tensor.shape, generator=self.server.rng)
            self.tensors[name] = tensor + size * noise.to(tensor.dtype)
        version = self.publisher.publish(self.tensors.items()).wait(PATIENCE_S).version
        self.by_version[version] = dict(self.tensors)
        self.server.wait(lambda status: status["version"] == version)
        return version

    def by_peft(self, version: int, tokens: list[int]) -> list[float]:
        """The log probabilities of these tokens after `PROMPT`, by PEFT in float32."""
        state = {name: tensor.float() for name, tensor in self.by_version[version].items()}
        assert not set_peft_model_state_dict(self.peft, state).unexpected_keys
        with torch.no_grad():
            logits = self.peft(input_ids=torch.tensor([PROMPT + tokens])).logits[0, len(PROMPT) - 1 : -1]
        return [
            float(each) for each in logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]
        ]

    def resident_bytes(self) -> int:
        """The memory of the server and of all that it started."""
        return sum(psutil.Process(pid).memory_info().rss for pid in self.child.pids())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    checkpoint = save_model(
        tmp_path_factory.mktemp("sglang"), Qwen3Config, intermediate_size=192, head_dim=32
    )
    channel = f"file://{checkpoint.parent}/channel"
    with serving(checkpoint, channel, *OPTIONS, DELTASYNC_ADAPTER="policy") as (server, child):
        assert refused(server, "/generate", {"text": "a"})[0] == 503
        code, text = refused(server, "/generate", {"text": "a", "lora_path": "policy"})
        assert (code, "No version of policy is served yet." in text) == (503, True)
        run = Run(checkpoint, server, child)
        yield run
        run.publisher.close()


def refused(server: Server, path: str, body: Mapping[str, Any], **headers: str) -> tuple[int, str]:
    """Code and text of an error."""
    with pytest.raises(urllib.error.HTTPError) as caught:
        server.open(path, body, **headers)
    with caught.value as error:
        return error.code, error.read().decode()


def distance(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def test_replies_are_pefts_at_each_version_and_keys_of_others_are_never_found(run: Run) -> None:
    for version in range(1, 6):
        assert run.publish() == version
        for asked in range(1, version + 1):
            name = "policy" if asked == version else f"policy-v{asked}"
            reply = generate(run.server, lora_path=name)
            tokens, logprobs = made(reply)
            assert distance(logprobs, run.by_peft(asked, tokens)) < NEARLY
            assert versions(reply) == [(asked, 0, len(tokens))]
            assert reply["meta_info"]["weight_version"] == str(asked)
    others = [run.by_peft(each, tokens) for each in range(1, 5)]
    assert min(distance(logprobs, other) for other in others) > 2 * NEARLY
    base = made(generate(run.server))[1]
    assert distance(base, logprobs) > 2 * NEARLY
    digest = run.server.json("/deltasync/digest")
    assert digest["version"] == 5 and set(digest["sha256"]) == set(run.tensors)


def test_a_reply_names_the_adapter_and_its_version(run: Run) -> None:
    server, newest = run.server, max(run.by_version)
    status = server.status()
    (base,) = status["base_models"]
    kept = [f"policy-v{version}" for version in range(newest, 0, -1)]
    assert status["adapters"] == ["policy", *kept]
    assert (status["state"], status["error"]) == ("serving", None)
    assert {each["id"] for each in server.json("/v1/models")["data"]} == {base, "policy", *kept}
    request = {"prompt": "a", "max_tokens": 2}
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    for path, body in (("/v1/completions", request), ("/v1/chat/completions", chat)):
        for fields, made_by in (
            *(
                ({"model": "policy"}, newest),
                ({"model": "policy-v1"}, 1),
                ({"model": f"{base}:policy-v2"}, 2),
            ),
            *(({"model": base, "lora_path": "policy-v3"}, 3), ({"model": base}, None)),
        ):
            for stream in (False, True):
                with server.open(path, body | fields | {"stream": stream}) as reply:
                    named = made_by and f"{made_by}..{made_by}"
                    assert reply.headers.get("x-deltasync-versions") == named
                    text = reply.read().decode()
                first = json.loads(text.split("\n")[0].removeprefix("data: "))
                assert first["model"] == ("policy" if made_by else base)
    with server.open("/metrics") as reply:
        assert f"deltasync_served_version {newest}.0" in reply.read().decode()


def test_a_request_gets_the_version_that_it_demands_or_409(run: Run) -> None:
    server, newest = run.server, max(run.by_version)
    request = {"prompt": "a", "max_tokens": 1}
    for headers, made_by in (
        ({"x-deltasync-version": "2"}, 2),
        ({"x-deltasync-version": f">={newest}"}, newest),
    ):
        with server.open("/v1/completions", request | {"model": "policy"}, **headers) as reply:
            assert reply.headers["x-deltasync-versions"] == f"{made_by}..{made_by}"
    demand = {"x-deltasync-version": f">={newest}", "x-deltasync-timeout": "5"}
    for model, headers, said in (
        (
            "policy-v99",
            {},
            "policy-v99 is not served here. Name policy, the newest version, or one that is kept:",
        ),
        ("policy-v1", demand, f"Version >={newest} was asked for, and this server serves version 1."),
        ("base", demand, "No version makes this reply."),
    ):
        for path, asked in (
            ("/v1/completions", request | {"model": model}),
            ("/generate", {"text": "a", "lora_path": None if model == "base" else model}),
        ):
            code, sentence = refused(server, path, asked, **headers)
            assert code == 409 and said in sentence
    several = {"text": ["a", "b"], "lora_path": ["policy", "policy-v1"]}
    assert refused(server, "/generate", several)[0] == 400
    both = server.json("/generate", several | {"lora_path": ["policy-v1"] * 2})
    assert [each["meta_info"]["weight_version"] for each in both] == ["1", "1"]


def test_an_adapter_that_sglang_would_compute_otherwise_leaves_the_one_before(run: Run) -> None:
    server, newest = run.server, max(run.by_version)
    before = made(generate(server, lora_path="policy"))[0]
    run.publisher.close()
    config = json.loads(run.files["adapter_config.json"])
    for change, said in (
        ({"alpha_pattern": {"q_proj": 1}}, "this adapter has others: q_proj"),
        ({"r": 4}, "this adapter has others: base_model"),
    ):
        files = run.files | {"adapter_config.json": json.dumps(config | change).encode()}
        with Publisher(server.channel, resume=True, anchor_every=1, model_files=files) as publisher:
            publisher.publish(run.tensors.items()).wait(PATIENCE_S)
        failed = server.wait(lambda status, said=said: said in (status["error"] or ""))
        assert (failed["state"], failed["version"]) == ("failed", newest)
        assert made(generate(server, lora_path="policy"))[0] == before
    run.publisher = Publisher(server.channel, resume=True, model_files=run.files)
    assert run.publish() == newest + 3


def test_two_hundred_versions_beside_two_names(run: Run) -> None:
    server, failed, count, is_over = run.server, list[str](), 0, threading.Event()
    first = run.publish()
    conversation = f"policy-v{first}"

    def ask(name: str) -> None:
        nonlocal count
        while not is_over.is_set():
            try:
                generate(server, 4, lora_path=name)
                count += 1
            except urllib.error.HTTPError as error:
                with error:
                    failed.append(f"{name}: {error.code} {error.read()[:200]!r}")

    threads = [threading.Thread(target=ask, args=(name,)) for name in ("policy", conversation)]
    resident = dict[int, int]()
    with contextlib.ExitStack() as stack:
        stack.callback(is_over.set)
        for version in range(first + 1, first + 201):
            assert run.publish(1e-3) == version
            if version == first + 1:
                generate(server, 1, lora_path=conversation)
                for thread in threads:
                    thread.start()
            resident[version - first] = run.resident_bytes()
    for thread in threads:
        thread.join()
    assert not failed
    assert count > 50
    print(f"{count} requests; resident: {resident[100] >> 20} MB, {resident[200] >> 20} MB")
    assert abs(resident[200] - resident[100]) < 0.03 * resident[100]
    status = server.wait(lambda status: len(status["adapters"]) <= 9)
    assert conversation in status["adapters"]
    reply = generate(server, lora_path=conversation)
    assert distance(made(reply)[1], run.by_peft(first, reply["output_ids"])) < NEARLY
    code, sentence = refused(server, "/generate", {"text": "a", "lora_path": f"policy-v{first + 100}"})
    assert (code, f"policy-v{first + 100} is not served here." in sentence) == (409, True)
