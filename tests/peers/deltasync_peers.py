"""A pytest plugin: transformers' and TRL's own trainer tests, from a checkout of theirs, with the callback in every trainer.

    make test-peers CHECKOUT=../trl TESTS=tests/test_sft_trainer.py

Each trainer publishes to a channel of its own, and once `train` has returned, the newest version is compared with what
`save_pretrained` of the trained model writes, adapters merged. Models and data that these tests download have stand-ins:
small models with random weights, of the architecture in the name, the demo's tokenizer, and made-up rows. Tests that need
others fail as they would without a network. The summary counts the comparisons, which must all be equal.
"""

from __future__ import annotations

import copy
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

_SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "eos_token_id": 2,
}
_ROWS = 17

compared: list[str] = []
"""Trainers whose newest version was what they would save."""

different: list[str] = []
"""The others, with what differs."""


def pytest_configure(config: pytest.Config) -> None:
    """Add the callback to every trainer, and put stand-ins in the place of downloads."""
    _stand_in()
    import transformers

    from trl_callback import DeltaSyncCallback

    folder = Path(tempfile.mkdtemp(prefix="deltasync-peers-"))
    init, train, count = transformers.Trainer.__init__, transformers.Trainer.train, iter(range(1 << 30))

    def init_with_callback(self: Any, *args: Any, **kwargs: Any) -> None:
        self._sync = DeltaSyncCallback(f"file://{folder}/{next(count)}")
        kwargs["callbacks"] = [*(kwargs.get("callbacks") or ()), self._sync]
        init(self, *args, **kwargs)

    def train_and_compare(self: Any, *args: Any, **kwargs: Any) -> Any:
        done = train(self, *args, **kwargs)
        _compare(self, folder)
        return done

    transformers.Trainer.__init__ = init_with_callback
    transformers.Trainer.train = train_and_compare


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say how many final versions were compared."""
    terminalreporter.write_line(f"PEERS: {len(compared)} final versions are what would be saved, {len(different)} are not")
    for line in different:
        terminalreporter.write_line(f"  {line}")


def _compare(trainer: Any, folder: Path) -> None:
    from deltasync import Replica

    replica = Replica(trainer._sync.config.channel)
    replica.sync()
    found, wanted = replica.state_dict(), _saved(trainer.accelerator.unwrap_model(trainer.model), folder / "saved")
    names = sorted(found.keys() ^ wanted.keys())
    names += [
        name for name in found.keys() & wanted.keys() if not torch.equal(found[name], wanted[name].to(found[name].dtype))
    ]
    said = f"{type(trainer).__name__} of {type(trainer.model).__name__}"
    (different if names else compared).append(f"{said}: {', '.join(names[:3])}" if names else said)
    assert not names, different[-1]


def _saved(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    """What `save_pretrained` of the merged model writes; of a plain module, its state."""
    from safetensors.torch import load_file

    if hasattr(model, "merge_and_unload"):
        model = copy.deepcopy(model).merge_and_unload()
    if not hasattr(model, "save_pretrained"):
        return dict(model.state_dict())
    for path in folder.glob("*.safetensors"):
        path.unlink()
    model.save_pretrained(folder)
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def _stand_in() -> None:
    import datasets
    import transformers
    from transformers import AutoTokenizer, PreTrainedTokenizerBase

    from deltasync.demo import model as demo_model

    def model_of(name: str) -> Any:
        """A small model of the class in a name such as `tiny-Qwen3ForCausalLM`."""
        found = re.search(r"tiny-(\w+?For\w+?)(-|$)", name)
        kind = getattr(transformers, found[1], None) if found else None
        if kind is None:
            raise OSError(f"There is no stand-in for {name}.")
        torch.manual_seed(0)
        return kind(kind.config_class(**_SIZES))

    def load(cls: Any, name: Any, *args: Any, **kwargs: Any) -> Any:
        if Path(str(name)).exists():
            return originals[cls.__name__](name, *args, **kwargs)
        model = model_of(str(name))
        return model if kwargs.get("dtype") in (None, "auto", "float32") else model.to(kwargs["dtype"])

    originals = {}
    for cls in (transformers.AutoModelForCausalLM, transformers.AutoModelForSequenceClassification):
        originals[cls.__name__] = cls.from_pretrained
        cls.from_pretrained = classmethod(load)

    from_tokenizer = AutoTokenizer.from_pretrained

    def tokenizer(name: Any, *args: Any, **kwargs: Any) -> PreTrainedTokenizerBase:
        exists = Path(str(name)).exists()
        return from_tokenizer(name, *args, **kwargs) if exists else demo_model.build_tokenizer()

    AutoTokenizer.from_pretrained = tokenizer
    transformers.AutoProcessor.from_pretrained = tokenizer

    def dataset(path: str, name: str = "standard_language_modeling", split: str | None = None, **_: Any) -> Any:
        rows = {split_: _rows(name) for split_ in ("train", "test")}
        made = datasets.DatasetDict({split_: datasets.Dataset.from_dict(columns) for split_, columns in rows.items()})
        return made if split is None else made[split]

    datasets.load_dataset = dataset


def _rows(name: str) -> dict[str, list[Any]]:
    """Made-up columns of one of TRL's kinds of data, such as `conversational_prompt_completion`."""

    def said(text: str, role: str) -> Any:
        return [{"role": role, "content": text}] if name.startswith("conversational") else text

    question, answer, worse = said("12 13", "user"), said("14 15", "assistant"), said("16", "assistant")
    whole = [*question, *answer] if isinstance(question, list) else f"{question} {answer}"
    columns = {
        "language_modeling": {"messages" if name.startswith("conversational") else "text": whole},
        "prompt_completion": {"prompt": question, "completion": answer},
        "prompt_only": {"prompt": question},
        "preference": {"prompt": question, "chosen": answer, "rejected": worse},
        "implicit_prompt_preference": {"chosen": whole, "rejected": whole},
        "unpaired_preference": {"prompt": question, "completion": answer, "label": True},
    }
    kind = name.partition("_")[2]
    return {
        column: [copy.deepcopy(value) for _ in range(_ROWS)]
        for column, value in columns.get(kind, columns["prompt_only"]).items()
    }
