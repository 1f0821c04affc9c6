"""Modules that MLX has quantized: mirrors of the published weights, and the arrays that MLX makes of them.

`mx.quantize` makes the packed words, the scale and the bias of a group, `group_size` elements of a row, from
these elements alone. So of a version's changes only the groups that they are in are quantized again.

Shape suffixes: K changed elements of a weight; G groups in which they are; S elements of a group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from deltasync.errors import ModelMismatchError
from mlx_plugin.arrays import bits, of_bits

_MADE = "weight", "scales", "biases"  # what `mx.quantize` returns; some modes make no biases
_FROM = "bfloat16", "float16", "float32"  # what it takes
_AT_ONCE = 32  # elements, of which MLX takes a multiple
_KINDS = {
    "mlx.nn.layers.quantized.QuantizedLinear",
    "mlx.nn.layers.quantized.QuantizedEmbedding",
    "mlx.nn.layers.quantized.QQLinear",
    "mlx_lm.models.switch_layers.QuantizedSwitchLinear",
    "mlx_lm.models.mla.QuantizedMultiLinear",
}
"""Modules whose arrays are what `mx.quantize` makes of a weight."""


class QuantizedWeight:
    """The weight of a quantized module: its published bits in a mirror, and the arrays that are made of them.

    Args:
        path: The module's path in the model.
        module: The module.
        places: The channel's tensors in the weight, each with the index of its first element there.
        dtype: Their dtype.

    Attributes:
        bits: The mirror: unsigned bit patterns in the shape of the weight, zeros at first. Commits mutate it.
        places: As given.
        dtype: As given.
        made: The names of the module's arrays in the model.

    Raises:
        ModelMismatchError: the module was not quantized from such a weight.
    """

    def __init__(self, path: str, module: nn.Module, places: Mapping[str, int], dtype: str) -> None:
        self._options = {"group_size": module.group_size, "bits": module.bits, "mode": module.mode}
        self._size: int = module.group_size
        self.places, self.dtype = places, dtype
        shape = (*module.weight.shape[:-1], module.scales.shape[-1] * self._size)
        self.bits = np.zeros(shape, f"u{getattr(mx, dtype).size}")
        held = [each for each in _MADE if isinstance(module.get(each), mx.array)]
        self.made = [f"{path}.{each}" for each in held]
        if module.get("global_scale") is not None:
            raise ModelMismatchError(
                f"{path} has a scale of each whole expert (global_scale), which any element may move: quantize "
                "the model without."
            )
        found = self._groups(self.bits.reshape(-1, self._size)[:1])
        if [each.dtype for each in found] != [module[each].dtype for each in held]:
            raise ModelMismatchError(
                f"{path} was not quantized from {dtype}, which {next(iter(places))} is in the channel: convert "
                f"the model by model.set_dtype(mx.{dtype}), then quantize it."
            )

    def changes(self, delta: Any, held: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """Return the arrays after a version, by their names; none if it changes nothing here.

        Args:
            delta: Its changes, a `Delta`, or the new bits of all tensors.
            held: The arrays of the model, which have the groups that stay.

        Raises:
            ModelMismatchError: of full weights, that MLX makes other bits of a group alone.
        """
        if isinstance(delta, Mapping):
            return self._whole(np.concatenate([delta[name].reshape(-1) for name in self.places]))
        steps = [(delta.of(name), first) for name, first in self.places.items()]
        at_K = np.concatenate([each.at_K.astype(np.int64) + first for each, first in steps])
        if not at_K.size:
            return {}
        group_G, of_K = np.unique(at_K // self._size, return_inverse=True)
        bits_GS = self.bits.reshape(-1, self._size)[group_G]
        bits_GS[of_K, at_K % self._size] += np.concatenate([each.data_K for each, _ in steps])
        found = {}
        for own, new in zip(self.made, self._groups(bits_GS), strict=True):
            whole = bits(held[own]).copy()
            whole.reshape(-1, new.shape[1])[group_G] = bits(new)[: len(group_G)]
            found[own] = of_bits(whole, new.dtype)
        return found

    def _groups(self, bits_GS: np.ndarray) -> list[mx.array]:
        """As `_quantized`, of groups alone; in nvfp4, which takes two at once, another one may be behind them."""
        odd = -len(bits_GS) % max(1, _AT_ONCE // self._size)
        return self._quantized(np.pad(bits_GS, ((0, odd), (0, 0))))

    def _whole(self, bits_N: np.ndarray) -> dict[str, mx.array]:
        """Return what MLX makes of the whole weight, and make sure that it makes the same of its groups."""
        found = self._quantized(bits_N.reshape(self.bits.shape))
        for new, of_groups in zip(found, self._groups(bits_N.reshape(-1, self._size)), strict=True):
            if not np.array_equal(bits(new).reshape(-1), bits(of_groups).reshape(-1)[: new.size]):
                raise ModelMismatchError(
                    f"MLX quantizes groups of {self.made[0]} by themselves to other bits than in the whole "
                    "weight, so its changes cannot be followed: follow with a model that is not quantized."
                )
        return dict(zip(self.made, found, strict=True))

    def _quantized(self, bits_of: np.ndarray) -> list[mx.array]:
        """Return what MLX makes of rows of a weight, computed."""
        found = list(mx.quantize(of_bits(bits_of, getattr(mx, self.dtype)), **self._options))
        mx.eval(found)
        return found


def find(
    model: nn.Module, specs: Mapping[str, Any], names: Callable[[str], str | Sequence[str] | None]
) -> dict[str, QuantizedWeight]:
    """Return the quantized weights of a model that the channel has as they were before, by their names in the
    model.

    Args:
        model: The model.
        specs: The specs of the channel's tensors.
        names: Returns the channel's names for one of the model's.

    Raises:
        ModelMismatchError: one was not quantized from the channel's dtype.
    """
    found = {}
    for path, module in model.named_modules():
        if f"{type(module).__module__}.{type(module).__name__}" not in _KINDS or "scales" not in module:
            continue
        named = names(f"{path}.weight")
        wanted = [named] if isinstance(named, str) else named or ()
        of = [specs[name] for name in wanted if name in specs and specs[name].dtype in _FROM]
        if of and len(of) == len(wanted):  # others are published as MLX packs them, or not at all
            found[f"{path}.weight"] = QuantizedWeight(path, module, _places(of), of[0].dtype)
    return found


def _places(specs: Iterable[Any]) -> dict[str, int]:
    found, first = {}, 0
    for spec in specs:
        found[spec.name] = first
        first += spec.element_count
    return found
