"""Ranks of a sharded trainer: what `deltasync.trainer` sees of torch.distributed, over simulated messages."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from tests.simulator.scheduler import Process, Scheduler


class KeyStore:
    """The key-value store of a process group. It is gone once the process of the first rank is."""

    def __init__(self, owner: Process) -> None:
        self.owner, self.held = owner, dict[str, bytes]()

    def clone(self) -> KeyStore:
        return self

    def set(self, key: str, value: str | bytes) -> None:
        self._pass()
        self.held[key] = value.encode() if isinstance(value, str) else bytes(value)

    def check(self, names: list[str]) -> bool:
        self._pass()
        return all(name in self.held for name in names)

    def get(self, key: str) -> bytes:
        self._pass()
        if not _scheduler().wait(lambda: key in self.held or self.owner.killed, 300.0, f"get {key}"):
            raise RuntimeError(f"{key}: time is up")
        self._pass()
        return self.held[key]

    def delete_key(self, key: str) -> bool:
        self._pass()
        return self.held.pop(key, None) is not None

    def _pass(self) -> None:
        scheduler = _scheduler()
        scheduler.maybe_switch("key-value store")
        if self.owner.killed:
            raise RuntimeError("Connection reset by peer")


class PrefixStore:
    """Keys below a prefix."""

    def __init__(self, prefix: str, store: Any) -> None:
        self._prefix, self._store = prefix, store

    def clone(self) -> PrefixStore:
        return self

    def __getattr__(self, verb: str) -> Callable[..., Any]:
        call = getattr(self._store, verb)

        def prefixed(key: Any, *rest: Any) -> Any:
            named = (
                [f"{self._prefix}/{each}" for each in key]
                if isinstance(key, list)
                else f"{self._prefix}/{key}"
            )
            return call(named, *rest)

        return prefixed


class Group:
    """A rank's process group."""

    def __init__(self, store: KeyStore, rank: int, size: int) -> None:
        self.store, self.rank, self.size = store, rank, size

    def get_group_store(self) -> KeyStore:
        return self.store


class Gloo:
    """Connections between the ranks, which carry full weights."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        self._store, self._rank = store, rank
        self._sent = dict.fromkeys(range(size), 0)

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Gloo:
        self._store.set(self._next(self._rank, rank, rank), tensors[0].numpy().tobytes())
        return self

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Gloo:
        data = self._store.get(self._next(rank, self._rank, rank))
        tensors[0].copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        return self

    def _next(self, source: int, target: int, other: int) -> str:
        self._sent[other] += 1
        return f"{source}-{target}-{self._sent[other]}"

    def wait(self) -> None:
        pass


class Distributed:
    """What `deltasync.trainer` sees as the module `torch.distributed`."""

    ProcessGroup, ProcessGroupGloo = Group, Gloo

    class group:
        WORLD: Any = None

    def get_rank(self, group: Group) -> int:
        return group.rank

    def get_world_size(self, group: Group) -> int:
        return group.size

    def get_global_rank(self, group: Group, rank: int) -> int:
        return rank


@contextlib.contextmanager
def simulated() -> Iterator[None]:
    """Show `deltasync.trainer` these, and no process of this machine."""
    ranks: Any = importlib.import_module("deltasync.trainer.ranks")
    shown = {
        "dist": Distributed(),
        "PrefixStore": PrefixStore,
        "_process": lambda pid: "",
        "_world_store": lambda: _scheduler().running.process.store,
    }
    with mock.patch.multiple(ranks, **shown):
        try:
            yield
        finally:
            ranks._open.clear()


def _scheduler() -> Scheduler:
    assert Scheduler.current is not None
    return Scheduler.current
