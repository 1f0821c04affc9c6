"""What is published is what saving would write, or training is refused before its first step by the method's
name.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3Config, Qwen3ForCausalLM, Trainer

from deltasync.errors import ConfigError
from tests.conftest import assert_same_bits
from tests.integration.trainers import SIZES, make_trainer, published_bits, saved_bits, tiny_model
from trl_callback import DeltaSyncCallback

Bits = dict[str, torch.Tensor]


def model_that_saves(change: Callable[[Any, Bits], Bits]) -> Any:
    """A model whose `save_pretrained` changes what transformers would save."""

    class Own(Qwen3ForCausalLM):
        def save_pretrained(self, *args: Any, state_dict: Any = None, **kwargs: Any) -> Any:
            return super().save_pretrained(
                *args, state_dict=change(self, state_dict or self.state_dict()), **kwargs
            )

    torch.manual_seed(0)
    return Own(Qwen3Config(**SIZES, tie_word_embeddings=False))


def renamed(model: Any, state: Bits) -> Bits:
    return {name.replace("model.norm", "model.final_norm"): value for name, value in state.items()}


def dropped(model: Any, state: Bits) -> Bits:
    return {name: value for name, value in state.items() if "layers.1.mlp" not in name}


def scaled(model: Any, state: Bits) -> Bits:
    return state | {"lm_head.weight": state["lm_head.weight"] * 2}


def rounded(model: Any, state: Bits) -> Bits:
    return {name: value.to(torch.bfloat16) for name, value in state.items()}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (renamed, r"it saves model.final_norm.weight, does not save model.norm.weight"),
        (dropped, r"does not save model.layers.1.mlp.\w+.weight"),
        (scaled, r"saves other values or dtypes of lm_head.weight"),
        (rounded, r"saves other values or dtypes of .* more"),
    ],
)
def test_a_model_that_saves_another_form_is_refused_by_name(
    tmp_path: Path, change: Callable[[Any, Bits], Bits], told: str
) -> None:
    trainer = make_trainer(
        model_that_saves(change), tmp_path / "out", DeltaSyncCallback(f"file://{tmp_path}/channel")
    )
    with pytest.raises(ConfigError, match=rf"Own\.save_pretrained saves another model .*{told}"):
        trainer.train()
    assert not (tmp_path / "channel/channel.json").exists()
    assert trainer.state.global_step == 0
    assert not [path for path in (tmp_path / "out").iterdir() if "saved" in path.name]


def test_a_model_that_saves_the_same_in_its_own_way_is_published(tmp_path: Path) -> None:
    url, model = (
        f"file://{tmp_path}/channel",
        model_that_saves(lambda model, state: dict(reversed(state.items()))),
    )
    make_trainer(model, tmp_path / "out", DeltaSyncCallback(url)).train()
    assert_same_bits(published_bits(url), saved_bits(model, tmp_path / "saved"))


def test_a_form_that_differs_once_weights_move_ends_publishing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As of a model that saves a moving average, which at first is equal."""
    first = {
        name: value.clone() for name, value in model_that_saves(lambda _, state: state).state_dict().items()
    }
    url, model = f"file://{tmp_path}/channel", model_that_saves(lambda _, state: dict(first))
    sync = DeltaSyncCallback(url)
    make_trainer(model, tmp_path / "out", sync, learning_rate=1e-2).train()
    assert [record.version for record in sync.history] == [1]
    assert re.search(
        r"Publishing has ended; training goes on: Own\.save_pretrained saves another model", caplog.text
    )


def test_a_method_that_fails_or_saves_no_safetensors_is_refused(tmp_path: Path) -> None:
    class Fails(Qwen3ForCausalLM):
        def save_pretrained(self, folder: Any, **kwargs: Any) -> Any:
            raise OSError("no")

    class Pickles(Qwen3ForCausalLM):
        def save_pretrained(self, folder: Any, **kwargs: Any) -> Any:
            torch.save(self.state_dict(), Path(folder) / "pytorch_model.bin")

    for kind, told in ((Fails, "it failed: OSError: no"), (Pickles, "saves no safetensors")):
        trainer = make_trainer(
            kind(Qwen3Config(**SIZES)), tmp_path / "out", DeltaSyncCallback(f"file://{tmp_path}/channel")
        )
        with pytest.raises(ConfigError, match=told):
            trainer.train()


def test_a_state_dict_of_its_own_is_what_is_published_and_saved(tmp_path: Path) -> None:
    class Own(Qwen3ForCausalLM):
        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            state = super().state_dict(*args, **kwargs)
            return {name.replace("model.norm", "model.final_norm"): value for name, value in state.items()}

    url, model = f"file://{tmp_path}/channel", Own(Qwen3Config(**SIZES, tie_word_embeddings=False))
    make_trainer(model, tmp_path / "out", DeltaSyncCallback(url)).train()
    model.save_pretrained(tmp_path / "saved")
    saved = {
        name: value.to(torch.bfloat16)
        for name, value in load_file(tmp_path / "saved/model.safetensors").items()
    }
    assert "model.final_norm.weight" in saved
    assert_same_bits(published_bits(url), saved)


def test_a_state_dict_hook_is_what_is_published_and_saved(tmp_path: Path) -> None:
    def drop(module: Any, state: Any, prefix: str, metadata: Any) -> None:
        del state["model.layers.1.mlp.up_proj.weight"]

    url, model = f"file://{tmp_path}/channel", tiny_model(tied=False)
    model.register_state_dict_post_hook(drop)
    make_trainer(model, tmp_path / "out", DeltaSyncCallback(url)).train()
    assert_same_bits(published_bits(url), saved_bits(model, tmp_path / "saved"))


def test_ignored_keys_are_neither_published_nor_saved(tmp_path: Path) -> None:
    class Own(Qwen3ForCausalLM):
        _keys_to_ignore_on_save = ("model.norm.weight",)

        def save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
            return super().save_pretrained(*args, **kwargs)

    url, model = f"file://{tmp_path}/channel", Own(Qwen3Config(**SIZES))  # tied, too
    make_trainer(model, tmp_path / "out", DeltaSyncCallback(url)).train()
    assert "model.norm.weight" not in published_bits(url)
    assert_same_bits(published_bits(url), saved_bits(model, tmp_path / "saved"))


@pytest.mark.parametrize("is_other", [True, False])
def test_a_trainer_that_saves_in_its_own_way(tmp_path: Path, is_other: bool) -> None:
    class Own(Trainer):
        def _save(self, output_dir: Any = None, state_dict: Any = None) -> None:
            state = self.model.state_dict()
            if is_other:
                state = renamed(self.model, state)
            super()._save(output_dir, state_dict=state)

    url, model = f"file://{tmp_path}/channel", tiny_model(tied=False)
    trainer = make_trainer(model, tmp_path / "out", DeltaSyncCallback(url))
    trainer.__class__ = Own
    if is_other:
        with pytest.raises(ConfigError, match=r"Own\._save saves another model"):
            trainer.train()
    else:
        trainer.train()
        assert_same_bits(published_bits(url), saved_bits(model, tmp_path / "saved"))
