"""A transformers Trainer on two processes, as `trainer_ranks` runs it: DDP, FSDP2, FSDP2 with activation checkpointing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from deltasync import Replica
from tests.conftest import assert_same_bits
from tests.integration.test_sharded import expected, manifests, torchrun


@pytest.fixture(scope="module")
def trainers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trainers")
    torchrun(2, folder, script="trainer_ranks.py")
    return folder


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "checkpointed"])
def test_a_trainer_publishes_what_each_process_holds(trainers: Path, kind: str) -> None:
    folder = trainers / kind
    states = expected(folder)
    assert sorted(states) == [1, 2, 3]
    replica = Replica(f"file://{folder}/channel")
    for version, state in states.items():
        replica.sync(version)
        found = replica.state_dict()
        assert state.keys() - found.keys() == {"lm_head.weight"}  # tied, so it is not saved
        assert_same_bits(found, {name: state[name] for name in found})
    model = AutoModelForCausalLM.from_pretrained(folder / "channel" / manifests(folder)[1].anchor.directory)  # type: ignore[union-attr]
    assert model.config.architectures == ["Qwen3ForCausalLM"]
    assert_same_bits({name: model.state_dict()[name] for name in states[1]}, states[1])
    reports = [json.loads((folder / f"told.{rank}.json").read_text()) for rank in range(2)]
    assert [row[:3] for row in reports[0]["history"]] == [[1, 0, "anchor"], [2, 3, "delta"], [3, 4, "delta"]]
    assert reports[1]["history"] == (reports[0]["history"] if kind != "ddp" else [])
    assert (reports[1]["sharded"] > 0) == (kind != "ddp")
    parts = {len(document.delta.files) for document in manifests(folder).values() if document.delta}
    assert parts == ({1} if kind == "ddp" else {2})
