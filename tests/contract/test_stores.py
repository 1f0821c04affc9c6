from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from deltasync import open_store
from deltasync.errors import ConfigError, ObjectExistsError, StoreError, TransientStoreError
from deltasync.stores import Store
from tests.contract.store_contract import StoreContract


class TestMemoryStore(StoreContract):
    @pytest.fixture
    def store(self, memory_url: str) -> Store:
        return open_store(memory_url)

    def test_one_name_is_one_store(self, memory_url: str) -> None:
        open_store(memory_url).create("a", b"1")
        assert open_store(memory_url).read("a") == b"1"
        assert list(open_store(f"{memory_url}/other").list("")) == []


class TestFileStore(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return open_store(f"file://{tmp_path}/not/there/yet")

    @pytest.fixture
    def elsewhere(self, store: Store) -> tuple[str, Mapping[str, str]]:
        return store.url, {}

    def fill(self, store: Store, keys: Sequence[str]) -> None:
        for key in keys:
            path = Path(store.url.removeprefix("file://"), key)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"x")

    def test_unfinished_files_are_never_listed(self, tmp_path: Path) -> None:
        store = open_store(f"file://{tmp_path}")
        stop = threading.Event()
        listed: set[str] = set()

        def look() -> None:
            while not stop.is_set():
                listed.update(info.key for info in store.list(""))

        looker = threading.Thread(target=look)
        looker.start()
        keys = {f"folder/{number}" for number in range(50)}
        try:
            for key in sorted(keys):
                store.create(key, b"x" * 10_000)
        finally:
            stop.set()
            looker.join()
        assert listed <= keys
        assert {path.name for path in (tmp_path / "folder").iterdir()} == {key.removeprefix("folder/") for key in keys}

    def test_what_a_killed_writer_left_behind_is_not_listed(self, tmp_path: Path) -> None:
        store = open_store(f"file://{tmp_path}")
        store.create("folder/a", b"1")
        (tmp_path / "folder" / ".b.0123.tmp").write_bytes(b"half")
        assert [info.key for info in store.list("")] == ["folder/a"]

    @pytest.mark.parametrize("step", ["fsync", "link"])
    def test_a_create_that_fails_leaves_nothing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
        store = open_store(f"file://{tmp_path}")

        def fail(*arguments: object, **options: object) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, step, fail)
            with pytest.raises(TransientStoreError, match="No space left"):
                store.create("folder/a", b"1")
        assert list(store.list("")) == []
        assert list((tmp_path / "folder").iterdir()) == []

    def test_a_refused_create_leaves_no_temporary_file(self, tmp_path: Path) -> None:
        store = open_store(f"file://{tmp_path}")
        store.create("a", b"1")
        with pytest.raises(ObjectExistsError):
            store.create("a", b"2")
        assert [path.name for path in tmp_path.iterdir()] == ["a"]

    def test_a_path_with_spaces_and_signs_is_that_path(self, tmp_path: Path) -> None:
        open_store(f"file://{tmp_path}/a%20b%23c").create("x", b"1")
        assert (tmp_path / "a b#c" / "x").read_bytes() == b"1"

    def test_deleting_what_is_a_folder_is_a_store_error(self, tmp_path: Path) -> None:
        store = open_store(f"file://{tmp_path}")
        store.create("a/b", b"1")
        with pytest.raises(StoreError):
            store.delete("a")
        assert store.read("a/b") == b"1"


@pytest.mark.parametrize(
    "url",
    [
        "",
        "/data/run",
        "file://",
        "file:///",
        "file://host/data",
        "file:relative",
        "memory://",
        "memory:///",
        "http://host/x",
        "file:///data/run#2",
        "file:///data/run?x=1",
        "memory://name#2",
    ],
)
def test_what_is_no_channel_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        open_store(url)
