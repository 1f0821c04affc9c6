"""What replicas and the workers of a server read through one cache."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from deltasync import Publisher, Replica
from deltasync.config import ReplicaSettings, Retention
from deltasync.errors import CorruptDataError, MissingVersionError, TransientStoreError
from deltasync.serve import engine
from deltasync.stores.cache import CachedStore
from tests.builders import assert_holds
from tests.conftest import assert_same_bits
from tests.faults import FaultyStore, flipped, truncated
from tests.unit import test_cache
from tests.unit.test_cache import MB, downloads, files

inner, directory, store = test_cache.inner, test_cache.directory, test_cache.store


class TestReader:
    """What a replica reads through it."""

    def test_documents_and_weights_are_downloaded_once(
        self, store: CachedStore, inner: FaultyStore, directory: Path
    ) -> None:
        held = {"w": torch.arange(1000, dtype=torch.int32)}
        with Publisher(inner) as publisher:
            for _ in range(3):
                held["w"][7] += 1
                publisher.publish(held.items()).wait(60)
        inner.calls.clear()
        for _ in range(3):
            assert_holds(CachedStore(inner, directory, MB), held)
        read = downloads(inner)
        assert read.count("channel.json") == 3
        weights_read = [key for key in read if key.startswith("anchors/")]
        assert len(weights_read) == len(set(weights_read)) == 1

    @pytest.mark.parametrize("change", [flipped, truncated])
    def test_damage_in_the_cache_is_repaired_and_in_the_store_is_not_kept(
        self, store: CachedStore, inner: FaultyStore, directory: Path, change: Callable[[bytes], bytes]
    ) -> None:
        held = {"w": torch.arange(1000, dtype=torch.int32)}
        with Publisher(inner) as publisher:
            publisher.publish(held.items()).wait(60)
            Replica(store).sync()
            held["w"][7] += 1
            publisher.publish(held.items()).wait(60)
        for name in files(directory):
            (directory / name).write_bytes(change((directory / name).read_bytes()))
        for prefix in ("anchors/",):
            inner.heal()
            inner.tamper(prefix, change)
            with pytest.raises((CorruptDataError, MissingVersionError)):
                Replica(store).sync()
        inner.heal()
        assert_holds(store, held)

    def test_what_came_before_the_store_went_is_not_downloaded_again(
        self, store: CachedStore, inner: FaultyStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("deltasync.publish.encode.INLINE_BYTES", 0)  # as if versions were large
        model = {"w": torch.randn(1 << 16, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)}
        with Publisher(inner.inner, retention=Retention(compact_every=0)) as publisher:
            for version in range(40):
                model["w"][version] += 1
                publisher.publish(model.items()).wait(60)

        def gone(data: bytes) -> bytes:
            if len(inner.calls) > most:
                raise TransientStoreError("gone, says the test")
            return data

        replica, failures = Replica(store), 0
        while replica.version != 40:
            # Requests enough for a plan and for a few files, then none.
            inner.heal()
            most = len(inner.calls) + 47
            inner.tamper("", gone)
            try:
                replica.sync()
            except TransientStoreError:
                failures += 1
            assert failures < 40
        assert_same_bits(replica.state_dict(), model)
        assert failures >= 3


def test_the_workers_of_a_server_download_once(
    inner: FaultyStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FaultyStore, "url", "s3://bucket/run")
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(engine, "open_failover", lambda url: inner)
    with Publisher(inner) as publisher:
        publisher.publish([("w", torch.arange(1000))]).wait(60)
    stores = [engine.open_reader(ReplicaSettings(channel="s3://bucket/run"), 4).store for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda store: Replica(store).sync(), stores)) == [1] * 4
    shared = [key for key in downloads(inner) if key.startswith("anchors/")]
    assert len(shared) == len(set(shared)) == 1
