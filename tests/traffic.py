"""What a publisher puts into messages to other ranks, weights for anchors aside."""

from __future__ import annotations

import pickle
from typing import Any

import torch
import torch.distributed as dist


class Traffic:
    """Counts from now on, for the life of this process: collectives of publishers' groups."""

    def __init__(self) -> None:
        self.moved_bytes = 0
        gather, reduce = dist.all_gather_object, dist.all_reduce

        def all_gather_object(found: list[Any], value: Any, group: Any = None) -> None:
            self._count(group, len(pickle.dumps(value)))
            gather(found, value, group=group)

        def all_reduce(tensor: torch.Tensor, *arguments: Any, group: Any = None, **options: Any) -> Any:
            self._count(group, tensor.nbytes)
            return reduce(tensor, *arguments, group=group, **options)

        dist.all_gather_object, dist.all_reduce = all_gather_object, all_reduce

    def _count(self, group: Any, size: int) -> None:
        if getattr(group, "group_desc", None) == "deltasync":
            self.moved_bytes += size
