"""Trainers that are killed, started again and resumed: they continue their own run, with the weights that it
had.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from deltasync import Replica, open_store
from deltasync.channel.reading import ChannelReader
from deltasync.errors import ChannelInUseError, ConfigError
from tests.conftest import assert_same_bits
from tests.integration.trainers import make_trainer, published_bits, saved_bits, tiny_model, tiny_moe
from trl_callback import DeltaSyncCallback
from trl_callback.weight_transfer import OWNER_FILE

ROOT = Path(__file__).parents[2]
SAVING: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}

KILLED = """
import os, signal, sys
from pathlib import Path
from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint
from tests.integration.trainers import make_trainer, tiny_model
from trl_callback import DeltaSyncCallback

url, out, dies_at = sys.argv[1], sys.argv[2], int(sys.argv[3])

class Kill(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        sync.weight_transfer.publisher.flush()
        if state.global_step == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)

sync = DeltaSyncCallback(url)
trainer = make_trainer(tiny_model(), Path(out), sync, Kill(), max_steps=6, save_strategy="steps", save_steps=4)
trainer.train(resume_from_checkpoint=get_last_checkpoint(out) if os.path.isdir(out) else None)
"""


def test_a_job_that_is_killed_and_started_again_by_itself_continues_its_run(tmp_path: Path) -> None:
    url, out = f"file://{tmp_path}/channel", tmp_path / "out"
    runs, versions = set(), []
    # Before the first checkpoint, after it, to the end: always by the same command.
    for dies_at, code in ((2, -signal.SIGKILL), (5, -signal.SIGKILL), (0, 0)):
        command = [sys.executable, "-c", KILLED, url, str(out), str(dies_at)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert done.returncode == code, done.stderr[-3000:]
        runs.add(ChannelReader(open_store(url)).channel().run_id)
        versions.append(Replica(url).sync())
    assert len(runs) == 1
    assert versions == sorted(set(versions))
    owner = (out / OWNER_FILE).read_text().strip()
    assert ChannelReader(open_store(url)).channel().owner == owner


@pytest.mark.parametrize("place", ["another directory", "a copy", "deleted", "not writable"])
def test_the_output_directory_says_whose_run_it_is(
    tmp_path: Path, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    url, out = f"file://{tmp_path}/channel", tmp_path / "out"
    if place == "not writable":  # a file is in the way
        (out / OWNER_FILE).mkdir(parents=True)
    make_trainer(tiny_model(), out, DeltaSyncCallback(url), max_steps=1).train()
    other = tmp_path / "other" if place == "another directory" else out
    if place == "a copy":
        other = out.rename(tmp_path / "copy")
    if place == "deleted":
        (out / OWNER_FILE).unlink()
    again = make_trainer(tiny_model(), other, DeltaSyncCallback(url), max_steps=1)
    if place == "a copy":
        again.train()
        assert_same_bits(published_bits(url), saved_bits(again.model, tmp_path / "saved"))
        return
    with pytest.raises(
        ChannelInUseError, match=r"Pass resume=True, beside the URL, to Publisher or DeltaSyncCallback"
    ):
        again.train()
    assert ("starts again before its first checkpoint" in caplog.text) == (place == "not writable")


def test_the_id_of_a_job_needs_no_disk(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/channel"
    for number in range(2):
        make_trainer(
            tiny_model(), tmp_path / str(number), DeltaSyncCallback(url, owner="slurm:7"), max_steps=1
        ).train()
    with pytest.raises(ChannelInUseError):
        make_trainer(
            tiny_model(), tmp_path / "0", DeltaSyncCallback(url, owner="slurm:8"), max_steps=1
        ).train()
    with pytest.raises(ConfigError, match="owner must be"):
        DeltaSyncCallback(url, owner="a/b")


def test_a_job_that_starts_again_from_nothing_may_have_other_first_weights(tmp_path: Path) -> None:
    url, out = f"file://{tmp_path}/channel", tmp_path / "out"
    make_trainer(tiny_model(), out, DeltaSyncCallback(url), max_steps=1).train()
    model = tiny_model()
    with torch.no_grad():  # as a head that is initialised anew
        model.model.norm.weight.add_(1)
    make_trainer(model, out, DeltaSyncCallback(url), max_steps=1).train()
    assert_same_bits(published_bits(url), saved_bits(model, tmp_path / "saved"))


class LoseExperts(TrainerCallback):
    """Leaves experts as they were initialised, as transformers does that loads a checkpoint of a mixture."""

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        with torch.no_grad():
            for name, param in model.named_parameters():
                if ".experts." in name:
                    param.copy_(tiny_moe().get_parameter(name))


def test_a_checkpoint_whose_experts_are_not_loaded_is_told(tmp_path: Path) -> None:
    url, out = f"file://{tmp_path}/channel", tmp_path / "out"
    make_trainer(tiny_moe(), out, DeltaSyncCallback(url), max_steps=2, learning_rate=1e-2, **SAVING).train()
    before, version = published_bits(url), Replica(url).sync()

    trainer = make_trainer(tiny_moe(), out, LoseExperts(), DeltaSyncCallback(url), max_steps=3, **SAVING)
    with pytest.raises(ChannelInUseError, match=r"step 2 as version \d+.*experts") as caught:
        trainer.train(resume_from_checkpoint=str(out / "checkpoint-2"))
    assert any(".experts." in name for name in caught.value.tensors)
    assert not any(".self_attn." in name for name in caught.value.tensors)
    assert Replica(url).sync() == version
    assert_same_bits(published_bits(url), before)

    overwrite = DeltaSyncCallback(url, resume="overwrite")
    trainer = make_trainer(tiny_moe(), out, LoseExperts(), overwrite, max_steps=3, **SAVING)
    trainer.train(resume_from_checkpoint=str(out / "checkpoint-2"))
    assert_same_bits(published_bits(url), saved_bits(trainer.model, tmp_path / "saved"))


def test_a_trainer_that_trains_once_more_in_one_process_is_compared_too(tmp_path: Path) -> None:
    url, out = f"file://{tmp_path}/channel", tmp_path / "out"
    trainer = make_trainer(tiny_moe(), out, DeltaSyncCallback(url), max_steps=2, learning_rate=1e-2, **SAVING)
    trainer.train()
    checkpoint = out / "checkpoint-2"
    trainer.args.max_steps = 3
    trainer.callback_handler.callbacks.insert(1, LoseExperts())
    with pytest.raises(ChannelInUseError, match="step 2 as version"):
        trainer.train(resume_from_checkpoint=str(checkpoint))
    trainer.train()  # anew, from step 0
    assert_same_bits(published_bits(url), saved_bits(trainer.model, tmp_path / "saved"))


@pytest.mark.parametrize("kind", ["modules_to_save", "tied"])
def test_adapters_and_tied_heads_resume_with_their_bits(tmp_path: Path, kind: str) -> None:
    peft = pytest.importorskip("peft")
    url, out = f"file://{tmp_path}/channel", tmp_path / "out"

    def model() -> Any:
        made: Any = tiny_model(tied=kind == "tied")
        more = {"modules_to_save": ["lm_head"]} if kind == "modules_to_save" else {}
        config = peft.LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False, **more)
        torch.manual_seed(0)
        return peft.get_peft_model(made, config)

    def train(trained: Any, steps: int, **more: Any) -> None:
        trainer = make_trainer(
            trained, out, DeltaSyncCallback(url), max_steps=steps, learning_rate=1e-2, **SAVING
        )
        trainer.train(**more)

    train(model(), 2)
    train(model(), 3, resume_from_checkpoint=str(out / "checkpoint-2"))
    lost = out / "checkpoint-2/adapter_model.safetensors"
    from safetensors.torch import load_file, save_file

    save_file({name: tensor * 2 for name, tensor in load_file(lost).items()}, lost, {"format": "pt"})
    with pytest.raises(ChannelInUseError, match="step 2 as version"):
        train(model(), 3, resume_from_checkpoint=str(out / "checkpoint-2"))
