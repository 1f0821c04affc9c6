"""Proof that a load plan is right: every tensor is compared with the checkpoint, or identified by its
fingerprint; and what becomes of tensors that the engine's loader puts nowhere.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType

import torch

from deltasync.errors import ModelMismatchError
from deltasync.live.memory import LiveMemory
from deltasync.live.segments import Segment
from deltasync.serve.draft import DRAFT
from deltasync.serve.load_plan import LoadPlan
from deltasync.tensors import Region, TensorSpec
from deltasync.tensors.bits import cast, int_view


def check_coverage(
    specs: Mapping[str, TensorSpec],
    regions: Sequence[Mapping[str, Sequence[Region]]],
    reasons: Mapping[str, str] = MappingProxyType({}),
) -> list[str]:
    """Make sure that all shards together hold every tensor: each element once, or in copies of the same
    region.

    `reasons` has known reasons why tensors cannot be patched in place. Returns the tensors of which no shard
    holds anything.

    Raises:
        ModelMismatchError: they do not hold these tensors; it says what is missing.
    """
    problems, ignored = [], []
    for spec in specs.values():
        held = {region for held in regions for region in held[spec.name]}
        if not held and spec.element_count and spec.name not in reasons:
            ignored.append(spec.name)
        elif (problem := _coverage(spec, held)) is not None:
            problems.append(f"{spec} ({reasons.get(spec.name, problem)})")
    if problems:
        raise ModelMismatchError(
            f"{len(problems)} tensors cannot be updated by this release: {'; '.join(problems[:5])}"
            + ("; ..." if len(problems) > 5 else ".")
        )
    return ignored


def _coverage(spec: TensorSpec, regions: Collection[Region]) -> str | None:
    count_N = torch.zeros(spec.element_count, dtype=torch.uint8, device="cpu")
    for offset, dims in regions:
        count_N.as_strided([size for size, _ in dims], [stride for _, stride in dims], offset).add_(1)
    if bool((count_N == 1).all()):
        return None
    return f"{int((count_N == 0).sum())} elements have no place, {int((count_N > 1).sum())} have several"


def verify(
    plan: LoadPlan,
    memory: LiveMemory,
    specs: Mapping[str, TensorSpec],
    tensors: Iterable[tuple[str, torch.Tensor]],
) -> tuple[set[str], dict[str, TensorSpec]]:
    """Compare live memory, as the engine loaded it, with the checkpoint's `tensors` through the plan, bit by
    bit.

    Tensors that differ get a reason in the plan. Returns the tensors that the checkpoint does not have in
    that shape: only a fingerprint can prove the plan for those. And it returns the checkpoint's tensors that
    are not in `specs`.
    """
    unproven, others = set(specs), {}
    for name, tensor in tensors:
        spec = specs.get(name)
        if spec is None:
            others[name] = TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        elif tuple(tensor.shape) == spec.shape:
            unproven.discard(name)
            if plan.segments[name] and memory.differs(name, int_view(cast(tensor, spec.dtype))):
                plan.reasons[name] = f"{plan.engine} keeps it in a layout of its own"
    return unproven, others


_HALVES = "bfloat16", "float16"
_HEAD = "lm_head.weight"
_EMBEDDINGS = "emb", "wte"  # parts of their names

_CONSTANTS = (
    "rotary_pos_emb.inv_freq",
    "rotary_emb.inv_freq",
    "rotary_emb.cos_cached",
    "rotary_emb.sin_cached",
)
"""Buffers of older checkpoints, which engines compute from the configuration."""


def ties(
    plan: LoadPlan, specs: Mapping[str, TensorSpec], model: torch.nn.Module, *, has_logits: bool
) -> dict[str, str]:
    """Return the tensors without a place in this process, each with the one that the model computes with
    instead.

    These are second names of parameters of `model`, which is as its loader expects it; and, where it computes
    logits without a head of its own, the head that is published, whose place is that of the embeddings.
    """
    lying: dict[int, list[str]] = {}
    for name, segments in plan.segments.items():
        for storage in {segment.live.untyped_storage().data_ptr() for segment in segments}:
            lying.setdefault(storage, []).append(name)
    parameters = [
        (own, parameter.untyped_storage().data_ptr())
        for own, parameter in model.named_parameters(remove_duplicate=False)
        if not parameter.is_meta
    ]
    embeddings = [
        name
        for name in sorted(plan.segments)
        if plan.segments[name] and any(part in name for part in _EMBEDDINGS)
    ]
    has_head = any(held and name.endswith(_HEAD) for name, held in plan.segments.items())
    found = {}
    for name, spec in specs.items():
        if plan.segments[name] or name in plan.reasons or name.startswith(DRAFT):
            continue
        at = {
            place
            for own, place in parameters
            if f".{own}".endswith(f".{name}") or f".{name}".endswith(f".{own}")
        }
        others = [other for place in at for other in lying.get(place, ())]
        if not others and has_logits and not has_head and name.endswith(_HEAD):
            others = embeddings
        alike = [
            other for other in others if (specs[other].shape, specs[other].dtype) == (spec.shape, spec.dtype)
        ]
        if alike:
            found[name] = alike[0]
    return found


def check_ignored(ignored: Iterable[str], specs: Mapping[str, TensorSpec], absent: Collection[str]) -> None:
    """Make sure that the engine has a reason to load none of these tensors: its own checkpoint has them too,
    or they are those of a draft that this server does not have.

    `absent` are those that this checkpoint lacks.

    Raises:
        ModelMismatchError: the trainer's model has tensors that the engine's has not.
    """
    known = [name for name in ignored if name.endswith(_CONSTANTS) or name.startswith(DRAFT)]
    strange = [name for name in ignored if name in absent and name not in known]
    if strange:
        raise ModelMismatchError(
            f"{len(strange)} tensors of the channel, such as {specs[strange[0]]}, are neither in the model "
            "that is served "
            "nor in the checkpoint that it was loaded from: serve a checkpoint of the trainer's model."
        )


def check_dtype(specs: Mapping[str, TensorSpec], engine: str, dtype: str | None) -> None:
    """Make sure that an engine that computes with this dtype can hold the bits of most of the channel's
    elements.

    Raises:
        ModelMismatchError: both are 16-bit floats, and others.
    """
    counts = {
        kind: sum(spec.element_count for spec in specs.values() if spec.dtype == kind) for kind in _HALVES
    }
    most = max(counts, key=lambda kind: counts[kind])
    if dtype in _HALVES and dtype != most and counts[most] > counts[dtype]:
        raise ModelMismatchError(
            f"The channel's weights are {most}, and {engine} computes with {dtype}, which cannot hold their "
            "bits: start it "
            f"with --dtype {most}, or publish with dtype={dtype!r} (DELTASYNC_DTYPE)."
        )


def misfits(specs: Mapping[str, TensorSpec], tensors: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """Return which of the checkpoint's `tensors` have other shapes than in the channel, with both shapes."""
    found = ((specs[name], tuple(tensor.shape)) for name, tensor in tensors if name in specs)
    return [
        f"{spec} has shape {shape} in the checkpoint that was loaded"
        for spec, shape in found
        if spec.shape != shape
    ]


def kept(
    specs: Mapping[str, TensorSpec], tensors: Iterable[tuple[str, torch.Tensor]]
) -> dict[str, list[Segment]]:
    """Return segments of host memory for tensors that the engine does not load; zeros where the checkpoint
    lacks them.
    """
    found = {
        name: torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype), device="cpu")
        for name, spec in specs.items()
    }
    for name, tensor in tensors:
        if name in found and tensor.shape == found[name].shape:
            found[name].copy_(cast(tensor, specs[name].dtype))
    return {name: [Segment.whole(tensor)] for name, tensor in found.items()}
