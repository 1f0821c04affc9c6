"""Parts that every target inside an engine's process needs, in addition to the follow loop."""

from __future__ import annotations

import os
from collections import OrderedDict
from typing import Any

import torch

from deltasync.channel.documents import VersionId
from deltasync.channel.failover import open_failover
from deltasync.channel.reading import ChannelReader
from deltasync.config import ReplicaSettings
from deltasync.errors import ConfigError
from deltasync.following.status import HISTORY
from deltasync.kernels import cpu
from deltasync.stores.cache import behind_cache


def open_reader(settings: ReplicaSettings, process_count: int = 1) -> ChannelReader:
    """Open the channel, behind the cache that the processes of this machine share."""
    assert settings.channel is not None
    store = behind_cache(open_failover(settings.channel), settings.cache_dir, settings.cache_bytes, process_count)
    return ChannelReader(store, settings.trusted_keys)


def limit_threads(given: str, process_count: int | None) -> None:
    """Limit our kernels on the host to the engine's threads in this process.

    Args:
        given: `OMP_NUM_THREADS`, which engines set; may be empty.
        process_count: The processes that share the cores equally where it is empty; None for no limit.

    Raises:
        ConfigError: numba has no threading layer that several threads may use at once; it would end the process.
    """
    first = given.partition(",")[0]
    if first.isdigit() and int(first):
        cpu.limit_threads(int(first))
    elif process_count is not None:
        cpu.limit_threads(len(os.sched_getaffinity(0)) // process_count)
    if cpu.threading_layer() == "workqueue":
        raise ConfigError(
            "numba found neither OpenMP nor TBB here, and its own threads end the process when two callers use them: "
            "install libgomp (apt-get install libgomp1)."
        )


def unique_name(names: OrderedDict[int, str], version: VersionId) -> str:
    """Return a version's number, with the start of its digest if `names` has another version of that number.

    Args:
        names: The first digest of each number that was named; this adds to it, and drops the oldest.
        version: The version to name.
    """
    first = names.setdefault(version.version, version.sha256)
    if len(names) > HISTORY:
        names.popitem(last=False)
    return str(version.version) if first == version.sha256 else f"{version.version}-{version.sha256[:12]}"


class Places:
    """The addresses of a model's parameters and buffers, so that a replaced one is noticed before the next step."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._places: list[tuple[dict[str, Any], str, torch.Tensor, torch.Tensor, int]] = [
            (held, name, tensor, tensor.data, tensor.data_ptr())
            for module in model.modules()
            for held in (module._parameters, module._buffers)
            for name, tensor in held.items()
            if tensor is not None
        ]

    def put_back(self) -> list[str]:
        """Put tensors back that were replaced, or whose memory was. Returns their names."""
        replaced = []
        for held, name, tensor, data, address in self._places:
            if held.get(name) is not tensor or tensor.data_ptr() != address:
                held[name] = tensor
                tensor.data = data
                replaced.append(name)
        return replaced
