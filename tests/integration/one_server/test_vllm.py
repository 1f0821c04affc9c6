"""A real vLLM server on the CPU that follows a directory, from before there is a channel."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
import urllib.error
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from deltasync import Publisher
from deltasync.channel import documents, keys
from deltasync.channel.documents import Head
from deltasync.following.cursor import REFRESH_S
from deltasync.serve import heartbeat
from demo.processes import get_json
from demo.run import free_port
from tests.faults import flipped
from tests.integration.expected_tokens import greedy
from tests.integration.vllm_server import PATIENCE_S, Server, digests, start

pytestmark = pytest.mark.vllm


def test_a_replica_started_before_the_first_anchor_waits_and_says_so(started: Server) -> None:
    status = started.wait(lambda status: "Waiting for the first version" in (status["error"] or ""))
    assert status["state"] == "waiting"
    assert status["version"] is None
    with pytest.raises(urllib.error.HTTPError, match="503") as caught:
        started.json("/v1/completions", {"prompt": [5, 6], "max_tokens": 1})
    with caught.value:
        assert caught.value.headers["retry-after"] == "1"
        assert "Waiting for the first version" in json.load(caught.value)["error"]["message"]


def test_weights_that_are_the_anchor_already_are_recognised_without_loading_it(started: Server) -> None:
    started.assert_serves(started.publish())
    assert started.status()["commits"] == []


def test_versions_are_committed_bit_for_bit_while_a_long_request_is_generated(server: Server) -> None:
    greedy(server, token_count=5)  # vLLM's first step takes seconds
    lengths: list[int] = []
    done = threading.Event()

    def keep_asking() -> None:
        while not done.is_set():
            lengths.append(len(greedy(server, token_count=1000)))

    asking = threading.Thread(target=keep_asking)
    asking.start()
    version = 0
    try:
        for _ in range(6):
            server.step()
            version = server.publish()
            server.assert_serves(version)
    finally:
        done.set()
        asking.join()
    assert set(lengths) == {1000}
    commits = server.status()["commits"]
    assert [commit["version"] for commit in commits] == list(range(2, version + 1))
    assert not any(commit["anchor"] for commit in commits)
    assert sum(commit["running_requests"] for commit in commits) >= 3
    assert sum(commit["tokens_during_sync"] for commit in commits) > 0
    assert server.json("/weight_info")["weight_version"] == str(version)


def test_a_heartbeat_tells_the_served_version(server: Server) -> None:
    server.step()
    version = server.publish()
    assert server.publisher is not None and server.publisher.run_id is not None
    found = heartbeat.wait_for(
        server.store, server.publisher.run_id, version, server.publisher.published, PATIENCE_S
    )
    (beat,) = found
    assert (beat.replica_id, beat.version, beat.state) == ("test-server", version, "serving")
    assert beat.sha256 == server.publisher.published[version] == server.status()["sha256"]


def test_a_version_without_changes_is_committed(server: Server) -> None:
    server.assert_serves(server.publish())


def test_a_damaged_record_leaves_the_old_version_served_until_it_is_repaired(server: Server) -> None:
    before = {name: tensor.clone() for name, tensor in server.weights.items()}
    version = server.status()["version"]
    server.step()
    with server.publishing_as(lambda _, data: flipped(data)) as repair:
        server.publish()
    status = server.wait(lambda status: status["error"] is not None)
    assert "has another body than its document says" in status["error"]
    assert (status["state"], status["version"]) == ("failed", version)
    assert server.json("/deltasync/digest")["sha256"] == digests(before)
    assert len(greedy(server, token_count=5)) == 5
    repair()
    server.assert_serves(version + 1)


def test_a_head_that_names_nothing_leads_nowhere(server: Server) -> None:
    """test_hostile_writer.py has all other wrong heads."""
    store = server.store
    head = documents.decode(store.read(keys.HEAD, 1 << 30), Head, keys.HEAD)
    store.put(keys.HEAD, documents.encode(dataclasses.replace(head, version=head.version + 100)))
    looked = time.monotonic()
    while time.monotonic() - looked < 1.2 * REFRESH_S:  # it looks at head meanwhile
        status = server.status()
        assert (status["state"], status["version"], status["error"]) == ("serving", head.version, None)
        time.sleep(0.2)
    server.step()
    server.assert_serves(server.publish())


@pytest.mark.slow
def test_a_channel_of_another_model_is_refused_and_says_which_tensors_differ(
    folder: Path, tmp_path: Path
) -> None:
    channel = f"file://{tmp_path}/other"
    weights = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).state_dict()
    weights["model.layers.0.mlp.down_proj.weight"] = torch.zeros(128, 192)
    with Publisher(channel) as publisher:
        publisher.publish(weights.items())
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with start(folder / "model", channel, port, tmp_path / "server.log") as child:
        child.wait_until(lambda: get_json(f"{url}/deltasync/status"), 2 * PATIENCE_S, "to start")
        other = Server(url, channel, weights)
        status = other.wait(lambda status: status["state"] == "failed")
        assert "ModelMismatchError" in status["error"]
        with pytest.raises(urllib.error.HTTPError, match="503") as caught:
            greedy(other, token_count=5)
        with caught.value:
            assert "ModelMismatchError" in json.load(caught.value)["error"]["message"]
