"""A real `vllm serve` with several API servers and engines: whichever server answers, its labels are
right.
"""

from __future__ import annotations

import functools
import json
import os
import random
import re
import signal
import threading
import urllib.error
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file
from transformers import Qwen3Config

from demo.processes import get_json
from demo.run import free_port
from tests.integration.expected_tokens import NEARLY, PROMPT, greedy, shortfall
from tests.integration.test_vllm_parallel import rolls_back_everywhere
from tests.integration.vllm_server import PATIENCE_S, Server, one_thread, save_model, serve

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

VERSIONS = int(os.environ.get("VERSIONS_OF_SERVERS", "50"))
SERVERS, ENGINES = 4, 2


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("log") / "log"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, log: Path) -> Iterator[Server]:
    checkpoint = save_model(tmp_path_factory.mktemp("vllm"), Qwen3Config, intermediate_size=192, head_dim=32)
    weights = {name: tensor.float() for name, tensor in load_file(checkpoint / "model.safetensors").items()}
    channel, port = f"file://{checkpoint.parent}/channel", free_port()
    server = Server(f"http://127.0.0.1:{port}", channel, weights)
    arguments = ["--host", "127.0.0.1", "--port", str(port), "--max-num-seqs", "16"]
    arguments += ["--api-server-count", str(SERVERS), "--data-parallel-size", str(ENGINES)]
    environ = {
        "DELTASYNC_CHANNEL": channel,
        "DELTASYNC_POLL_INTERVAL_S": "0.05",
        "DELTASYNC_REPLICA_ID": "test-server",
    }
    # for /pause, and what each server logs
    environ |= {"VLLM_SERVER_DEV_MODE": "1", "VLLM_LOGGING_LEVEL": "INFO"}
    with one_thread(), serve(checkpoint, log, *arguments, **environ) as child:
        said = "Application startup complete"
        child.wait_until(lambda: log.read_text().count(said) == SERVERS, 2 * PATIENCE_S, "to start")
        server.assert_serves(server.publish())
        yield server
        assert server.publisher is not None
        server.publisher.close()


def processes(log: Path, what: str = "") -> list[int]:
    """The API servers that have logged this."""
    return [int(found) for found in re.findall(rf"\(ApiServer_\d+ pid=(\d+)\).*{what}", log.read_text())]


def leader(log: Path) -> int:
    """The process that follows now."""
    return processes(log, "deltasync follows file")[-1]


def answering(log: Path, server: Server) -> set[int]:
    """The API servers that have a connection to a client."""
    port, found = int(server.url.rpartition(":")[2]), {*processes(log)}
    return {
        pid
        for pid in found
        if any(each.laddr.port == port for each in psutil.Process(pid).net_connections() if each.raddr)
    }


