from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import PIPE

import pytest

from deltasync import limits, open_store
from deltasync.config import ReplicaSettings
from deltasync.errors import ConfigError, CorruptDataError, ObjectMissingError, TransientStoreError
from deltasync.stores import Store, cache
from deltasync.stores.cache import CachedStore, behind_cache
from tests.builders import PATIENCE_S
from tests.contract.store_contract import DecidingContract, StoreContract
from tests.faults import FaultyStore, flipped, truncated

MB = 1 << 20
_TICK_S = 0.01  # file systems' clocks tick every few milliseconds


class TestContract(StoreContract, DecidingContract):
    @pytest.fixture
    def store(self, memory_url: str, tmp_path: Path) -> Store:
        return CachedStore(open_store(memory_url), tmp_path / "cache", MB)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def checker(expected: str) -> Callable[[bytes], None]:
    def check(data: bytes) -> None:
        if sha256(data) != expected:
            raise CorruptDataError("not the bytes that were asked for")

    return check


def ask(store: CachedStore, key: str, data: bytes, size: int | None = None) -> bytes:
    """Ask for the object at a key, which is to hold this data."""
    return store.read_known(key, sha256(data), len(data) if size is None else size, checker(sha256(data)), MB)


@pytest.fixture
def inner(memory_url: str) -> FaultyStore:
    return FaultyStore(open_store(memory_url))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def store(inner: FaultyStore, directory: Path) -> CachedStore:
    return CachedStore(inner, directory, MB)


def downloads(inner: FaultyStore) -> list[str]:
    return [key for operation, key in inner.calls if operation == "read"]


def files(directory: Path) -> dict[str, int]:
    return {
        path.name: path.stat().st_size for path in directory.iterdir() if not path.name.startswith(".lock-")
    }


def test_the_second_one_who_asks_gets_the_file(
    store: CachedStore, inner: FaultyStore, directory: Path
) -> None:
    inner.create("a", b"one")
    assert ask(store, "a", b"one") == b"one"
    assert ask(store, "a", b"one") == b"one"
    assert ask(CachedStore(inner, directory, MB), "a", b"one") == b"one"
    assert downloads(inner) == ["a"]
    assert files(directory) == {sha256(b"one"): 3}


def test_it_is_what_was_asked_for_and_not_what_has_the_name(store: CachedStore, inner: FaultyStore) -> None:
    inner.create("a", b"one")
    ask(store, "a", b"one")
    inner.put("a", b"two")  # another run in the same place
    assert ask(store, "a", b"two") == b"two"
    assert ask(store, "a", b"one") == b"one"


def test_only_reads_by_digest_are_answered(store: CachedStore, inner: FaultyStore) -> None:
    inner.create("head.json", b"one")
    ask(store, "head.json", b"one")
    assert store.read("head.json", 1 << 30) == store.read_range("head.json", 0, 3) == b"one"
    assert len(downloads(inner)) == 3


def test_an_empty_object_is_cached_too(store: CachedStore, inner: FaultyStore) -> None:
    inner.create("a", b"")
    assert ask(store, "a", b"") == ask(store, "a", b"") == b""
    assert len(downloads(inner)) == 1


def test_what_the_store_says_is_passed_on(store: CachedStore, inner: FaultyStore) -> None:
    with pytest.raises(ObjectMissingError):
        ask(store, "a", b"one")
    inner.fail_at("read")
    with pytest.raises(TransientStoreError):
        ask(store, "a", b"one")
    inner.create("a", b"one")
    assert ask(store, "a", b"one") == b"one"


@pytest.mark.parametrize("change", [flipped, truncated, lambda data: b""])
def test_what_the_store_returns_damaged_is_not_kept(
    store: CachedStore, inner: FaultyStore, directory: Path, change: Callable[[bytes], bytes]
) -> None:
    inner.create("a", b"one")
    inner.tamper("a", change)
    for _ in range(2):
        with pytest.raises(CorruptDataError):
            ask(store, "a", b"one")
    assert files(directory) == {}
    inner.heal()
    assert ask(store, "a", b"one") == b"one"


