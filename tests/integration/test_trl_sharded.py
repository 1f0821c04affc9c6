"""TRL's trainers on two processes that shard the model, as `trl_ranks` runs them: what they leave, and what
they say.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from deltasync import Replica
from tests.conftest import assert_same_bits
from tests.integration.test_sharded import expected, records, torchrun
from trl_callback import gather

pytestmark = [
    pytest.mark.trl,
    # of torch, while TRL imports it
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning"),
]


def told(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"told.{rank}.json").read_text()) for rank in range(2)]


def prove(folder: Path, steps: list[int]) -> list[dict[str, Any]]:
    """All versions have the bits that the trainer had, and all ranks heard the same of them."""
    states = expected(folder)
    assert sorted(states) == [*range(1, len(steps) + 1)]
    replica = Replica(f"file://{folder}/channel")
    for version, state in states.items():
        replica.sync(version)
        assert_same_bits(replica.state_dict(), state)
    found = told(folder)
    assert [row["error"] for row in found] == [None, None]
    assert found[0]["history"] == found[1]["history"]
    assert [row[:2] for row in found[0]["history"]] == [
        [number, step] for number, step in enumerate(steps, start=1)
    ]
    assert all(row[3] > 0 for row in found[0]["history"][1:])
    for record in records(folder).values():  # what the first rank holds may lie in the record
        assert record.delta is None or any("/001-" in file.key for file in record.delta.parts)
    return found


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trl")
    torchrun(2, folder, "shards", "lost_upload", script="trl_ranks.py")
    return folder


def test_async_grpo_publishes_what_each_process_holds(quick: Path) -> None:
    found = prove(quick / "shards", [0, 2, 3])
    assert found[0]["events"] == ["version 1", "start", "version 2", "stop"]
    for rank in found:
        # All that a sync gives to collectives, TRL's barriers with it; its own stream gathers all weights.
        assert max(rank["moved_bytes"]["ours"]) < 20_000
        assert rank["moved_bytes"]["trl"][0] >= rank["weight_bytes"]


def test_a_rank_that_cannot_store_its_part_leaves_no_version_and_hangs_none(quick: Path) -> None:
    found = told(quick / "lost_upload")
    assert [rank["error"][0] for rank in found] == ["PublishError", "PublishError"]
    assert all("failed by the test" in rank["error"][1] for rank in found)
    assert found[0]["events"] == ["version 1", "start", "stop"]
    assert Replica(f"file://{quick}/lost_upload/channel").sync() == 1


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trl")
    torchrun(2, folder, "moe", "distillation", "lost_stream", "unheard", script="trl_ranks.py")
    return folder


@pytest.mark.slow
def test_experts_are_published_one_by_one(slow: Path) -> None:
    found = prove(slow / "moe", [0, 1, 2, 3])
    assert any(".experts.3.up_proj" in name for name in expected(slow / "moe")[4])
    assert all(max(rank["moved_bytes"]["ours"]) < 40_000 for rank in found)
    assert all(rank["moved_bytes"]["trl"][0] >= rank["weight_bytes"] for rank in found)


@pytest.mark.slow
def test_async_distillation_publishes_what_each_process_holds(slow: Path) -> None:
    prove(slow / "distillation", [0, 1, 2, 3])
    states = expected(slow / "distillation")
    anchor = records(slow / "distillation")[1].anchor
    assert anchor is not None
    model = AutoModelForCausalLM.from_pretrained(slow / "distillation/channel" / anchor.directory)
    assert_same_bits(gather.held_tensors(model), states[1])


@pytest.mark.slow
def test_a_rank_that_cannot_read_its_weights_takes_the_others_along(slow: Path) -> None:
    found = told(slow / "lost_stream")
    assert found[1]["error"] == ["OverflowError", "the stream broke"]
    assert found[0]["error"][0] == "PublishError"
    assert "Rank 1 failed" in found[0]["error"][1]
    assert Replica(f"file://{slow}/lost_stream/channel").sync() == 1


@pytest.mark.slow
def test_all_ranks_hear_that_no_replica_acknowledges(slow: Path) -> None:
    found = told(slow / "unheard")
    assert [rank["error"][0] for rank in found] == ["AckTimeoutError", "AckTimeoutError"]
    assert all("no replica has ever reported" in rank["error"][1] for rank in found)
    assert found[0]["events"] == ["stop"]
    assert Replica(f"file://{slow}/unheard/channel").sync() == 1  # it is published all the same


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.parametrize("method", ["grpo", "rloo"])
def test_completions_are_of_the_weights_that_two_processes_hold(method: str, tmp_path: Path) -> None:
    from tests.integration import vllm_server

    checkpoint = vllm_server.save_model(tmp_path)
    with vllm_server.serving(checkpoint) as server:
        where = {"url": server.url, "channel": server.channel, "model": str(checkpoint)}
        (tmp_path / "server.json").write_text(json.dumps(where))
        torchrun(2, tmp_path, method, script="trl_ranks.py")
        found = [json.loads((tmp_path / f"{method}.{rank}.json").read_text()) for rank in range(2)]
        assert [row[:2] for row in found[0]["history"]] == [[1, 0], [2, 1], [3, 2], [4, 3]]
        server.wait(lambda status: status["version"] == found[0]["history"][-1][0])
        assert server.json("/deltasync/digest")["sha256"] == found[0]["final"] == found[1]["final"]
    for rank in found:
        assert rank["compared"] == [True] * 3
        assert max(rank["moved_bytes"]) < 20_000
