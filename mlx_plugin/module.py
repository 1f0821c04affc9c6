"""A replica whose weights are an `mlx.nn.Module`'s arrays, which are replaced between two forward calls.

A forward call builds a graph, which keeps its arrays and is computed later, so a commit never writes into an
array that a graph may have: `stage` copies the arrays and prepares the exchange with the copies; `commit`
puts the copies, which have the same bits, in the place of the arrays, and then exchanges the values.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import torch
from mlx.utils import tree_flatten, tree_unflatten

from deltasync.channel.reading import ChannelReader
from deltasync.channel.record import StoredRecord
from deltasync.errors import ConfigError, StageError
from deltasync.following import Commit, Identify, StagedVersion
from deltasync.serve import Gate, GatedTarget, Mapped, Names, Part, gated_calls
from mlx_plugin.derived import KeptArrays

_EXPERTS = ".switch_mlp."  # mlx_lm's name for the experts of a layer, which it stacks


def bits(array: mx.array) -> np.ndarray:
    """Return an array's bit patterns, unsigned, in its shape; they share its memory. Raises StageError."""
    try:
        return np.asarray(array.view(getattr(mx, f"uint{8 * array.itemsize}")))
    except RuntimeError as error:  # a graph is computed in the thread that built it
        raise StageError(
            f"The model has an array that is not computed: call mx.eval(model.parameters()). {error}"
        ) from None


def arrays(model: nn.Module) -> dict[str, mx.array]:
    """Return a model's parameters by name."""
    return dict(tree_flatten(model.parameters()))


def all_bits(model: nn.Module) -> dict[str, np.ndarray]:
    """Return the bits of a model's parameters by name."""
    return {name: bits(each) for name, each in arrays(model).items()}


class MlxTarget(GatedTarget):
    """The arrays of a model."""

    def __init__(self, module: nn.Module, reader: ChannelReader, names: Names, gate: Gate) -> None:
        super().__init__(module, reader, self._unstacked, gate)
        self._given = names
        self._next: tuple[dict[str, mx.array], Mapped] | None = None  # the copies of the last `stage`
        if mx.default_device() == mx.gpu and mx.cuda.is_available():
            raise ConfigError(
                "MLX on CUDA keeps arrays where they cannot be patched: follow with a torch.nn.Module there."
            )
        mx.eval(module.parameters())
        self._kept = KeptArrays(module)

    def _unstacked(self, own: str) -> str | Sequence[str] | None:
        """As `Names`; for experts that mlx_lm has stacked, the names of each one's tensor."""
        named = self._given(own)
        if isinstance(named, str) and _EXPERTS in named and named not in self.reader.specs:
            return [
                named.replace(_EXPERTS, f".experts.{each}.") for each in range(len(arrays(self._module)[own]))
            ]
        return named

    def _state(self, held: Mapping[str, mx.array] | None = None) -> dict[str, Any]:
        state: dict[str, Any] = {}
        for own, array in (held or arrays(self._module)).items():
            view, name = bits(array), str(array.dtype).removeprefix("mlx.core.").rstrip("_")
            state[own] = torch.from_numpy(view.view(f"i{view.itemsize}")).view(getattr(torch, name))
        if getattr(getattr(self._module, "args", None), "tie_word_embeddings", False):
            state.setdefault("lm_head.weight", state.get("model.embed_tokens.weight"))
        return state

    def _found(self) -> dict[str, int]:
        found = {}
        for own, array in arrays(self._module).items():
            with contextlib.suppress(StageError):
                found[own] = bits(array).ctypes.data
        return found

    def _held(self) -> list[Part]:
        parameters = {id(array) for array in arrays(self._module).values()}
        held = [(module, *each) for module in self._module.modules() for each in module.items()]
        return [(*each, None) for each in held if isinstance(each[2], nn.Module) or id(each[2]) in parameters]

    def open(self, identify: Identify) -> None:
        """Find the channel's tensors in the model, and which version they are, if any."""
        with self._gate.alone():
            self._kept.drop()
        super().open(identify)

    def stage(self, chain: Sequence[StoredRecord]) -> StagedVersion | None:
        """As `Target.stage`. Takes memory for a second copy of the weights, until no graph has the first any
        more.
        """
        live = self._opened.memory
        made: dict[int, mx.array] = {}  # arrays that have two names stay one
        copies = {}
        for own, each in arrays(self._module).items():
            copies[own] = made.setdefault(id(each), mx.array(bits(each)).view(each.dtype))
        mx.eval(copies)
        if any(bits(each).ctypes.data != bits(each).ctypes.data for each in copies.values()):
            raise StageError("MLX copies an array to view its bits here, so that they cannot be written.")
        mapped = self._mapped(self._state(copies))
        self._opened.memory = mapped[0]
        mapped[0].parts = live.parts
        try:
            staged = super().stage(chain)
        finally:
            self._opened.memory = live
        self._next = copies, mapped
        return staged

    def _exchange(self, staged: StagedVersion) -> Commit:
        assert self._next is not None
        (copies, mapped), self._next = self._next, None
        self._kept.drop()
        self._module.update(tree_unflatten([*copies.items()]))
        self._opened.memory, self.tensors, self._ties = mapped
        self._storages, self._parts = self._found(), self._held()
        return super()._exchange(staged)


gating = functools.partial(gated_calls, names=("__call__", "embed_inputs"))
"""Returns a context in which a model's calls, also those that encode images, pass a gate."""

ADAPTER = MlxTarget, gating
"""What `deltasync.follow` follows an `mlx.nn.Module` with, by the entry point `deltasync.modules`."""
