"""Proof that a load plan is right: every tensor is compared with the checkpoint, or identified by its fingerprint."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from deltasync.errors import ModelMismatchError
from deltasync.live import LiveMemory, Segment
from deltasync.tensors import Region, TensorSpec
from deltasync.tensors.bits import cast, int_view
from vllm_plugin.load.plan import LoadPlan


def check_coverage(
    specs: Mapping[str, TensorSpec],
    regions: Sequence[Mapping[str, Sequence[Region]]],
    reasons: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Make sure that all shards together hold every tensor: each element once, or in copies of the same region.

    `reasons` has known reasons why tensors cannot be patched in place.

    Raises:
        ModelMismatchError: they do not hold these tensors; it says what is missing.
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
    """Yield the tensors that a vLLM model runner loaded its model from.

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
    """Compare live memory, as vLLM loaded it, with the checkpoint's `tensors` through the plan, bit by bit.

    Tensors that differ get a reason in the plan. Returns the tensors that the checkpoint does not have in that shape, and
    that share no place with a compared one. Only a fingerprint can prove the plan for those.
    """
    compared = set()
    for name, tensor in tensors:
        spec = specs.get(name)
        if spec is None or tuple(tensor.shape) != spec.shape:
            continue
        compared.add(name)
        if memory.differs(name, int_view(cast(tensor, spec.dtype))):
            plan.reasons[name] = "vLLM keeps it in a layout of its own"
    # A tied tensor lies in the same place as the one that the checkpoint has.
    proven = {_place(segment) for name in compared - plan.reasons.keys() for segment in plan.segments[name]}
    return {
        name
        for name in specs.keys() - compared
        if not (plan.segments[name] and all(_place(segment) in proven for segment in plan.segments[name]))
    }


def _place(segment: Segment) -> tuple[object, ...]:
    return segment.live.data_ptr(), segment.live.shape, segment.live.stride(), segment.stride, segment.offset
