"""A replica whose weights are an `mlx.nn.Module`'s arrays, which are replaced between two forward calls.

A forward call builds a graph, which keeps its arrays and is computed later, so a commit never writes into an
array that a graph may have: `stage` copies the arrays and prepares the exchange with the copies; `commit`
puts the copies, which have the same bits, in the place of the arrays, and then exchanges the values. Of a
quantized module a mirror of the published weight is exchanged; the arrays that `stage` has quantized from it
replace the module's.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import torch
from mlx.utils import tree_unflatten

from deltasync.channel.reading import ChannelReader
from deltasync.channel.record import StoredRecord
from deltasync.errors import ConfigError, ModelMismatchError, StageError
from deltasync.following import Commit, Identify, StagedVersion
from deltasync.serve import Gate, GatedTarget, Mapped, Names, Part, gated_calls, in_place
from mlx_plugin import quantized
from mlx_plugin.arrays import arrays, bits, of_bits
from mlx_plugin.derived import KeptArrays

_EXPERTS = ".switch_mlp."  # mlx_lm's name for the experts of a layer, which it stacks

# The arrays of an adapter's layer in mlx_lm, and PEFT's names for them. Those of one matrix are transposed there.
_LAYERS_OWN = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight", "m": "lora_magnitude_vector"}
_EMBEDDINGS_OWN = {"lora_a": "lora_embedding_A", "lora_b": "lora_embedding_B", "m": "lora_magnitude_vector"}
_TRANSPOSED = "lora_a", "lora_b"
_PEFT = "base_model.model."


class MlxTarget(GatedTarget):
    """The arrays of a model."""

    def __init__(self, module: nn.Module, reader: ChannelReader, names: Names, gate: Gate) -> None:
        super().__init__(module, reader, names, gate)
        # the copies of the last `stage`, and live memory over what MLX has made
        self._next: tuple[dict[str, mx.array], Mapped, Any] | None = None
        self._layers: Mapping[str, nn.Module] = {}  # those with an adapter, by their paths
        self._quantized: dict[str, quantized.QuantizedWeight] = {}
        self._made: Any = None  # live memory over what MLX has made of the version, as it was made
        if mx.default_device() == mx.gpu and mx.cuda.is_available():
            raise ConfigError(
                "MLX on CUDA keeps arrays where they cannot be patched: follow with a torch.nn.Module there."
            )
        mx.eval(module.parameters())
        self._kept = KeptArrays(module)

    def _names(self, own: str) -> str | Sequence[str] | None:
        """As `Names`; for experts that mlx_lm has stacked, the names of each one's tensor."""
        named = super()._names(own)
        if isinstance(named, str) and _EXPERTS in named and named not in self.reader.specs:
            return [
                named.replace(_EXPERTS, f".experts.{each}.") for each in range(len(arrays(self._module)[own]))
            ]
        return named

    def _adapter_name(self, own: str) -> str | None:
        path, _, last = own.rpartition(".")
        layer = self._layers.get(path)
        kinds = _EMBEDDINGS_OWN if hasattr(layer, "embedding") else _LAYERS_OWN
        return f"{_PEFT}{path}.{kinds[last]}" if layer is not None and last in kinds else None

    def _note_kind(self) -> None:
        super()._note_kind()
        self._layers = {path: each for path, each in self._module.named_modules() if "lora_a" in each}

    def _check_config(self, config: Mapping[str, Any]) -> None:
        for path, layer in self._layers.items():
            wanted = in_place.scaling(config, path)
            if not math.isclose(layer.scale, wanted):
                raise ModelMismatchError(
                    f"{path} multiplies its adapter by {layer.scale:g}, and the channel's {in_place.CONFIG} says "
                    f"{wanted:g}: make the layers with that scale."
                )

    def _base(self) -> Iterator[tuple[str, torch.Tensor]]:
        for own, tensor in self._state().items():
            if self._names(own) is None:
                yield own.replace(".linear.", ".").replace(".embedding.", "."), tensor

    def _state(self, held: Mapping[str, mx.array] | None = None) -> dict[str, Any]:
        held = held or arrays(self._module)
        dtypes = {own: str(each.dtype).removeprefix("mlx.core.").rstrip("_") for own, each in held.items()}
        dtypes |= {own: weight.dtype for own, weight in self._quantized.items()}
        state: dict[str, Any] = {}
        for own, view in self.published(held).items():
            tensor = _signed(view).view(getattr(torch, dtypes[own]))
            is_transposed = self._is_adapter and tensor.ndim == 2 and own.endswith(_TRANSPOSED)
            state[own] = tensor.t() if is_transposed else tensor
        is_tied = getattr(getattr(self._module, "args", None), "tie_word_embeddings", False)
        if is_tied and not self._is_adapter:
            state.setdefault("lm_head.weight", state.get("model.embed_tokens.weight"))
        return state

    def published(self, held: Mapping[str, mx.array] | None = None) -> dict[str, np.ndarray]:
        """Return the bits of the weights by their names in the model; of those that MLX has quantized, of the
        mirror. They share memory with these.

        Args:
            held: The model's arrays; those that it has now by default.
        """
        made = self._made_names
        found = {own: bits(array) for own, array in (held or arrays(self._module)).items() if own not in made}
        return found | {own: weight.bits for own, weight in self._quantized.items()}

    def made(self) -> dict[str, np.ndarray]:
        """Return the bits of the arrays that MLX has made of published weights, by their names in the model."""
        held = arrays(self._module)
        return {own: bits(held[own]) for own in self._made_names}

    @property
    def _made_names(self) -> set[str]:
        return {own for weight in self._quantized.values() for own in weight.made}

    def _is_made(self) -> bool:
        return self.version is None or self._made is None or bool(self._made.is_intact())

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
        self._note_kind()
        self._made = None
        self._quantized = quantized.find(self._module, self.reader.specs, self._names)
        super().open(identify)
        self._opened.reported = {name for each in self._quantized.values() for name in each.places}

    def stage(self, chain: Sequence[StoredRecord]) -> StagedVersion | None:
        """As `Target.stage`. Takes memory for a second copy of the weights, until no graph has the first any
        more.
        """
        live = self._opened.memory
        made: dict[int, mx.array] = {}  # arrays that have two names stay one
        copies = {}
        held, remade = arrays(self._module), self._made_names
        for own, each in held.items():
            if own not in remade and not (self._is_adapter and self._names(own) is None):
                copies[own] = made.setdefault(id(each), of_bits(bits(each), each.dtype))
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
        if staged is None:
            return None
        for weight in self._quantized.values():
            copies |= weight.changes(staged.whole, held)
        mx.eval(copies)
        remade_bits = {own: _signed(bits((held | copies)[own])) for own in remade}
        self._next = copies, mapped, type(live).audited(remade_bits)
        return staged

    def _exchange(self, staged: StagedVersion) -> Commit:
        assert self._next is not None
        (copies, mapped, made), self._next = self._next, None
        self._kept.drop()
        held, before = arrays(self._module), self._made
        self._put(copies)
        self._made, (self._opened.memory, self.tensors, self._ties) = made, mapped
        try:
            return super()._exchange(staged)
        except BaseException:
            self._put({own: held[own] for own in self._made_names})
            self._made = before
            raise

    def _put(self, replacing: Mapping[str, mx.array]) -> None:
        """Have the model compute with these arrays, by their names."""
        self._module.update(tree_unflatten([*replacing.items()]))
        self._note_places()


def _signed(bits_of: np.ndarray) -> torch.Tensor:
    """Return bit patterns as signed integers, which share their memory."""
    return torch.from_numpy(bits_of.view(f"i{bits_of.itemsize}"))


gating = functools.partial(gated_calls, names=("__call__", "embed_inputs"))
"""Returns a context in which a model's calls, also those that encode images, pass a gate."""

ADAPTER = MlxTarget, gating
"""What `deltasync.follow` follows an `mlx.nn.Module` with, by the entry point `deltasync.modules`."""
