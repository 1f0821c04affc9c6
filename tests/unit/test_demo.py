from __future__ import annotations

import hashlib
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerState

pytest.importorskip("trl")
from demo.run import Talker
from demo.train import DigestsFileCallback
from trl_callback import VersionRecord


class Sync:
    def __init__(self) -> None:
        self.history: list[VersionRecord] = []

    def publish(self, version: int, step: int) -> None:
        record = VersionRecord(
            version=version,
            step=step,
            kind="delta",
            changed=1,
            total=3,
            payload_bytes=6,
            anchor_bytes=0,
            held_s=0.0,
            encode_s=0.0,
            ack_s=None,
        )
        self.history.append(record)


def sha256(*values: float) -> str:
    return hashlib.sha256(
        torch.tensor(values, dtype=torch.bfloat16).view(torch.int16).numpy().tobytes()
    ).hexdigest()


def test_each_version_is_held_to_the_weights_that_the_trainer_had(tmp_path: Path) -> None:
    model, sync = torch.nn.Module(), Sync()
    model.w = torch.nn.Parameter(torch.tensor([1.0, -0.0, 3.0]))
    unused: Any = None
    callback = DigestsFileCallback(sync, tmp_path / "published.jsonl")  # type: ignore[arg-type]
    callback.on_train_begin(unused, TrainerState(global_step=0), unused, model=model)
    callback.on_step_begin(unused, unused, unused)  # nothing is encoded yet
    model.w.data[1] = 0.0
    callback.on_step_end(unused, TrainerState(global_step=1), unused, model=model)
    sync.publish(1, step=0)
    callback.on_step_begin(unused, unused, unused)
    model.w.data[1] = 7.0
    sync.publish(2, step=1)
    callback.write()
    callback.write()
    lines = [json.loads(line) for line in (tmp_path / "published.jsonl").read_text().splitlines()]
    assert [(line["version"], line["sha256"]) for line in lines] == [
        (1, {"w": sha256(1.0, -0.0, 3.0)}),
        (2, {"w": sha256(1.0, 0.0, 3.0)}),
    ]


def test_silence_is_broken_by_what_still_goes_on() -> None:
    said: list[str] = []
    several = threading.Event()

    def note(line: str) -> None:
        said.append(line)
        if len(said) >= 4:
            several.set()

    with Talker(note, every_s=0.02) as say:
        say("starting vLLM; it takes a while")
        assert several.wait(30)
    assert said[0] == "starting vLLM; it takes a while"
    assert set(said[1:]) == {"0 s later, still: starting vLLM"}
    assert not say._thread.is_alive()
