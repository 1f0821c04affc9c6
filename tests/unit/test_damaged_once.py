"""A byte that is wrong in one read of an unsigned object is not believed, published on or copied."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import TypeVar

import pytest
import torch

from deltasync import Publisher, Replica
from deltasync.channel import keys
from deltasync.channel.reading import ChannelReader
from deltasync.errors import DeltaSyncError
from deltasync.following import search
from deltasync.ops import check, copy
from deltasync.stores import open_store
from deltasync.stores.base import Store, WrappedStore
from tests.faults import FaultyStore

_Result = TypeVar("_Result")


class DamagedOnce(WrappedStore):
    """Replaces a text of an object in one of the reads that have it, the first by default."""

    def __init__(self, inner: Store, key: str, old: str, in_read: int = 1) -> None:
        super().__init__(inner)
        self.key, self.left = key, in_read
        self.old, self.new = old.encode(), (old[:-1] + ("0" if old[-1] != "0" else "1")).encode()

    def ask(self, verb: str, key: str, action: Callable[[], _Result]) -> _Result:
        found = action()
        if key != self.key or not isinstance(found, bytes) or self.old not in found:
            return found
        self.left -= 1
        return found if self.left else found.replace(self.old, self.new)  # type: ignore[return-value]


def publish(store: Store, *, resume: bool = False, versions: int = 2) -> dict[str, torch.Tensor]:
    weights = {"w": torch.arange(64).bfloat16()}
    with Publisher(store, resume=resume) as publisher:
        for _ in range(versions):
            weights["w"][publisher.version % 64] += 1 + publisher.version
            publisher.publish(weights.items()).wait()
    return weights


@pytest.mark.parametrize("kind", ["channel", "opening"])
def test_a_copy_has_what_the_source_has(memory_url: str, kind: str) -> None:
    store = open_store(memory_url)
    publish(store)
    publish(store, resume=True)
    key = keys.CHANNEL if kind == "channel" else [info.key for info in store.list(keys.EPOCHS)][-1]
    run_id = json.loads(store.read(keys.CHANNEL, 1 << 20))["run_id"]
    for read in range(1, 6):  # whichever of its reads is damaged
        target = open_store(f"{memory_url}-{kind}-{read}")
        with contextlib.suppress(DeltaSyncError):
            copy(ChannelReader(DamagedOnce(store, key, run_id, read)), target)
        there = {info.key for info in target.list("")}
        assert key not in there or target.read(key, 1 << 20) == store.read(key, 1 << 20)
        assert keys.CHANNEL in there or keys.HEAD not in there, "head leads to a channel that is not there"
        copy(ChannelReader(store), target)
        assert check(ChannelReader(target), read_data=True).exit_code == 0


def test_a_version_that_caches_do_not_show_is_lost_only_after_a_while(
    memory_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FaultyStore(open_store(memory_url))
    publish(store, versions=3)
    replica = Replica(store)
    assert replica.sync() == 3
    newest = replica.identity
    assert newest is not None
    store.hide(lambda key: key == newest.key)  # a listing that is behind
    store.drop(newest.key)  # a cache that remembers that it was missing
    store.drop(keys.HEAD)
    assert {replica.sync() for _ in range(30)} == {3}
    monkeypatch.setattr(search, "_LOST_S", 0.0)
    assert min(replica.sync() for _ in range(30)) == 2