@pytest.mark.parametrize(
    "change", [flipped, truncated, lambda data: b"", lambda data: data + b"\0", lambda data: b"x" * MB]
)
def test_a_damaged_file_is_fetched_anew(
    store: CachedStore,
    inner: FaultyStore,
    directory: Path,
    change: Callable[[bytes], bytes],
    caplog: pytest.LogCaptureFixture,
) -> None:
    inner.create("a", b"one")
    ask(store, "a", b"one")
    path = directory / sha256(b"one")
    path.write_bytes(change(b"one"))
    for _ in range(2):
        assert ask(store, "a", b"one") == b"one"
    assert len(downloads(inner)) == 2
    assert path.read_bytes() == b"one"
    assert [record.getMessage() for record in caplog.records] == [
        f"{path} was damaged; downloading it again."
    ]


def test_a_file_larger_than_the_object_may_be_is_not_read(
    store: CachedStore, inner: FaultyStore, directory: Path
) -> None:
    inner.create("a", b"one")
    ask(store, "a", b"one")
    path = directory / sha256(b"one")
    path.write_bytes(bytes(1000))
    read: list[int] = []

    def check(data: bytes) -> None:
        read.append(len(data))

    assert store.read_known("a", sha256(b"one"), 3, check, 3) == b"one"
    assert read == [3]
    assert path.read_bytes() == b"one"


class TestTogether:
    def test_threads_that_ask_at_a_time_download_once(self, inner: FaultyStore, directory: Path) -> None:
        inner.create("a", b"one")
        inner.create("b", b"two")
        gate = inner.hold_at("read", "a")
        with ThreadPoolExecutor(9) as pool:
            same = [pool.submit(ask, CachedStore(inner, directory, MB), "a", b"one") for _ in range(8)]
            assert gate.entered.wait(PATIENCE_S)
            other = pool.submit(ask, CachedStore(inner, directory, MB), "b", b"two")
            assert other.result(PATIENCE_S) == b"two"  # does not wait for the others
            assert not any(future.done() for future in same)
            gate.opened.set()
            assert [future.result(PATIENCE_S) for future in same] == [b"one"] * 8
        assert sorted(downloads(inner)) == ["a", "b"]

    def test_when_a_download_fails_the_next_one_tries(self, inner: FaultyStore, directory: Path) -> None:
        inner.create("a", b"one")
        gate = inner.hold_at("read", "a")
        fault = inner.fail_at("read", "a")
        with ThreadPoolExecutor(4) as pool:
            futures = [pool.submit(ask, CachedStore(inner, directory, MB), "a", b"one") for _ in range(4)]
            assert gate.entered.wait(PATIENCE_S)
            gate.opened.set()
            failed = [future for future in futures if future.exception(PATIENCE_S) is not None]
        assert fault.hits == len(failed) == 1
        assert len(downloads(inner)) == 2


