"""A real vLLM whose weights are spread over two workers."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import Qwen2Config

from deltasync import Publisher, codec
from deltasync.channel import keys, payloads
from deltasync.channel.reading import ChannelReader
from deltasync.codec import tiles
from demo.processes import get_json
from tests.integration.expected_tokens import greedy
from tests.integration.vllm_server import Server, digests, save_model, serving

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Biases, one key and value head that both workers copy, tied embeddings, padded, whose tiles both have
    parts of, and a network whose matrices have tiles."""
    fields = {
        "vocab_size": 1031,
        "intermediate_size": 512,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
    }
    checkpoint = save_model(tmp_path_factory.mktemp("vllm"), Qwen2Config, **fields)
    with serving(checkpoint, "--tensor-parallel-size", "2") as server:
        assert "lm_head.weight" not in server.weights
        server.publisher = Publisher(server.channel, initial=checkpoint)
        yield server


def test_the_checkpoint_that_the_channel_refers_to_is_recognised_over_both_workers(server: Server) -> None:
    version = server.publish()
    server.assert_serves(version)
    assert server.status()["commits"] == []
    assert not list(server.store.list(keys.ANCHORS))


def test_both_workers_commit_every_version_while_a_request_is_generated(server: Server) -> None:
    greedy(server, token_count=5)
    lengths: list[int] = []
    asking = threading.Thread(target=lambda: lengths.append(len(greedy(server, token_count=300))))
    asking.start()
    for _ in range(5):
        server.step()
        server.assert_serves(server.publish())
    asking.join()
    assert lengths == [300]
    commits = server.status()["commits"]
    assert [commit["version"] for commit in commits] == [2, 3, 4, 5, 6]
    assert all(commit["changed"] > 0 for commit in commits)


def test_a_tensor_that_changed_completely_is_committed_by_both(server: Server) -> None:
    server.weights["model.norm.weight"] *= 3.0
    server.weights["model.layers.1.mlp.down_proj.weight"] *= -1.5
    server.weights["model.layers.0.self_attn.k_proj.bias"] += 1.0
    server.assert_serves(server.publish())


def test_both_workers_decode_their_tiles(server: Server) -> None:
    assert server.publisher is not None
    server.publisher.close()
    server.publisher = Publisher(server.channel, codec="context", resume=True)
    for _ in range(3):
        server.step()
        server.assert_serves(version := server.publish())
    reader = ChannelReader(server.store)
    (data,) = [data for _, data in payloads.fetch(reader, reader.numbered(version))]
    payload = codec.open_payload(data)
    assert payload.codec == "context"
    rows = json.loads(payload.metadata["vectors"])
    assert rows.keys() == {"2"} and "tiles" in rows["2"]
    shapes = {name.removeprefix("model.layers.0.mlp."): spec.shape for name, spec in reader.specs.items()}
    cut = {
        name: tiles.cut(shape, 0, math.prod(shape), tiles.TILE, tiles.BLOCK) for name, shape in shapes.items()
    }
    ways = {name: found.grid.ways for name, found in cut.items() if found.grid is not None}
    # by rows, by rows, by columns
    assert [ways[f"{name}_proj.weight"] for name in ("gate", "up", "down")] == [(2, 2)] * 3
    assert ways["model.embed_tokens.weight"] == (1, 2)  # of which each worker has a part
    log = (Path(server.channel.removeprefix("file://")).parent / "server.log").read_text(errors="replace")
    assert (
        log.count("each process keeps 1 tensors whole on the host, 0.3 MB, such as model.embed_tokens.weight")
        == 1
    )
    commits = server.status()["commits"]
    assert [commit["version"] for commit in commits[-3:]] == [version - 2, version - 1, version]
    assert not any(commit["anchor"] for commit in commits[-3:])


def test_bits_that_one_worker_got_wrong_are_rolled_back_by_both_and_the_next_anchor_heals(
    server: Server,
) -> None:
    # A version that promises what it does not give.
    version = server.status()["version"]
    before = {name: tensor.clone() for name, tensor in server.weights.items()}
    server.step()
    status = server.publish_wrong_bits()
    assert status["version"] == version
    assert get_json(f"{server.url}/deltasync/digest") == {"version": version, "sha256": digests(before)}
    assert len(greedy(server, token_count=5)) == 5
    server.publish_anchor()
    assert server.status()["commits"][-1]["anchor"]
    server.step()
    # by what the anchor has said of the tiles of which each has a part
    server.assert_serves(server.publish())
