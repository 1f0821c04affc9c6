"""A replica whose weights are an `mlx.nn.Module`'s arrays, which are replaced between two forward calls.

A forward call builds a graph, which keeps its arrays and is computed later, so a commit never writes into an array that a
graph may have: `stage` copies the arrays and prepares the exchange with the copies; `commit` puts the copies, which have the
same bits, in the place of the arrays, and then exchanges the values.
"""

from __future__ import annotations

import contextlib
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
from deltasync.following import Commit, Gate, GatedTarget, Names, StagedVersion, reclassed
from deltasync.live import LiveMemory

_VIEWS = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}
_EXPERTS = ".switch_mlp."  # mlx_lm's name for the experts of a layer, which it stacks


def bits(array: mx.array) -> np.ndarray:
    """Return an array's bit patterns, unsigned, in its shape; they share its memory. Raises StageError."""
    try:
        return np.asarray(array.view(_VIEWS[array.itemsize]))
    except RuntimeError as error:  # a graph is computed in the thread that built it
        raise StageError(f"The model has an array that is not computed: call mx.eval(model.parameters()). {error}") from None


def arrays(model: nn.Module) -> dict[str, mx.array]:
    """Return a model's parameters by name."""
    return dict(tree_flatten(model.parameters()))


class ModuleTarget(GatedTarget):
    """The arrays of a model."""

    def __init__(self, module: nn.Module, reader: ChannelReader, names: Names, gate: Gate) -> None:
        super().__init__(module, reader, self._unstacked, gate)
        self._given = names
        self._next: tuple[dict[str, mx.array], LiveMemory] | None = None  # the copies of the last `stage`
        if mx.default_device() == mx.gpu and mx.cuda.is_available():
            raise ConfigError("MLX on CUDA keeps arrays where they cannot be patched: follow with a torch.nn.Module there.")
        mx.eval(module.parameters())

    def _unstacked(self, own: str) -> str | Sequence[str] | None:
        """As `Names`; for experts that mlx_lm has stacked, the names of each one's tensor."""
        named = self._given(own)
        if isinstance(named, str) and _EXPERTS in named and named not in self.reader.specs:
            return [named.replace(_EXPERTS, f".experts.{each}.") for each in range(len(arrays(self._module)[own]))]
        return named

    def _state(self, held: Mapping[str, mx.array] | None = None) -> dict[str, Any]:
        state: dict[str, Any] = {}
        for own, array in (arrays(self._module) if held is None else held).items():
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

    def stage(self, chain: Sequence[StoredRecord]) -> StagedVersion:
        """As `Target.stage`. Takes memory for a second copy of the weights, until no graph has the first any more."""
        live = self._opened.memory
        copies = {own: mx.array(bits(each)).view(each.dtype) for own, each in arrays(self._module).items()}
        mx.eval(copies)
        if any(bits(each).ctypes.data != bits(each).ctypes.data for each in copies.values()):
            raise StageError("MLX copies an array to view its bits here, so that they cannot be written.")
        memory = self._mapped(self._state(copies))
        memory.parts = dict(live.parts)
        self._opened.memory = memory
        try:
            staged = super().stage(chain)
        finally:
            self._opened.memory = live
        self._next = copies, memory
        return staged

    def _exchange(self, staged: StagedVersion) -> Commit:
        assert self._next is not None
        (copies, memory), self._next = self._next, None
        self._module.update(tree_unflatten([*copies.items()]))
        self._storages, self._opened.memory = self._found(), memory
        return super()._exchange(staged)


def gating(module: nn.Module, gate: Gate) -> contextlib.AbstractContextManager[None]:
    """Return a context in which the calls of a model pass a gate."""
    kind = type(module)
    if hasattr(kind, "deltasync_gate"):
        raise ConfigError("This model follows a channel already: close() that first.")

    def call(self: nn.Module, *arguments: Any, **options: Any) -> Any:
        with gate.inside():
            return kind.__call__(self, *arguments, **options)

    own = {"__call__": call, "__module__": kind.__module__, "__qualname__": kind.__qualname__, "deltasync_gate": gate}
    return reclassed(module, type(kind.__name__, (kind,), own))
