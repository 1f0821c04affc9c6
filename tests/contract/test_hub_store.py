from __future__ import annotations

import ast
import dataclasses
import importlib
import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from unittest import mock

import huggingface_hub
import pytest
from packaging.requirements import Requirement

from deltasync.clouds import hub_api, xet
from deltasync.clouds.hub import HubStore
from deltasync.clouds.xet import CONFIG
from deltasync.errors import ConfigError, ObjectMissingError, StoreError, TransientStoreError
from deltasync.opening import checkpoint
from deltasync.stores import ObjectInfo, Store
from deltasync.stores.retries import retried
from tests.contract.store_contract import RefusingContract, SharedContract, StoreContract
from tests.http_faults import FaultProxy
from tests.hub.fixtures import HubServer
from tests.hub.hub import EXPIRED, READ, WRITE

FOREVER = 1000
SMALL, LARGE = b"small", os.urandom(300_000)


class TestHubStore(StoreContract, SharedContract, RefusingContract):
    hub: HubServer

    @pytest.fixture
    def store(self, hub: HubServer, hub_channel: HubStore) -> Store:
        self.hub = hub
        return hub_channel

    @pytest.fixture
    def elsewhere(self, hub: HubServer, hub_url: str) -> tuple[str, Mapping[str, str]]:
        return hub_url, hub.env

    @pytest.fixture
    def refused(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> Store:
        store.put("a", b"1")
        monkeypatch.setenv("HF_TOKEN", "hf_wrong")
        return HubStore(store.url)

    def fill(self, store: Store, keys: Sequence[str]) -> None:
        assert isinstance(store, HubStore)
        first, *others = keys
        store.put(first, b"x")
        self.hub.fill(store, others, like=first)

    def test_many_threads_may_create_the_bucket(self, store: Store) -> None:
        super().fill(store, [str(number) for number in range(16)])
        assert len(list(store.list(""))) == 16


@pytest.fixture
def store(hub: HubServer, hub_channel: HubStore, monkeypatch: pytest.MonkeyPatch) -> HubStore:
    """A store with a small and a large object, its tokens fetched, the counts at zero, and no patience
    between attempts.
    """
    monkeypatch.setattr("deltasync.clouds.hub._RETRY_DELAY_S", 0.02)
    for config in CONFIG.values():
        monkeypatch.setitem(config, "client.retry_base_delay", "20ms")
    hub_channel.put("small", SMALL)
    hub_channel.put("large", LARGE)
    assert hub_channel.read("large", 1 << 30) == LARGE
    hub.reset()
    return hub_channel


def _bucket(store: HubStore) -> str:
    return "/".join(store.url.split("/")[3:5])


class TestUrl:
    @pytest.mark.parametrize(
        "url", ["hf://buckets/user/b", "hf://buckets/user/b.1_-x/run", "hf://buckets/u/b/a/b/c"]
    )
    def test_a_store_tells_the_url_it_was_opened_with(self, url: str) -> None:
        assert HubStore(url).url == HubStore(url + "/").url == url

    @pytest.mark.parametrize(
        "url",
        [
            "hf://",
            "hf://buckets",
            "hf://buckets/user",
            "hf://buckets//b/c",
            "hf://buckets/user//run",
            "hf://buckets/user/b/../c",
            "hf://buckets/user/b/a b",
            "hf://buckets/user/b/run?x=1",
            "hf://buckets/user/b/läuft",
            "hf://datasets/user/b",
            "hf://user/b",
        ],
    )
    def test_what_names_no_bucket_is_refused(self, url: str) -> None:
        with pytest.raises(ConfigError):
            HubStore(url)

    def test_prefixes_of_one_bucket_are_stores_of_their_own(self, hub_url: str) -> None:
        inner, outer, other = (HubStore(hub_url + suffix) for suffix in ("/in", "", "b"))
        inner.put("x", b"1")
        assert [info.key for info in outer.list("")] == ["in/x"]
        assert outer.read("in/x", 1 << 30) == b"1"
        assert list(other.list("")) == []


class TestBucket:
    def test_the_first_write_creates_it_private(self, hub: HubServer, hub_channel: HubStore) -> None:
        counts = hub.counted(lambda: hub_channel.put("a", b"1"))
        assert counts["create_bucket"] == 1
        assert huggingface_hub.HfApi(endpoint=hub.endpoint).bucket_info(_bucket(hub_channel)).private is True
        assert "create_bucket" not in hub.counted(lambda: hub_channel.put("b", b"1"))

    def test_reading_finds_nothing_where_there_is_none(self, hub_channel: HubStore) -> None:
        with pytest.raises(ObjectMissingError, match=f"^{hub_channel.url}/a does not exist[.]$"):
            hub_channel.read("a", 1 << 30)
        assert list(hub_channel.list("")) == []
        hub_channel.delete("a")

    def test_a_token_that_may_not_create_it_says_so(
        self, hub_channel: HubStore, hub: HubServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hub.arm("create_bucket", status=403, message="Forbidden in this namespace")
        with pytest.raises(
            StoreError, match=r"could not be created: .*Forbidden in this namespace"
        ) as caught:
            hub_channel.put("a", b"1")
        assert not isinstance(caught.value, TransientStoreError)

    def test_the_official_client_reads_and_writes_the_same_objects(
        self, store: HubStore, hub: HubServer, tmp_path: Path
    ) -> None:
        api, bucket = huggingface_hub.HfApi(endpoint=hub.endpoint), _bucket(store)
        api.batch_bucket_files(bucket, add=[(b"theirs", "run/a/theirs")])
        assert store.read("theirs", 1 << 30) == b"theirs"
        found = {
            file.path: file.size
            for file in api.list_bucket_tree(bucket, "run/a/", recursive=True)
            if isinstance(file, huggingface_hub.BucketFile)
        }
        assert found == {f"run/a/{info.key}": info.bytes for info in store.list("")}
        api.download_bucket_files(bucket, [("run/a/large", tmp_path / "large")], raise_on_missing_files=True)
        assert (tmp_path / "large").read_bytes() == LARGE


class TestRequests:
    """What each call costs; a free token has 1,000 requests to the Hub's interface per five minutes."""

    def test_of_every_verb(self, store: HubStore, hub: HubServer) -> None:
        upload = {"xorb": 1, "shard": 1}
        download = {"reconstruction": 1, "data": 1}
        for data in (b"new", b"newer"):
            assert hub.counted(lambda data=data: store.put("a", data)) == {**upload, "batch": 1}  # type: ignore[misc]
        (info,) = store.list("a")
        assert hub.counted(lambda: store.read("a", 5, info)) == download
        for _ in range(2):
            assert hub.counted(lambda: store.read("a", 1 << 30)) == {"resolve": 1, **download}
        assert hub.counted(lambda: store.read("a", 1 << 30)) == {"resolve": 1}
        assert hub.counted(lambda: store.read("large", 1 << 30)) == {"resolve": 1, **download}
        assert hub.counted(lambda: store.read_range("large", 5, 10)) == {"resolve": 1, **download}
        assert hub.counted(lambda: list(store.list(""))) == {"tree": 1}
        assert hub.counted(lambda: store.delete("a", "small")) == {"batch": 1}
        assert hub.counted(lambda: store.delete()) == {}
        store.put("empty", b"")
        assert hub.counted(lambda: store.read("empty", 1 << 30)) == {"resolve": 1}

    def test_a_range_beyond_the_end_is_not_tried_again(self, store: HubStore, hub: HubServer) -> None:
        hub.reset()
        with pytest.raises(StoreError, match="ends before byte 300001") as caught:
            store.read_range("large", 0, 300_001)
        assert not isinstance(caught.value, TransientStoreError)
        assert hub.requests() == {"resolve": 1}

    def test_an_unchanged_small_object_costs_one_and_a_changed_one_is_seen_at_once(
        self, store: HubStore, hub: HubServer
    ) -> None:
        poller = HubStore(store.url)
        for _ in range(2):
            assert poller.read("small", 1 << 30) == SMALL
        assert hub.counted(lambda: [poller.read("small", 1 << 30) for _ in range(100)]) == {"resolve": 100}
        store.put("small", b"other")
        assert poller.read("small", 1 << 30) == b"other"
        store.put("small", SMALL)
        assert poller.read("small", 1 << 30) == SMALL
        store.delete("small")
        with pytest.raises(ObjectMissingError):
            poller.read("small", 1 << 30)

    def test_many_small_objects_do_not_push_out_the_one_that_is_polled(
        self, store: HubStore, hub: HubServer
    ) -> None:
        keys = [f"many/{number}" for number in range(200)]
        hub.fill(store, keys, like="small")
        for key in keys:
            assert store.read(key, 1 << 30) == SMALL
        store.put("head.json", b"1")
        for _ in range(2):
            assert store.read("head.json", 1 << 30) == b"1"
        for key in keys[:50]:
            store.read(key, 1 << 30)
        assert hub.counted(lambda: store.read("head.json", 1 << 30)) == {"resolve": 1}
        assert len(store._small) <= 64

    def test_thousands_of_objects_are_listed_and_deleted_in_a_few(
        self, store: HubStore, hub: HubServer
    ) -> None:
        keys = [f"many/{number:05d}" for number in range(2500)]
        hub.fill(store, keys, like="small")
        assert list(store.list("many/")) == [ObjectInfo(key, len(SMALL)) for key in keys]
        assert hub.requests() == {"tree": 3}
        hub.reset()
        store.delete(*keys)
        assert hub.requests() == {"batch": 3}
        assert [info.key for info in store.list("")] == ["large", "small"]

    @pytest.mark.parametrize("is_deep", [False, True])
    def test_folders_are_listed_without_their_objects(
        self, store: HubStore, hub: HubServer, monkeypatch: pytest.MonkeyPatch, is_deep: bool
    ) -> None:
        """Also by a Hub that lists everything whatever it is asked for, in more requests."""
        hub.fill(store, [f"many/{number % 3}/{number:05d}" for number in range(2500)], like="small")
        hub.fill(store, ["many/file", "many-others/1/x"], like="small")
        page = store._api.page
        if is_deep:
            monkeypatch.setattr(
                store._api, "page", lambda at, query: page(at, query.replace("false", "true"))
            )
        found = store.folders("many/")
        assert found is not None and sorted(found) == ["many/0/", "many/1/", "many/2/"]
        assert hub.requests() == {"tree": 3 if is_deep else 1}
        client = huggingface_hub.HfApi(endpoint=hub.endpoint)
        shown = client.list_bucket_tree(_bucket(store), "run/a/many/", recursive=False)
        assert {entry.path for entry in shown} == {f"run/a/many/{name}" for name in ("0", "1", "2", "file")}

    def test_a_listing_without_folders_is_no_proof_that_there_are_none(self, store: HubStore) -> None:
        assert store.folders("none/") is None


class TestToken:
    @pytest.mark.parametrize(
        ("token", "told"),
        [
            (EXPIRED, "has expired. Set HF_TOKEN or log in"),
            ("hf_wrong", "does not accept the token"),
            (None, "needs a token. Set HF_TOKEN or log in"),
        ],
    )
    def test_one_that_is_refused_is_told_and_never_shown(
        self, store: HubStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, token: str | None, told: str
    ) -> None:
        monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
        monkeypatch.delenv("HF_TOKEN")
        if token is not None:
            monkeypatch.setenv("HF_TOKEN", token)
        fresh = HubStore(store.url)
        for action in (
            lambda: fresh.read("small", 1 << 30),
            lambda: fresh.put("small", b"1"),
            lambda: fresh.delete("small"),
            lambda: list(fresh.list("")),
        ):
            with pytest.raises(StoreError, match=told) as caught:
                action()
            assert not isinstance(caught.value, TransientStoreError | ObjectMissingError)
            assert token is None or token not in str(caught.value)

    def test_one_that_may_only_read_reads(self, store: HubStore, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HF_TOKEN", READ)
        reader = HubStore(store.url)
        assert reader.read("large", 1 << 30) == LARGE
        assert [info.key for info in reader.list("")] == ["large", "small"]
        for action in (lambda: reader.put("new", b"1"), lambda: reader.delete("small")):
            with pytest.raises(StoreError, match="The token lacks a right"):
                action()

    def test_a_new_one_is_used_without_opening_the_store_again(
        self, store: HubStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HF_TOKEN", EXPIRED)
        with pytest.raises(StoreError, match="expired"):
            store.read("small", 1 << 30)
        monkeypatch.setenv("HF_TOKEN", WRITE)
        assert store.read("small", 1 << 30) == SMALL

    def test_of_the_content_store_that_has_expired_is_renewed(self, store: HubStore, hub: HubServer) -> None:
        """hf_xet tells an error for a refused token, or, one time in four, an empty object."""
        for _ in range(20):
            hub.arm("read_token", expired=True)
            assert HubStore(store.url).read("large", 1 << 30) == LARGE
        hub.reset()
        fresh = HubStore(store.url)
        hub.arm("read_token", expired=True)
        hub.arm("write_token", expired=True)
        assert fresh.read("large", 1 << 30) == LARGE
        fresh.put("new", b"1")
        assert fresh.read("new", 1 << 30) == b"1"
        assert (hub.requests()["read_token"], hub.requests()["write_token"]) == (2, 2)

    def test_of_the_content_store_is_kept_where_the_clocks_differ(
        self, store: HubStore, hub: HubServer
    ) -> None:
        hub.set(exp_skew_s=-7200)
        fresh = HubStore(store.url)
        for number in range(4):
            fresh.put("new", b"%d" % number)
            assert fresh.read("large", 1 << 30) == LARGE
        assert (hub.requests()["read_token"], hub.requests()["write_token"]) == (1, 1)

    def test_offline_mode_is_told(self, store: HubStore, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        with pytest.raises(StoreError, match="HF_HUB_OFFLINE") as caught:
            store.read("small", 1 << 30)
        assert not isinstance(caught.value, TransientStoreError)


HUB_FAULTS: list[dict[str, object]] = [
    {"status": 503},
    {"status": 500},
    {"status": 408},
    {"reset": True},
    {"reset": True, "after": True},
    {"status": 504, "after": True},
    {"empty": True},
]


def _name(fault: object) -> str:
    return (
        "-".join(f"{name}={value}" for name, value in fault.items())
        if isinstance(fault, dict)
        else str(fault)
    )


class TestFaults:
    """Each passes by itself when it happens once, and leaves the state that the port promises when it
    stays.
    """

    @pytest.mark.parametrize("fault", [*HUB_FAULTS, {"failed": "Internal error"}], ids=_name)
    def test_writing_once(self, store: HubStore, hub: HubServer, fault: dict[str, object]) -> None:
        hub.arm("batch", **fault)
        store.put("new", b"1")
        assert hub.requests()["batch"] == 2
        assert store.read("new", 1 << 30) == b"1"

    @pytest.mark.parametrize(
        "fault", [{"status": 503}, {"reset": True}, {"failed": "Internal error"}], ids=_name
    )
    def test_writing_always(self, store: HubStore, hub: HubServer, fault: dict[str, object]) -> None:
        hub.arm("batch", times=FOREVER, **fault)
        for key in ("small", "new"):
            with pytest.raises(TransientStoreError):
                store.put(key, b"1")
        assert hub.requests()["batch"] in (3, 6)  # after three failures in a row it is left alone for a while
        fresh = HubStore(store.url)
        assert fresh.read("small", 1 << 30) == SMALL
        assert [info.key for info in fresh.list("")] == ["large", "small"]

    def test_a_lost_reply_hides_a_success(self, store: HubStore, hub: HubServer) -> None:
        hub.arm("batch", times=3, reset=True, after=True)
        with pytest.raises(TransientStoreError):
            store.put("new", b"1")
        assert store.read("new", 1 << 30) == b"1"

    @pytest.mark.parametrize("fault", HUB_FAULTS[:-1], ids=_name)
    def test_reading_once(self, store: HubStore, hub: HubServer, fault: dict[str, object]) -> None:
        hub.arm("resolve", **fault)
        assert store.read("large", 1 << 30) == LARGE
        hub.arm("resolve", **fault)
        assert store.read_range("large", 10, 20) == LARGE[10:20]

    @pytest.mark.parametrize("fault", [*HUB_FAULTS, {"truncate": True}, {"cut": True}], ids=_name)
    def test_listing_once(self, store: HubStore, hub: HubServer, fault: dict[str, object]) -> None:
        hub.arm("tree", **fault)
        assert [info.key for info in store.list("")] == ["large", "small"]
        assert hub.requests() == {"tree": 2}

    @pytest.mark.parametrize("fault", HUB_FAULTS, ids=_name)
    def test_deleting_once(self, store: HubStore, hub: HubServer, fault: dict[str, object]) -> None:
        hub.arm("batch", **fault)
        store.delete("small", "missing")
        assert [info.key for info in store.list("")] == ["large"]

    def test_what_was_not_deleted_is_an_error_though_the_answer_is_a_200(
        self, store: HubStore, hub: HubServer
    ) -> None:
        hub.arm("batch", times=FOREVER, failed="Internal error")
        with pytest.raises(TransientStoreError, match="did not delete run/a/small: Internal error"):
            store.delete("small")
        store.delete("missing")

    @pytest.mark.parametrize(
        ("step", "fault"),
        [
            *(("data", {kind: True}) for kind in ("truncate", "cut", "empty", "reset")),
            *(("data", {"status": status}) for status in (403, 404, 503)),
            *(("reconstruction", {"status": status}) for status in (401, 404, 503)),
            *(("reconstruction", {kind: True}) for kind in ("truncate", "empty", "reset")),
            ("resolve", {"extra_bytes": 500}),
        ],
        ids=_name,
    )
    def test_a_damaged_download_is_fetched_again(
        self, store: HubStore, hub: HubServer, step: str, fault: dict[str, object]
    ) -> None:
        hub.arm(step, **fault)
        assert store.read("large", 1 << 30) == LARGE
        hub.arm(step, times=FOREVER, **fault)
        with pytest.raises(TransientStoreError) as caught:
            store.read("large", 1 << 30)
        assert "X-Signature" not in str(caught.value)
        hub.reset()
        assert store.read("large", 1 << 30) == LARGE

    def test_a_flipped_bit_comes_through(self, store: HubStore, hub: HubServer) -> None:
        """By length alone it cannot be told; readers of a channel compare digests (test_hub_faults.py)."""
        hub.arm("data", flip=True)
        data = store.read("large", 1 << 30)
        assert data != LARGE
        assert len(data) == len(LARGE)

    def test_a_flipped_bit_is_not_kept(self, store: HubStore, hub: HubServer) -> None:
        data = os.urandom(1000)
        store.put("small", data)
        hub.arm("data", flip=True)
        assert store.read("small", 1 << 30) != data
        for _ in range(4):
            assert store.read("small", 1 << 30) == data

    def test_a_hub_that_wants_to_be_asked_where_to_upload_is_asked(
        self, store: HubStore, hub: HubServer
    ) -> None:
        hub.arm("xorb", status=403)
        store.put("new", b"1")
        assert hub.requests()["grant"] == 1
        assert hub.counted(lambda: store.put("new", b"2"))["grant"] == 1

    @pytest.mark.parametrize("step", ["xorb", "shard"])
    @pytest.mark.parametrize(
        "fault", [{"status": 503}, {"reset": True}, {"reset": True, "after": True}], ids=_name
    )
    def test_an_upload_is_tried_again(
        self, store: HubStore, hub: HubServer, step: str, fault: dict[str, object]
    ) -> None:
        hub.arm(step, **fault)
        data = os.urandom(1000)
        store.put("new", data)
        assert store.read("new", 1 << 30) == data

    def test_nothing_is_taken_for_stored_because_it_once_was(self, store: HubStore, hub: HubServer) -> None:
        data = os.urandom(1000)
        for key in ("a", "b", "c"):
            assert hub.counted(lambda key=key: store.put(key, data))["xorb"] == 1  # type: ignore[misc]

    def test_next_to_nothing_is_left_on_disk(self, store: HubStore, hub: HubServer) -> None:
        folder = Path(hub.env["HF_XET_CACHE"])
        before = {path for path in folder.rglob("*") if path.is_file()}
        for _ in range(5):
            store.put("a", os.urandom(1000))
        left = {path for path in folder.rglob("*") if path.is_file()} - before
        assert len(left) <= 1
        assert all(path.parent.name == "deltasync" and path.stat().st_size < 10_000 for path in left)

    @pytest.mark.parametrize("step", ["xorb", "shard"])
    def test_an_upload_that_fails_leaves_what_was_there(
        self, store: HubStore, hub: HubServer, step: str
    ) -> None:
        hub.arm(step, times=FOREVER, status=400)
        with pytest.raises(StoreError, match=r"the transfer \(write\) failed") as caught:
            store.put("small", os.urandom(1000))
        assert not isinstance(caught.value, TransientStoreError)
        assert "batch" not in hub.requests()
        assert store.read("small", 1 << 30) == SMALL

    @pytest.mark.parametrize(
        ("headers", "said"),
        [
            ({"Retry-After": "1"}, "no requests for 1 s"),
            (
                {"RateLimit": '"api"; r=0; t=1', "RateLimit-Policy": '"fixed window";"api";q=500;w=300'},
                "500 api requests in 300 s",
            ),
        ],
    )
    def test_a_rate_limit_is_told_with_its_wait_and_nothing_is_sent_before(
        self,
        store: HubStore,
        hub: HubServer,
        caplog: pytest.LogCaptureFixture,
        headers: dict[str, str],
        said: str,
    ) -> None:
        hub.arm("resolve", status=429, headers=headers)
        for _ in range(3):
            with pytest.raises(TransientStoreError, match=said) as caught:
                store.read("small", 1 << 30)
            assert 0 < caught.value.wait_s <= 1
        assert hub.requests() == {"resolve": 1}
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert retried(lambda: store.read("small", 1 << 30), 1) == SMALL

    def test_waiting_for_a_rate_limit_ends_when_it_is_told_to(self, store: HubStore, hub: HubServer) -> None:
        hub.arm("resolve", status=429, headers={"Retry-After": "3000"})
        stop = threading.Event()
        threading.Timer(0.1, stop.set).start()
        with pytest.raises(TransientStoreError, match="3000 s"):
            retried(lambda: store.read("small", 1 << 30), 5, stop=stop)

    @pytest.mark.parametrize("status", [400, 402, 410, 418, 507])
    def test_what_will_not_pass_is_tried_once(self, store: HubStore, hub: HubServer, status: int) -> None:
        hub.arm("resolve", status=status, message="No way.")
        with pytest.raises(StoreError, match=f"the Hub answered {status}: No way[.]$") as caught:
            store.read("small", 1 << 30)
        assert not isinstance(caught.value, TransientStoreError)

    def test_a_replica_of_the_hub_that_lags_shows_what_was_there_before(
        self, store: HubStore, hub: HubServer
    ) -> None:
        """Nothing is promised about reading one's own writes; whoever needs it names digests."""
        store.put("small", b"new")
        for step in ("resolve", "tree"):
            hub.arm(step, stale=True)
        assert store.read("small", 1 << 30) == SMALL
        assert list(store.list("")) == [ObjectInfo("small", len(SMALL))]
        assert store.read("small", 1 << 30) == b"new"

    def test_one_404_to_a_listing_is_no_proof_that_there_is_no_bucket(
        self, store: HubStore, hub: HubServer
    ) -> None:
        hub.arm("tree", status=404, message="Repository not found")
        assert [info.key for info in store.list("")] == ["large", "small"]
        hub.arm("tree", times=FOREVER, status=404, message="Repository not found")
        for call in (lambda: list(store.list("")), lambda: list(store.list("none/"))):
            with pytest.raises(TransientStoreError, match="404 for a bucket that exists"):
                call()

    def test_a_later_page_that_is_missing_is_no_end(self, store: HubStore, hub: HubServer) -> None:
        hub.fill(store, [f"many/{number:05d}" for number in range(1500)], like="small")
        hub.arm("tree", status=404, skip=1)
        assert len(list(store.list("many/"))) == 1500

    def test_a_cursor_that_is_repeated_ends(self, store: HubStore, hub: HubServer) -> None:
        hub.fill(store, [f"many/{number:05d}" for number in range(1500)], like="small")
        hub.set(repeat_cursor=True)
        with pytest.raises(StoreError, match="listing repeats itself"):
            list(store.list("many/"))

    def test_no_hub_at_all(self, hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
        with pytest.raises(TransientStoreError, match=r"no answer from the Hub: .*refused"):
            HubStore("hf://buckets/user/b").read("a", 1 << 30)


class TestGuard:
    """Of a guarded put one request makes the object visible, and nobody repeats it."""

    def test_bytes_that_were_uploaded_before_are_only_named(self, store: HubStore, hub: HubServer) -> None:
        data = b"1"
        hub.arm("xorb", status=503)
        store.upload(data)
        store.upload(data)
        assert "batch" not in hub.requests() and hub.requests()["shard"] == 1
        assert hub.counted(lambda: store.put("new", data)) == {"batch": 1}
        assert store.read("new", 1) == data

    @pytest.mark.parametrize("status", [301, 307, 308])
    def test_a_bucket_that_was_moved_is_not_followed(
        self, store: HubStore, hub: HubServer, status: int
    ) -> None:
        hub.arm("batch", status=status, headers={"Location": f"{hub.endpoint}/api/buckets/user/other/batch"})
        with pytest.raises(StoreError, match="was moved") as refused:
            store.put("new", b"1")
        assert not isinstance(refused.value, TransientStoreError)
        assert hub.requests()["batch"] == 1

    def test_a_token_that_may_no_longer_write_is_told(self, store: HubStore, hub: HubServer) -> None:
        hub.arm("batch", status=403, message="You may not")
        with pytest.raises(StoreError, match="The token lacks a right") as refused:
            store.put("new", b"1")
        assert not isinstance(refused.value, TransientStoreError)

    def test_a_bucket_that_is_deleted_meanwhile_is_created_by_the_next_one(
        self, store: HubStore, hub: HubServer
    ) -> None:
        data = b"1"
        store.upload(data)
        huggingface_hub.HfApi(endpoint=hub.endpoint).delete_bucket(_bucket(store))
        with pytest.raises(TransientStoreError, match="deleted during the upload"):
            store.put("new", data)
        store.put("new", data)
        assert store.read("new", 1) == b"1"


class TestContent:
    def test_it_is_read_whatever_the_key_names_by_now(self, store: HubStore, hub: HubServer) -> None:
        (info,) = store.list("large")
        store.put("large", b"other")
        assert store.read("large", info.bytes, info) == LARGE
        store.delete("large")
        assert store.read("large", info.bytes, info) == LARGE

    def test_the_key_is_asked_for_where_it_cannot_be_had(self, store: HubStore, hub: HubServer) -> None:
        (info,) = store.list("large")
        hub.reset()
        hub.arm("reconstruction", times=2, status=404)
        assert store.read("large", info.bytes, info) == LARGE
        assert hub.requests()["resolve"] == 1
        store.delete("large")
        hub.arm("reconstruction", times=2, status=404)
        with pytest.raises(ObjectMissingError):
            store.read("large", info.bytes, info)

    @pytest.mark.parametrize("bytes", [0, 5, len(LARGE) - 1])
    def test_no_more_is_read_than_was_told(self, store: HubStore, hub: HubServer, bytes: int) -> None:
        (info,) = store.list("large")
        less = dataclasses.replace(info, bytes=bytes)
        assert store.read("large", bytes, less) == LARGE[:bytes]
        hub.arm("resolve", extra_bytes=bytes - len(LARGE))
        assert store.read("large", bytes) == LARGE[:bytes]

    def test_a_content_store_that_sends_without_end_is_given_up(
        self, store: HubStore, hub: HubServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sent = itertools.count(1)

        class Endless:
            def download_stream(self, info: object, start: int, end: int) -> Iterator[bytes]:
                while True:
                    next(sent)
                    yield bytes(1000)

        session = mock.Mock(new_download_stream_group=lambda **_: Endless())
        monkeypatch.setattr(store._xet, "_session", lambda _: session)
        store._xet._downloads = None
        with pytest.raises(TransientStoreError, match="301000 of 300000 bytes arrived"):
            store.read("large", len(LARGE))
        assert next(sent) == 603  # each of two attempts reads no more than one piece too much


def test_what_is_used_of_the_clients_beside_their_interface_is_what_it_was() -> None:
    """Where this fails, a new version of a client changed what it does not promise."""
    http = sys.modules[type(huggingface_hub.get_session()).__module__.partition(".")[0]]
    assert hub_api._TRANSPORT_ERROR is http.HTTPError
    assert issubclass(http.ConnectError, http.HTTPError)
    assert isinstance(huggingface_hub.constants.ENDPOINT, str)
    assert isinstance(huggingface_hub.constants.HF_HUB_DISABLE_IMPLICIT_TOKEN, bool)
    for settings in (*CONFIG.values(), {"client.legacy_direct_xorb_upload": True}):
        xet.hf_xet.XetConfig().with_config(settings)  # an unknown one is an error
    with pytest.raises(Exception, match="no_such"):
        xet.hf_xet.XetConfig().with_config({"client.no_such": 1})
    # The feed is closed through the socket of a response; test_hub_watch.py closes it.


PRIVATE = {
    "huggingface_hub": {"get_session", "constants"},
    "huggingface_hub.utils": {"parse_ratelimit_headers", "build_hf_headers"},
    "huggingface_hub.errors": {
        "HfHubHTTPError",
        "OfflineModeIsEnabled",
        "HFValidationError",
        "LocalEntryNotFoundError",
    },
    "hf_xet": {"SKIP_SHA256", "XetConfig", "XetFileInfo", "XetSession"},
}
"""What stores and checkpoints use of the Hub's clients. Only the errors, `get_session` and `build_hf_headers`
are in huggingface_hub's reference; hf_xet has none. Beside these: the base class of `HfHubHTTPError`, the
settings of `CONFIG`, and the socket in a response's `network_stream`."""


def test_each_thing_that_is_used_of_the_clients_is_known_and_there_and_bounded() -> None:
    """A new use belongs into the list, and only where the client's own calls will not do (decision 3)."""
    used: dict[str, set[str]] = {name: set() for name in PRIVATE}
    public = {"snapshot_download"}
    for path in [*Path(xet.__file__).parent.glob("*.py"), Path(checkpoint.__file__)]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("huggingface_hub"):
                used.setdefault(str(node.module), set()).update(
                    alias.name for alias in node.names if alias.name not in public
                )
            elif (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id == "hf_xet"
            ):
                used["hf_xet"].add(node.attr)
    assert used == PRIVATE
    for module, names in PRIVATE.items():
        assert all(hasattr(importlib.import_module(module), name) for name in names)
    bounds = {
        wanted.name: wanted.specifier for wanted in map(Requirement, metadata.requires("deltasync") or [])
    }
    for name in ("huggingface_hub", "hf_xet"):
        assert not bounds[name].contains("99"), f"{name} has no upper bound"


def test_a_connection_that_the_hub_has_closed_is_no_error(
    hub: HubServer, hub_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FaultProxy(hub.endpoint) as proxy:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", proxy.url)
        store = HubStore(hub_url)
        store.put("large", LARGE)
        (info,) = store.list("")
        for action in (
            lambda: store.read("large", len(LARGE)),
            lambda: store.read("large", len(LARGE), info),
            lambda: store.put("large", LARGE),
            lambda: list(store.list("")),
            lambda: store.delete("large"),
        ):
            proxy.cut()
            time.sleep(0.05)
            action()
        huggingface_hub.close_session()


_FORK = """
import os, sys, time
from deltasync.clouds.hub import HubStore
store = HubStore(sys.argv[1])
data = os.urandom(1_000_000)
store.put("parent", data)
assert store.read("parent", 1 << 30) == data
watch = store.watch("parent", lambda _: None)
while not watch.live:
    time.sleep(0.001)
for number in range(3):
    child = os.fork()
    if child == 0:
        assert not watch.live
        store.put(f"child-{number}", data)
        assert store.read(f"child-{number}", 1 << 30) == store.read("parent", 1 << 30) == data
        watch.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
assert watch.live
assert store.read("child-2", 1 << 30) == data
print(len(list(store.list(""))))
"""


def test_parent_and_forked_children_use_one_store(hub: HubServer, hub_url: str) -> None:
    """It must also end by itself, though its watch still runs."""
    command = [sys.executable, "-W", "error", "-c", _FORK, hub_url]
    done = subprocess.run(command, env=hub.env, capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.stderr, done.returncode) == ("4", "", 0)


def test_importing_the_store_asks_nobody(tmp_path: Path) -> None:
    """Neither does opening one; and a channel's other stores do not need its clients."""
    code = (
        "import sys, deltasync.stores; assert 'hf_xet' not in sys.modules and 'huggingface_hub' not in "
        "sys.modules;"
        "from deltasync.clouds.hub import HubStore; HubStore('hf://buckets/user/b/run'); assert 'torch' not "
        "in sys.modules"
    )
    environment = os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9"}
    subprocess.run([sys.executable, "-W", "error", "-c", code], env=environment, check=True, timeout=60)
