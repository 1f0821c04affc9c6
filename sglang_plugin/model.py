"""A model as SGLang has loaded it: how its loader is recorded, and what is made again after a commit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from deltasync.errors import ModelMismatchError
from deltasync.serve import derived
from deltasync.serve.mirror import MirroringEngine
from deltasync.tensors.bits import dtype_name
from sglang_plugin import refusals
from sglang_plugin.reload import SglangLayers, note_built


def note_loads() -> None:
    """Have SGLang's loader note what loading makes beside parameters. Call before a model is loaded."""
    from sglang.srt.model_loader.loader import DefaultModelLoader

    load = DefaultModelLoader.load_weights_and_postprocess

    def noted(model: Any, *args: Any) -> Any:
        derived.note_built(model)
        note_built(model)
        done = load(model, *args)
        derived.note_loaded(model)
        return done

    DefaultModelLoader.load_weights_and_postprocess = staticmethod(noted)


class ModelEngine(MirroringEngine):
    """The model of one of SGLang's model runners.

    Raises:
        ConfigError: its weights are not where deltas reach them.
    """

    layers = SglangLayers()
    loader = layers.loader

    def __init__(self, runner: Any) -> None:
        self._runner, self.model = runner, runner.model
        refusals.check_model(self.model)
        self.is_complete = derived.is_complete(self.model)
        self.has_logits = runner.model_config.is_generation
        self.dtype = dtype_name(runner.model_config.dtype)

    def checkpoint(self) -> Iterator[tuple[str, torch.Tensor]]:
        """As `Engine.checkpoint`."""
        from sglang.srt.model_loader.loader import DefaultModelLoader, get_model_loader

        loader = get_model_loader(self._runner.load_config, self._runner.model_config)
        if not isinstance(loader, DefaultModelLoader):
            raise ModelMismatchError(
                f"SGLang loaded its weights by {type(loader).__name__}, so it cannot be proven where they "
                "are: serve a "
                "checkpoint, without --load-format."
            )
        yield from loader._get_all_weights(self._runner.model_config, self.model)
