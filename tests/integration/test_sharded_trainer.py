"""A transformers Trainer on two processes, as `trainer_ranks` runs it: DDP, FSDP2, with activation
checkpointing, ZeRO-3.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from deltasync import Replica
from deltasync.opening.adapter_base import AdapterBase
from tests.conftest import assert_same_bits
from tests.integration.test_sharded import ROOT, expected, records, torchrun


@pytest.fixture(scope="module")
def trainers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trainers")
    torchrun(2, folder, "ddp", "fsdp2", "checkpointed", "fsdp2-adapter", script="trainer_ranks.py")
    return folder


def prove(folder: Path, sharded: bool) -> list[dict[str, Any]]:
    """All versions have the bits that the trainer had; what each rank was told."""
    states = expected(folder)
    assert sorted(states) == [1, 2, 3]
    replica = Replica(f"file://{folder}/channel")
    for version, state in states.items():
        replica.sync(version)
        found = replica.state_dict()
        assert state.keys() - found.keys() <= {"lm_head.weight"}  # where it is tied, it is not saved
        assert_same_bits(found, {name: state[name] for name in found})
    reports = [json.loads((folder / f"told.{rank}.json").read_text()) for rank in range(2)]
    assert [row[:3] for row in reports[0]["history"]] == [[1, 0, "anchor"], [2, 3, "delta"], [3, 4, "delta"]]
    assert reports[1]["history"] == (reports[0]["history"] if sharded else [])
    assert [report["sharded"] for report in reports] == [sharded, sharded]
    for record in records(folder).values():  # what the first rank holds may lie in the record
        assert record.delta is None or any("/001-" in file.key for file in record.delta.parts) == sharded
    return reports


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "checkpointed"])
def test_a_trainer_publishes_what_each_process_holds(trainers: Path, kind: str) -> None:
    folder = trainers / kind
    prove(folder, sharded=kind != "ddp")
    states = expected(folder)
    model = AutoModelForCausalLM.from_pretrained(folder / "channel" / records(folder)[1].anchor.directory)  # type: ignore[union-attr]
    assert model.config.architectures == ["Qwen3ForCausalLM"]
    assert_same_bits({name: model.state_dict()[name] for name in states[1]}, states[1])


def prove_saved(folder: Path) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    """The adapter of all versions has the bits that the trainer had, the last one's those that it saved."""
    reports = prove(folder, sharded=True)
    saved = load_file(folder / "saved" / "adapter_model.safetensors")
    assert_same_bits(expected(folder)[3], saved)
    return reports, saved


def prove_adapter(folder: Path) -> None:
    """As `prove_saved`, with all that PEFT saves; and its base is known by the bits of all processes."""
    reports, saved = prove_saved(folder)
    assert any("magnitude" in name for name in saved) and any(".norm." in name for name in saved)
    anchor = records(folder)[1].anchor
    assert anchor is not None
    files = folder / "channel" / anchor.directory
    base = AdapterBase.decode((files / "adapter_base.json").read_bytes())
    assert base.tensors == reports[0]["base"]
    config = json.loads((files / "adapter_config.json").read_bytes())
    assert config == json.loads((folder / "saved" / "adapter_config.json").read_bytes())


def test_an_adapter_over_a_sharded_model_is_published_as_it_is_saved(trainers: Path) -> None:
    prove_adapter(trainers / "fsdp2-adapter")


def test_what_fails_in_one_process_before_its_publisher_is_there_is_told_to_all(tmp_path: Path) -> None:
    torchrun(2, tmp_path, "refused", script="trainer_ranks.py")


@pytest.mark.slow
def test_an_adapter_over_packed_weights_is_published_as_it_is_saved(
    bitsandbytes: Path, tmp_path: Path
) -> None:
    path = f"{ROOT}:{ROOT / 'examples'}:{bitsandbytes}"
    torchrun(2, tmp_path, "fsdp2-qlora", script="trainer_ranks.py", PYTHONPATH=path, CUDA_VISIBLE_DEVICES="")
    prove_saved(tmp_path / "fsdp2-qlora")
    (anchor,) = (tmp_path / "fsdp2-qlora" / "channel" / "anchors").iterdir()
    base = AdapterBase.decode((anchor / "adapter_base.json").read_bytes()).tensors
    assert "model.embed_tokens.weight" in base and not any("proj" in name for name in base)


def with_deepspeed(folder: Path, deepspeed: Path, *kinds: str) -> None:
    path = f"{ROOT}:{ROOT / 'examples'}:{deepspeed}"
    environ = {"PYTHONPATH": path, "DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": f"{deepspeed}/built"}
    torchrun(2, folder, *kinds, script="trainer_ranks.py", **environ)


@pytest.mark.slow
def test_zero3_publishes_what_each_process_holds(deepspeed: Path, tmp_path: Path) -> None:
    with_deepspeed(tmp_path, deepspeed, "zero3", "zero3-moe")
    for kind in ("zero3", "zero3-moe"):
        reports = prove(tmp_path / kind, sharded=True)
        assert all(0 < report["moved_bytes"] < 20_000 for report in reports)
    assert "model.layers.1.mlp.experts.3.up_proj.weight" in expected(tmp_path / "zero3-moe")[3]


@pytest.mark.slow
def test_zero3_publishes_an_adapter_as_it_is_saved(deepspeed: Path, tmp_path: Path) -> None:
    with_deepspeed(tmp_path, deepspeed, "zero3-adapter")
    prove_adapter(tmp_path / "zero3-adapter")
