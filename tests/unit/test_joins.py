"""What the first commands that people try say of a channel that has lost something, and what its replicas
say.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from deltasync import Publisher, Replica, open_store
from deltasync.channel import keys
from deltasync.channel.reading import ChannelReader
from deltasync.config import ReplicaSettings
from deltasync.errors import MissingVersionError, NotPublishedError
from deltasync.following.follow import Follow
from deltasync.following.replica import MemoryTarget
from deltasync.ops import check_join
from deltasync.ops.cli import main
from deltasync.ops.compaction import write_compaction
from deltasync.serve import heartbeat
from deltasync.serve.heartbeat import Heartbeat
from deltasync.stores import Store
from deltasync.stores.local import LocalStore

COMMANDS = [
    ["watch", "--once"],
    ["watch", "--once", "--json"],
    ["log"],
    ["log", "--json"],
]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A channel of four versions, with full weights in the first only."""
    store = open_store(f"file://{tmp_path}/channel")
    weights = torch.zeros(64)
    with Publisher(store) as publisher:
        for number in range(4):
            weights[number] = 1
            publisher.publish({"w": weights}.items()).wait(timeout_s=60)
    return store


def key_of(store: Store, version: int) -> str:
    return next(info.key for slot, info in ChannelReader(store).slots() if slot.version == version)


def said(store: Store, command: list[str]) -> tuple[int, str]:
    done = CliRunner().invoke(main, [command[0], store.url, *command[1:]])
    return done.exit_code, done.output


def delete_all(store: Store, *, but: str = " ") -> None:
    for info in list(store.list("")):
        if not info.key.startswith(but):
            store.delete(info.key)


def test_a_log_of_the_newest_versions_reads_no_older_ones(store: Store) -> None:
    store.delete(key_of(store, 1))
    assert said(store, ["log", "--last", "1"])[0] == 0
    assert said(store, ["log"])[0] == MissingVersionError.exit_code


def test_a_log_of_the_newest_versions_reads_no_shortcuts_to_older_ones(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version in (2, 4):
        write_compaction(ChannelReader(store), 1, version)
    with Publisher(store, resume=True) as publisher:
        for number in range(4):
            publisher.publish({"w": torch.full((64,), float(number))}.items()).wait(timeout_s=60)
    newest = write_compaction(ChannelReader(store), 4, 8)
    assert len(ChannelReader(store).compactions()) == 3

    read = set[str]()
    for verb in ("read", "read_range"):
        original = getattr(LocalStore, verb)

        def noting(of: LocalStore, key: str, *args: object, call: Any = original, **kwargs: object) -> Any:
            read.add(key)
            return call(of, key, *args, **kwargs)

        monkeypatch.setattr(LocalStore, verb, noting)
    code, text = said(store, ["log", "--last", "2", "--json"])
    assert code == 0
    assert [json.loads(line)["version"] for line in text.splitlines()] == [7, 8, 8]
    assert {key for key in read if key.startswith(keys.COMPACTIONS)} == {newest.key}
    assert key_of(store, 4) not in read


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
class TestCommands:
    def test_a_whole_channel_is_no_error(self, store: Store, command: list[str]) -> None:
        assert said(store, command)[0] == 0

    @pytest.mark.parametrize("version", [1, 2, 3, 4])
    def test_a_missing_record_is_named(self, store: Store, command: list[str], version: int) -> None:
        key = key_of(store, version)
        store.delete(key)
        code, text = said(store, command)
        assert code == MissingVersionError.exit_code
        assert key in text.splitlines()[-1]
        assert "restore it from a copy" in text.splitlines()[-1]

    def test_a_missing_file_is_named(self, store: Store, command: list[str]) -> None:
        key = next(iter(store.list(keys.ANCHORS))).key
        store.delete(key)
        code, text = said(store, command)
        assert code == MissingVersionError.exit_code
        assert key in text.splitlines()[-1]

    def test_without_records_and_with_head_the_record_is_named(
        self, store: Store, command: list[str]
    ) -> None:
        key = key_of(store, 4)
        for slot, _ in ChannelReader(store).slots():
            store.delete(slot.key)
        code, text = said(store, command)
        assert code == MissingVersionError.exit_code
        assert key in text.splitlines()[-1]

    @pytest.mark.parametrize("left", [keys.HEAD, keys.VERSIONS, keys.REPLICAS])
    def test_a_deleted_channel_of_which_something_is_left(
        self, store: Store, command: list[str], left: str
    ) -> None:
        beat(store)
        delete_all(store, but=left)
        code, text = said(store, command)
        assert code == MissingVersionError.exit_code
        assert f"({left}" in text
        assert keys.CHANNEL in text


def beat(store: Store, version: int | None = 4) -> None:
    run_id = ChannelReader(store).channel().run_id
    heartbeat.write(
        store, Heartbeat(replica_id="r", run_id=run_id, version=version, state="serving", error=None)
    )


@pytest.mark.parametrize("left", [keys.HEAD, keys.VERSIONS, keys.REPLICAS])
def test_the_doctor_sees_a_deleted_channel(store: Store, left: str) -> None:
    beat(store)
    delete_all(store, but=left)
    code, text = said(store, ["doctor", "--json"])
    found = {row["check"]: row for row in json.loads(text)}["channel"]
    assert code == 1
    assert found["state"] == "failure"
    assert f"({left}" in found["found"]


def test_a_heartbeat_names_a_version_though_nothing_else_does(store: Store) -> None:
    beat(store)
    for info in [*store.list(keys.VERSIONS), *store.list(keys.HEAD)]:
        store.delete(info.key)
    with pytest.raises(MissingVersionError, match="Replica r names version 4"):
        check_join(ChannelReader(store))


def test_before_the_first_version_nothing_is_missing(store: Store) -> None:
    beat(store, version=None)
    delete_all(store, but="c")  # all but channel.json
    assert check_join(ChannelReader(store)) is None


def test_a_replica_says_that_its_channel_is_gone(store: Store) -> None:
    reader = ChannelReader(store)
    follow = Follow(reader, MemoryTarget(reader), ReplicaSettings())
    assert follow.catch_up() == 4
    delete_all(store)
    follow.poke()
    with pytest.raises(NotPublishedError, match=r"The channel is gone: .* lacks its channel\.json"):
        follow.catch_up()
    status = follow.status()
    assert (status.version, status.state) == (4, "failed")
    assert "The channel is gone" in (status.error or "")


def test_a_replica_names_the_next_record_where_it_is_missing(store: Store) -> None:
    replica = Replica(store)
    replica.sync(2)
    key = key_of(store, 3)
    store.delete(key)
    with pytest.raises(MissingVersionError, match=key):
        replica.sync()
    assert replica.version == 2
