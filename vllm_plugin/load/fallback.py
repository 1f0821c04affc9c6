"""The fallback for tensors that vLLM keeps in its own layout (repacked, quantized): they are patched in a mirror on the
host, and vLLM loads their layers again from there.

The work is proportional to the layers that changed, not to the changes in them. Fingerprints prove the mirror; for live
memory vLLM's loader is trusted.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Set
from typing import Any

import torch

from deltasync.errors import ModelMismatchError
from deltasync.live import Segment
from deltasync.tensors import TensorSpec
from deltasync.tensors.bits import cast, int_view
from vllm_plugin.load.layers import as_loaded, prepare_reload
from vllm_plugin.load.plan import LoadPlan


def mirrored(
    plan: LoadPlan, specs: Mapping[str, TensorSpec], tensors: Iterable[tuple[str, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """Return host copies of the checkpoint's tensors that have a reason in the plan, and of the others in their layers.

    The others get a reason too, because they are loaded again with their layers.
    """
    layers = {layer for name in plan.reasons for layer in plan.layers[name]}
    copies = {
        name: _on_host(cast(tensor, specs[name].dtype))
        for name, tensor in tensors
        if name in specs and plan.layers[name] & layers
    }
    for name in copies:
        plan.reasons.setdefault(name, "others of its layer are loaded again")
    return copies


class Mirror:
    """Host copies of tensors as in the checkpoint, which commits mutate, and vLLM's layerwise reload from them.

    `layers` has the modules that each tensor is loaded into.
    """

    def __init__(self, runner: Any, layers: Mapping[str, Set[torch.nn.Module]], tensors: Mapping[str, torch.Tensor]) -> None:
        self._runner = runner
        self._layers = layers
        self._tensors = tensors

    @property
    def segments(self) -> dict[str, list[Segment]]:
        """The places of the mirrored tensors."""
        return {name: [Segment(int_view(tensor).reshape(-1), (1,), 0)] for name, tensor in self._tensors.items()}

    def prove(self) -> None:
        """Make sure that reloading changes each layer, and that reloading the unchanged mirror restores live memory.

        Raises:
            ModelMismatchError: it does not; live memory is as before.
        """
        for layers, names in _together(self._layers):  # in groups, to hold fewer copies on the host at once
            self._prove(layers, names)

    def _prove(self, layers: Set[torch.nn.Module], names: Set[str]) -> None:
        before = {layer: {name: _on_host(tensor) for name, tensor in layer.state_dict().items()} for layer in layers}
        held = {layer: (dict(layer._parameters), dict(layer._buffers)) for layer in layers}
        problem = cause = None
        try:
            self._negate(names)
            try:
                self.reload(names)
            finally:
                self._negate(names)
            if idle := sorted(type(layer).__name__ for layer in layers if not _differences(layer, before[layer])):
                problem = f"does not change {idle[0]}"
            self.reload(names)
            if wrong := sorted(
                f"{type(layer).__name__}.{name}" for layer in layers for name in _differences(layer, before[layer])
            ):
                problem = problem or f"gives another {', '.join(wrong[:5])}"
        except RuntimeError as error:  # as torch raises it
            problem, cause = f"fails ({error})", error
        finally:
            for layer, tensors in before.items():
                layer._parameters, layer._buffers = held[layer]  # a reload that failed may have left others
                for name in _differences(layer, tensors):
                    layer.state_dict()[name].copy_(tensors[name])
        if problem is not None:
            raise ModelMismatchError(
                f"vLLM does not keep {len(self._tensors)} tensors as they are in the checkpoint, and having it load them "
                f"again {problem}, so this model cannot be updated."
            ) from cause

    def _negate(self, names: Set[str]) -> None:
        for name in names:
            self._tensors[name].neg_()

    def reload(self, changed: Iterable[str]) -> float:
        """Load the layers of those changed tensors that are mirrored. Mutates live weights. Returns the seconds it took.

        Raises:
            Exception: whatever vLLM raises; the layers then hold unknown values.
        """
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        layers = {layer for name in changed for layer in self._layers.get(name, ())}
        if not layers:
            return 0.0
        before = time.perf_counter()
        names = [name for name, of in self._layers.items() if of & layers]
        model = self._runner.get_model()
        with torch.no_grad():
            for layer in layers:
                prepare_reload(layer)
                initialize_layerwise_reload(layer)
            try:
                as_loaded(model)[0].load_weights((name, self._tensors[name]) for name in names)  # type: ignore[operator]
            finally:
                for layer in layers:
                    finalize_layerwise_reload(layer, self._runner.model_config)
        return time.perf_counter() - before


def _together(layers: Mapping[str, Set[torch.nn.Module]]) -> list[tuple[set[torch.nn.Module], set[str]]]:
    """Group layers, with the tensors that are loaded into them, so that no two groups share a layer."""
    groups: list[tuple[set[torch.nn.Module], set[str]]] = []
    for name, of in layers.items():
        joined, names = set(of), {name}
        for group in [group for group in groups if group[0] & joined]:
            groups.remove(group)
            joined |= group[0]
            names |= group[1]
        groups.append((joined, names))
    return groups


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)


def _differences(layer: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names of a layer's tensors whose bits differ from these, which are on the host."""
    now = layer.state_dict()
    return [name for name in now if not torch.equal(int_view(now[name]).cpu(), int_view(tensors[name]))]
