"""The README's command with each supported version of vLLM (`make test-vllm`): bits, answers, spans, requests
in flight.

What a version should answer is asked of a server that has just loaded it, without deltasync.
"""

from __future__ import annotations

import itertools
import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from demo.processes import get_json
from demo.run import free_port
from tests.integration.one_server.test_vllm_prefix_cache import CLOSE, Answer, answer, apart, body_of
from tests.integration.vllm_server import PATIENCE_S, Server, save_model, serve

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

VERSIONS = 4
PROMPTS = [[*range(5, 45)] * 8, [7, 8, 9, 10] * 70, [*range(9, 39)]]


def ask(
    server: Server, prompt: list[int], count: int = 12, **fields: Any
) -> tuple[dict[str, Any], list[list[int]] | None]:
    """The choice, and its spans if this vLLM knows them."""
    with server.open("/v1/completions", body_of(server, prompt, count, **fields)) as reply:
        spans = (
            json.loads(reply.headers["x-deltasync-spans"])[0]
            if "x-deltasync-spans" in reply.headers
            else None
        )
        return json.load(reply)["choices"][0], spans


def answers(server: Server) -> list[Answer]:
    """Each prompt twice: the second time its prefix is found."""
    return [answer(server, prompt, count=12) for prompt in PROMPTS * 2]


def test_the_literal_command_serves_every_version_as_a_fresh_server_does(tmp_path: Path) -> None:
    checkpoint = save_model(tmp_path)
    channel, port = f"file://{tmp_path}/channel", free_port()
    weights = {name: tensor.float() for name, tensor in load_file(checkpoint / "model.safetensors").items()}
    server = Server(f"http://127.0.0.1:{port}", channel, weights)
    seen: list[list[Answer]] = []
    with serve(checkpoint, tmp_path / "log", "--port", str(port), DELTASYNC_CHANNEL=channel) as child:
        child.wait_until(lambda: get_json(f"{server.url}/deltasync/status"), 2 * PATIENCE_S, "to start")
        for _ in range(VERSIONS):
            version = server.publish()
            server.assert_serves(version)
            seen.append(answers(server))
            _, spans = ask(server, PROMPTS[0])
            assert spans == [[version, 12]]
            last = {name: tensor.to(torch.bfloat16) for name, tensor in server.weights.items()}
            server.step(0.02)
        assert all(one != other for one, other in itertools.pairwise(seen))

        stop = threading.Event()

        def keep_asking(client: int) -> list[tuple[dict[str, Any], list[list[int]] | None]]:
            found = []
            while not stop.is_set():
                found.append(ask(server, [5, 6, 7 + client], 500, temperature=1.0))
            return found

        with ThreadPoolExecutor(4) as pool:
            running = [pool.submit(keep_asking, client) for client in range(4)]
            try:
                for _ in range(6):
                    server.wait_for_requests(1)
                    server.step()
                    server.assert_serves(server.publish())
            finally:
                stop.set()
            replies = [reply for each in running for reply in each.result()]
        assert {len(choice["token_ids"]) for choice, _ in replies} == {500}
        assert sum(commit["running_requests"] for commit in server.status()["commits"][-6:]) >= 6
        known = [spans for _, spans in replies if spans is not None]
        assert all(sum(count for _, count in spans) == 500 for spans in known)
        assert any(len(spans) > 1 for spans in known)
        assert server.status()["error"] is None
        assert server.publisher is not None
        server.publisher.close()

    exported, port = tmp_path / "exported", free_port()
    shutil.copytree(checkpoint, exported)
    save_file(last, exported / "model.safetensors", {"format": "pt"})
    fresh = Server(f"http://127.0.0.1:{port}", channel, weights)
    with serve(exported, tmp_path / "fresh.log", "--port", str(port)) as child:
        child.wait_until(lambda: get_json(f"{fresh.url}/v1/models"), 2 * PATIENCE_S, "to start")
        for one, other in zip(answers(fresh), seen[-1], strict=True):
            assert apart(one, other) < CLOSE
