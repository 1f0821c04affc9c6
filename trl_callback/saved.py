"""Compare what is published with what is saved, of a model whose class or trainer saves it in a way of its
own.

Every other model is saved by transformers, whose form `gather` derives.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from transformers import PreTrainedModel

from deltasync.errors import ConfigError
from deltasync.tensors.bits import bits_of, readable
from deltasync.trainer.stream import unwrapped
from trl_callback import adapter, gather

_NAMED = 3  # tensors that a message names
_LIBRARIES = ("transformers", "trl")


class OwnForm:
    """A model that its class, or its trainer, saves in a way of its own.

    Attributes:
        name: The method that saves it, such as `MyModel.save_pretrained`.
    """

    def __init__(self, name: str, save: Callable[[str], object], folder: str) -> None:
        self.name = name
        self._save, self._folder = save, folder

    @classmethod
    def of(cls, model: torch.nn.Module, trainer: Any) -> OwnForm | None:
        """Return how a model is saved; None if transformers saves it, or if nothing is saved by a name of its
        own.
        """
        base = adapter.base_of(model)
        if not isinstance(base, PreTrainedModel):
            return None
        folder = str(trainer.args.output_dir)
        if (owner := _owner(base, "save_pretrained")) is not PreTrainedModel:

            def save(folder: str) -> object:
                whole: Any = adapter.merged(model) if gather.is_peft(model) else unwrapped(model)
                return whole.save_pretrained(folder)

            return cls(f"{owner.__name__}.save_pretrained", save, folder)
        owner = _owner(trainer, "_save")
        if owner.__module__.partition(".")[0] not in _LIBRARIES and not gather.is_peft(model):
            return cls(f"{owner.__name__}._save", trainer._save, folder)
        return None

    def check(self, model: torch.nn.Module) -> None:
        """Save the model into a temporary folder, and compare that with what is published of it now.

        Raises:
            ConfigError: it is another model, or what is saved cannot be known.
        """
        if gather.is_sharded(model):
            raise ConfigError(
                f"{self.name} is not transformers' own, so what it would save of a sharded model cannot be "
                "compared with "
                f"what is published. Train with DDP, or leave the method out. {_CURE}"
            )
        wanted = {name: tensor.detach() for name, tensor in gather.stream_of(model)}
        only_saved, differing, seen = list[str](), list[str](), set[str]()
        for name, tensor in self._saved():
            seen.add(name)
            if name not in wanted:
                tied = getattr(adapter.base_of(model), "_tied_weights_keys", None) or ()
                if not any(re.search(key, name) for key in tied) or not any(
                    _same(tensor, one) for one in wanted.values()
                ):
                    only_saved.append(name)
            elif not _same(tensor, wanted[name]):
                differing.append(name)
        # A trainer may save a part of the model; what it saves has to be what is published.
        left_out = [name for name in wanted if name not in seen] if self.name.endswith("pretrained") else []
        problems = {
            "saves": only_saved,
            "does not save": left_out,
            "saves other values or dtypes of": differing,
        }
        told = [f"{what} {_listed(names)}" for what, names in problems.items() if names]
        if told:
            raise ConfigError(
                f"{self.name} saves another model than the one that would be published: it "
                f"{', '.join(told)}. {_CURE}"
            )

    def _saved(self) -> Iterator[tuple[str, torch.Tensor]]:
        where = self._folder if os.access(self._folder, os.W_OK) else None
        with tempfile.TemporaryDirectory(prefix="deltasync-saved-", dir=where) as folder:
            try:
                self._save(folder)
            except Exception as error:
                raise ConfigError(
                    f"What {self.name} saves has to be compared with what is published, and it failed: "
                    f"{type(error).__name__}: {error}"
                ) from error
            files = sorted(Path(folder).glob("*.safetensors"))
            if not files:
                raise ConfigError(
                    f"{self.name} saves no safetensors, so what it saves cannot be compared with what is "
                    f"published. {_CURE}"
                )
            for path in files:
                with safe_open(path, framework="pt") as file:
                    for name in file.keys():  # noqa: SIM118 - no mapping
                        yield name, file.get_tensor(name)


_CURE = (
    "Make changes of names and values in the model's state_dict(), which saving and publishing both use, or "
    "publish from a "
    "loop of your own with deltasync.Publisher."
)


def _owner(thing: object, name: str) -> type:
    """Return the class that defines a method of an object, or the object's own class if it has a method of
    its own.
    """
    if name in vars(thing):
        return type(thing)
    return next(base for base in type(thing).__mro__ if name in vars(base))


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    here, there = (bits_of(readable("", tensor).detach().cpu().contiguous()) for tensor in (one, other))
    return bool(np.array_equal(here, there))


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else ""
    return f"{', '.join(names[:_NAMED])}{more}"
