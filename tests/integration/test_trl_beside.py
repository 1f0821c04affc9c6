"""The callback beside what else a training does: other callbacks, searches, wrappers, odd models. Training
goes on, or is refused before it begins; what is published last is the model as it is at the end."""

from __future__ import annotations

import json
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, TrainerCallback

from deltasync import Replica
from deltasync.errors import ConfigError, StoreError
from tests.conftest import assert_same_bits
from tests.integration.trainers import (
    FlushEachStep,
    anchor_directory,
    make_trainer,
    published_bits,
    saved_bits,
    tiny_model,
    tiny_moe,
)
from tests.waiting import wait_until
from trl_callback import DeltaSyncCallback, gather

LORA: dict[str, Any] = {"r": 4, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}


class Halves(TrainerCallback):
    """Changes the weights late, as averages of weights do."""

    def __init__(self, event: str) -> None:
        setattr(self, event, self.halve)

    def halve(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step == state.max_steps:
            with torch.no_grad():
                for param in model.parameters():
                    param.mul_(0.5)


@pytest.mark.parametrize("event", ["on_step_end", "on_train_end"])
@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
def test_the_final_weights_are_those_after_all_callbacks(event: str, first: bool, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/channel"
    sync, model = DeltaSyncCallback(url), tiny_model()
    callbacks = [Halves(event), sync] if first else [sync, Halves(event)]
    make_trainer(model, tmp_path / "out", *callbacks, max_steps=2).train()
    assert_same_bits(published_bits(url), saved_bits(model, tmp_path / "saved"))


def test_what_evaluations_and_trainings_return_has_none_of_our_keys(tmp_path: Path) -> None:
    sync = DeltaSyncCallback(f"file://{tmp_path}/channel")
    trainer = make_trainer(
        tiny_model(), tmp_path / "out", sync, eval_strategy="steps", eval_steps=1, max_steps=2
    )
    done = trainer.train()
    found = trainer.evaluate()
    assert not any("delta_sync" in name for name in [*done.metrics, *found])
    logs = [line for line in trainer.state.log_history if "loss" in line]
    assert all(any("delta_sync" in name for name in line) for line in logs)


def test_a_search_is_refused_before_it_trains(tmp_path: Path) -> None:
    trainer = make_trainer(
        tiny_model(), tmp_path / "out", DeltaSyncCallback(f"file://{tmp_path}/channel"), max_steps=1
    )
    trainer.state.is_hyper_param_search = True
    trainer.is_in_train = True
    with pytest.raises(ConfigError, match=r"remove_callback\(DeltaSyncCallback\)"):
        trainer.callback_handler.on_train_begin(trainer.args, trainer.state, trainer.control)
    assert not (tmp_path / "channel").exists()


class Grows(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(4))
        self.register_buffer("seen", torch.zeros(0))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **_: Any) -> dict[str, torch.Tensor]:
        if self.weight.any():
            self.seen = torch.cat([self.seen, torch.ones(1)])
        return {"loss": ((self.weight - input_ids.float().mean()) ** 2).sum()}


def test_training_goes_on_when_a_tensor_changes_its_shape(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"file://{tmp_path}/channel"
    trainer = make_trainer(Grows(), tmp_path / "out", DeltaSyncCallback(url), max_steps=4, learning_rate=0.1)
    trainer.train()
    assert trainer.state.global_step == 4
    said = [record.getMessage() for record in caplog.records if record.name.startswith("trl_callback")]
    assert [line[:36] for line in said] == [
        "Publishing has ended; training goes ",
        "The last published weights are those",
    ]
    assert "seen" in said[0]
    assert published_bits(url)["seen"].numel() == 0


def test_files_that_cannot_be_saved_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    url, model = f"file://{tmp_path}/channel", tiny_model()
    model.generation_config.temperature = 0.7  # without do_sample
    trainer = make_trainer(model, tmp_path / "out", DeltaSyncCallback(url), max_steps=1)
    trainer.callback_handler.processing_class = object()
    trainer.train()
    assert "no generation config: ValueError" in caplog.text
    assert "no tokenizer or processor: AttributeError" in caplog.text
    assert {path.suffix for path in anchor_directory(tmp_path).iterdir()} == {".json", ".safetensors"}


def test_two_callbacks_publish_to_two_channels_and_resume(tmp_path: Path) -> None:
    def train(steps: int, resume: bool) -> list[int]:
        model = get_peft_model(tiny_model(tied=False), LoraConfig(**LORA))
        merged, alone = (
            DeltaSyncCallback(f"file://{tmp_path}/merged"),
            DeltaSyncCallback(f"file://{tmp_path}/adapter", adapter_only=True),
        )
        flushes = FlushEachStep(merged), FlushEachStep(alone)
        trainer = make_trainer(
            model,
            tmp_path / "out",
            merged,
            alone,
            *flushes,
            max_steps=steps,
            save_strategy="steps",
            save_steps=2,
        )
        trainer.train(resume_from_checkpoint=resume)
        line = next(line for line in reversed(trainer.state.log_history) if "loss" in line)
        assert line["delta_sync/version"] == merged.history[-1].version
        assert line["delta_sync_2/version"] == alone.history[-1].version
        return [merged.history[-1].version, alone.history[-1].version]

    assert train(2, resume=False) == [3, 3]
    assert train(4, resume=True) == [6, 6]


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")  # of torch's compiler
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("inner", [False, True], ids=["the-model", "a-layer"])
def test_a_compiled_model_is_published_by_plain_names(inner: bool, tmp_path: Path) -> None:
    url, model = f"file://{tmp_path}/channel", tiny_model()
    expected = saved_bits(model, tmp_path / "saved")
    if inner:
        model.model.layers[0] = torch.compile(model.model.layers[0], backend="eager")
    given = model if inner else torch.compile(model, backend="eager")
    settings: dict[str, Any] = {"max_steps": 1, "learning_rate": 0.0, "remove_unused_columns": False}
    make_trainer(given, tmp_path / "out", DeltaSyncCallback(url), **settings).train()
    assert_same_bits(published_bits(url), expected)
    AutoModelForCausalLM.from_pretrained(anchor_directory(tmp_path))


@pytest.mark.filterwarnings("ignore:Model .*tie_word_embeddings=True")
@pytest.mark.filterwarnings("ignore:Input and output embeddings are no longer tied")
def test_a_head_that_is_trained_apart_is_not_called_tied(tmp_path: Path) -> None:
    url, model = (
        f"file://{tmp_path}/channel",
        get_peft_model(tiny_model(), LoraConfig(**LORA, modules_to_save=["lm_head"])),
    )
    with torch.no_grad():
        model.base_model.model.lm_head.modules_to_save["default"].weight.mul_(2)
    sync = DeltaSyncCallback(url, served_dtype="keep")
    make_trainer(model, tmp_path / "out", sync, max_steps=1, learning_rate=0.0).train()
    folder = anchor_directory(tmp_path)
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is False
    tokens = torch.arange(1, 13)[None]
    with torch.no_grad():
        torch.testing.assert_close(
            AutoModelForCausalLM.from_pretrained(folder)(tokens).logits, model(tokens).logits
        )


def test_a_model_that_was_dequantized_is_published_as_it_is_trained(tmp_path: Path) -> None:
    from transformers import FineGrainedFP8Config, Qwen3Config, Qwen3ForCausalLM

    from tests.integration.trainers import SIZES

    sizes = SIZES | {"hidden_size": 128, "intermediate_size": 128, "head_dim": 64}
    small = Qwen3ForCausalLM(Qwen3Config(**sizes, tie_word_embeddings=False)).to(torch.bfloat16)
    quantized = DeltaSyncCallback(f"file://{tmp_path}/channel", served_dtype="fp8")
    make_trainer(small, tmp_path / "out", quantized, max_steps=1, learning_rate=0.0).train()
    model = AutoModelForCausalLM.from_pretrained(
        anchor_directory(tmp_path),
        quantization_config=FineGrainedFP8Config(dequantize=True),
        dtype=torch.bfloat16,
    )
    held = {name: tensor.clone() for name, tensor in gather.held_tensors(model).items()}
    assert_same_bits(dict(gather.stream_of(model)), held)
    assert "quantization_config" not in json.loads(
        gather.checkpoint_files(model, None, "bfloat16")["config.json"]
    )


def test_the_code_of_a_custom_model_is_beside_its_weights(tmp_path: Path) -> None:
    from transformers import AutoConfig, Qwen3Config

    from tests.integration.trainers import SIZES

    (tmp_path / "configuration_custom.py").write_text(
        "from transformers import Qwen3Config\n\n\nclass CustomConfig(Qwen3Config):\n    model_type = "
        "'custom'\n"
    )
    (tmp_path / "modeling_custom.py").write_text(
        "from transformers import Qwen3ForCausalLM\n\nfrom .configuration_custom import CustomConfig\n\n\n"
        "class CustomForCausalLM(Qwen3ForCausalLM):\n    config_class = CustomConfig\n"
    )
    names = {
        "AutoConfig": "configuration_custom.CustomConfig",
        "AutoModelForCausalLM": "modeling_custom.CustomForCausalLM",
    }
    config = Qwen3Config(**SIZES).to_dict() | {"model_type": "custom", "auto_map": names}
    (tmp_path / "config.json").write_text(json.dumps(config))
    read = AutoConfig.from_pretrained(tmp_path, trust_remote_code=True)
    made = AutoModelForCausalLM.from_config(read, trust_remote_code=True)
    made.save_pretrained(tmp_path / "saved")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", trust_remote_code=True)
    files = gather.checkpoint_files(model, None, "keep")
    assert {"configuration_custom.py", "modeling_custom.py"} <= files.keys()
    assert json.loads(files["config.json"])["auto_map"] == names


def test_additional_chat_templates_are_beside_the_weights(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    processing = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    )
    processing.chat_template = {"default": "a {{ messages }}", "rag": "b {{ messages }}"}
    files = gather.checkpoint_files(tiny_model(), processing, "keep")
    assert files["additional_chat_templates/rag.jinja"] == b"b {{ messages }}"


def quietly_with_adapter(model: Any, config: LoraConfig) -> Any:
    """`get_peft_model` without its warnings. The filters are set here and not by a mark: `catch_warnings` of
    another thread that ends after the mark was set puts the older filters back."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return get_peft_model(model, config)


REFUSED: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "cannot-be-merged": (
        lambda: quietly_with_adapter(tiny_model(tied=False), LoraConfig(**LORA, lora_bias=True)),
        {},
        "PEFT cannot merge these .LORA.",
    ),
    "one-side-of-a-tie": (
        lambda: get_peft_model(tiny_model(), LoraConfig(**(LORA | {"target_modules": ["embed_tokens"]}))),
        {},
        "embed_tokens would be merged into weights that lm_head shares",
    ),
    "trained-outside": (
        lambda: get_peft_model(tiny_model(tied=False), LoraConfig(**LORA)),
        {"adapter_only": True},
        "norm.weight is trained and not part of it",
    ),
}


@pytest.mark.filterwarnings("ignore:Model .*tie_word_embeddings=True")
@pytest.mark.parametrize("name", REFUSED)
def test_adapters_that_cannot_be_published_are_refused_when_the_trainer_is_made(
    name: str, tmp_path: Path
) -> None:
    make, settings, said = REFUSED[name]
    model = make()
    if name == "trained-outside":
        model.base_model.model.model.norm.weight.requires_grad_(True)
    with pytest.raises(ConfigError, match=said):
        make_trainer(model, tmp_path / "out", DeltaSyncCallback(f"file://{tmp_path}/channel", **settings))


def test_two_adapters_are_published_to_two_channels(tmp_path: Path) -> None:
    model = get_peft_model(tiny_model(tied=False), LoraConfig(**LORA))
    model.add_adapter("other", LoraConfig(**(LORA | {"r": 2}), init_lora_weights=False))
    model.base_model.set_adapter(["default", "other"])
    syncs = {
        name: DeltaSyncCallback(f"file://{tmp_path}/{name}", adapter_only=name, served_dtype="keep")
        for name in ("default", "other")
    }
    make_trainer(model, tmp_path / "out", *syncs.values()).train()
    model.save_pretrained(tmp_path / "saved")
    for name, folder in {"default": tmp_path / "saved", "other": tmp_path / "saved" / "other"}.items():
        assert all(record.changed > 0 for record in syncs[name].history[1:])
        assert_same_bits(
            published_bits(f"file://{tmp_path}/{name}"), load_file(folder / "adapter_model.safetensors")
        )
    wrong = DeltaSyncCallback(f"file://{tmp_path}/wrong", adapter_only="policy")
    with pytest.raises(ConfigError, match="names the adapter policy, and the model has default, other"):
        make_trainer(model, tmp_path / "out", wrong)


class Switches(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step == 2:
            model.set_adapter("other")


def test_another_active_adapter_is_not_published_as_the_first(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = get_peft_model(tiny_model(tied=False), LoraConfig(**LORA))
    model.add_adapter("other", LoraConfig(**LORA, lora_alpha=64))
    sync = DeltaSyncCallback(f"file://{tmp_path}/channel", adapter_only=True)
    make_trainer(model, tmp_path / "out", Switches(), sync, FlushEachStep(sync), max_steps=4).train()
    assert [record.step for record in sync.history] == [0, 1]
    assert "holds the adapter default, but now other is active" in caplog.text


def test_a_store_that_cannot_be_reached_at_the_start_ends_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    sync = DeltaSyncCallback(
        "s3://bucket/run?endpoint=http://127.0.0.1:9&region=us-east-1", ack_timeout_s=0.1
    )
    with pytest.raises(StoreError, match=r"cannot be reached: .* See: deltasync doctor 's3://bucket/run"):
        make_trainer(tiny_model(), tmp_path / "out", sync).train()


@pytest.mark.parametrize("make", [tiny_model, tiny_moe])
def test_a_finished_trainer_holds_no_threads_and_trains_again(
    make: Callable[[], Any], tmp_path: Path
) -> None:
    url, model = f"file://{tmp_path}/channel", make()
    trainer = make_trainer(model, tmp_path / "out", DeltaSyncCallback(url), max_steps=2)
    for _ in range(2):
        trainer.train()
        assert_same_bits(published_bits(url), saved_bits(model, tmp_path / "saved"))
    ended = {"deltasync-upload", "deltasync-maintenance"}  # a second after their last work
    wait_until(lambda: not ended & {thread.name for thread in threading.enumerate()})
    assert Replica(url).sync() >= 4
