from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import tempfile
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from deltasync import Publisher, Replica, open_store, ops
from deltasync.channel.reading import ChannelReader
from deltasync.errors import (
    ConfigError,
    CorruptDataError,
    ObjectExistsError,
    ObjectMissingError,
    StoreError,
    TransientStoreError,
)
from deltasync.ops.doctor import examine
from deltasync.stores import Store
from deltasync.stores.base import check_key
from deltasync.stores.local import LocalStore
from deltasync.stores.object import PortableStore
from deltasync.stores.retries import RetryStore, decides
from tests.contract.store_contract import BAD_KEYS, DecidingContract, DecidingSharedContract, StoreContract
from tests.writers import QUICK, Journal, WriterStore


class TestMemoryStore(StoreContract, DecidingContract):
    @pytest.fixture
    def store(self, memory_url: str) -> Store:
        return open_store(memory_url)

    def test_one_name_is_one_store(self, memory_url: str) -> None:
        open_store(memory_url).create("a", b"1")
        assert open_store(memory_url).read("a", 1 << 30) == b"1"
        assert list(open_store(f"{memory_url}/other").list("")) == []


class TestLeasedStore(DecidingContract):
    """Memory that does not decide, within claims."""

    @pytest.fixture
    def store(self, memory_url: str) -> Store:
        return QUICK(WriterStore(open_store(memory_url), Journal(), decides=False))


