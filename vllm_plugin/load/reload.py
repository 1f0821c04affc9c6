"""vLLM's layerwise reload: of layers in place, and of their twins.

vLLM notes a layer's parameters before it loads them, puts meta tensors in their place, and processes the layer
when its last weight has come.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Set
from types import MethodType
from typing import Any, TypeGuard

import torch

from deltasync.serve.engine import around
from deltasync.serve.mirror import LayerLoader, Weights, on_host
from deltasync.serve.twin import Group, Made, Plain, parts
from deltasync.tensors.bits import int_view
from vllm_plugin.load import plain
from vllm_plugin.load.layers import LOADER, alone, prepare_reload, whole


class VllmLayers(LayerLoader):
    """How vLLM loads layers again. `config` is vLLM's of the model."""

    loader = LOADER

    def __init__(self, config: Any) -> None:
        self._config = config

    def load(self, model: torch.nn.Module, layers: Set[torch.nn.Module], weights: Weights) -> None:
        """As `LayerLoader.load`. Addresses that CUDA graphs have stay."""
        from vllm.utils.torch_utils import set_default_torch_dtype

        # kernels take the default for that of their outputs
        with set_default_torch_dtype(self._config.dtype), _kept_attributes(layers):
            _begin(layers)
            self._load(self.loader.as_loaded(model, restored=False)[0], layers, weights)

    def load_twins(
        self, loaded: torch.nn.Module, twins: Mapping[torch.nn.Module, torch.nn.Module], weights: Weights
    ) -> None:
        """As `LayerLoader.load_twins`."""
        from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO

        modules = {
            twin: layer
            for each, of in twins.items()
            for twin, layer in zip(each.modules(), of.modules(), strict=True)
        }
        try:
            for twin, layer in modules.items():
                LAYERWISE_INFO[twin] = _info(LAYERWISE_INFO[layer], twin, layer)
            _begin(twins)
            self._load(loaded, twins, weights)
        finally:
            for twin in modules:
                LAYERWISE_INFO.pop(twin, None)

    @contextlib.contextmanager
    def noting(self, layers: Iterable[torch.nn.Module]) -> Iterator[Made]:
        """As `LayerLoader.noting`."""
        from vllm.model_executor.model_loader.reload import layerwise

        found, materialize = Made(), layerwise.materialize_layer

        def zeroed(layer: Any, info: Any) -> None:
            materialize(layer, info)
            for tensor in _registered(layer).values():
                int_view(tensor.data).zero_()

        def noting(process: Any, layer: Any) -> None:
            found[layer] = {name: on_host(tensor.data) for name, tensor in _registered(layer).items()}
            process(layer)

        methods = {id(each): each for layer in layers if (each := getattr(layer, "quant_method", None))}
        for method in methods.values():
            around(method, "process_weights_after_loading")(noting)
        layerwise.materialize_layer = zeroed
        try:
            yield found
        finally:
            layerwise.materialize_layer = materialize
            for method in methods.values():
                vars(method).pop("process_weights_after_loading", None)

    def plain(
        self, model: torch.nn.Module, groups: Iterable[Group], tensors: Weights
    ) -> Mapping[torch.nn.Module, Plain]:
        """As `LayerLoader.plain`."""
        return plain.find(model, groups, tensors)

    def _load(self, loaded: torch.nn.Module, layers: Iterable[torch.nn.Module], weights: Weights) -> None:
        """Have vLLM load `layers` of a model, which is as its loader expects it, layer by layer. Mutates the
        layers' tensors in place.
        """
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        with alone(weights.values()), whole():
            try:
                loaded.load_weights(weights.items())  # type: ignore[operator]
            finally:
                for layer in layers:
                    finalize_layerwise_reload(layer, self._config)


def _begin(layers: Iterable[torch.nn.Module]) -> None:
    """Have vLLM put meta tensors in the place of the parameters of layers."""
    from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

    for layer in layers:
        prepare_reload(layer)
        initialize_layerwise_reload(layer)


def _info(info: Any, twin: torch.nn.Module, layer: torch.nn.Module) -> Any:
    """Return what vLLM notes of a layer for its reload, for the twin: with weight loaders of the twin."""
    from vllm.model_executor.model_loader.reload.layerwise import _get_original_loader
    from vllm.model_executor.model_loader.reload.meta import to_meta_tensor
    from vllm.model_executor.model_loader.reload.sanitize import layer_ref_sentinel

    def rebound(tensor: torch.Tensor) -> torch.Tensor:
        found = to_meta_tensor(tensor)
        if hasattr(found, "weight_loader"):
            found.weight_loader = _get_original_loader(found)
        for key, value in vars(found).items():
            if isinstance(value, MethodType) and value.__self__ in (layer, layer_ref_sentinel):
                vars(found)[key] = MethodType(value.__func__, twin)
        return found

    metadata = tuple({name: rebound(each) for name, each in held.items()} for held in info.restore_metadata)
    return type(info)(restore_metadata=metadata, restore_device=info.restore_device)


@contextlib.contextmanager
def _kept_attributes(layers: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Keep tensors that layers and their `parts` hold in attributes at their addresses, which CUDA graphs
    have, if the body makes others.
    """
    before = [
        (layer, path, name, value)
        for layer in layers
        for path, part in parts(layer).items()
        for name, value in vars(part).items()
        if _is_tensor(value)
    ]
    yield
    now = {layer: parts(layer) for layer in layers}
    for layer, path, name, tensor in before:
        attributes = vars(now[layer][path]) if path in now[layer] else {}
        other = attributes.get(name)
        if (
            other is not tensor
            and _is_tensor(other)
            and (other.dtype, other.shape) == (tensor.dtype, tensor.shape)
        ):
            attributes[name] = tensor.copy_(other)


def _is_tensor(value: object) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and not value.is_meta


def _registered(layer: torch.nn.Module) -> dict[str, torch.Tensor]:
    held = {**layer._parameters, **layer._buffers}
    return {name: tensor for name, tensor in held.items() if tensor is not None and not tensor.is_meta}