class TestRoom:
    def test_what_was_read_longest_ago_goes_first(self, inner: FaultyStore, directory: Path) -> None:
        store = CachedStore(inner, directory, 300)
        objects = {f"{number}": bytes([number]) * 100 for number in range(5)}
        for key, data in objects.items():
            inner.create(key, data)
        for key in "01203":
            ask(store, key, objects[key])
            time.sleep(_TICK_S)
        assert files(directory).keys() == {sha256(objects[key]) for key in "023"}
        ask(store, "4", objects["4"])
        assert files(directory).keys() == {sha256(objects[key]) for key in "034"}
        assert sum(files(directory).values()) == 300

    @pytest.mark.parametrize("size", [None, 0])
    def test_what_is_larger_than_the_limit_is_not_kept(
        self, inner: FaultyStore, directory: Path, size: int | None
    ) -> None:
        store = CachedStore(inner, directory, 300)
        inner.create("small", b"s")
        inner.create("large", b"x" * 301)
        ask(store, "small", b"s")
        for _ in range(2):
            assert ask(store, "large", b"x" * 301, size) == b"x" * 301
        assert len(downloads(inner)) == 3
        assert files(directory) == {sha256(b"s"): 1}
        # nor waited for, if that is known
        assert (directory / f".lock-{sha256(b'x' * 301)[:2]}").exists() == (size == 0)

    def test_the_number_of_files_is_bounded(
        self, inner: FaultyStore, directory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(limits, "CACHE_FILES", 3)
        store = CachedStore(inner, directory, MB)
        for number in range(6):
            inner.create(f"{number}", bytes([number]))
            ask(store, f"{number}", bytes([number]))
            time.sleep(_TICK_S)
        assert files(directory).keys() == {sha256(bytes([number])) for number in (3, 4, 5)}

    def test_only_its_own_files_are_touched(
        self, store: CachedStore, inner: FaultyStore, directory: Path
    ) -> None:
        directory.mkdir(mode=0o700)
        for name in ("notes.txt", ".x.tmp", "a" * 63, "A" * 64):
            (directory / name).write_bytes(b"x" * MB)
        left_behind = directory / f".{sha256(b'killed')}.tmp"
        left_behind.write_bytes(b"half")
        inner.create("a", b"one")
        ask(store, "a", b"one")
        assert files(directory).keys() == {"notes.txt", ".x.tmp", "a" * 63, "A" * 64, sha256(b"one")}


class TestTrouble:
    @pytest.fixture
    def warnings(self, caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
        return lambda: [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]

    def test_a_directory_that_cannot_be_is_no_error(
        self,
        inner: FaultyStore,
        tmp_path: Path,
        warnings: Callable[[], list[str]],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(cache, "_PAUSE_S", 0.0)
        (tmp_path / "file").touch()
        store = CachedStore(inner, tmp_path / "file" / "cache", MB)
        inner.create("a", b"one")
        for _ in range(3):
            assert ask(store, "a", b"one") == b"one"
        assert len(downloads(inner)) == 3
        assert len(warnings()) == 1
        assert "cannot be used (Not a directory)" in warnings()[0]

    @pytest.mark.parametrize("step", ["write", "replace"])
    def test_a_full_disk_is_no_error(
        self,
        store: CachedStore,
        inner: FaultyStore,
        directory: Path,
        warnings: Callable[[], list[str]],
        monkeypatch: pytest.MonkeyPatch,
        step: str,
    ) -> None:
        def fail(*arguments: object, **options: object) -> None:
            with contextlib.suppress(FileNotFoundError):
                (directory / f".{sha256(b'one')}.tmp").write_text("half")
            raise OSError(28, "No space left on device")

        inner.create("a", b"one")
        with monkeypatch.context() as patch:
            patch.setattr(Path, "write_bytes" if step == "write" else "replace", fail)
            assert ask(store, "a", b"one") == b"one"
            assert files(directory) == {}
            assert ask(store, "a", b"one") == b"one"  # does not even try
        assert warnings() == [
            f"The cache in {directory} cannot be used (No space left on device); reading without it."
        ]
        assert ask(store, "a", b"one") == b"one"
        assert len(downloads(inner)) == 3
        store._off_until = 0.0  # a minute later
        ask(store, "a", b"one")
        ask(store, "a", b"one")
        assert len(downloads(inner)) == 4
        assert len(warnings()) == 1

    def test_a_file_that_cannot_be_read_is_no_error(
        self, store: CachedStore, inner: FaultyStore, directory: Path, warnings: Callable[[], list[str]]
    ) -> None:
        inner.create("a", b"one")
        directory.mkdir(mode=0o700)
        (directory / sha256(b"one")).mkdir()
        assert ask(store, "a", b"one") == b"one"
        assert len(warnings()) == 1

    def test_a_directory_may_vanish(self, store: CachedStore, inner: FaultyStore, directory: Path) -> None:
        inner.create("a", b"one")
        ask(store, "a", b"one")
        for path in directory.iterdir():
            path.unlink()
        directory.rmdir()
        ask(store, "a", b"one")
        ask(store, "a", b"one")
        assert len(downloads(inner)) == 2


_CHILD = """
import hashlib, json, random, sys, time
from pathlib import Path
from deltasync.errors import CorruptDataError
from deltasync.stores import open_store
from deltasync.stores.cache import CachedStore
url, directory, limit = sys.argv[1:]

def ask(key, sha256):
    def check(data):
        if hashlib.sha256(data).hexdigest() != sha256:
            raise CorruptDataError("damaged")
    return store.read_known(key, sha256, 0, check, 1 << 30)

class Slow:
    url, hook = "slow", ""
    def __init__(self):
        self.inner, self.reads = open_store(url), []
    def read(self, key, most_bytes, known=None):
        self.reads.append(key)
        print("downloads", flush=True)
        time.sleep(self.sleep_s)
        exec(self.hook)
        return self.inner.read(key, most_bytes)

slow = Slow()
store = CachedStore(slow, directory, int(limit))
print("ready", flush=True)
exec(sys.stdin.readline())
print("reads", *slow.reads, flush=True)
"""


def said(child: subprocess.Popen[str]) -> str:
    """Its next line."""
    assert child.stdout is not None
    return child.stdout.readline().rstrip()


def tell(child: subprocess.Popen[str], line: str) -> None:
    """What to do: one line of Python."""
    assert child.stdin is not None
    child.stdin.write(line + "\n")
    child.stdin.flush()


def ended(child: subprocess.Popen[str]) -> list[str]:
    """Once it has ended, and warned of nothing: which keys it downloaded."""
    out, err = child.communicate(timeout=60)
    assert (child.returncode, err) == (0, "")
    return out.splitlines()[-1].split()[1:]


Start = Callable[..., list[subprocess.Popen[str]]]


class TestProcesses:
    @pytest.fixture
    def url(self, tmp_path: Path) -> str:
        return f"file://{tmp_path}/channel"

    @pytest.fixture
    def start(self, url: str, directory: Path) -> Iterator[Start]:
        with contextlib.ExitStack() as stack:

            def begin(count: int, limit: int = MB) -> list[subprocess.Popen[str]]:
                command = [sys.executable, "-c", _CHILD, url, str(directory), str(limit)]
                children = [
                    subprocess.Popen(command, text=True, stdin=PIPE, stdout=PIPE, stderr=PIPE)
                    for _ in range(count)
                ]
                for child in children:
                    stack.enter_context(child)
                    stack.callback(child.kill)
                for child in children:
                    assert said(child) == "ready"
                return children

            yield begin

    def test_four_processes_download_each_object_once(self, url: str, start: Start) -> None:
        keys = [f"{number}" for number in range(20)]
        for key in keys:
            open_store(url).create(key, key.encode())
        known = {key: sha256(key.encode()) for key in keys}
        children = start(4)
        for child in children:
            tell(child, f"slow.sleep_s = 0.01; [ask(*item) for item in {known}.items()]")
        assert sorted(key for child in children for key in ended(child)) == sorted(keys)

    def test_a_killed_downloader_leaves_the_lock(self, url: str, start: Start) -> None:
        open_store(url).create("a", b"one")
        killed, *waiting = start(3)
        tell(killed, f"slow.sleep_s = 1000; ask('a', {sha256(b'one')!r})")
        assert said(killed) == "downloads"
        for child in waiting:
            tell(child, f"slow.sleep_s = 0; ask('a', {sha256(b'one')!r})")
        time.sleep(0.2)
        os.kill(killed.pid, signal.SIGKILL)
        assert sorted(len(ended(child)) for child in waiting) == [0, 1]

    def test_a_stopped_downloader_does_not_hold_up_the_others_for_ever(
        self,
        url: str,
        store: CachedStore,
        inner: FaultyStore,
        start: Start,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        monkeypatch.setattr(cache, "_DOWNLOAD_S", 0.3)
        for target in (open_store(url), inner):
            target.create("a", b"one")
        (stopped,) = start(1)
        tell(stopped, f"slow.sleep_s = 1000; ask('a', {sha256(b'one')!r})")
        assert said(stopped) == "downloads"
        os.kill(stopped.pid, signal.SIGSTOP)
        assert ask(store, "a", b"one") == b"one"
        assert "a lock was held for 0.3 s" in caplog.text
        caplog.clear()
        assert ask(store, "a", b"one") == b"one"
        assert not caplog.text, "it waits for the lock once"
        os.kill(stopped.pid, signal.SIGCONT)

    def test_a_process_that_was_forked_meanwhile_does_not_keep_the_lock(
        self, url: str, directory: Path, start: Start
    ) -> None:
        open_store(url).create("a", b"one")
        first, second = start(2)
        fork = "import os; print(os.fork() or time.sleep(1000), flush=True)"
        tell(first, f"slow.sleep_s = 0; slow.hook = {fork!r}; ask('a', {sha256(b'one')!r})")
        assert said(first) == "downloads"
        forked = int(said(first))
        try:
            assert said(first) == "reads a"
            (directory / sha256(b"one")).unlink()
            tell(second, f"slow.sleep_s = 0; ask('a', {sha256(b'one')!r})")
            assert ended(second) == ["a"]
        finally:
            os.kill(forked, signal.SIGKILL)

    def test_a_process_killed_while_it_writes_leaves_no_trace(
        self, url: str, directory: Path, start: Start
    ) -> None:
        for key in "ab":
            open_store(url).create(key, key.encode())
        first, second = start(2)
        die = "import os; Path.write_bytes = lambda path, data: (path.touch(), os.kill(os.getpid(), 9)); "
        tell(first, f"{die} slow.sleep_s = 0; ask('a', {sha256(b'a')!r})")
        assert first.wait(30) == -signal.SIGKILL
        assert files(directory) == {f".{sha256(b'a')}.tmp": 0}
        tell(second, f"slow.sleep_s = 0; ask('b', {sha256(b'b')!r})")
        assert ended(second) == ["b"]
        assert files(directory) == {sha256(b"b"): 1}


class TestBehindCache:
    @pytest.fixture
    def remote(self, inner: FaultyStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FaultyStore:
        monkeypatch.setattr(FaultyStore, "url", "s3://bucket/run")
        monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
        inner.create("a", b"one")
        return inner

    def test_several_workers_share_a_directory_of_this_user(
        self, remote: FaultyStore, tmp_path: Path
    ) -> None:
        for _ in range(2):
            store = behind_cache(remote, None, MB, workers=2)
            assert isinstance(store, CachedStore)
            ask(store, "a", b"one")
        assert downloads(remote) == ["a"]
        (directory,) = tmp_path.iterdir()
        assert directory.stat().st_mode & 0o777 == 0o700

    def test_one_worker_finds_what_was_fetched_for_it_and_keeps_nothing(
        self, remote: FaultyStore, tmp_path: Path
    ) -> None:
        store, ahead = behind_cache(remote, None, MB, workers=1), behind_cache(remote, None, MB)
        assert isinstance(ahead, CachedStore)
        ask(store, "a", b"one")
        assert (downloads(remote), list(tmp_path.rglob("*"))) == (["a"], [])
        ahead.add(sha256(b"one"), b"one")
        assert ask(store, "a", b"one") == b"one"
        assert downloads(remote) == ["a"]

    def test_one_worker_keeps_what_it_reads_if_it_is_told_where(
        self, remote: FaultyStore, directory: Path
    ) -> None:
        store = behind_cache(remote, str(directory), MB, workers=1)
        assert isinstance(store, CachedStore)
        ask(store, "a", b"one")
        assert files(directory)

    def test_no_bytes_are_no_cache(self, remote: FaultyStore, directory: Path) -> None:
        assert behind_cache(remote, None, 0, workers=2) is remote
        assert behind_cache(remote, str(directory), 0, workers=2) is remote

    def test_whose_the_directory_is_is_looked_at_at_each_use(
        self,
        remote: FaultyStore,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        store = behind_cache(remote, None, MB, workers=2)
        assert ask(store, "a", b"one") == b"one"
        (directory,) = tmp_path.iterdir()
        for change, said in (
            (lambda: directory.chmod(0o770), "others may use it"),
            (lambda: directory.chmod(0o704), "others may use it"),
        ):
            change()
            before = len(downloads(remote))
            assert isinstance(store, CachedStore)
            store._off_until, store._warned = 0.0, False
            assert ask(store, "a", b"one") == b"one"
            assert len(downloads(remote)) == before + 1
            assert said in caplog.text
            caplog.clear()
            directory.chmod(0o700)
        owner = os.getuid() + 1
        monkeypatch.setattr(os, "getuid", lambda: owner)
        store._off_until = 0.0
        assert ask(store, "a", b"one") == b"one"
        assert len(downloads(remote)) == 4

    def test_a_link_in_the_place_of_the_directory_is_not_followed(
        self, remote: FaultyStore, tmp_path: Path
    ) -> None:
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir(0o700)
        (tmp_path / f"deltasync-{os.getuid()}").symlink_to(elsewhere)
        assert ask(behind_cache(remote, None, MB, workers=2), "a", b"one") == b"one"
        assert not list(elsewhere.iterdir())

    @pytest.mark.parametrize("url", ["file:///data/run", "memory://run"])
    def test_what_is_local_is_not_cached(self, url: str, tmp_path: Path) -> None:
        store = open_store(url)
        assert behind_cache(store, str(tmp_path), MB, workers=8) is store

    def test_settings(self) -> None:
        settings = ReplicaSettings.from_env(
            {"DELTASYNC_CACHE_DIR": "/data/cache", "DELTASYNC_CACHE_BYTES": "0"}
        )
        assert (settings.cache_dir, settings.cache_bytes) == ("/data/cache", 0)
        for environ in ({"DELTASYNC_CACHE_DIR": "~/cache"}, {"DELTASYNC_CACHE_BYTES": "-1"}):
            with pytest.raises(ConfigError):
                ReplicaSettings.from_env(environ)