class TestPortableFileStore(StoreContract, DecidingSharedContract):
    """`file://` on Windows."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return PortableStore(f"{tmp_path}/not/there/yet")

    @pytest.fixture
    def elsewhere(self, store: Store) -> tuple[str, Mapping[str, str]]:
        return store.url, {}

    def fill(self, store: Store, keys: Sequence[str]) -> None:
        for key in keys:
            store.put(key, b"x")

    # what lies below a file is missing to Windows alone
    @pytest.mark.parametrize("key", ["missing", "a/missing", "a"])
    def test_reading_what_is_not_there(self, store: Store, key: str) -> None:
        super().test_reading_what_is_not_there(store, key)


class TestFileStore(StoreContract, DecidingSharedContract):
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
        assert {path.name for path in (tmp_path / "folder").iterdir()} == {
            key.removeprefix("folder/") for key in keys
        }

    def test_what_a_killed_writer_left_behind_is_not_listed(self, tmp_path: Path) -> None:
        store = open_store(f"file://{tmp_path}")
        store.create("folder/a", b"1")
        (tmp_path / "folder" / ".b.0123.tmp").write_bytes(b"half")
        assert [info.key for info in store.list("")] == ["folder/a"]

    @pytest.mark.parametrize("step", ["fsync", "link"])
    def test_a_create_that_fails_leaves_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
    ) -> None:
        store = open_store(f"file://{tmp_path}")
        store.put("folder/before", b"1")

        def fail(*arguments: object, **options: object) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, step, fail)
            with pytest.raises(TransientStoreError, match="No space left"):
                store.create("folder/a", b"1")
        assert [path.name for path in (tmp_path / "folder").iterdir()] == ["before"]

    @pytest.mark.parametrize(
        ("code", "kind", "words"),
        [
            (errno.ENOSYS, StoreError, "cannot rename files. Use a directory on another one"),
            (errno.EOPNOTSUPP, StoreError, "cannot rename files"),
            (errno.EACCES, TransientStoreError, "a reader has it open"),
            (errno.EBUSY, TransientStoreError, "a reader has it open"),
        ],
    )
    def test_a_put_that_cannot_rename_says_why(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, kind: type[StoreError], words: str
    ) -> None:
        store = open_store(f"file://{tmp_path}")
        store.put("folder/a", b"1")
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", Mock(side_effect=OSError(code, os.strerror(code))))
            with pytest.raises(StoreError, match=words) as caught:
                store.put("folder/a", b"2")
        assert type(caught.value) is kind
        assert store.read("folder/a", 9) == b"1" and [
            path.name for path in (tmp_path / "folder").iterdir()
        ] == ["a"]

    def test_a_put_waits_for_a_reader_that_has_the_file_open(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        replace, refusals = os.replace, [PermissionError(errno.EACCES, "Permission denied")] * 2

        def refuse(*arguments: Any, **options: Any) -> None:
            if refusals:
                raise refusals.pop()
            replace(*arguments, **options)

        monkeypatch.setattr(os, "replace", refuse)
        RetryStore(open_store(f"file://{tmp_path}"), 2, 0.001).put("a", b"1")
        assert (tmp_path / "a").read_bytes() == b"1"

    def test_a_file_that_is_open_elsewhere_is_deleted_later(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = open_store(f"file://{tmp_path}")
        store.put("folder/a", b"1")
        with monkeypatch.context() as patch:
            patch.setattr(os, "unlink", Mock(side_effect=PermissionError(errno.EACCES, "Permission denied")))
            with pytest.raises(TransientStoreError, match="a reader has it open"):
                store.delete("folder/a")
        store.delete("folder/a")
        assert [*store.list("")] == []

    @pytest.fixture
    def readable(self) -> Iterator[Path]:
        """A folder that a user without rights can reach, and such a user for the time of the test."""
        if os.geteuid():
            with tempfile.TemporaryDirectory() as folder:
                yield Path(folder)
            return
        with tempfile.TemporaryDirectory() as folder:
            os.chmod(folder, 0o777)
            os.seteuid(65534)
            try:
                yield Path(folder)
            finally:
                os.seteuid(0)

    def test_a_folder_that_cannot_be_read_is_an_error_and_not_empty(self, readable: Path) -> None:
        store = open_store(f"file://{readable}/run")
        for key in ("anchors/a/1", "anchors/b/1", "versions/0/1"):
            store.put(key, b"1")
        closed = readable / "run" / "anchors" / "a"
        closed.chmod(0)
        for prefix in ("", "anchors/", "anchors/a", "anchors/a/"):
            with pytest.raises(StoreError, match="anchors/a cannot be read: Permission denied"):
                list(store.list(prefix))
        assert [info.key for info in store.list("versions/")] == ["versions/0/1"]
        assert [info.key for info in store.list("anchors/b")] == ["anchors/b/1"]
        closed.chmod(0o755)
        assert [info.key for info in store.list("anchors/")] == ["anchors/a/1", "anchors/b/1"]

    @pytest.mark.parametrize("folder", ["versions", "versions/0000000", "anchors", "epochs"])
    def test_a_folder_that_cannot_be_read_starts_no_run_anew(self, readable: Path, folder: str) -> None:
        url, weights = f"file://{readable}/run", {"weight": torch.arange(8).bfloat16()}
        for resume in (False, True):
            with Publisher(url, resume=resume) as publisher:
                publisher.publish(weights.items()).wait(60)
        (readable / "run" / folder).chmod(0)
        with pytest.raises(StoreError, match="Permission denied"), Publisher(url, resume=True) as publisher:
            publisher.publish({"weight": weights["weight"] + 1}.items()).wait(60)
        if folder != "epochs":
            with pytest.raises(StoreError, match="Permission denied"):
                Replica(url).sync()
        (readable / "run" / folder).chmod(0o755)
        replica = Replica(url)
        assert replica.sync() == 2 and torch.equal(replica.state_dict()["weight"], weights["weight"])

    @pytest.mark.parametrize("grace_s", [0.0, 3600.0])
    def test_gc_deletes_the_files_of_a_dead_writer_and_tools_see_them(
        self, tmp_path: Path, grace_s: float
    ) -> None:
        url = f"file://{tmp_path}/run"
        with Publisher(url) as publisher:
            publisher.publish({"weight": torch.ones(8)}.items()).wait(60)
        names = [f"anchors/.model.safetensors.{uuid.uuid4().hex}.tmp", f".head.json.{uuid.uuid4().hex}.tmp"]
        for name, age_s in zip(names, (7200, 0), strict=True):
            path = tmp_path / "run" / name
            path.write_bytes(b"half")
            os.utime(path, (path.stat().st_atime, path.stat().st_mtime - age_s))
        reader = ChannelReader(open_store(url))
        assert ops.check(reader).garbage_objects == 2
        unfinished = [finding for finding in examine(reader, parameters=1e9) if finding.check == "unfinished"]
        assert [(finding.state, finding.found[:17]) for finding in unfinished] == [
            ("warning", "2 temporary files")
        ]
        found = ops.gc(reader, grace_s=grace_s)
        assert {info.key for info in found.objects} == {*(names[:1] if grace_s else names)}
        assert [path.name for path in (tmp_path / "run").rglob("*.tmp")] == (names[1:] if grace_s else [])
        assert ops.check(reader).garbage_objects == (1 if grace_s else 0)

    def test_the_files_of_a_dead_writer_are_found_and_deleted(self, tmp_path: Path) -> None:
        store = LocalStore(str(tmp_path))
        store.put("folder/a", b"1")
        name = f".b.{uuid.uuid4().hex}.tmp"
        (tmp_path / "folder" / name).write_bytes(b"half")
        (tmp_path / "folder" / ".of another.tmp").write_bytes(b"kept")
        found = [*store.unfinished()]
        assert [(info.key, info.bytes) for info in found] == [(f"folder/{name}", 4)]
        store.delete_unfinished(found[0])
        assert {path.name for path in (tmp_path / "folder").iterdir()} == {"a", ".of another.tmp"}

    def test_a_refused_create_leaves_no_temporary_file(self, tmp_path: Path) -> None:
        store = open_store(f"file://{tmp_path}")
        store.create("a", b"1")
        with pytest.raises(ObjectExistsError):
            store.create("a", b"2")
        assert [path.name for path in tmp_path.iterdir()] == ["a"]

    def test_a_path_with_spaces_and_signs_is_that_path(self, tmp_path: Path) -> None:
        open_store(f"file://{tmp_path}/a%20b%23c").create("x", b"1")
        assert (tmp_path / "a b#c" / "x").read_bytes() == b"1"

    @pytest.mark.parametrize("key", ["link", "folder/link", "linked/secret"])
    def test_symbolic_links_are_not_followed(self, tmp_path: Path, key: str) -> None:
        outside, root = tmp_path / "outside", tmp_path / "root"
        outside.mkdir()
        (outside / "secret").write_bytes(b"secret")
        (root / "folder").mkdir(parents=True)
        (root / "link").symlink_to(outside / "secret")
        (root / "folder" / "link").symlink_to(outside / "secret")
        (root / "linked").symlink_to(outside)
        store = open_store(f"file://{root}")
        for read in (lambda: store.read(key, 1 << 30), lambda: store.read_range(key, 0, 1)):
            with pytest.raises(StoreError, match="symbolic link, which is not followed"):
                read()
        assert list(store.list("")) == list(store.list("folder/")) == []
        with pytest.raises(StoreError, match="symbolic link, which is not followed"):
            list(store.list("linked/"))
        with pytest.raises(StoreError) as refused:
            store.create("linked/new", b"x")
        assert not isinstance(refused.value, TransientStoreError)
        store.put("link", b"mine")  # the link goes, what it led to stays
        store.delete("linked/secret")
        assert (outside / "secret").read_bytes() == b"secret"
        assert [path.name for path in outside.iterdir()] == ["secret"]

    def test_the_root_itself_may_be_a_link(self, tmp_path: Path) -> None:
        (tmp_path / "disk").mkdir()
        (tmp_path / "run").symlink_to(tmp_path / "disk")
        store = open_store(f"file://{tmp_path}/run")
        store.create("folder/a", b"1")
        assert store.read("folder/a", 1 << 30) == b"1"
        assert [info.key for info in store.list("")] == ["folder/a"]

    @pytest.mark.parametrize("kind", ["fifo", "socket", "device"])
    def test_what_is_no_ordinary_file_is_not_read(
        self, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = open_store(f"file://{tmp_path}")
        path = tmp_path / "head.json"
        with contextlib.ExitStack() as stack:
            if kind == "fifo":
                os.mkfifo(path)
            elif kind == "socket":
                monkeypatch.chdir(tmp_path)  # names of sockets are short
                stack.enter_context(socket.socket(socket.AF_UNIX)).bind("head.json")
            else:
                with contextlib.suppress(PermissionError):
                    os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 5))  # /dev/zero
                if not path.exists():
                    pytest.skip("may not make devices")
            with pytest.raises(StoreError) as refused:
                store.read("head.json", 1 << 20)
            assert not isinstance(refused.value, ObjectMissingError)
            assert list(store.list("")) == []

    def test_a_file_that_grows_while_it_is_read_is_bounded(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = open_store(f"file://{tmp_path}")
        (tmp_path / "a").write_bytes(b"x" * 1_000_000)
        # 0 bytes so far
        monkeypatch.setattr(os, "fstat", lambda _: os.stat_result((stat.S_IFREG | 0o644, *[0] * 9)))
        with pytest.raises(CorruptDataError, match="may have 0 at most"):
            store.read("a", 0)
        assert len(store.read("a", 10)) == 1

    def test_new_folders_are_synced_up_to_the_root(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        synced: list[str] = []

        def fsync(descriptor: int) -> None:
            synced.append(os.readlink(f"/proc/self/fd/{descriptor}").removeprefix(str(tmp_path)))

        monkeypatch.setattr(os, "fsync", fsync)
        store = open_store(f"file://{tmp_path}/new/run")
        store.create("a/b/c", b"1")
        expected = [
            *("/new", ""),  # entries of the root and the one above it
            *("/new/run", "/new/run/a"),
            "/new/run/a/b",  # the object's own
        ]
        found = [path for path in synced if not path.endswith(".tmp")]
        assert [path for path in found if path in expected] == expected
        assert os.path.ismount(found[found.index("/new/run") - 1])
        synced.clear()
        # another process may have died before it synced
        open_store(f"file://{tmp_path}/new/run").create("a/b/c2", b"1")
        assert [path for path in synced if not path.endswith(".tmp")] == found
        synced.clear()
        store.create("a/b/d", b"1")
        assert [path for path in synced if not path.endswith(".tmp")] == ["/new/run/a/b"]

    @pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EROFS, errno.EDQUOT])
    @pytest.mark.parametrize("verb", ["create", "put"])
    def test_what_no_other_try_makes_better_is_not_transient(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, verb: str
    ) -> None:
        store = open_store(f"file://{tmp_path}")

        def fail(*arguments: object, **options: object) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "fsync", fail)
        with pytest.raises(StoreError, match=os.strerror(number)) as refused:
            getattr(store, verb)("a", b"1")
        assert not isinstance(refused.value, TransientStoreError)

    @pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOTSUP, errno.EMLINK, errno.EPERM])
    def test_a_file_system_without_hard_links_is_leased(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
    ) -> None:
        def fail(*arguments: object, **options: object) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "link", fail)
        store = open_store(f"file://{tmp_path}")
        with pytest.raises(StoreError, match="no hard links") as refused:
            store.create("a", b"1")
        assert not isinstance(refused.value, TransientStoreError)
        assert not decides(store, "probe/a")
        found = {finding.check: finding for finding in examine(ChannelReader(store), parameters=1e9)}
        assert found["create"].state == "warning" and "no hard links here" in found["create"].found

    @pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOSYS])
    def test_a_file_system_that_cannot_sync_folders_holds_objects(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
    ) -> None:
        sync = os.fsync

        def fail(descriptor: int) -> None:
            if stat.S_ISDIR(os.fstat(descriptor).st_mode):
                raise OSError(number, os.strerror(number))
            sync(descriptor)

        monkeypatch.setattr(os, "fsync", fail)
        store = open_store(f"file://{tmp_path}/new")
        store.create("a/b", b"1")
        store.put("a/c", b"2")
        assert [info.key for info in store.list("")] == ["a/b", "a/c"]

    def test_names_of_other_programs_are_not_listed(self, tmp_path: Path) -> None:
        store = open_store(f"file://{tmp_path}")
        store.create("replicas/a.json", b"1")
        for name in ("a b.json", ".hidden", "\udcff.json", "x~"):
            (tmp_path / "replicas" / name).write_bytes(b"x")
        (tmp_path / "replicas/.folder").mkdir()
        (tmp_path / "replicas/.folder/b").write_bytes(b"x")
        assert [info.key for info in store.list("")] == ["replicas/a.json"]

    def test_deleting_what_is_a_folder_is_a_store_error(self, tmp_path: Path) -> None:
        store = open_store(f"file://{tmp_path}")
        store.create("a/b", b"1")
        with pytest.raises(StoreError):
            store.delete("a")
        assert store.read("a/b", 1 << 30) == b"1"


@pytest.mark.parametrize("key", ["a", "a/b", "a.b/c-d_e=f+g@h", "replicas/host-1.json", "a" * 900])
def test_plain_keys_pass(key: str) -> None:
    assert check_key(key) == key


@pytest.mark.parametrize("key", [*BAD_KEYS, "./a", "a/.", "a?b", ".hidden", "a/.hidden", "..."])
def test_other_keys_are_refused(key: str) -> None:
    with pytest.raises(ConfigError):
        check_key(key)
