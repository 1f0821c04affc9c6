"""The tasks, the base and the files of `make corpus`, without training."""

from __future__ import annotations

import json
import random
import runpy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.corpus import dataset, tasks, train
from deltasync import Publisher
from deltasync.errors import ConfigError

PATIENCE_S = 60.0


def _said(*texts: str) -> list[list[dict[str, str]]]:
    return [[{"role": "assistant", "content": text}] for text in texts]


@pytest.mark.parametrize("name", tasks.TASKS)
def test_every_row_can_be_scored(name: str) -> None:
    task = tasks.TASKS[name]
    rows = task.rows(random.Random(0))
    assert rows == task.rows(random.Random(0)) and len(rows) == tasks.ROW_COUNT
    columns = {column: [row[column] for row in rows[:2]] for column in rows[0] if column != "prompt"}
    scores = task.reward(_said("nothing", "12"), prompts=[row["prompt"] for row in rows[:2]], **columns)
    assert len(scores) == 2 and all(0 <= score <= 1.1 for score in scores)


def test_rewards() -> None:
    assert tasks.addition_reward(_said("It is 12.", "13", "none", "1,2"), [12, 12, 12, 12]) == pytest.approx(
        [1.1, 0.1, 0, 1.1]
    )
    said = _said('["a", "b"]', '["a"]', "[a", "a", "7")
    assert tasks.format_reward(said, [2] * 5) == [1.0, 0.5, 0.1, 0.0, 0.0]
    # Of the secret "crane" the guess "crate" gets GGGXG; a word that gives it the same marks scores all.
    assert tasks.wordle_reward(_said("Crane!", "no"), ["crate"] * 2, ["GGGXG"] * 2) == pytest.approx(
        [1.0, 0.0]
    )


def test_a_base_is_made_once_and_not_mistaken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Network(torch.nn.Module):
        def save_pretrained(self, place: str) -> None:
            save_file({"w": torch.ones(2)}, Path(place) / "model.safetensors")

    class Tokenizer:
        def save_pretrained(self, place: str) -> None:
            (Path(place) / "tokenizer.json").write_text("{}")

    monkeypatch.setattr(train, "_loaded", lambda model: (Network(), Tokenizer()))
    base = train.make_base(tmp_path, "small")
    assert sorted(path.name for path in base.iterdir()) == [
        "made_from.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    monkeypatch.setattr(train, "_loaded", lambda model: pytest.fail("made twice"))
    assert train.make_base(tmp_path, "small") == base
    with pytest.raises(ConfigError):
        train.make_base(tmp_path, "smollm2")


def test_a_data_set_has_a_card_a_licence_and_a_loader_that_works(tmp_path: Path) -> None:
    states = [{"w": torch.full((4,), float(step), dtype=torch.bfloat16)} for step in range(3)]
    (tmp_path / "base").mkdir()
    save_file(states[0], tmp_path / "base" / "model.safetensors")
    with Publisher((tmp_path / "a").as_uri(), initial=tmp_path / "base") as publisher:
        for state in states:
            publisher.publish(state).wait(PATIENCE_S)
    steps = [{"step": step, "reward": step / 2} for step in (1, 2)]
    facts = {"task": "counting", "learning_rate": 1e-6, "master": "fp32", "model": "small", "steps": steps}
    (tmp_path / "a.json").write_text(json.dumps(facts))
    dataset.write(tmp_path)
    card = (tmp_path / "README.md").read_text()
    assert "| a | counting | 1e-06 | fp32 | 2 | 0.75, 0.75 |" in card and "deltasync's demo" in card
    assert "Apache License" in (tmp_path / "LICENSE").read_text()
    versions = runpy.run_path(str(tmp_path / "load.py"))["versions"]
    found = [(version, tensors["w"].clone()) for version, tensors in versions("a")]
    assert [version for version, _ in found] == [1, 2, 3]
    assert all(torch.equal(w, state["w"]) for (_, w), state in zip(found, states, strict=True))
    assert load_file(tmp_path / "base" / "model.safetensors")["w"].tolist() == [0.0] * 4
