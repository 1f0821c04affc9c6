"""The load plan: where each checkpoint element lies in this worker's memory, learnt from vLLM's own loader.

The loader is run once on meta tensors of the checkpoint's names and shapes under a dispatch mode that records every
`aten.copy_` instead of executing it. A recorded copy is a segment: a strided view of one checkpoint tensor and the strided
view of the parameter it goes to. Fused, stacked and sliced parameters need no table per architecture.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from deltasync.bits import bits_of, cast, int_view
from deltasync.errors import ModelMismatchError
from deltasync.memory import LiveMemory, Region, Segment
from deltasync.types import TensorSpec

logger = logging.getLogger(f"vllm.{__name__}")  # under vLLM's own logger, whose handlers and level it shares


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's base class is untyped
    """Records copies out of meta tensors; runs everything else."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and args[1].device.type == "meta" and args[0].device.type != "meta":
            self.copies.append((args[0], args[1]))
            return args[0]
        return func(*args, **(kwargs or {}))


@dataclasses.dataclass(frozen=True)
class LoadPlan:
    """Where the tensors of a checkpoint, or this worker's shards of them, lie.

    Attributes:
        segments: Of each tensor, as far as it has a place of its own dtype, element for element, in the model's parameters
            and buffers; `check_coverage` tells what is missing from all workers.
        layers: Of each tensor, the modules that the loader copies it into.
    """

    segments: dict[str, list[Segment]]
    layers: dict[str, set[torch.nn.Module]]


def record(model: torch.nn.Module, specs: Mapping[str, TensorSpec]) -> LoadPlan:
    """Learn where the tensors of `specs` lie in the memory of `model`, which is not touched.

    Args:
        model: A loaded vLLM model.
        specs: Names, served dtypes and shapes of the checkpoint.

    Raises:
        ModelMismatchError: the loader refuses a name or a shape.
    """
    meta = {name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta") for name, spec in specs.items()}
    names = {tensor.untyped_storage()._cdata: name for name, tensor in meta.items()}
    recorder = _Recorder()
    try:
        with torch.no_grad(), recorder:
            model.load_weights(iter(meta.items()))  # type: ignore[operator]
    except Exception as error:
        raise ModelMismatchError(f"vLLM's loader refuses the channel's tensors: {error!r}") from error
    owners: dict[int, set[torch.nn.Module]] = {}
    for module in model.modules():
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            owners.setdefault(tensor.untyped_storage()._cdata, set()).add(module)
    plan = LoadPlan({name: [] for name in specs}, {name: set() for name in specs})
    for live, source in recorder.copies:
        name, layers = names.get(source.untyped_storage()._cdata), owners.get(live.untyped_storage()._cdata)
        if name is None or layers is None:
            continue
        plan.layers[name] |= layers
        if live.shape != source.shape:
            live, source = live.squeeze(), source.squeeze()
        if live.dtype == source.dtype and live.shape == source.shape:
            integers = live.detach().view(int_view(live[:0] if live.ndim else live).dtype)
            plan.segments[name].append(Segment(integers, source.stride(), int(source.storage_offset())))
    return plan


def check_coverage(specs: Mapping[str, TensorSpec], regions: Sequence[Mapping[str, Sequence[Region]]]) -> None:
    """Make sure that the shards hold every tensor: each element once, or in copies of one and the same region.

    Args:
        specs: Served names, dtypes and shapes.
        regions: Of each shard.

    Raises:
        ModelMismatchError: they do not; names tensors and says what is missing.
    """
    problems = []
    for spec in specs.values():
        problem = _coverage(spec, {region for held in regions for region in held[spec.name]})
        if problem is not None:
            problems.append(f"{spec} ({problem})")
    if problems:
        raise ModelMismatchError(
            f"{len(problems)} tensors cannot be patched in place by this release: {'; '.join(problems[:5])}"
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
    memory: LiveMemory, specs: Mapping[str, TensorSpec], tensors: Iterable[tuple[str, torch.Tensor]]
) -> tuple[int, list[str]]:
    """Compare live memory through the plan with the checkpoint that vLLM loaded, bit by bit.

    Args:
        memory: Live weights as they were loaded.
        specs: Served names, dtypes and shapes.
        tensors: The checkpoint.

    Returns:
        How many tensors were compared, and those that lie in live memory in another layout than in the checkpoint. Tensors
        that the checkpoint does not hold are left to the fingerprint.
    """
    compared, wrong = 0, []
    for name, tensor in tensors:
        spec = specs.get(name)
        if spec is None or tuple(tensor.shape) != spec.shape:
            continue
        compared += 1
        if memory.differs(name, bits_of(cast(tensor, spec.dtype))):
            wrong.append(name)
    return compared, wrong


def mirrored(
    plan: LoadPlan, specs: Mapping[str, TensorSpec], wrong: Iterable[str], tensors: Iterable[tuple[str, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """Copies of the tensors that have to be loaded again, layer by layer, because some of each layer lie in another layout.

    Args:
        plan: Of this worker.
        specs: Served names, dtypes and shapes.
        wrong: As `verify` found.
        tensors: The checkpoint.
    """
    layers = {layer for name in wrong for layer in plan.layers[name]}
    return {
        name: cast(tensor, specs[name].dtype).clone(memory_format=torch.contiguous_format)
        for name, tensor in tensors
        if name in specs and plan.layers[name] & layers
    }
