"""A real vLLM that follows by the worker extension and DELTASYNC_CHANNEL alone: no driver, one worker and two."""

from __future__ import annotations

import hashlib
import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config

from deltasync import heartbeat, layout
from deltasync.bits import bits_of, cast
from deltasync.demo.processes import get_json
from deltasync.heartbeat import Heartbeat
from tests.integration.vllm_server import PATIENCE_S, Server, complete, save_model, serving, tells_of_wrong_bits

pytestmark = pytest.mark.vllm

EXTENSION = ("--worker-extension-cls", "vllm_plugin.DeltaSyncWorkerExtension")


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.slow)], ids=["one worker", "two workers"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("vllm")
    if request.param == 1:
        with serving(save_model(folder), *EXTENSION, driver=False) as server:
            yield server
        return
    fields = {"vocab_size": 71, "intermediate_size": 192, "num_key_value_heads": 1, "tie_word_embeddings": True}
    checkpoint = save_model(folder, Qwen2Config, **fields)
    cores = sorted(os.sched_getaffinity(0))[-2:]
    bind = "|".join(map(str, cores))
    parallel = ("--tensor-parallel-size", "2")
    with serving(checkpoint, *EXTENSION, *parallel, cores=cores, driver=False, VLLM_CPU_OMP_THREADS_BIND=bind) as server:
        yield server


def wait(server: Server, condition: Callable[[Heartbeat], bool]) -> Heartbeat:
    """The server's heartbeat, once it is as wanted."""
    assert server.publisher is not None and server.publisher.run_id is not None
    deadline = time.monotonic() + PATIENCE_S
    while True:
        beats = heartbeat.read_all(server.store, server.publisher.run_id)
        if beats and condition(beats[0]):
            assert [beat.replica_id for beat in beats] == ["test-server"]
            return beats[0]
        assert time.monotonic() < deadline, beats
        time.sleep(0.01)


def call(server: Server, *arguments: str) -> list[dict[str, Any]]:
    """What each worker answers to a `deltasync_call`."""
    results: list[dict[str, Any]] = server.json("/collective_rpc", {"method": "deltasync_call", "args": arguments})[
        "results"
    ]
    return results


def assert_holds(server: Server, weights: dict[str, torch.Tensor]) -> None:
    """Live memory of all workers has the bits of these weights, every element of them."""
    workers = [reply["sha256"] for reply in call(server, "digest_segments")]
    for name, tensor in weights.items():
        flat = torch.from_numpy(bits_of(cast(tensor, "bfloat16")).view("i2")).reshape(-1)
        held = {}
        for of_worker in workers:
            for (offset, dims), sha256 in of_worker[name]:
                shape, stride = [size for size, _ in dims], [stride for _, stride in dims]
                expected = flat.as_strided(shape, stride, offset).contiguous().numpy()
                assert sha256 == hashlib.sha256(expected).hexdigest(), name
                held[offset, str(dims)] = math.prod(shape)
        assert sum(held.values()) == tensor.numel(), name


def assert_serves(server: Server, version: int) -> None:
    wait(server, lambda beat: (beat.version, beat.state, beat.error) == (version, "serving", None))
    assert_holds(server, server.weights)


def greedy(server: Server) -> list[int]:
    model = get_json(f"{server.url}/v1/models")["data"][0]["id"]
    body = {"model": model, "prompt": [5, 6, 7], "max_tokens": 30, "temperature": 0, "return_token_ids": True}
    tokens: list[int] = server.json("/v1/completions", {**body, "ignore_eos": True})["choices"][0]["token_ids"]
    return tokens


class Stream:
    """A streamed request; `tokens` is how many have arrived."""

    def __init__(self, server: Server, token_count: int) -> None:
        model = get_json(f"{server.url}/v1/models")["data"][0]["id"]
        body = {"model": model, "prompt": [5, 6, 7], "max_tokens": token_count, "ignore_eos": True}
        self._reply = server.open("/v1/completions", {**body, "stream": True, "return_token_ids": True})
        self.tokens = 0
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        with self._reply:
            for line in self._reply:
                if line.startswith(b"data: {"):
                    self.tokens += len(json.loads(line.removeprefix(b"data: "))["choices"][0]["token_ids"] or ())

    def running(self) -> bool:
        return self._thread.is_alive()

    def join(self) -> None:
        self._thread.join(PATIENCE_S)
        assert not self.running()


def test_the_first_version_is_recognised_and_later_ones_are_committed_while_idle(server: Server) -> None:
    fresh = greedy(server)
    first = {name: tensor.clone() for name, tensor in server.weights.items()}
    assert_serves(server, server.publish())
    assert greedy(server) == fresh
    for name in server.weights:
        server.weights[name] *= 1.5
    assert_serves(server, server.publish())
    assert greedy(server) != fresh
    for _ in range(3):
        server.step()
        assert_serves(server, server.publish())
    server.weights = first
    assert_serves(server, server.publish())
    assert greedy(server) == fresh


def test_versions_are_committed_while_a_request_streams(server: Server) -> None:
    complete(server.url, 5)
    committed, tokens = 0, []
    while committed < 5:
        stream = Stream(server, 900)
        while stream.running():
            server.step()
            version = server.publish()
            wait(server, lambda beat: beat.version == version)  # noqa: B023  # called before the loop goes on
            if stream.running():
                committed += 1
                tokens.append(stream.tokens)
            assert_holds(server, server.weights)
        stream.join()
        assert stream.tokens == 900
    assert len(set(tokens)) > 1  # they went on arriving from one version to the next


def test_a_damaged_payload_leaves_the_old_version_served_and_is_told_of(server: Server) -> None:
    version = wait(server, lambda beat: beat.state == "serving").version or 0
    before = {name: tensor.clone() for name, tensor in server.weights.items()}
    part = Path(server.channel.removeprefix("file://"), layout.delta_dir(version + 1), layout.delta_part(1, 1))
    whole = b""
    replace = type(server.store).replace

    def damage_first(self: Any, key: str, body: bytes) -> None:
        # The workers poll all the time, so the damage must be there before head names the version.
        nonlocal whole
        if key == layout.HEAD:
            whole = part.read_bytes()
            part.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        replace(self, key, body)

    server.step()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(server.store), "replace", damage_first)
        server.publish()
    beat = wait(server, lambda beat: beat.state == "failed")
    assert (beat.version, beat.head_version) == (version, version + 1)
    assert "sha256" in (beat.error or "")
    assert_holds(server, before)
    assert len(complete(server.url, 5)) == 5
    part.write_bytes(whole)
    assert_serves(server, version + 1)


def test_bits_that_are_not_the_published_ones_are_rolled_back_by_all_workers(server: Server) -> None:
    version = wait(server, lambda beat: beat.state == "serving").version
    before = {name: tensor.clone() for name, tensor in server.weights.items()}
    stream = Stream(server, 900)
    server.step()
    with server.publishing_a_wrong_fingerprint():
        server.publish()
    beat = wait(server, lambda beat: tells_of_wrong_bits(beat.error))
    assert (beat.version, beat.state) == (version, "failed")
    assert_holds(server, before)
    stream.join()
    assert stream.tokens == 900


def test_nobody_else_can_drive_workers_that_follow_by_themselves(server: Server) -> None:
    opened = server.json("/collective_rpc", {"method": "deltasync_open", "args": ["file:///other"]})["results"]
    assert all("VLLM_PLUGINS=deltasync" in reply["error"] for reply in opened)
    assert all("cannot be asked" in reply["error"] for reply in call(server, "undo"))
    assert get_json(f"{server.url}/weight_info")["weight_version"] == "default"  # the limit that the docs name
