"""A pytest plugin: transformers' and TRL's own trainer tests, from a checkout of theirs, with the callback in
every trainer.

    make test-peers CHECKOUT=../trl TESTS=tests/test_sft_trainer.py

Each trainer publishes to a channel of its own, and once `train` has returned, the newest version is compared
with what `save_pretrained` of the trained model writes, adapters merged. Models and data that these tests
download have stand-ins: small models with random weights, of the architecture in the name, the demo's
tokenizer, and made-up rows. Tests that need others fail as they would without a network. The summary counts
the comparisons, which must all be equal.
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
_MOST = 50_000_000  # parameters of a stand-in
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
    terminalreporter.write_line(
        f"PEERS: {len(compared)} final versions are what would be saved, {len(different)} are not"
    )
    for line in different:
        terminalreporter.write_line(f"  {line}")


def _compare(trainer: Any, folder: Path) -> None:
    from deltasync import Replica

    replica = Replica(trainer._sync.config.channel)
    replica.sync()
    found, wanted = (
        replica.state_dict(),
        _saved(trainer.accelerator.unwrap_model(trainer.model), folder / "saved"),
    )
    names = sorted(found.keys() ^ wanted.keys())
    names += [
        name
        for name in found.keys() & wanted.keys()
        if not _same_bits(found[name], wanted[name].to(found[name].dtype))
    ]
    said = f"{type(trainer).__name__} of {type(trainer.model).__name__}"
    (different if names else compared).append(f"{said}: {', '.join(names[:3])}" if names else said)
    assert not names, different[-1]


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(
        one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8)
    )


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

    folder = Path(tempfile.mkdtemp(prefix="deltasync-models-"))
    loaders = [getattr(transformers, name) for name in dir(transformers) if name.startswith("AutoModelFor")]
    for loader in [
        *loaders,
        *(getattr(transformers, name) for name in ("AutoConfig", "AutoTokenizer", "AutoProcessor")),
    ]:
        _load_locally(loader, folder)
    for loader in (transformers.PreTrainedModel, transformers.GenerationConfig):
        _load_locally(loader, folder)

    def dataset(
        path: str, name: str = "standard_language_modeling", split: str | None = None, **_: Any
    ) -> Any:
        made = datasets.DatasetDict(
            {split_: datasets.Dataset.from_dict(_rows(name)) for split_ in ("train", "test")}
        )
        return made if split is None else made[split]

    datasets.load_dataset = dataset


def _load_locally(loader: Any, folder: Path) -> None:
    """Let `from_pretrained` of a class find a stand-in in place of a name on the Hub."""
    original = loader.__dict__["from_pretrained"].__func__ if "from_pretrained" in loader.__dict__ else None

    def load(cls: Any, name: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("revision", None)
        found = name if Path(str(name)).exists() else _checkpoint(str(name), folder)
        if original is not None:
            return original(cls, found, *args, **kwargs)
        return super(loader, cls).from_pretrained(found, *args, **kwargs)

    loader.from_pretrained = classmethod(load)


def _checkpoint(name: str, folder: Path) -> str:
    """A small model of the class in a name such as `tiny-Qwen3ForCausalLM`, with the demo's tokenizer."""
    import transformers

    from demo import model as demo_model

    found = re.search(r"tiny-(\w+?For[A-Z][A-Za-z]+)", name)
    kind = getattr(transformers, found[1], None) if found else None
    if found is None or kind is None:
        raise OSError(f"There is no stand-in for {name}.")
    path = folder / found[1]
    if not path.exists():
        torch.manual_seed(0)
        labels = {"num_labels": 1} if "SequenceClassification" in found[1] else {}
        config = kind.config_class(**_SIZES, **labels)
        with torch.device("meta"):
            count = sum(parameter.numel() for parameter in kind(copy.deepcopy(config)).parameters())
        if count > _MOST:  # its vision tower has sizes of its own
            raise OSError(f"There is no small stand-in for {name}: it has {count:,} parameters.")
        kind(config).save_pretrained(path)
        demo_model.build_tokenizer().save_pretrained(path)
    return str(path)


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
