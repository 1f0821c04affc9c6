"""Agreement of a trainer's processes before they publish: nothing failed in any of them, and they hold the same weights."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
import torch.distributed as dist

from deltasync.publish.source import check_equal
from deltasync.ranks.ranks import Ranks
from deltasync.tensors.bits import is_wrapper

_Value = TypeVar("_Value")

_OPEN_S = 600.0  # for a process that is late


@contextlib.contextmanager
def _processes() -> Iterator[Ranks]:
    """Connect the processes of a trainer for a moment; all of them call this. A single one asks nobody."""
    many = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    peers = Ranks(dist.group.WORLD if many else None, _OPEN_S)
    try:
        yield peers
    finally:
        peers.close("has left the trainer's start")


def in_all_processes(action: Callable[[], _Value]) -> _Value:
    """Run an action in each process of a trainer and return its result in this one; all of them call this.

    Its error is raised here; in the other processes a `DeltaSyncError` with the rank and the message.
    """
    with _processes() as peers:
        return peers.all(action)


def check_replicas(model: torch.nn.Module) -> None:
    """Check that all processes hold the same parameters, of which the main one publishes its own; all of them call this.

    Frozen weights of wrapper subclasses, which are quantized, are not read.

    Raises ConfigError in all processes if they differ, as local experts do.
    """
    params = {
        name: param.detach() for name, param in model.named_parameters() if param.requires_grad or not is_wrapper(param)
    }
    known = {
        name: data for name, data in params.items() if (type(data) is torch.Tensor or is_wrapper(data)) and not data.is_meta
    }
    with _processes() as peers:
        check_equal(peers, known)
