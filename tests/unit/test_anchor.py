from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

from deltasync import Publisher, Replica, errors, limits, ops
from deltasync.channel import anchors
from deltasync.channel.reading import ChannelReader
from deltasync.errors import ConfigError
from deltasync.stores import open_store
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
    for name in (
        "config.json",
        "tokenizer.json",
        "model.safetensors",
        "model.safetensors.index.json",
        "a.bin",
        ".hidden",
    ):
        (tmp_path / name).write_text(name)
    (tmp_path / "folder").mkdir()
    assert anchors.read_model_files(tmp_path) == {
        "config.json": b"config.json",
        "tokenizer.json": b"tokenizer.json",
    }


def write_all(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)


KEPT = (
    "config.json",
    "__init__.py",
    "additional_chat_templates/rag.jinja",
    "code/modeling/layers.py",
    "1_Pooling/config.json",
    "qformer_tokenizer/tokenizer_config.json",
)


def test_texts_in_subfolders_are_model_files(tmp_path: Path) -> None:
    write_all(tmp_path, *KEPT)
    write_all(
        tmp_path, "code/__pycache__/layers.json", ".git/config.json", "code/.hidden.json", "code/model.onnx"
    )
    write_all(tmp_path, "2_Dense/model.safetensors", "original/consolidated.00.pth", "code/a name.py")
    write_all(
        tmp_path, "checkpoint-5/trainer_state.json", "checkpoint-5/config.json", "checkpoint-5/inner/a.json"
    )
    write_all(tmp_path, "merged/config.json", "merged/tokenizer_config.json")
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "linked.json").symlink_to(tmp_path / "config.json")  # as in the Hub's cache
    found = anchors.read_model_files(tmp_path)
    assert found == {name: name.encode() for name in KEPT} | {"linked.json": b"config.json"}


def test_a_directory_that_is_no_checkpoint_gives_its_top_alone(tmp_path: Path) -> None:
    write_all(tmp_path, "notes.json", "inner/config.json")
    assert anchors.read_model_files(tmp_path) == {"notes.json": b"notes.json"}


def test_a_directory_with_too_much_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_all(tmp_path, "config.json", "code/one.py", "code/two.py")
    monkeypatch.setattr(limits, "COMPANION_FILES", 2)
    with pytest.raises(ConfigError, match="more than 2 files"):
        anchors.read_model_files(tmp_path)


def test_subfolders_arrive_in_anchors_and_exports(tmp_path: Path, memory_url: str) -> None:
    write_all(tmp_path / "model", *KEPT)
    with Publisher(memory_url, model_files=tmp_path / "model") as publisher:
        publisher.publish({"weight": torch.ones(4)}.items()).wait(60)
    ops.export(ChannelReader(open_store(memory_url)), None, tmp_path / "out")
    files = {
        path.relative_to(tmp_path / "out").as_posix()
        for path in (tmp_path / "out").rglob("*")
        if path.is_file()
    }
    assert files == {*KEPT, "model.safetensors"}
    assert all((tmp_path / "out" / name).read_text() == name for name in KEPT)


def test_a_missing_model_directory_is_a_config_error(tmp_path: Path, memory_url: str) -> None:
    with pytest.raises(ConfigError):
        Publisher(memory_url, model_files=tmp_path / "nothing")


def test_a_file_name_that_is_no_key_is_refused_before_anything_is_published(memory_url: str) -> None:
    with pytest.raises(ConfigError):
        Publisher(memory_url, model_files={"notes (copy).txt": b""})
    with pytest.raises(errors.NotPublishedError):
        Replica(memory_url).sync()
