"""How SGLang loads layers again that it does not keep as they are in the checkpoint, such as quantized ones.

SGLang has a layer's `quant_method` process its parameters once all weights are loaded, and put others in their
place. So the parameters are noted before, and a twin of the layer has them until it is processed.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Set
from types import MethodType
from typing import Any

import torch

from deltasync.errors import ModelMismatchError
from deltasync.serve import load_plan
from deltasync.serve.mirror import LayerLoader, Weights
from deltasync.serve.twin import is_part, tensors_of

_FEW = 1 << 16
"""Parameters of fewer elements, such as scales, are noted with the values that they have before loading."""


class _Built:
    """A layer before its weights were loaded: its parameters, and the values that its `quant_method` has."""

    def __init__(self, layer: Any) -> None:
        self.parameters = {
            name: None if each is None else _noted(each) for name, each in layer._parameters.items()
        }
        self.method = _values(layer.quant_method)

    def is_kept(self, layer: torch.nn.Module) -> bool:
        """Whether a layer still has these parameters, in the same dtype and layout, and no others."""
        now = layer._parameters
        return now.keys() == self.parameters.keys() and all(
            _layout(now[name]) == _layout(each) for name, each in self.parameters.items()
        )


_built: weakref.WeakKeyDictionary[torch.nn.Module, _Built] = weakref.WeakKeyDictionary()


def note_built(model: torch.nn.Module) -> None:
    """Note the layers of a model before its weights are loaded."""
    _built.update(
        (layer, _Built(layer))
        for layer in model.modules()
        if getattr(layer, "quant_method", None) is not None
    )


def restore(twin: torch.nn.Module, module: torch.nn.Module) -> None:
    """Give a copy of a module the parameters that SGLang's loader expects: on the meta device if processing
    weights has changed their dtypes or layouts.

    Keeps the copy from making what it keeps beside parameters, which a commit has made again after it.
    """
    if hasattr(module, "post_load_weights"):
        twin.post_load_weights = lambda *_, **__: None  # type: ignore[assignment]
    built = _built.get(module)
    if built is None:
        return
    is_kept, now = built.is_kept(module), module._parameters
    for name, noted in built.parameters.items():
        if not is_kept:
            twin._parameters[name] = None if noted is None else _as(noted, noted.data.to("meta"))  # type: ignore[assignment]
        elif type(noted) is not type(now[name]):
            twin._parameters[name] = _as(noted, now[name].data)  # type: ignore[arg-type, assignment, union-attr]
    for name in now.keys() - built.parameters.keys():
        del twin._parameters[name]


class SglangLayers(LayerLoader):
    """How SGLang loads layers again: twins, whose tensors it copies into those of the layers."""

    loader = load_plan.Loader("SGLang", restore)

    def load(self, model: torch.nn.Module, layers: Set[torch.nn.Module], weights: Weights) -> None:
        """As `LayerLoader.load`."""
        for layer, made in self.make(model, layers, weights).items():
            for name, tensor in tensors_of(layer).items():
                if _layout(tensor) != _layout(made.get(name)):
                    raise ModelMismatchError(f"{type(layer).__name__}.{name} becomes another tensor")
                tensor.data.copy_(made[name])

    def load_twins(
        self, loaded: torch.nn.Module, twins: Mapping[torch.nn.Module, torch.nn.Module], weights: Weights
    ) -> None:
        """As `LayerLoader.load_twins`."""
        for module in loaded.modules():
            if hasattr(module, "post_load_weights"):
                module.post_load_weights = lambda *_, **__: None  # type: ignore[assignment]
        device = next(tensor.device for layer in twins.values() for tensor in tensors_of(layer).values())
        with device:
            for twin, layer in twins.items():
                _build(twin, layer, device)
            loaded.load_weights(weights.items())  # type: ignore[operator]
            for twin in twins:
                twin.quant_method.process_weights_after_loading(twin)  # type: ignore[union-attr, operator]


def _build(twin: Any, layer: torch.nn.Module, device: torch.device) -> None:
    """Give a twin what its layer had before its weights were loaded."""
    built = _built[layer]
    twin._parameters = {
        name: None if noted is None else _empty(noted, device, twin, layer)
        for name, noted in built.parameters.items()
    }
    method = vars(twin.quant_method)
    for name in _values(twin.quant_method).keys() - built.method.keys():
        del method[name]
    method.update(built.method)


def _empty(noted: torch.Tensor, device: torch.device, twin: Any, layer: torch.nn.Module) -> torch.Tensor:
    data = torch.zeros_like(noted.data, device=device) if noted.is_meta else noted.data.to(device, copy=True)
    found = _as(noted, data)
    for key, value in vars(found).items():
        if isinstance(value, MethodType) and value.__self__ is layer:
            vars(found)[key] = MethodType(value.__func__, twin)
    return found


def _values(method: object) -> dict[str, Any]:
    return {
        name: each
        for name, each in vars(method).items()
        if name not in load_plan.NOT_HELD and not is_part(each)
    }


def _noted(parameter: torch.Tensor) -> torch.Tensor:
    """Return a parameter on the host, or on the meta device if it is large."""
    is_small = parameter.numel() < _FEW and not parameter.is_meta
    return _as(parameter, parameter.data.to("cpu", copy=True) if is_small else parameter.data.to("meta"))


def _as(parameter: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """Return data as a parameter of the same class, with the same attributes, such as its weight loader."""
    data = data.view_as(data)
    data.__class__, data.__dict__ = parameter.__class__, dict(vars(parameter))
    return data


def _layout(tensor: torch.Tensor | None) -> tuple[object, ...] | None:
    return None if tensor is None else (tensor.dtype, tensor.shape, tensor.stride())
