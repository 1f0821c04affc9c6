"""A real vLLM whose OffloadingConnector keeps blocks in host memory: no request meets keys that older weights
computed.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.one_server.test_vllm_prefix_cache import (
    Answer,
    answer,
    apart,
    change_much,
    prompt_of,
    uncached,
)
from tests.integration.vllm_server import Server, save_model, serving

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

VERSIONS = 5
FAR = 0.25  # nats that other weights change at the least, at some token
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def hold(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hold") / "hold"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, hold: Path) -> Iterator[Server]:
    """One with room for two prompts, so that what a request finds later comes back from host memory."""
    extra = {
        "spec_name": "HostSpec",
        "spec_module_path": "tests.integration.offloading",
        "cpu_bytes_to_use": 1 << 28,
    }
    transfer = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
    arguments = [
        "--kv-transfer-config",
        json.dumps(transfer),
        "--block-size",
        "32",
        "--num-gpu-blocks-override",
        "33",
    ]
    environ = {"OFFLOADING_HOLD": str(hold), "PYTHONPATH": str(ROOT)}
    with serving(save_model(tmp_path_factory.mktemp("vllm")), *arguments, **environ) as server:
        server.assert_serves(server.publish())
        yield server


def loaded(server: Server) -> int:
    """Tokens whose keys came back from host memory."""
    with server.open("/metrics") as reply:
        (found,) = re.findall(
            r"^vllm:external_prefix_cache_hits_total{.*} (\S+)$", reply.read().decode(), re.MULTILINE
        )
    return int(float(found))


def displace(server: Server) -> None:
    """Let other prompts take the blocks of all others."""
    for seed in (101, 102, 103):
        answer(server, prompt_of(seed, 900))


def test_a_conversation_over_five_versions_comes_back_from_host_memory_and_is_never_stale(
    server: Server,
) -> None:
    prompt, before = prompt_of(1, 300), None
    for _ in range(VERSIONS):
        came = loaded(server)
        first = answer(server, prompt)
        assert loaded(server) == came, "what older weights computed is not found"
        assert apart(first, uncached(server, prompt)) == 0.0
        assert before is None or apart(first, before) > FAR
        displace(server)
        came = loaded(server)
        again = answer(server, prompt)
        assert loaded(server) - came >= 256
        assert apart(again, first) == 0.0
        prompt, before = [*prompt, *again[0]], answer(server, [*prompt, *again[0]])
        displace(server)
        change_much(server)


@pytest.mark.parametrize("count", [1, 2])
def test_blocks_that_come_back_after_a_commit_are_dropped(server: Server, hold: Path, count: int) -> None:
    """The first of two requests loads them, and the second waits for the same ones. The pause waits for the
    load.
    """
    prompt = prompt_of(10 + count, 300)
    answer(server, prompt)
    displace(server)
    hold.touch()
    try:
        found: list[Answer] = []
        asking = [threading.Thread(target=lambda: found.append(answer(server, prompt))) for _ in range(count)]
        for each in asking:
            each.start()
        server.wait_for_requests(count, "waiting")
        change_much(server, waits=False)
        server.wait(lambda status: status["state"] == "committing")
    finally:
        hold.unlink()
    for each in asking:
        each.join()
    server.wait(lambda status: status["state"] == "serving")
    expected = uncached(server, prompt)
    assert [apart(each, expected) for each in found] == [0.0] * count
