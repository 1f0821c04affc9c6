"""Commit after commit in a real vLLM under load: each is checked bit by bit (COMMITS_UNDER_LOAD of them), and
all tokens.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import statistics
import threading
import urllib.error
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.integration.expected_tokens import greedy
from tests.integration.test_vllm_images import CLOSE, ORDERS, Expected, message
from tests.integration.vllm_server import Server, Weights, one_thread, save_model, save_vision_model, serving

pytestmark = pytest.mark.vllm

COMMITS = int(os.environ.get("COMMITS_UNDER_LOAD", "0"))


@pytest.mark.skipif(not COMMITS, reason="a long run: make test-long")
@pytest.mark.parametrize("workers", [1, 2])
def test_every_worker_holds_the_published_bits_after_every_commit_under_load(
    workers: int, tmp_path: Path
) -> None:
    cores = sorted(os.sched_getaffinity(0))[-2:]
    arguments = ["--tensor-parallel-size", str(workers)] if workers > 1 else []
    environ = {"VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, cores))} if workers > 1 else {}
    with serving(save_model(tmp_path), *arguments, cores=cores[-workers:], **environ) as server:
        server.assert_serves(server.publish())
        done = threading.Event()
        completed: list[int] = []

        def ask() -> None:
            while not done.is_set():
                completed.append(len(greedy(server, token_count=200)))

        clients = [threading.Thread(target=ask) for _ in range(4)]
        for client in clients:
            client.start()
        try:
            for _ in range(COMMITS):
                server.step()
                server.assert_serves(server.publish())
        finally:
            done.set()
            for client in clients:
                client.join()
        commits = server.status()["commits"]
        assert len(commits) == COMMITS
        assert all(commit["changed"] for commit in commits)
        # All four clients may be between two requests for once.
        assert sum(commit["running_requests"] > 0 for commit in commits) > 0.8 * COMMITS
        assert completed and set(completed) == {200}


@dataclasses.dataclass
class Reply:
    order: tuple[int, ...]
    tokens: list[int]
    prompt_count: int
    likely: list[float]  # of each token but those of the prompt
    spans: list[tuple[int, int]]  # version, tokens
    versions: tuple[int, int]  # the first and the last while it was made
    in_session: bool
    wanted: str | None  # the version that it demanded


def ask(server: Server, model: str, number: int, newest: int) -> Reply | None:
    """Of several images or none; many have a long beginning in common, some name an older version, and some
    demand one.

    None if the version that it demanded was not served.
    """
    pick = random.Random(number)
    order = pick.choice([*ORDERS, ()])
    text = "once upon a time there was a model " * pick.choice([0, 3, 3]) + f"{pick.randrange(20)} what?"
    session = max(1, newest - pick.randrange(3)) if pick.random() < 0.3 else None
    body = {
        "model": model,
        "messages": [message(order, text)],
        "max_tokens": pick.randint(1, 24),
        "ignore_eos": True,
        "temperature": 1.0,
        "logit_bias": {"4": -100},  # an image's token would want an image
        "logprobs": True,
        "return_token_ids": True,
    }
    headers = {} if session is None else {"x_deltasync_session": str(session)}
    demands = str(newest), str(max(1, newest - 1)), f">={newest + 1}", ">=latest"
    wanted = pick.choice(demands) if pick.random() < 0.4 else None
    if wanted is not None:
        headers |= {"x_deltasync_version": wanted, "x_deltasync_timeout": "20"}
    try:
        with server.open("/v1/chat/completions", body, **headers) as reply:
            spans = json.loads(reply.headers["x-deltasync-spans"])[0]
            first, _, last = reply.headers["x-deltasync-versions"].partition("..")
            found = json.load(reply)
    except urllib.error.HTTPError as error:
        with error:
            assert wanted is not None and error.code == 409, error.read()
        return None
    made_by = [version for version, _ in spans]
    if wanted is not None and wanted.isdecimal():
        assert {*made_by} == {int(wanted)}
    elif wanted is not None:
        assert min(made_by) >= (newest if wanted == ">=latest" else newest + 1)
    (choice,) = found["choices"]
    prompt, likely = found["prompt_token_ids"], [each["logprob"] for each in choice["logprobs"]["content"]]
    tokens = [*prompt, *choice["token_ids"]]
    return Reply(
        order, tokens, len(prompt), likely, spans, (int(first), int(last)), session is not None, wanted
    )


def far(reply: Reply, version: int, model: Expected) -> float:
    """By how much, in nats, the tokens that this version made are more or less likely in a reply of its
    weights alone.
    """
    logits = model.logits(reply.tokens, reply.order)
    worst, done = 0.0, 0
    for made_by, count in reply.spans:
        for at in range(done, done + count):
            if made_by == version:
                place = reply.prompt_count + at
                worst = max(worst, abs(float(logits[place - 1, reply.tokens[place]]) - reply.likely[at]))
        done += count
    assert done == len(reply.likely)
    return worst


@pytest.mark.slow
@pytest.mark.parametrize(("kv_cache", "version_count", "clients"), [("recompute", 50, 200), ("keep", 8, 40)])
def test_every_token_is_what_the_version_that_it_names_makes_of_all_before_it(
    kv_cache: str, version_count: int, clients: int, tmp_path: Path
) -> None:
    """With `keep`, of replies that no commit met and that have no session: others rest on older keys, as they
    should.
    """
    checkpoint = save_vision_model(tmp_path)
    arguments = ("--max-num-seqs", "16", "--max-num-batched-tokens", "256")
    published: dict[int, Weights] = {}
    replies: list[Reply] = []
    refused: list[int] = []
    with (
        serving(checkpoint, *arguments, DELTASYNC_KV_CACHE=kv_cache) as server,
        ThreadPoolExecutor(clients) as pool,
    ):
        stop = threading.Event()
        numbers = iter(range(10**9))
        served = ""

        def keep_asking() -> None:
            while not stop.is_set():
                number = next(numbers)
                reply = ask(server, served, number, max(published))
                if reply is None:
                    refused.append(number)
                else:
                    replies.append(reply)

        def publish() -> None:
            version = server.publish()
            published[version] = {name: tensor.to(torch.bfloat16) for name, tensor in server.weights.items()}
            server.wait(lambda status: status["version"] == version)

        publish()
        first = {name: tensor.clone() for name, tensor in server.weights.items()}
        served = server.json("/v1/models")["data"][0]["id"]
        asking = [pool.submit(keep_asking) for _ in range(clients)]
        try:
            while len(published) < version_count:
                enough = len(replies) + (2 * clients if kv_cache == "keep" else 8)
                # around the first ones, lest they grow, and errors with them
                for name, tensor in server.weights.items():
                    spread = 0.3 * first[name].std() if tensor.ndim > 1 else 0.0
                    tensor.copy_(first[name] + spread * torch.randn(tensor.shape, generator=server.rng))
                publish()
                while len(replies) < enough and not any(each.done() for each in asking):
                    stop.wait(0.05)
        finally:
            stop.set()
        for each in asking:
            each.result()
        status = server.status()
        assert status["error"] is None and len(status["commits"]) == version_count - 1
        assert sum(commit["running_requests"] for commit in status["commits"]) > 4 * version_count
    assert refused and sum(reply.wanted is not None for reply in replies) > clients // 2
    if kv_cache == "keep":
        checked = [reply for reply in replies if len(set(reply.versions)) == 1 and not reply.in_session]
    else:
        checked = replies
        assert sum(len(reply.spans) > 1 for reply in replies) > version_count
    assert len(checked) > clients
    assert len({version for reply in checked for version, _ in reply.spans}) > version_count // 2
    as_if: list[float] = []
    with one_thread():
        model = Expected(checkpoint)
        for version, weights in published.items():
            model.load(weights)
            for reply in checked:
                if any(made_by == version for made_by, _ in reply.spans):
                    assert far(reply, version, model) < 2 * CLOSE, (version, reply.spans, reply.versions)
            other = checked[version]
            if all(made_by != version for made_by, _ in other.spans):
                as_if.append(
                    far(dataclasses.replace(other, spans=[(version, len(other.likely))]), version, model)
                )
    assert statistics.median(as_if) > 4 * CLOSE, "tokens of another version would be seen"
