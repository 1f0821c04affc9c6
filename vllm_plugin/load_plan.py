"""The load plan: where each checkpoint element lies in this worker's memory, learnt from vLLM's own loader.

The loader is run once on meta tensors of the checkpoint's names and shapes under a dispatch mode that records every
`aten.copy_` instead of executing it. A recorded copy is a segment: a strided view of one checkpoint tensor and the strided
view of the parameter it goes to. Fused, stacked and sliced parameters need no table per architecture.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
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


def record(model: torch.nn.Module, specs: Mapping[str, TensorSpec]) -> dict[str, list[Segment]]:
    """Where the tensors of `specs`, or this worker's shards of them, lie in the memory of `model`, which is not touched.

    What has no place of its own dtype, element for element, in the model's parameters and buffers is left out;
    `check_coverage` tells what is missing from all workers.

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
    owned = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
    segments: dict[str, list[Segment]] = {name: [] for name in specs}
    for live, source in recorder.copies:
        name = names.get(source.untyped_storage()._cdata)
        if name is None or live.dtype != source.dtype or live.untyped_storage()._cdata not in owned:
            continue
        if live.shape != source.shape:
            if live.squeeze().shape != source.squeeze().shape:
                continue
            live, source = live.squeeze(), source.squeeze()
        integers = live.detach().view(int_view(live[:0] if live.ndim else live).dtype)
        segments[name].append(Segment(integers, source.stride(), int(source.storage_offset())))
    return segments


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


def verify(memory: LiveMemory, specs: Mapping[str, TensorSpec], checkpoint: Path) -> int:
    """Compare live memory through the plan with the checkpoint that vLLM loaded, bit by bit.

    Args:
        memory: Live weights as they were loaded.
        specs: Served names, dtypes and shapes.
        checkpoint: Directory with safetensors files.

    Returns:
        How many tensors were compared; those that the checkpoint does not hold are left to the fingerprint.

    Raises:
        ModelMismatchError: the plan maps a tensor to other bits.
    """
    compared = 0
    wrong = []
    for name, tensor in _tensors(checkpoint):
        spec = specs.get(name)
        if spec is None or tuple(tensor.shape) != spec.shape:
            continue
        compared += 1
        if memory.differs(name, bits_of(cast(tensor, spec.dtype))):
            wrong.append(name)
    if wrong:
        raise ModelMismatchError(
            f"{len(wrong)} tensors lie in live memory in another layout than in {checkpoint} and cannot be patched in "
            f"place by this release: {', '.join(wrong[:5])}."
        )
    return compared


def _tensors(checkpoint: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for path in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - safe_open has no iterator of its own
                yield name, file.get_tensor(name)
