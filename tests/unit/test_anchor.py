from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

from deltasync import Publisher, Replica, errors, limits
from deltasync.channel import anchors
from deltasync.errors import ConfigError
from tests.conftest import assert_same_bits

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # other people's warnings at import are not ours to fix
    import transformers


def _tiny(tied: bool) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=tied,
    )
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("shard_bytes", [1 << 30, 4096], ids=["one file", "sharded"])
def test_an_anchor_is_a_checkpoint_that_transformers_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tied: bool, shard_bytes: int
) -> None:
    monkeypatch.setattr(limits, "WEIGHT_FILE_BYTES", shard_bytes)
    model = _tiny(tied)
    model.config.save_pretrained(tmp_path / "config")
    channel = tmp_path / "channel"
    with Publisher(f"file://{channel}", model_files=tmp_path / "config") as publisher:
        publisher.publish(model.state_dict().items()).wait(60)
    (folder,) = (channel / "anchors").iterdir()
    assert (folder / "model.safetensors.index.json").exists() == (shard_bytes == 4096)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert loaded.dtype == torch.bfloat16
    assert_same_bits(loaded.state_dict(), model.state_dict())


def test_companion_files_are_all_but_weights_and_hidden_ones(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "model.safetensors", "model.safetensors.index.json", "a.bin", ".hidden"):
        (tmp_path / name).write_text(name)
    (tmp_path / "folder").mkdir()
    assert anchors.read_model_files(tmp_path) == {"config.json": b"config.json", "tokenizer.json": b"tokenizer.json"}


def test_a_missing_model_directory_is_a_config_error(tmp_path: Path, memory_url: str) -> None:
    with pytest.raises(ConfigError):
        Publisher(memory_url, model_files=tmp_path / "nothing")


def test_a_file_name_that_is_no_key_is_refused_before_anything_is_published(memory_url: str) -> None:
    with pytest.raises(ConfigError):
        Publisher(memory_url, model_files={"notes (copy).txt": b""})
    with pytest.raises(errors.NotPublishedError):
        Replica(memory_url).sync()
