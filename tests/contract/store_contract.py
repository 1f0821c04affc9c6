"""What every store must do. A backend passes by subclassing `StoreContract` with a fixture `store`, empty at
the start.

What only some stores can do is in the classes below it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from deltasync.errors import (
    ConfigError,
    CorruptDataError,
    ObjectExistsError,
    ObjectMissingError,
    StoreError,
)
from deltasync.stores import ObjectInfo, Store
from deltasync.stores.base import folders
from deltasync.stores.retries import decides

BAD_KEYS = [
    "",
    "/a",
    "a/",
    "a//b",
    "../a",
    "a/../b",
    ".",
    ".a",
    "a/.b",
    "a b",
    "a#b",
    "ä",
    "a\n",
    "a\\b",
    "a" * 901,
]

_RACE = """
import sys, time
from pathlib import Path
from deltasync import open_store
from deltasync.errors import ObjectExistsError
url, folder, me, count = sys.argv[1:]
store = open_store(url)
store.create(f"ready/{me}", b"")
Path(folder, "ready-" + me).touch()
while not Path(folder, "go").exists():
    time.sleep(0.001)
for number in range(int(count)):
    try:
        store.create(f"race/{number}", me.encode() * 1000)
        print(number)
    except ObjectExistsError:
        pass
"""


class StoreContract:
    def fill(self, store: Store, keys: Sequence[str]) -> None:
        """Put one byte under each key; a backend may know a quicker way."""
        with ThreadPoolExecutor(16) as pool:
            for _ in pool.map(lambda key: store.put(key, b"x"), keys):
                pass

    def test_an_object_larger_than_asked_for_is_refused(self, store: Store) -> None:
        store.put("a", b"four")
        store.put("empty", b"")
        assert store.read("a", 4) == b"four"
        assert store.read("empty", 0) == b""
        for most_bytes in (3, 0):
            with pytest.raises(CorruptDataError, match="4 bytes"):
                store.read("a", most_bytes)

    def test_what_a_listing_tells_is_read(self, store: Store) -> None:
        for data in (b"one", b"", bytes(100_000)):
            store.put("a", data)
            (info,) = store.list("")
            assert store.read("a", len(data), info) == data
            if data:
                with pytest.raises(CorruptDataError):
                    store.read("a", len(data) - 1, info)
        store.delete("a")
        assert store.read("a", len(data), info) == data if info.content else True

    def test_a_store_decides_if_it_says_so(self, store: Store) -> None:
        assert decides(store, "probe/000001-00000000") == store.can_create
        assert list(store.list("")) == []

    def test_put_creates_and_overwrites(self, store: Store) -> None:
        store.put("head.json", b"one")
        assert store.read("head.json", 1 << 30) == b"one"
        store.put("head.json", b"2")
        assert store.read("head.json", 1 << 30) == b"2"

    def test_empty_object(self, store: Store) -> None:
        store.put("empty", b"")
        assert store.read("empty", 1 << 30) == b""
        assert list(store.list("")) == [ObjectInfo("empty", 0)]

    @pytest.mark.parametrize("key", ["missing", "a/missing", "a", "a/b/c"])
    def test_reading_what_is_not_there(self, store: Store, key: str) -> None:
        store.put("a/b", b"")
        with pytest.raises(ObjectMissingError):
            store.read(key, 1 << 30)

    def test_an_empty_store_lists_nothing(self, store: Store) -> None:
        assert list(store.list("")) == []
        assert list(store.list("a/")) == []

    def test_listing_is_sorted_and_complete(self, store: Store) -> None:
        keys = ["b", "a/z", "a/b/c", "a.b", "a/b-c", "c/1", "c/10", "c/2"]
        for key in keys:
            store.put(key, key.encode())
        assert list(store.list("")) == [ObjectInfo(key, len(key)) for key in sorted(keys)]

    @pytest.mark.parametrize(
        "prefix", ["manifests/", "manifests/000", "mani", "manifests/0000000002.json", "nothing", "x/y"]
    )
    def test_a_prefix_is_of_the_key_not_of_path_parts(self, store: Store, prefix: str) -> None:
        keys = [
            "manifests/0000000001.json",
            "manifests/0000000002.json",
            "manifests-old/1",
            "head.json",
            "x/y/z",
            "x/yy/z",
        ]
        for key in keys:
            store.put(key, b"")
        assert [info.key for info in store.list(prefix)] == sorted(
            key for key in keys if key.startswith(prefix)
        )

    def test_listing_several_pages(self, store: Store) -> None:
        keys = [f"many/{number:05d}" for number in range(2_500)]  # a page has a thousand
        self.fill(store, keys[::-1])
        assert [info.key for info in store.list("many/")] == keys
        assert {info.bytes for info in store.list("many/")} == {1}

    def test_folders_are_listed_without_what_is_in_them(self, store: Store) -> None:
        for key in ("a/1/x", "a/1/y", "a/2/x/y", "a/3", "a2/1/x", "b/1/x"):
            store.put(key, b"1")
        found = folders(store, "a/")
        assert found is None or sorted(found) == ["a/1/", "a/2/"]
        assert folders(store, "none/") in ([], None)

    def test_deleted_objects_are_gone_and_may_be_created_again(self, store: Store) -> None:
        store.put("a/b", b"one")
        store.put("a/c", b"two")
        store.delete("a/b")
        with pytest.raises(ObjectMissingError):
            store.read("a/b", 1 << 30)
        assert [info.key for info in store.list("")] == ["a/c"]
        store.put("a/b", b"three")
        assert store.read("a/b", 1 << 30) == b"three"

    def test_deleting_what_is_not_there_is_no_error(self, store: Store) -> None:
        store.delete("missing")
        store.delete("a/missing")

    @pytest.mark.parametrize("key", BAD_KEYS)
    def test_bad_keys_are_refused_by_every_verb(self, store: Store, key: str) -> None:
        if store.can_create:
            with pytest.raises(ConfigError):
                store.create(key, b"")
        with pytest.raises(ConfigError):
            store.put(key, b"")
        with pytest.raises(ConfigError):
            store.read(key, 1 << 30)
        with pytest.raises(ConfigError):
            store.delete(key)
        assert list(store.list("")) == []

    def test_every_character_of_the_key_rules_is_kept(self, store: Store) -> None:
        key = "AZaz09._=+@-/x." + "y" * 100
        store.put(key, b"1")
        assert store.read(key, 1 << 30) == b"1"
        assert [info.key for info in store.list("AZ")] == [key]

    def test_all_bytes_of_a_large_object_come_back(self, store: Store) -> None:
        data = bytes(range(256)) * (64 << 12)
        assert len(data) == 64 << 20
        store.put("large", data)
        assert store.read("large", 1 << 30) == data
        assert list(store.list("")) == [ObjectInfo("large", len(data))]

    def test_a_large_object_is_put_as_a_whole(self, store: Store) -> None:
        for value in (b"a", b"b"):
            data = value * (17 << 20)
            store.put("large", data)
            assert store.read("large", 1 << 30) == data

    def test_a_range_of_a_large_object(self, store: Store) -> None:
        data = os.urandom(17 << 20)
        store.put("large", data)
        assert store.read_range("large", 1 << 20, 9 << 20) == data[1 << 20 : 9 << 20]

    def test_ranges(self, store: Store) -> None:
        data = bytes(range(256)) * 100
        store.put("ranged", data)
        for start, end in ((0, 1), (0, len(data)), (255, 257), (len(data) - 1, len(data))):
            assert store.read_range("ranged", start, end) == data[start:end]
        for start, end in ((0, len(data) + 1), (len(data), len(data) + 1)):
            with pytest.raises(StoreError):
                store.read_range("ranged", start, end)
        with pytest.raises(ObjectMissingError):
            store.read_range("missing", 0, 1)

    def test_many_are_deleted_at_once(self, store: Store) -> None:
        for key in ("a", "b/c", "d"):
            store.put(key, b"")
        store.delete("a", "missing", "b/c")
        store.delete()
        assert [info.key for info in store.list("")] == ["d"]

    def test_listing_tells_when_an_object_was_stored(self, store: Store) -> None:
        store.put("first", b"")
        time.sleep(1.1)  # some stores count in seconds
        store.put("second", b"")
        first, second = store.list("")
        assert 0.5 < second.modified_s - first.modified_s < 60

    def test_who_sees_a_record_sees_what_was_written_before_it(self, store: Store) -> None:
        versions = 20
        store.put("head.json", b"0")

        def write() -> None:
            for version in range(1, versions + 1):
                store.put(f"parts/{version:010d}/part", bytes(100_000))
                store.put(f"versions/{version:010d}.json", b"{}")
                store.put("head.json", str(version).encode())

        writer = threading.Thread(target=write)
        writer.start()
        try:
            seen = set()
            while writer.is_alive():
                version = int(store.read("head.json", 1 << 30))
                seen.add(version)
                if version:
                    assert store.read(f"versions/{version:010d}.json", 1 << 30) == b"{}"
                    assert len(store.read(f"parts/{version:010d}/part", 1 << 30)) == 100_000
                    assert f"versions/{version:010d}.json" in {info.key for info in store.list("versions/")}
        finally:
            writer.join()
        assert int(store.read("head.json", 1 << 30)) == versions

    def test_readers_see_the_old_or_the_new_object_never_a_mixture(self, store: Store) -> None:
        states = {bytes([value]) * size for value, size in ((1, 100_000), (2, 50_000), (3, 0))}
        store.put("head.json", min(states))
        stop = threading.Event()

        def write() -> None:
            while not stop.is_set():
                for state in states:
                    store.put("head.json", state)

        writer = threading.Thread(target=write)
        writer.start()
        try:
            seen = {store.read("head.json", 1 << 30) for _ in range(300)}
        finally:
            stop.set()
            writer.join()
        assert seen <= states

    def test_url_and_what_it_can_are_told(self, store: Store) -> None:
        assert "://" in store.url
        assert "secret" not in store.url
        assert isinstance(store.can_create, bool)


class DecidingContract:
    """What a store must do that decides which one of two writers wins, too."""

    def test_create_then_read(self, store: Store) -> None:
        store.create("a/b.json", b"one")
        assert store.read("a/b.json", 1 << 30) == b"one"

    def test_create_never_overwrites(self, store: Store) -> None:
        store.create("a", b"one")
        for data in (b"two", b"one"):
            with pytest.raises(ObjectExistsError):
                store.create("a", data)
        assert store.read("a", 1 << 30) == b"one"

    def test_a_taken_key_is_not_overwritten_by_a_large_object(self, store: Store) -> None:
        store.create("taken", b"small")
        with pytest.raises(ObjectExistsError):
            store.create("taken", bytes(17 << 20))
        assert store.read("taken", 1 << 30) == b"small"

    def test_of_many_threads_creating_one_key_exactly_one_wins(self, store: Store) -> None:
        threads, keys = 16, [f"race/{number}" for number in range(8)]
        start = threading.Barrier(threads)

        def race(thread: int) -> set[str]:
            start.wait()
            won = set()
            for key in keys:
                try:
                    store.create(key, f"{key} by {thread}".encode())
                    won.add(key)
                except ObjectExistsError:
                    pass
            return won

        with ThreadPoolExecutor(threads) as pool:
            wins = list(pool.map(race, range(threads)))
        for key in keys:
            (winner,) = [thread for thread in range(threads) if key in wins[thread]]
            assert store.read(key, 1 << 30) == f"{key} by {winner}".encode()


class SharedContract:
    """What a store must do that other processes reach, too: `elsewhere` is its URL, and the environment that
    they need.
    """


class RefusingContract:
    """What a store must do that has credentials, too: a fixture `refused` is `store`, opened with some that
    it refuses.
    """

    def test_refused_credentials_are_told_and_not_taken_for_something_else(self, refused: Store) -> None:
        calls = (
            lambda: refused.put("a", b""),
            lambda: refused.read("a", 1 << 30),
            lambda: refused.read_range("a", 0, 1),
            lambda: list(refused.list("")),
            lambda: refused.delete("a"),
        )
        for call in calls:
            with pytest.raises(StoreError, match=r"credentials|token|secret|access key|HF_TOKEN") as refusal:
                call()
            assert type(refusal.value) is StoreError  # neither missing nor worth another try


class DecidingSharedContract(DecidingContract, SharedContract):
    """Both: what it decides holds between processes."""

    def test_of_two_processes_creating_one_key_exactly_one_wins(
        self, store: Store, elsewhere: tuple[str, Mapping[str, str]], tmp_path: Path
    ) -> None:
        count, (url, env) = 200, elsewhere
        folder = tmp_path / "race"
        folder.mkdir()
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", _RACE, url, str(folder), me, str(count)],
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, **env},
            )
            for me in "ab"
        ]
        while not all((folder / f"ready-{me}").exists() for me in "ab"):
            assert all(process.poll() is None for process in processes)
            time.sleep(0.01)
        (folder / "go").touch()
        wins = [{int(line) for line in process.communicate(timeout=60)[0].split()} for process in processes]
        assert [process.returncode for process in processes] == [0, 0]
        assert wins[0] | wins[1] == set(range(count))
        assert not wins[0] & wins[1]
        for number in range(count):
            assert store.read(f"race/{number}", 1 << 30) == (b"a" if number in wins[0] else b"b") * 1000
