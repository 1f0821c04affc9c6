"""A real vLLM that loaded other weights than those of the checkpoint that its channel starts from."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from deltasync import Publisher
from deltasync.channel import keys
from tests.faults import FaultyStore
from tests.integration.vllm_server import PATIENCE_S, Server, save_model, serving

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

CHANGED = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with serving(save_model(folder), DELTASYNC_MAX_LAG="0") as server:
        yield server


def test_it_says_which_tensors_differ_and_loads_the_checkpoint_once_it_is_there(
    server: Server, folder: Path
) -> None:
    base, away = folder / "base", folder / "away"
    shutil.copytree(folder / "model", base)
    tensors = load_file(base / "model.safetensors")
    tensors[CHANGED][3, 5] += 1.0
    save_file(tensors, base / "model.safetensors", {"format": "pt"})
    server.weights[CHANGED][3, 5] = tensors[CHANGED][3, 5].float()
    store = FaultyStore(server.store)
    gate = store.hold_at("create", keys.VERSIONS)
    server.publisher = Publisher(store, initial=base)
    receipt = server.publisher.publish(server.weights.items())
    assert gate.entered.wait(PATIENCE_S)
    base.rename(away)
    gate.opened.set()
    receipt.wait(PATIENCE_S)

    status = server.wait(lambda status: status["state"] == "failed")
    assert status["version"] is None
    assert f"Version 1 refers to the checkpoint {base}, which this machine cannot load" in status["error"]
    assert f"1 of {len(server.weights)} tensors differ: {CHANGED}." in status["error"]
    server.wait(lambda status: status["state"] == "failed")

    away.rename(base)
    server.assert_serves(1)
    (commit,) = server.status()["commits"]
    assert commit["anchor"] and commit["payload_bytes"] < 100  # the empty body of its record


def test_from_then_on_it_takes_deltas(server: Server) -> None:
    for version in (2, 3):
        server.step()
        assert server.publish() == version
        server.assert_serves(version)
    assert [commit["anchor"] for commit in server.status()["commits"]] == [True, False, False]
    assert not any(info.key.startswith("anchors/") for info in server.store.list(""))


@pytest.mark.parametrize(("own", "ended"), [(None, True), ("1000", False)])
def test_requests_that_name_no_age_of_their_own_get_the_servers(
    server: Server, own: str | None, ended: bool
) -> None:
    assert server.status()["max_lag"] == 0
    found: list[tuple[str, list[list[int]]]] = []

    def ask() -> None:
        headers = {} if own is None else {"x-deltasync-max-lag": own}
        body = {"model": str(server.json("/v1/models")["data"][0]["id"]), "prompt": [5, 6, 7]}
        body |= {"max_tokens": 900, "ignore_eos": True}
        with server.open("/v1/completions", body, **headers) as reply:
            (spans,) = json.loads(reply.headers["x-deltasync-spans"])
            found.append((json.load(reply)["choices"][0]["finish_reason"], spans))

    asking = threading.Thread(target=ask)
    asking.start()
    server.wait_for_requests(1)
    while asking.is_alive():
        server.step()
        server.assert_serves(server.publish())
    ((reason, spans),) = found
    assert (reason, len(spans) == 1) == (("abort", True) if ended else ("length", False))
    assert (sum(count for _, count in spans) < 900) == ended
