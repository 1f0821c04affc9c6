"""The contract on a real server that checks signatures: `make test-radosgw`."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

import pytest

from deltasync import open_store
from deltasync.errors import ObjectMissingError, StoreError
from deltasync.stores import Store
from deltasync.stores.retries import decides
from tests.contract.store_contract import DecidingSharedContract, RefusingContract, StoreContract
from tests.http_faults import FaultProxy, ignored
from tests.servers.s3 import KEYS, RGW_VARIABLE, S3Server

if RGW_VARIABLE not in os.environ:
    pytest.skip(f"{RGW_VARIABLE} is not set; see make test-radosgw", allow_module_level=True)


pytestmark = pytest.mark.radosgw


class TestRgwStore(StoreContract, DecidingSharedContract, RefusingContract):
    @pytest.fixture
    def store(self, rgw_server: S3Server, rgw_bucket: str) -> Store:
        return open_store(rgw_server.url(rgw_bucket))

    @pytest.fixture
    def elsewhere(self, store: Store) -> tuple[str, Mapping[str, str]]:
        return store.url, KEYS

    @pytest.fixture
    def refused(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> Store:
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
        return open_store(store.url)


@pytest.fixture
def store(rgw_server: S3Server, rgw_bucket: str) -> Store:
    return open_store(rgw_server.url(rgw_bucket))


def test_an_unknown_access_key_is_told(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    with pytest.raises(StoreError, match=r"InvalidAccessKeyId.*AWS_ACCESS_KEY_ID"):
        open_store(store.url).read("a", 1 << 30)


def test_requests_without_a_signature_are_refused(store: Store) -> None:
    with pytest.raises(StoreError, match="403 Forbidden"):
        open_store(f"{store.url}&anonymous=1").read("a", 1 << 30)


def test_a_bucket_that_is_not_there_is_named(store: Store) -> None:
    elsewhere = open_store(store.url.replace("s3://", "s3://not-"))
    with pytest.raises(StoreError, match=r"s3://not-.*there is no such bucket"):
        elsewhere.read("a", 1 << 30)


def test_asking_for_a_version_that_is_not_there_is_one_request_of_less_than_1_kb_and_5_ms(
    rgw_server: S3Server, rgw_bucket: str, store: Store
) -> None:
    slot = "versions/0000012/0000012346.000003-9f8e7d6c.safetensors"
    times_s = []
    for _ in range(200):
        before = time.perf_counter()
        with pytest.raises(ObjectMissingError):
            store.read(slot, 1 << 20)
        times_s.append(time.perf_counter() - before)
    assert sorted(times_s)[100] < 0.005
    with FaultProxy(rgw_server.endpoint) as proxy:
        with pytest.raises(ObjectMissingError):
            open_store(rgw_server.url(rgw_bucket, endpoint=proxy.url)).read(slot, 1 << 20)
        (exchange,) = proxy.exchanges
    assert exchange.bytes_up + exchange.bytes_down < 1024


def test_it_is_found_out_where_something_before_it_ignores_preconditions(
    rgw_server: S3Server, rgw_bucket: str, store: Store
) -> None:
    with FaultProxy(rgw_server.endpoint) as proxy:
        proxied = open_store(rgw_server.url(rgw_bucket, endpoint=proxy.url))
        assert decides(proxied, "probe/000001-9f8e7d6c")
        proxy.strike(ignored("If-None-Match"), "PUT", times=2)
        assert not decides(proxied, "probe/000002-9f8e7d6c")
    assert list(store.list("")) == []
