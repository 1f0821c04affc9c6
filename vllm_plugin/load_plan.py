"""The load plan: where each checkpoint element lies in this worker's memory, learnt from vLLM's own loader.

The loader is run once on meta tensors of the checkpoint's names and shapes under a dispatch mode that records every
`aten.copy_` instead of executing it. A recorded copy is a segment: a strided view of one checkpoint tensor and the strided
view of the parameter it goes to. Fused, stacked and sliced parameters need no table per architecture.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from deltasync.bits import cast, int_view
from deltasync.errors import ModelMismatchError
from deltasync.live import LiveMemory, Region, Segment
from deltasync.types import TensorSpec
from vllm_plugin.as_loaded import as_loaded, computed_parameters

logger = logging.getLogger(f"vllm.{__name__}")  # under vLLM's own logger, whose handlers and level it shares


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's base class is untyped
    """Records copies out of the checkpoint's tensors into parameters; runs everything else.

    Args:
        sources: The checkpoint's tensors, on the meta device.
        owners: Storage of each parameter and buffer -> the modules it belongs to.
    """

    def __init__(self, sources: Mapping[str, torch.Tensor], owners: Mapping[int, Collection[torch.nn.Module]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.copies: list[tuple[set[str], torch.Tensor, torch.Tensor]] = []
        self._owners = owners
        self._names = {_storage(tensor): {name} for name, tensor in sources.items()}
        self._kept: list[torch.Tensor] = []  # so that no storage is taken for one that is gone

    def names(self, tensor: torch.Tensor) -> set[str]:
        """Which of the checkpoint's tensors a meta tensor was computed from."""
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
    """Where the tensors of a checkpoint, or this worker's shards of them, lie.

    Attributes:
        segments: Of each tensor, as far as it has a place of its own dtype, element for element, in the model's parameters
            and buffers; `check_coverage` tells what is missing from all workers.
        layers: Of each tensor, the modules that the loader copies it into.
        reasons: Of each tensor that has a place, but not of that kind: why.
    """

    segments: dict[str, list[Segment]]
    layers: dict[str, set[torch.nn.Module]]
    reasons: dict[str, str]


def record(model: torch.nn.Module, specs: Mapping[str, TensorSpec]) -> LoadPlan:
    """Learn where the tensors of `specs` lie in the memory of `model`, which is not touched.

    Args:
        model: A loaded vLLM model.
        specs: Names, served dtypes and shapes of the checkpoint.

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
    """Why a copy does not put elements as they are into live memory; None if it does."""
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
        ModelMismatchError: not from tensors of the same layer.
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


def check_coverage(
    specs: Mapping[str, TensorSpec],
    regions: Sequence[Mapping[str, Sequence[Region]]],
    reasons: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Make sure that the shards hold every tensor: each element once, or in copies of one and the same region.

    Args:
        specs: Served names, dtypes and shapes.
        regions: Of each shard.
        reasons: Why tensors cannot be patched in place, as far as that is known.

    Raises:
        ModelMismatchError: they do not; names tensors and says what is missing.
    """
    problems = []
    for spec in specs.values():
        problem = _coverage(spec, {region for held in regions for region in held[spec.name]})
        if problem is not None:
            problems.append(f"{spec} ({reasons.get(spec.name, problem)})")
    if problems:
        raise ModelMismatchError(
            f"{len(problems)} tensors cannot be updated by this release: {'; '.join(problems[:5])}"
            + ("; ..." if len(problems) > 5 else ".")
        )


def _coverage(spec: TensorSpec, regions: Collection[Region]) -> str | None:
    if not regions and spec.element_count:
        return "the loader copies it nowhere"
    count_N = torch.zeros(spec.element_count, dtype=torch.uint8)
    for offset, dims in regions:
        count_N.as_strided([size for size, _ in dims], [stride for _, stride in dims], offset).add_(1)
    if bool((count_N == 1).all()):
        return None
    return f"{int((count_N == 0).sum())} elements have no place, {int((count_N > 1).sum())} have several"


def checkpoint(runner: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that a vLLM model runner loaded its model from.

    Raises:
        ModelMismatchError: it was not loaded from a checkpoint that can be read again.
    """
    from vllm.model_executor.model_loader import get_model_loader

    loader = get_model_loader(runner.load_config)
    if not hasattr(loader, "get_all_weights"):
        raise ModelMismatchError(
            f"vLLM loaded its weights by {type(loader).__name__}, so it cannot be proven where they lie. "
            "Serve a checkpoint, without --load-format."
        )
    yield from loader.get_all_weights(runner.model_config, runner.get_model())


def verify(
    plan: LoadPlan, memory: LiveMemory, specs: Mapping[str, TensorSpec], tensors: Iterable[tuple[str, torch.Tensor]]
) -> set[str]:
    """Compare live memory through the plan with the checkpoint that vLLM loaded, bit by bit.

    Tensors that lie in live memory in another layout than in the checkpoint get a reason in the plan.

    Args:
        plan: Of this worker.
        memory: Live weights as they were loaded.
        specs: Served names, dtypes and shapes.
        tensors: The checkpoint.

    Returns:
        Tensors that were not compared, because the checkpoint does not hold them in that shape, and that lie nowhere where
        one that was compared does. Only a fingerprint can tell whether the plan is right about those.
    """
    compared = set()
    for name, tensor in tensors:
        spec = specs.get(name)
        if spec is None or tuple(tensor.shape) != spec.shape:
            continue
        compared.add(name)
        if memory.differs(name, int_view(cast(tensor, spec.dtype))):
            plan.reasons[name] = "vLLM keeps it in a layout of its own"
    # A tied tensor is one with the tensor that the checkpoint has.
    proven = {_place(segment) for name in compared - plan.reasons.keys() for segment in plan.segments[name]}
    return {
        name
        for name in specs.keys() - compared
        if not (plan.segments[name] and all(_place(segment) in proven for segment in plan.segments[name]))
    }


def _place(segment: Segment) -> tuple[object, ...]:
    return segment.live.data_ptr(), segment.live.shape, segment.live.stride(), segment.stride, segment.offset


def mirrored(
    plan: LoadPlan, specs: Mapping[str, TensorSpec], tensors: Iterable[tuple[str, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """Copies of the tensors that have to be loaded again, layer by layer: those with a reason, and others of their layers.

    They are on the host, wherever the loader puts them.

    Args:
        plan: Of this worker; gets reasons for the others.
        specs: Served names, dtypes and shapes.
        tensors: The checkpoint.
    """
    layers = {layer for name in plan.reasons for layer in plan.layers[name]}
    copies = {
        name: cast(tensor, specs[name].dtype).to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, tensor in tensors
        if name in specs and plan.layers[name] & layers
    }
    for name in copies:
        plan.reasons.setdefault(name, "others of its layer are loaded again")
    return copies
