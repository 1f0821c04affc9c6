"""Ranks forked from one process that has imported everything: many_ranks.py FOLDER RANKS FIRST [DEATH]

Publishes the version of step FIRST and the next one to FOLDER/channel, continuing the run that is there. With a
DEATH, a rank is killed as it publishes a third one, and each other one leaves FOLDER/survivor.RANK: "published" or
"refused". All leave FOLDER/moved.FIRST.RANK: the bytes that this rank said to others and read from them for the
second version.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from deltasync import Publisher
from deltasync.errors import PublishError
from deltasync.publish.log import Log
from deltasync.publish.ranges import TensorRange
from deltasync.trainer import parts
from deltasync.trainer.agreement import Agreement
from deltasync.trainer.source import Source

EXPERTS = 64  # each held whole by one rank
_SHARED = (640, 16)  # a tensor of which each rank holds some rows

DEATHS: dict[str, tuple[bool, Any, str, bool]] = {
    "before it compares": (False, Source, "compare", False),
    "after it compared": (False, Source, "compare", True),
    "after all agreed": (False, Agreement, "totals", True),
    "before its part is stored": (False, parts, "put_file", False),
    "before it says that its part is stored": (False, Agreement, "answer", False),
    "after it said so": (False, Agreement, "answer", True),
    "the first one, before the record": (True, Log, "append", False),
    "the first one, after the record": (True, Log, "append", True),
}
"""Of each: whether the first rank dies, in which function, and whether that has returned."""


def weights(step: int) -> dict[str, torch.Tensor]:
    """The whole model at a step; a few elements of most tensors differ from the step before."""
    found = {f"experts.{n}": torch.ones(24, 8) * (n + 1) for n in range(EXPERTS)}
    found["shared"] = torch.arange(640 * 16, dtype=torch.float32).view(_SHARED) / 64
    for tensor in found.values():
        tensor.view(-1)[: 3 * step] += step
    found["shared"][::7] += step
    return {name: tensor.bfloat16() for name, tensor in found.items()}


def held(step: int, rank: int, ranks: int) -> dict[str, torch.Tensor | TensorRange]:
    """What a rank holds of it."""
    whole, share = weights(step), 640 * 16 // ranks
    found: dict[str, torch.Tensor | TensorRange] = {
        f"experts.{n}": whole[f"experts.{n}"] for n in range(rank, EXPERTS, ranks)
    }
    part = whole["shared"].view(-1)[rank * share : (rank + 1) * share]
    return found | {"shared": TensorRange(part, rank * share, _SHARED)}


class Counted:
    """The store of the ranks, which counts the bytes of messages; signs of life aside, which depend on time."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.said, self.read = inner, 0, 0

    def set(self, key: str, value: str | bytes) -> None:
        if not key.startswith("alive/"):
            self.said += len(value)
        self.inner.set(key, value)

    def get(self, key: str) -> bytes:
        found: bytes = self.inner.get(key)
        if not key.startswith("alive/"):
            self.read += len(found)
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def dies(owner: Any, name: str, after: bool) -> None:
    """Kill this process when it calls a function next, or when that has returned."""
    inner: Callable[..., Any] = getattr(owner, name)

    def dying(*arguments: Any, **named: Any) -> Any:
        if "seen" in arguments:  # an answer about the version before
            return inner(*arguments, **named)
        if after:
            inner(*arguments, **named)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, name, dying)


def run(folder: Path, rank: int, ranks: int, first: int, death: str | None, port: int) -> None:
    """Do what one rank does."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    url, group = f"file://{folder}/channel", dist.group.WORLD
    publisher = Publisher(url, group=group, resume=True, peer_timeout_s=120)
    counted = Counted(publisher.agreement._store)  # type: ignore[attr-defined]
    publisher.agreement._store = counted  # type: ignore[attr-defined]
    publisher.publish(held(first, rank, ranks), step=first).wait(120)
    publisher.flush()
    before = counted.said, counted.read
    publisher.publish(held(first + 1, rank, ranks), step=first + 1).wait(120)
    publisher.flush()
    (folder / f"moved.{first}.{rank}").write_text(
        json.dumps([counted.said - before[0], counted.read - before[1]])
    )
    if death is None:
        publisher.close()
        return
    is_first, owner, name, after = DEATHS[death]
    if rank == (0 if is_first else ranks - 1):
        dies(owner, name, after)
    try:
        publisher.publish(held(first + 2, rank, ranks), step=first + 2).wait(120)
        publisher.flush()
        end = "published"
    except PublishError:
        end = "refused"
    with contextlib.suppress(PublishError):
        publisher.close()
    (folder / f"survivor.{rank}").write_text(end)


def main(folder: Path, ranks: int, first: int, death: str | None) -> None:
    """Fork the ranks, and wait for them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children: dict[int, int] = {}
    for rank in range(ranks):
        child = os.fork()
        if child:
            children[child] = rank
            continue
        code = 1
        try:
            run(folder, rank, ranks, first, death, port)
            code = 0
        except BaseException:  # noqa: BLE001 - whatever ends it is shown
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    ended = {children.pop(child): status for child, status in (os.wait() for _ in range(ranks))}
    wrong = {rank: status for rank, status in ended.items() if status}
    dead = None if death is None else 0 if DEATHS[death][0] else ranks - 1
    assert wrong == ({} if dead is None else {dead: signal.SIGKILL}), wrong


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), *(sys.argv[4:] or [None]))