def ask(server: Server, count: int, wanted: str | None = None, **headers: str) -> dict[str, Any] | None:
    """A reply's versions, spans and tokens; None if the version that it demands was not served."""
    model = server.json("/v1/models")["data"][0]["id"]
    body = {
        "model": model,
        "prompt": PROMPT,
        "max_tokens": count,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    if wanted is not None:
        headers |= {"x_deltasync_version": wanted, "x_deltasync_timeout": "60"}
    try:
        with server.open("/v1/completions", body, **headers) as reply:
            spans = json.loads(reply.headers["x-deltasync-spans"])[0]
            first, _, last = reply.headers["x-deltasync-versions"].partition("..")
            tokens = json.load(reply)["choices"][0]["token_ids"]
    except urllib.error.HTTPError as error:
        with error:
            assert wanted is not None and error.code == 409, error.read()
        return None
    assert sum(length for _, length in spans) == len(tokens) == count
    made = [version for version, _ in spans]
    assert int(first) <= min(made) and max(made) <= int(last), "the header covers every token's version"
    return {"first": int(first), "last": int(last), "made": made, "tokens": tokens}


def check_demand(found: dict[str, Any], wanted: str, newest: int) -> None:
    if wanted.isdecimal():
        assert (found["first"], found["last"]) == (int(wanted), int(wanted))
    else:
        assert found["first"] >= (newest if wanted == ">=latest" else int(wanted[2:]))


def test_all_servers_label_wait_and_report_alike_over_many_versions_under_load(
    server: Server, log: Path
) -> None:
    done, newest, refused = threading.Event(), [1], Counter[str]()
    failures: list[BaseException] = []
    answered: set[int] = set()

    def load(number: int) -> None:
        pick = random.Random(number)
        try:
            while not done.is_set():
                known = newest[0]
                wanted = pick.choice([None, None, str(known), f">={known}", ">=latest", f">={known + 1}"])
                if wanted == f">={known + 1}" and known > VERSIONS:
                    continue
                found = ask(
                    server, pick.randint(1, 12), wanted, X_data_parallel_rank=str(pick.randrange(ENGINES))
                )
                if found is None:
                    assert wanted == str(known), f"{wanted} was refused"
                elif wanted is not None:
                    check_demand(found, wanted, known)
                refused[str(found is None)] += 1
        except BaseException as error:
            failures.append(error)
            raise

    clients = [threading.Thread(target=load, args=(number,)) for number in range(12)]
    for client in clients:
        client.start()
    try:
        for _ in range(VERSIONS):
            server.step()
            version = server.publish()
            server.assert_serves(version)  # the bits of both engines, read through any of the servers
            newest[0] = version
            answered |= answering(log, server)
            assert not failures
    finally:
        done.set()
        for client in clients:
            client.join()
    assert not failures and refused["False"] > VERSIONS
    assert len(answered) == SERVERS, "every server has answered"
    # Nothing changes now, so all say the same.
    last = newest[0]
    with ThreadPoolExecutor(8) as pool:
        engines = [{"X_data_parallel_rank": str(number % ENGINES)} for number in range(16)]
        found = [*pool.map(lambda headers: ask(server, 5, **headers), engines)]
        states = [*pool.map(lambda _: server.status(), range(16))]
        digests = [*pool.map(lambda _: server.json("/deltasync/digest"), range(4))]
    assert {(each["first"], each["last"], *each["made"]) for each in found if each is not None} == {
        (last, last, last)
    }
    assert {(state["version"], state["sha256"], state["boot"], state["state"]) for state in states} == {
        (last, states[0]["sha256"], states[0]["boot"], "serving")
    }
    assert all(each == digests[0] for each in digests)
    assert [commit["version"] for commit in states[0]["commits"]] == [*range(2, last + 1)]


def test_each_engine_makes_the_tokens_of_the_version(server: Server) -> None:
    checkpoint = Path(server.channel.removeprefix("file://")).parent / "model"
    old = {name: tensor.clone() for name, tensor in server.weights.items()}
    server.step(0.05)
    server.assert_serves(server.publish())
    for engine in range(ENGINES):
        tokens = greedy(server, X_data_parallel_rank=str(engine))
        assert shortfall(checkpoint, server.weights, tokens) < NEARLY
        assert shortfall(checkpoint, old, tokens) > 2 * NEARLY


def test_both_engines_roll_back(server: Server) -> None:
    rolls_back_everywhere(server, [{"X_data_parallel_rank": str(engine)} for engine in range(ENGINES)])


def test_other_clients_may_pause_through_any_server(server: Server) -> None:
    version = server.status()["version"]
    for _ in range(SERVERS):
        server.json("/pause?mode=keep", {})
        server.step()
        version = server.publish()
        server.wait(lambda status, version=version: status["version"] == version)  # type: ignore[misc]
        assert server.json("/is_paused")["is_paused"], "it stays paused over a commit"
        server.json("/resume", {})
        server.assert_serves(version)
        assert ask(server, 3) is not None


def test_a_server_that_ends_changes_nothing(server: Server, log: Path) -> None:
    """Another one follows, also if it is the one that does, unless vLLM ends all of them.

    vLLM 0.32 does that when one crashes, and when it looks for the exit code of one that ended in order too
    early.
    """
    before, boot = leader(log), server.status()["boot"]
    os.kill(before, signal.SIGTERM)
    server.step()
    version = server.publish()
    try:
        with ThreadPoolExecutor(8) as pool:
            found = [*pool.map(functools.partial(ask, server, 4), [f">={version}"] * 8)]
        assert all(each is not None and each["first"] == version for each in found)
        server.assert_serves(version)
        assert leader(log) != before and server.status()["boot"] != boot
        assert server.status()["commits"][-1]["version"] == version
        assert get_json(f"{server.url}/deltasync/ready")["ready"]
    except OSError:
        assert f"(PID: {before}) died with exit code None" in log.read_text()
