"""A real vLLM with its prefix cache on, as it is by default: no prompt meets keys that older weights
computed.

What a request should be answered is asked of the same server with a salt that nobody has used, which computes
its whole prompt; and, in a slow test, of a server that has just loaded the last version and does not follow.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch

from demo.processes import Child, get_json
from demo.run import free_port
from tests.integration.vllm_server import PATIENCE_S, Server

pytestmark = pytest.mark.vllm

VERSIONS = 3
# nats by which bfloat16 on a CPU differs between a prompt that is computed at once and one in parts
CLOSE = 0.06
FAR = 0.25  # what other weights change at the least, at some token

Answer = tuple[list[int], list[float]]


def prompt_of(seed: int, length: int = 600) -> list[int]:
    return torch.randint(5, 40, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def change_much(server: Server, *, waits: bool = True) -> int:
    for tensor in server.weights.values():
        tensor += 0.1 * tensor.std() * torch.randn(tensor.shape, generator=server.rng)
    version = server.publish()
    if waits:
        server.wait(lambda status: status["version"] == version)
    return version


def model(server: Server) -> str:
    name: str = get_json(f"{server.url}/v1/models")["data"][0]["id"]
    return name


def body_of(server: Server, prompt: Any, count: int, **fields: Any) -> dict[str, Any]:
    """The body of a request whose answers can be compared: greedy, of a fixed length, with tokens and
    log-probabilities.
    """
    return {
        "model": model(server),
        "prompt": prompt,
        "max_tokens": count,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 0,
        "return_token_ids": True,
        **fields,
    }


def ask(
    server: Server, prompt: Any, *, headers: dict[str, str] | None = None, count: int = 8, **fields: Any
) -> Any:
    return server.json("/v1/completions", body_of(server, prompt, count, **fields), **(headers or {}))


def answer(server: Server, prompt: list[int], **fields: Any) -> Answer:
    (choice,) = ask(server, prompt, **fields)["choices"]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


def uncached(server: Server, prompt: list[int]) -> Answer:
    """The answer with no help of the cache."""
    before = hits(server)
    found = answer(server, prompt, cache_salt=uuid.uuid4().hex)
    assert hits(server) == before
    return found


def metric(server: Server, name: str) -> float:
    with server.open("/metrics") as reply:
        (found,) = re.findall(rf"^vllm:{name}_total{{.*}} (\S+)$", reply.read().decode(), re.MULTILINE)
    return float(found)


def hits(server: Server) -> int:
    return int(metric(server, "prefix_cache_hits"))


def block_size(server: Server) -> int:
    with server.open("/metrics") as reply:
        (found,) = set(re.findall(r'vllm:cache_config_info{.*?[{,]block_size="(\d+)"', reply.read().decode()))
    return int(found)


def apart(one: Answer, other: Answer) -> float:
    """The largest difference of log probabilities, up to the first token that differs; that one counts as
    infinitely far unless both found it about as likely."""
    for left, right, a, b in zip(one[0], other[0], one[1], other[1], strict=True):
        if left != right:
            return 0.0 if abs(a - b) < CLOSE else float("inf")
        if abs(a - b) >= CLOSE:
            return abs(a - b)
    return 0.0


def test_after_each_version_prompts_are_answered_as_if_computed_anew(server: Server) -> None:
    old, size = prompt_of(0), block_size(server)
    lengths: list[int] = []
    done = threading.Event()

    def keep_asking() -> None:
        while not done.is_set():
            lengths.append(len(ask(server, [5, 6, 7], count=900)["choices"][0]["token_ids"]))

    asking = threading.Thread(target=keep_asking)
    asking.start()
    answers: list[Answer] = []
    try:
        for number in range(VERSIONS):
            change_much(server)
            before = hits(server)
            answers.append(answer(server, old))
            assert hits(server) == before, "nothing is found of the version before"
            expected = uncached(server, old)
            assert apart(answers[-1], expected) < CLOSE, number
            before = hits(server)
            assert apart(answer(server, old), expected) < CLOSE, number
            assert hits(server) - before == (len(old) - 1) // size * size, (
                "the same version shares its prefix"
            )
            new = prompt_of(100 + number)
            assert apart(answer(server, new), uncached(server, new)) < CLOSE, number
    finally:
        done.set()
        asking.join()
    assert lengths and set(lengths) == {900}, "requests that span commits finish"
    assert sum(commit["running_requests"] for commit in server.status()["commits"]) >= VERSIONS // 2
    differing = sum(
        max(abs(a - b) for a, b in zip(one[1], other[1], strict=True)) > FAR or one[0] != other[0]
        for one, other in itertools.pairwise(answers)
    )
    assert differing == VERSIONS - 1, "old keys would have been seen"


@pytest.mark.slow
def test_a_server_that_has_just_loaded_the_version_agrees(server: Server, folder: Path) -> None:
    """A vLLM that loads the last version from an export and does not follow: its answers, and vLLM's own
    checksums.

    It is given a channel so that it does not pack its weights for the CPU, which changes their bytes; without
    the worker extension nobody patches them.
    """
    change_much(server)
    prompt, exported, port = prompt_of(0), folder / "exported", free_port()
    found = answer(server, prompt)
    subprocess.run(
        [sys.executable, "-m", "deltasync", "export", server.channel, "latest", str(exported)], check=True
    )
    for file in (folder / "model").iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, exported)
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(exported),
        "--host",
        "127.0.0.1",
    ]
    command += ["--port", str(port), "--enforce-eager", "--max-model-len", "1024", "--max-num-seqs", "8"]
    environ = {**_environment(), "DELTASYNC_CHANNEL": server.channel, "DELTASYNC_WAIT_READY": "0"}
    with Child("The fresh server", command, environ, folder / "fresh.log") as child:
        fresh = Server(f"http://127.0.0.1:{port}", server.channel, server.weights)
        child.wait_until(lambda: get_json(f"{fresh.url}/v1/models"), 2 * PATIENCE_S, "to start")
        assert "without --worker-extension-cls" in fresh.status()["error"]
        assert apart(found, answer(fresh, prompt)) < CLOSE
        checksums = fresh.json("/weight_checker", {"action": "checksum"})["checksums"]
        compared = server.json("/weight_checker", {"action": "compare", "baseline": checksums})
        assert compared == {"match": True, "mismatches": []}
        checksums.popitem()
        assert not server.json("/weight_checker", {"action": "compare", "baseline": checksums})["match"]


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DELTASYNC_")}
    settings = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_SERVER_DEV_MODE": "1",
    }
    return {**kept, **settings, "VLLM_NO_USAGE_STATS": "1"}


def test_eight_samples_of_a_prompt_compute_it_once(server: Server) -> None:
    prompt, size = prompt_of(1), block_size(server)
    change_much(server)
    before = hits(server)
    choices = ask(server, prompt, n=8, temperature=1.0)["choices"]
    assert len(choices) == 8
    assert hits(server) - before == 7 * ((len(prompt) - 1) // size * size)


def tenant(server: Server, prompt: list[int], salt: str | None, **headers: str) -> int:
    """How many tokens of the prompt were found."""
    before = hits(server)
    ask(server, prompt, headers=headers, **({} if salt is None else {"cache_salt": salt}))
    return hits(server) - before


def test_own_salts_are_kept_apart_and_combined_with_the_version(server: Server) -> None:
    prompt, size = prompt_of(2), block_size(server)
    found = (len(prompt) - 1) // size * size
    assert [tenant(server, prompt, salt) for salt in ("a", "a", "b", None, "a")] == [0, found, 0, 0, found]
    change_much(server)
    assert [tenant(server, prompt, salt) for salt in ("a", "a", None)] == [0, found, 0]


def test_a_session_finds_its_prefix_over_a_commit_and_nobody_else_does(server: Server) -> None:
    prompt, size = prompt_of(3), block_size(server)
    found = (len(prompt) - 1) // size * size
    with server.open("/v1/completions", {"model": model(server), "prompt": prompt, "max_tokens": 1}) as reply:
        versions = reply.headers["x-deltasync-versions"]
    change_much(server)
    assert tenant(server, prompt, None, x_deltasync_session=versions) == found
    assert tenant(server, prompt, None, x_deltasync_session=versions.partition(".")[0]) == found
    assert tenant(server, prompt, "a", x_deltasync_session=versions) == 0
    assert tenant(server, prompt, None) == 0
    # as good as none: that of the live version
    assert tenant(server, prompt, None, x_deltasync_session="999") == found


ROUTES: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": ("/v1/completions", {"prompt": prompt_of(4), "max_tokens": 4}),
    "several prompts": ("/v1/completions", {"prompt": [prompt_of(5), prompt_of(6)], "max_tokens": 4}),
    "streamed": ("/v1/completions", {"prompt": prompt_of(7), "max_tokens": 4, "stream": True}),
    "beam": ("/v1/completions", {"prompt": prompt_of(8), "max_tokens": 4, "use_beam_search": True, "n": 2}),
    "chat": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "1 + 1 = " * 70}], "max_tokens": 4},
    ),
    "chats": (
        "/v1/chat/completions/batch",
        {"messages": [[{"role": "user", "content": f"{n} + 1 = " * 70}] for n in (2, 3)], "max_tokens": 4},
    ),
    "responses": ("/v1/responses", {"input": "1 + 2 = " * 70, "max_output_tokens": 4}),
    "messages": (
        "/v1/messages",
        {"messages": [{"role": "user", "content": "2 + 1 = " * 70}], "max_tokens": 4},
    ),
    "generate": ("/inference/v1/generate", {"token_ids": prompt_of(9), "sampling_params": {"max_tokens": 4}}),
}


@pytest.mark.parametrize("route", ROUTES)
def test_every_route_shares_within_a_version_and_finds_nothing_of_the_one_before(
    server: Server, route: str
) -> None:
    path, body = ROUTES[route]
    body = {"temperature": 0, **({} if route == "generate" else {"model": model(server)}), **body}

    def found() -> int:
        before = hits(server)
        with server.open(path, body) as reply:
            assert reply.status == 200
            assert reply.read()
        return hits(server) - before

    change_much(server)
    first, second = found(), found()
    change_much(server)
    third, fourth = found(), found()
    assert first == third, "beams share among themselves; everything else finds nothing"
    assert (first == 0) is (route != "beam")
    assert second == fourth >= max(1, first)
    if route == "streamed":
        with server.open(path, body) as reply:
            events = [line for line in reply.read().decode().splitlines() if line.startswith("data: {")]
        assert json.loads(events[-1].removeprefix("data: "))["choices"]
