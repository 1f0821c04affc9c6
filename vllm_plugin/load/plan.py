"""The load plan: where each checkpoint element lies in this worker's memory, recorded from vLLM's own loader.

The loader is run once on meta tensors of the checkpoint's names and shapes under a dispatch mode that records every
`aten.copy_` instead of executing it. A recorded copy is a segment: a strided view of one checkpoint tensor and the strided
view of the parameter it goes to. Fused, stacked and sliced parameters need no table per architecture.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from deltasync.errors import ModelMismatchError
from deltasync.live import Segment
from deltasync.tensors import TensorSpec
from deltasync.tensors.bits import int_view
from vllm_plugin.load.layers import as_loaded, computed_parameters


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's base class is untyped
    """Records copies of the checkpoint's meta tensors into parameters. Runs everything else.

    `sources` are those meta tensors by name; `owners` has the modules of each parameter's storage.
    """

    def __init__(self, sources: Mapping[str, torch.Tensor], owners: Mapping[int, Collection[torch.nn.Module]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.copies: list[tuple[set[str], torch.Tensor, torch.Tensor]] = []
        self._owners = owners
        self._names = {_storage(tensor): {name} for name, tensor in sources.items()}
        self._kept: list[torch.Tensor] = []  # so that no new storage has the address of a freed one

    def names(self, tensor: torch.Tensor) -> set[str]:
        """Return which of the checkpoint's tensors a meta tensor was computed from."""
        return self._names.get(_storage(tensor), set())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and args[1].device.type == "meta" and self._lasts(args[0]):
            self.copies.append((self.names(args[1]), args[0], args[1]))
            return args[0]
        result = func(*args, **(kwargs or {}))
        names = set().union(*(self.names(each) for each in _meta_tensors((args, kwargs))))
        for each in _meta_tensors(result) if names else ():
            if not self.names(each) >= names:
                self._names[_storage(each)] = self.names(each) | names
                self._kept.append(each)
        return result

    def _lasts(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type != "meta" or _storage(tensor) in self._owners


def _meta_tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.device.type == "meta"]


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


@dataclasses.dataclass(frozen=True)
class LoadPlan:
    """Where a checkpoint's tensors, or this worker's shards of them, lie.

    Attributes:
        segments: The places that hold each tensor's elements unchanged, in its dtype. `proof.check_coverage` finds what is
            missing in all workers.
        layers: The modules that the loader copies each tensor into.
        reasons: Why tensors cannot be patched in place.
    """

    segments: dict[str, list[Segment]]
    layers: dict[str, set[torch.nn.Module]]
    reasons: dict[str, str]


def record(model: torch.nn.Module, specs: Mapping[str, TensorSpec]) -> LoadPlan:
    """Find where the checkpoint's tensors, which are served as `specs`, lie in a loaded vLLM model. Changes nothing.

    Raises:
        ModelMismatchError: the loader refuses a name or a shape, or the model keeps weights computed from others.
    """
    meta = {name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta") for name, spec in specs.items()}
    loaded, originals = as_loaded(model)
    owners: dict[int, set[torch.nn.Module]] = {}
    for module, original in originals.items():
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            owners.setdefault(_storage(tensor), set()).add(original)
    recorder = _Recorder(meta, owners)
    try:
        with torch.no_grad(), recorder:
            loaded.load_weights(iter(meta.items()))  # type: ignore[operator]
    except Exception as error:
        raise ModelMismatchError(f"vLLM's loader refuses the channel's tensors: {error!r}") from error
    plan = LoadPlan({name: [] for name in specs}, {name: set() for name in specs}, {})
    for names, live, source in recorder.copies:
        for name in names:
            plan.layers[name] |= owners.get(_storage(live), set())
        problem = _problem(live, source)
        if problem is None and [_storage(source)] == [_storage(meta[name]) for name in names]:
            (name,) = names
            if live.shape != source.shape:
                live, source = live.squeeze(), source.squeeze()
            integers = live.detach().view(int_view(live[:0] if live.ndim else live).dtype)
            plan.segments[name].append(Segment(integers, source.stride(), int(source.storage_offset())))
        else:
            plan.reasons.update(dict.fromkeys(names, problem or "vLLM's loader computes with it"))
    _find_computed(plan, originals.values(), {_storage(live) for _, live, _ in recorder.copies})
    for name in plan.reasons:
        plan.segments[name].clear()
    return plan


def _problem(live: torch.Tensor, source: torch.Tensor) -> str | None:
    """Return why a copy does not put elements unchanged into live memory, or None if it does."""
    if live.device.type == "meta":
        return "vLLM holds its layer in another dtype or shape, quantized for example"
    if live.dtype != source.dtype:
        return f"vLLM holds it as {str(live.dtype).removeprefix('torch.')}"
    if live.squeeze().shape != source.squeeze().shape:
        return "vLLM's loader repeats it"
    return None


def _find_computed(plan: LoadPlan, layers: Iterable[torch.nn.Module], loaded: Collection[int]) -> None:
    """Give reasons to tensors that vLLM computed others from.

    Raises:
        ModelMismatchError: vLLM computed a layer's tensor from other layers' tensors.
    """
    for layer in layers:
        computed = computed_parameters(layer)
        if all(_storage(tensor) in loaded for tensor in computed.values()):
            continue
        names = [name for name, of in plan.layers.items() if layer in of]
        if not names:
            raise ModelMismatchError(
                f"vLLM computed {', '.join(computed)} of {type(layer).__name__} from weights of other layers, and would not "
                "do so again, so this model cannot be updated."
            )
        plan.reasons.update(dict.fromkeys(names, f"vLLM computes {', '.join(computed)} from it"))
