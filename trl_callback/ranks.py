"""Agreement of a trainer's processes before they publish: nothing failed in any of them, and they hold the
same weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist

from deltasync.errors import ConfigError
from deltasync.publish.agreement import Alone
from deltasync.tensors.bits import is_wrapper, readable
from deltasync.trainer.ranks import connected
from deltasync.trainer.source import digest_of


@contextlib.contextmanager
def processes(together: bool = True) -> Iterator[Alone]:
    """Connect the processes of a trainer for a moment; all of them call this. One that is not `together` asks
    nobody.
    """
    many = together and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    peers = connected(dist.group.WORLD if many else None, timeout_s=600.0)  # for a process that is late
    try:
        yield peers
    finally:
        peers.close("has left the trainer's start")


def check_replicas(peers: Alone, model: torch.nn.Module) -> None:
    """Check that all processes hold the same parameters, of which the main one publishes its own; all of them
    call this.

    Frozen weights of wrapper subclasses, which are quantized, are not read.

    Raises ConfigError in all processes if they differ, as local experts do.
    """

    def read() -> dict[str, tuple[str, list[int], int]]:
        found = {}
        for name, param in model.named_parameters():
            held = param.detach()
            is_trained = is_wrapper(param) and param.requires_grad
            if (is_trained or type(held) is torch.Tensor) and not held.is_meta:
                found[name] = str(held.dtype), list(held.shape), digest_of(name, readable(name, held))
        return found

    first, *others = peers.share(read, dict[str, tuple[str, list[int], int]]) if peers.size > 1 else [{}]
    for rank, other in enumerate(others, start=1):
        for name in {**first, **other}:
            if first.get(name) != other.get(name):
                raise ConfigError(
                    f"{name} differs between ranks 0 and {rank}, or one of them lacks it, and rank 0 "
                    "publishes alone. If "
                    "each rank trains experts or layers of its own, publish from a loop of your own on all "
                    "ranks, each with "
                    "Publisher(..., group=group), by the names of the checkpoint; otherwise broadcast the "
                    "parameter."
                )
