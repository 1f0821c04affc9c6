"""A draft that guesses the next tokens of a model, and is followed with it if its trainer trains both.

A channel has the tensors of such a draft in one of two ways: as those of the model's own checkpoint (MTP
layers), or with `DRAFT` before their names. Names without it are never those of a draft that has a checkpoint
of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable

import torch

DRAFT = "draft."
"""The prefix of the names of a draft that has a checkpoint of its own, such as an EAGLE head."""


class WithDraft(torch.nn.Module):
    """A model and its draft as one, for the load plan. Call `load_weights` of a copy
    (`plan.Loader.as_loaded`).

    Args:
        draft: The draft; None for tensors of a draft that is not here.
        is_part: Whether the model's own checkpoint has the draft, so that each of them picks its tensors.
    """

    def __init__(
        self, model: torch.nn.Module, draft: torch.nn.Module | None = None, is_part: bool = False
    ) -> None:
        super().__init__()
        self.model, self.draft, self.is_part = model, draft, is_part

    @property
    def drafting(self) -> set[torch.nn.Module]:
        """The modules of the draft that it does not share with the model, as engines share embeddings and
        heads.
        """
        return {*(() if self.draft is None else self.draft.modules())} - {*self.model.modules()}

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Have both load their tensors. The draft's copies of what it shares with the model go nowhere."""
        held = [*weights]
        own = [(name.removeprefix(DRAFT), tensor) for name, tensor in held if name.startswith(DRAFT)]
        others = [item for item in held if not item[0].startswith(DRAFT)]
        self.model.load_weights(iter(others))  # type: ignore[operator]
        if self.draft is None or not (self.is_part or own):
            return
        drafting = self.drafting
        for module in drafting:
            for name, child in module._modules.items():
                if child is not None and child not in drafting:
                    module._modules[name] = _nowhere(child)
        self.draft.load_weights(iter(others if self.is_part else own))  # type: ignore[operator]


def _nowhere(module: torch.nn.Module) -> torch.nn.Module:
    """Return a copy of a module without memory, which takes what is loaded into it."""
    twin = copy.copy(module)
    twin._parameters = {}
    for name, parameter in module._parameters.items():
        if parameter is not None:
            empty = parameter.data.to("meta")
            empty.__class__, empty.__dict__ = parameter.__class__, dict(parameter.__dict__)
            twin._parameters[name] = empty  # type: ignore[assignment]
    return twin
