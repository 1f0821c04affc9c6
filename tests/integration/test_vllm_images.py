"""A real vLLM that sees, whose vision tower alone changes: no request uses features that other weights
computed.

What a request should be answered is what transformers makes of the version's weights.
"""

from __future__ import annotations

import base64
import functools
import io
import itertools
import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from deltasync import Publisher
from tests.integration.vllm_server import PATIENCE_S, Server, Weights, save_vision_model, serving

pytestmark = pytest.mark.vllm

CLOSE = 0.2  # nats by which vLLM in bfloat16 differs from transformers
FAR = 0.6  # what the least change of the tower makes of them

ORDERS = ((0,), (1,), (0, 1), (1, 0, 1), (0, 0), (2, 0, 1))  # images repeated and interleaved


@functools.cache
def picture(seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (56, 56, 3), dtype=np.uint8))


@functools.cache
def address(seed: int) -> str:
    file = io.BytesIO()
    picture(seed).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def message(order: tuple[int, ...], text: str) -> dict[str, Any]:
    images = [{"type": "image_url", "image_url": {"url": address(seed)}} for seed in order]
    return {"role": "user", "content": [*images, {"type": "text", "text": text}]}


def ask(server: Server, order: tuple[int, ...], **fields: Any) -> tuple[dict[int, float], set[int]]:
    """How likely each first token is that vLLM names, by its id; and the first and last version while it was
    made.
    """
    body = {
        "model": server.json("/v1/models")["data"][0]["id"],
        "messages": [message(order, "what?")],
        "max_tokens": 4,
        "ignore_eos": True,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 8,
        "return_tokens_as_token_ids": True,
        **fields,
    }
    with server.open("/v1/chat/completions", body) as reply:
        versions = set(map(int, reply.headers["x-deltasync-versions"].split("..")))
        first = json.load(reply)["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    return {int(each["token"].removeprefix("token_id:")): each["logprob"] for each in first}, versions


class Expected:
    """What transformers makes of the weights of a version."""

    def __init__(self, checkpoint: Path) -> None:
        from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor

        self._processor = AutoProcessor.from_pretrained(checkpoint)
        self._model = AutoModelForImageTextToText.from_config(
            AutoConfig.from_pretrained(checkpoint), dtype=torch.float32
        )

    def load(self, weights: Weights) -> None:
        self._model.load_state_dict(
            {name: tensor.to(torch.bfloat16).float() for name, tensor in weights.items()}
        )

    def logits(self, tokens: list[int], order: tuple[int, ...]) -> torch.Tensor:
        """How likely each token is after each of these, which see these images."""
        seen = {}
        if order:
            seen = dict(
                self._processor.image_processor([[picture(seed) for seed in order]], return_tensors="pt")
            )
        with torch.no_grad():
            found: torch.Tensor = (
                self._model(input_ids=torch.tensor([tokens]), **seen).logits[0].log_softmax(-1)
            )
        return found

    def answers(self, weights: Weights) -> list[list[float]]:
        """For each of `ORDERS`, how likely each token is to be the first after "what?"."""
        self.load(weights)
        found = []
        for order in ORDERS:
            images = [[picture(seed) for seed in order]]
            (tokens,) = self._processor(text="<image>" * len(order) + "what?", images=images)["input_ids"]
            found.append(self.logits(tokens, order)[-1].tolist())
        return found


def apart(found: dict[int, float], expected: list[float]) -> float:
    return max(abs(likely - expected[token]) for token, likely in found.items())


def change_tower(weights: Weights, rng: torch.Generator) -> None:
    for name, tensor in weights.items():
        if "vision_model" in name and tensor.ndim > 1:
            tensor += 0.5 * tensor.std() * torch.randn(tensor.shape, generator=rng)


@pytest.mark.parametrize("kv_cache", ["keep", pytest.param("recompute", marks=pytest.mark.slow)])
def test_images_are_seen_by_the_version_that_answers(tmp_path: Path, kv_cache: str) -> None:
    checkpoint = save_vision_model(tmp_path)
    expected: dict[int, list[list[float]]] = {}
    model = Expected(checkpoint)
    arguments = ("--max-num-batched-tokens", "64")  # so that prompts are computed in parts
    with (
        serving(checkpoint, *arguments, DELTASYNC_KV_CACHE=kv_cache) as server,
        ThreadPoolExecutor(12) as pool,
    ):
        stop = threading.Event()
        replies: list[tuple[int, dict[int, float], set[int]]] = []

        def keep_asking(client: int) -> None:
            for number in itertools.count(client):
                if stop.is_set():
                    return
                at = number % len(ORDERS)
                replies.append((at, *ask(server, ORDERS[at], max_tokens=4 + number % 30)))

        def publish() -> None:
            expected_now = model.answers(server.weights)
            version = server.publish()
            expected[version] = expected_now
            server.wait(lambda status: status["version"] == version)
            for at, order in enumerate(ORDERS):
                assert apart(ask(server, order)[0], expected_now[at]) < CLOSE, (version, order)

        publish()
        asking = [pool.submit(keep_asking, client) for client in range(8)]
        try:
            for _ in range(6):
                change_tower(server.weights, server.rng)
                publish()
        finally:
            stop.set()
        for each in asking:
            each.result()
        publish()
        assert server.status()["error"] is None
    for one, other in itertools.pairwise(list(expected.values())[:-1]):
        for a, b in zip(one, other, strict=True):
            likeliest = dict(sorted(enumerate(a), key=lambda each: -each[1])[:8])
            assert apart(likeliest, b) > FAR, "old features would be seen"
    whole = [(at, found, *versions) for at, found, versions in replies if len(versions) == 1]
    assert all(apart(found, expected[version][at]) < CLOSE for at, found, version in whole)
    assert 10 < len(whole) < len(replies), "some requests met a commit"


_OFFLINE = """
import json, sys
from vllm import LLM, SamplingParams
path, channel, *images = sys.argv[1:]
llm = LLM(path, enforce_eager=True, max_model_len=256, worker_extension_cls="vllm_plugin.DeltaSyncWorkerExtension")
import vllm_plugin
replica = vllm_plugin.follow(llm, channel)
for version in (1, 2):
    print("VERSION", replica.sync(version, timeout_s=100), flush=True)
    for order in json.loads(sys.stdin.readline()):
        content = [{"type": "image_url", "image_url": {"url": images[seed]}} for seed in order]
        messages = [{"role": "user", "content": [*content, {"type": "text", "text": "what?"}]}]
        (reply,) = llm.chat(messages, SamplingParams(temperature=0, max_tokens=1, logprobs=8), use_tqdm=False)
        found = reply.outputs[0].logprobs[0]
        print("FOUND " + json.dumps([[token, each.logprob] for token, each in found.items()]), flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("processes", ["0", "1"])
def test_offline_an_image_is_seen_anew_after_a_version(tmp_path: Path, processes: str) -> None:
    """In a process of its own, which has its engine in itself or in another one."""
    checkpoint, channel = save_vision_model(tmp_path), f"file://{tmp_path}/channel"
    weights = {name: tensor.float() for name, tensor in load_file(checkpoint / "model.safetensors").items()}
    environ = {
        "DELTASYNC_CHANNEL": channel,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": processes,
        "VLLM_NO_USAGE_STATS": "1",
    }
    model, rng = Expected(checkpoint), torch.Generator().manual_seed(0)
    command = [sys.executable, "-c", _OFFLINE, str(checkpoint), channel, *map(address, range(3))]
    with (
        Publisher(channel) as publisher,
        (tmp_path / "log").open("w") as log,
        subprocess.Popen(
            command,
            env={**os.environ, **environ},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        ) as process,
    ):
        assert process.stdin is not None and process.stdout is not None
        try:
            for version in (1, 2):
                expected = model.answers(weights)
                publisher.publish(weights.items()).wait(PATIENCE_S)
                process.stdin.write(json.dumps(ORDERS) + "\n")
                process.stdin.flush()
                lines = (line for line in process.stdout if line.startswith(("VERSION", "FOUND")))
                assert next(lines, None) == f"VERSION {version}\n", (tmp_path / "log").read_text()[-2000:]
                for at in range(len(ORDERS)):
                    assert apart(dict(json.loads(next(lines).removeprefix("FOUND "))), expected[at]) < CLOSE
                change_tower(weights, rng)
        finally:
            process.kill()
