"""The memory that each rank takes beside its shard and its shadow, with one tensor of half the model.

    torchrun --nproc-per-node 4 tests/integration/memory_ranks.py FOLDER MEGABYTES CODEC

MEGABYTES is the size of the model as it is served, CODEC that of its deltas. Publishes a first version, a
delta and, from another publisher, one that resumes; as bfloat16 and from float32. FOLDER/<dtype>.<rank>.json
has the peaks in MB: anonymous memory, which is what the system cannot drop, less what the process had before
and less the shadow, if the publisher made one.
"""

from __future__ import annotations

import ctypes
import gc
import json
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from deltasync import Publisher, Replica

FOLDER = Path(sys.argv[1])
_COLUMNS = 1024
_MB = 1 << 20


def anonymous_bytes() -> int:
    found = re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def peak_bytes(action: Callable[[], object]) -> int:
    """By how much the process grows while the action runs, at most."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = most = anonymous_bytes()
    ended = threading.Event()

    def watch() -> None:
        nonlocal most
        while not ended.wait(0.002):
            most = max(most, anonymous_bytes())

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    action()
    ended.set()
    thread.join()
    return most - before


def sharded(megabytes: int, dtype: torch.dtype) -> dict[str, DTensor]:
    """Rows over all ranks: a tensor of half of the model, and 16 of a 32nd."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows, found = megabytes * _MB // 2 // _COLUMNS // 2, {}
    counts = {"half": rows} | {f"layers.{number}": rows // 16 for number in range(16)}
    for name, count in counts.items():
        chunk = -(-count // mesh.size())
        held = max(0, min(chunk, count - dist.get_rank() * chunk))
        local = torch.empty(held, _COLUMNS, dtype=dtype).normal_(
            generator=torch.Generator().manual_seed(dist.get_rank())
        )
        shape = {"shape": (count, _COLUMNS), "stride": (_COLUMNS, 1)}
        found[name] = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, **shape)
    return found


def change(weights: dict[str, DTensor]) -> None:
    """One element in a thousand: what changed takes memory, too, whatever the size of a tensor."""
    for value in weights.values():
        value.to_local().view(-1)[::1000] += 1


def measure(megabytes: int, dtype: torch.dtype, codec: str, url: str) -> dict[str, float]:
    """Publish and resume; return the peaks in MB, by what was done."""
    weights, peaks = sharded(megabytes, dtype), dict[str, float]()
    shadow_bytes = 2 * sum(value.to_local().numel() for value in weights.values())

    def note(name: str, publisher: Publisher, without: int) -> None:
        peaks[name] = (
            peak_bytes(lambda: publisher.publish(weights, step=len(peaks)).wait(300)) - without
        ) / _MB

    with Publisher(url, group=dist.group.WORLD, codec=codec) as publisher:
        note("first", publisher, shadow_bytes)
        change(weights)
        note("delta", publisher, 0)
    del publisher
    with Publisher(url, group=dist.group.WORLD, codec=codec, resume=True) as publisher:
        change(weights)
        note("resume", publisher, shadow_bytes)
        assert publisher.version == 3
    served = {}
    if dist.get_rank() == 0:
        replica = Replica(url)
        replica.sync()
        served = replica.state_dict()
    for name, value in weights.items():
        part = value.to_local().bfloat16().view(torch.int32)
        parts = None if dist.get_rank() else [torch.empty_like(part) for _ in range(dist.get_world_size())]
        dist.gather(part, parts)  # equal parts
        assert parts is None or torch.equal(served[name].view(torch.int32), torch.cat(parts)), name
    dist.barrier()
    return peaks


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for each in (torch.bfloat16, torch.float32):
        kind = str(each).removeprefix("torch.")
        measure(8, each, sys.argv[3], f"file://{FOLDER}/compiled-{kind}")  # loads the kernels
        found = measure(int(sys.argv[2]), each, sys.argv[3], f"file://{FOLDER}/{kind}")
        (FOLDER / f"{kind}.{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()
