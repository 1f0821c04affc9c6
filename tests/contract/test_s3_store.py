from __future__ import annotations

import contextlib
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

import pytest
import torch

from deltasync import Publisher, Replica, open_store
from deltasync.clouds import cloud
from deltasync.errors import (
    ConfigError,
    CorruptDataError,
    DeltaSyncError,
    ObjectExistsError,
    ObjectMissingError,
    StoreError,
    TransientStoreError,
)
from deltasync.stores import Store, object
from deltasync.stores.retries import decides
from tests.contract.store_contract import DecidingSharedContract, RefusingContract, StoreContract
from tests.http_faults import (
    Action,
    FaultProxy,
    Reply,
    empty,
    flipped,
    ignored,
    reset,
    s3_error,
    shortened,
    slow,
    status,
    truncated,
)
from tests.servers.endless import Endless
from tests.servers.s3 import KEYS, MotoServer

FOREVER = 1000


class ForgetfulGateway:
    """Passes connections on to a server; those that were `forget`-ten lose all bytes, without a reset."""

    def __init__(self, endpoint: str) -> None:
        server = urlsplit(endpoint)
        self._server = (server.hostname, server.port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._alive: list[list[bool]] = []
        self._sockets: list[socket.socket] = []

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for each in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def forget(self) -> None:
        """Lose all bytes of the connections that there are."""
        for alive in self._alive:
            alive[0] = False

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server, alive = socket.create_connection(self._server), [True]
                self._alive.append(alive)
                self._sockets += [client, server]
                for one, other in ((client, server), (server, client)):
                    threading.Thread(target=self._pass_on, args=(one, other, alive), daemon=True).start()

    @staticmethod
    def _pass_on(one: socket.socket, other: socket.socket, alive: list[bool]) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(1 << 16):
                if alive[0]:
                    other.sendall(data)
            if alive[0]:
                other.shutdown(socket.SHUT_WR)


class TestMotoStore(StoreContract, DecidingSharedContract, RefusingContract):
    @pytest.fixture
    def store(self, s3_server: MotoServer, s3_bucket: str) -> Store:
        return open_store(s3_server.url(s3_bucket))

    @pytest.fixture
    def elsewhere(self, store: Store) -> tuple[str, Mapping[str, str]]:
        return store.url, KEYS

    @pytest.fixture
    def refused(self, proxy: FaultProxy, proxied: Store) -> Store:
        proxy.strike(s3_error(400, "ExpiredToken"), times=FOREVER)  # moto itself checks no credentials
        return open_store(proxied.url)

    @pytest.fixture(autouse=True)
    def _remember(self, s3_server: MotoServer, s3_bucket: str) -> None:
        self._server, self._bucket = s3_server, s3_bucket

    def fill(self, store: Store, keys: Sequence[str]) -> None:
        self._server.fill(self._bucket, [f"run/{key}" for key in keys])


@pytest.fixture
def proxy(s3_server: MotoServer) -> Iterator[FaultProxy]:
    with FaultProxy(s3_server.endpoint) as proxy:
        yield proxy


@pytest.fixture
def proxied(proxy: FaultProxy, s3_server: MotoServer, s3_bucket: str) -> Store:
    """A store behind the proxy, holding `a`."""
    store = open_store(s3_server.url(s3_bucket, endpoint=proxy.url))
    store.create("a", b"one")
    proxy.exchanges.clear()
    return store


class TestUrl:
    @pytest.mark.parametrize(
        ("url", "bucket", "prefix", "config"),
        [
            ("s3://bkt", "bkt", "", {}),
            ("s3://bkt/", "bkt", "", {}),
            ("s3://My.bkt_1/a/b/", "My.bkt_1", "a/b", {}),
            (
                "s3://name/prefix?endpoint=https://s3.hf.co/namespace&region=us-east-1",
                "name",
                "prefix",
                {
                    "endpoint": "https://s3.hf.co/namespace",
                    "aws_endpoint_url_s3": "https://s3.hf.co/namespace",
                    "region": "us-east-1",
                },
            ),
            (
                "s3://bkt/a?endpoint=http%3A%2F%2Fminio.local%3A7480/&virtual_hosted=1&profile=work&anonymous=0",
                "bkt",
                "a",
                {
                    "endpoint": "http://bkt.minio.local:7480",
                    "aws_endpoint_url_s3": "http://bkt.minio.local:7480",
                    "virtual_hosted_style_request": True,
                },
            ),
            ("s3://bkt?anonymous=1", "bkt", "", {"skip_signature": True}),
            ("gs://bkt/a", "bkt", "a", {}),
            ("az://container/a", "container", "a", {}),
        ],
    )
    def test_its_parts(self, url: str, bucket: str, prefix: str, config: dict[str, object]) -> None:
        store = open_store(url)
        assert isinstance(store, cloud.CloudStore)
        assert (store._bucket, store._prefix, store._s3_config()) == (bucket, prefix, config)
        assert store.url == url
        assert store.can_create

    @pytest.mark.parametrize(
        ("url", "said"),
        [
            ("s3://", "A bucket is written s3://bucket/prefix"),
            ("s3:///prefix", "A bucket is written s3://bucket/prefix"),
            ("s3://bkt:9000/prefix", "A bucket is written s3://bucket/prefix"),
            ("s3://key:hidden@bkt/prefix", "holds no credentials"),
            ("s3://bkt?access_key=hidden", "holds no credentials"),
            ("s3://bkt?secret_access_key=hidden", "holds no credentials"),
            ("s3://bkt?session_token=hidden", "holds no credentials"),
            ("s3://bkt?endpoint=https://key:hidden@host", "endpoint="),
            ("s3://bkt?endpoint=host:9000", "endpoint="),
            ("s3://bkt?endpoint=http://300.1.2.3", "endpoint="),
            ("s3://bkt?endpoint=http://1.2.3:9000", "endpoint="),
            ("s3://bkt?endpoint=https://", "endpoint="),
            ("s3://bkt?endpoint=https://host?x=hidden", "endpoint="),
            ("s3://bkt?bogus=hidden", "Unknown option bogus="),
            ("s3://bkt?virtual_hosted=yes", "virtual_hosted= in a channel URL is 0 or 1"),
            ("s3://bkt/a b", "Not a valid object key"),
            ("s3://bkt/a//b", "Not a valid object key"),
            ("s3://bkt/a#hidden", "no '#'"),
            ("gs://bkt?endpoint=https://host", "Unknown option endpoint="),
        ],
    )
    def test_what_is_wrong_is_told_in_one_sentence(self, url: str, said: str) -> None:
        with pytest.raises(ConfigError, match=said) as refusal:
            open_store(url)
        assert "hidden" not in str(refusal.value)

    def test_virtual_hosted_puts_the_bucket_before_the_host_once(self) -> None:
        for endpoint in ("https://host:9000", "https://bkt.host:9000"):
            store = cloud.CloudStore(f"s3://bkt/a?virtual_hosted=1&endpoint={endpoint}")
            assert store._s3_config()["endpoint"] == "https://bkt.host:9000"


class TestCredentials:
    def test_those_of_the_environment_sign(self, proxy: FaultProxy, proxied: Store) -> None:
        fault = proxy.strike(status(404), header=("Authorization", "Credential=testkey/"))
        with pytest.raises(ObjectMissingError):
            proxied.read("a", 1 << 30)
        assert fault.hits == 1

    def test_anonymous_requests_are_not_signed(
        self, proxy: FaultProxy, proxied: Store, s3_server: MotoServer, s3_bucket: str
    ) -> None:
        s3_server.client.put_object_acl(Bucket=s3_bucket, Key="run/a", ACL="public-read")
        fault = proxy.strike(status(404), header=("Authorization", "."))
        assert open_store(f"{proxied.url}&anonymous=1").read("a", 1 << 30) == b"one"
        assert fault.hits == 0

    @pytest.mark.parametrize("by", ["the URL", "AWS_PROFILE"])
    def test_those_of_a_profile_sign(
        self, proxy: FaultProxy, proxied: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, by: str
    ) -> None:
        url = f"{proxied.url}&profile=work" if by == "the URL" else proxied.url
        self._profile(monkeypatch, tmp_path)
        if by == "AWS_PROFILE":
            monkeypatch.setenv("AWS_PROFILE", "work")
            monkeypatch.delenv("AWS_ACCESS_KEY_ID")
            monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
        fault = proxy.strike(status(404), header=("Authorization", "Credential=profilekey/.*/us-east-1/"))
        with pytest.raises(ObjectMissingError):
            open_store(url).read("a", 1 << 30)
        assert fault.hits == 1

    def test_keys_of_the_environment_come_before_its_profile(
        self, proxied: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("AWS_PROFILE", "no such profile")
        assert open_store(proxied.url).read("a", 1 << 30) == b"one"

    def test_an_unknown_profile_is_told(
        self, proxied: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        self._profile(monkeypatch, tmp_path)
        with pytest.raises(ConfigError, match=r"'play' gives no credentials"):
            open_store(f"{proxied.url}&profile=play").read("a", 1 << 30)

    def test_a_profile_needs_an_extra(self, proxied: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "boto3", None)
        with pytest.raises(ConfigError, match="pip install boto3"):
            open_store(f"{proxied.url}&profile=work").read("a", 1 << 30)

    def test_half_of_a_key_pair_is_told(self, proxied: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
        with pytest.raises(ConfigError, match="Missing SecretAccessKey"):
            open_store(proxied.url).read("a", 1 << 30)

    @staticmethod
    def _profile(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        (folder / "config").write_text("[profile work]\nregion = eu-west-3\n")
        (folder / "credentials").write_text(
            "[work]\naws_access_key_id = profilekey\naws_secret_access_key = s\n"
        )
        monkeypatch.setenv("AWS_CONFIG_FILE", str(folder / "config"))
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(folder / "credentials"))


class TestEndpoint:
    @pytest.mark.parametrize("variable", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"])
    def test_it_may_come_from_the_environment(
        self, s3_server: MotoServer, s3_bucket: str, monkeypatch: pytest.MonkeyPatch, variable: str
    ) -> None:
        monkeypatch.setenv(variable, s3_server.endpoint)
        open_store(f"s3://{s3_bucket}/a").create("b", b"1")
        assert open_store(s3_server.url(s3_bucket, "a")).read("b", 1 << 30) == b"1"

    def test_the_url_comes_before_the_environment(
        self, proxied: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")
        assert open_store(proxied.url).read("a", 1 << 30) == b"one"

    def test_https_is_never_left_for_http(self, proxied: Store) -> None:
        with pytest.raises(StoreError, match="does not speak TLS at this port"):
            open_store(proxied.url.replace("http:", "https:")).read("a", 1 << 30)

    @pytest.mark.parametrize(
        ("port", "said"), [(1, r"refused at http://127\.0\.0\.1:1\)"), (None, "timed out")]
    )
    def test_a_server_that_does_not_answer_is_told(
        self, s3_env: object, monkeypatch: pytest.MonkeyPatch, port: int | None, said: str
    ) -> None:
        monkeypatch.setattr(cloud, "_REPLY_WITHIN", ((1 << 30, 0.1),))
        with socket.create_server(("127.0.0.1", 0)) as silent:
            address = f"http://127.0.0.1:{port or silent.getsockname()[1]}"
            with pytest.raises(TransientStoreError, match=said):
                open_store(f"s3://bkt/a?endpoint={address}").read("a", 1 << 30)


NAMED = [
    (s3_error(404, "NoSuchBucket"), StoreError, "there is no such bucket"),
    (s3_error(400, "ExpiredToken"), TransientStoreError, "has expired: renew"),
    (s3_error(403, "ExpiredToken"), TransientStoreError, "has expired: renew"),
    (s3_error(400, "InvalidToken"), TransientStoreError, "not valid: renew"),
    (s3_error(403, "SignatureDoesNotMatch"), StoreError, "check AWS_SECRET_ACCESS_KEY"),
    (s3_error(403, "InvalidAccessKeyId"), TransientStoreError, "check AWS_ACCESS_KEY_ID"),
    (s3_error(403, "RequestTimeTooSkewed"), StoreError, "clock"),
    (s3_error(403, "AccessDenied"), StoreError, "403 Forbidden (AccessDenied). Check the credentials"),
    (s3_error(403, "QuotaExceeded"), StoreError, "403 Forbidden (QuotaExceeded). Delete something"),
    (status(401), StoreError, "401 Unauthorized. Check the credentials"),
    (s3_error(400, "AuthorizationHeaderMalformed"), StoreError, "check region="),
    (status(301), StoreError, "in another region"),
    (s3_error(400, "InvalidRequest"), StoreError, "400 Bad Request (InvalidRequest)"),
    (s3_error(400, "RequestTimeout"), TransientStoreError, "RequestTimeout"),
    (status(429, retry_after_s=1), TransientStoreError, "429 Too Many Requests"),
    (s3_error(503, "SlowDown"), TransientStoreError, "503 Service Unavailable (SlowDown)"),
    (status(500), TransientStoreError, "500 Internal Server Error"),
    (reset(), TransientStoreError, "Connection reset"),
]


class TestErrors:
    @pytest.mark.parametrize(
        ("action", "kind", "said"), NAMED, ids=lambda value: str(getattr(value, "name", ""))[:40]
    )
    @pytest.mark.parametrize("verb", ["create", "put", "read", "read_range", "list", "delete"])
    def test_what_the_store_answers_is_told_by_its_kind_and_a_sentence(
        self, proxy: FaultProxy, proxied: Store, verb: str, action: Action, kind: type[StoreError], said: str
    ) -> None:
        proxy.strike(action, times=FOREVER)
        arguments = {
            "create": ("b", b"1"),
            "put": ("a", b"1"),
            "read": ("a", 1),
            "read_range": ("a", 0, 1),
            "list": ("",),
        }
        with pytest.raises(StoreError) as failure:
            result = getattr(proxied, verb)(*arguments.get(verb, ("a",)))
            list(result)
        assert type(failure.value) is kind
        assert said in str(failure.value)
        assert str(failure.value).startswith(proxied.url.partition("?")[0] + "/")
        assert len(str(failure.value)) < 250
        assert failure.value.__cause__ is None

    @pytest.mark.parametrize("code", [501, 507])
    def test_what_a_server_will_never_do_is_not_transient(
        self, proxy: FaultProxy, proxied: Store, code: int
    ) -> None:
        proxy.strike(status(code), times=FOREVER)
        with pytest.raises(StoreError, match=f"answered {code}") as failure:
            proxied.put("b", b"1")
        assert type(failure.value) is StoreError

    @pytest.mark.parametrize(
        "action", [status(503), status(500), status(429), status(408)], ids=lambda action: action.name
    )
    @pytest.mark.parametrize("verb", ["create", "read"])
    def test_the_client_itself_tries_three_times(
        self, proxy: FaultProxy, proxied: Store, verb: str, action: Action
    ) -> None:
        proxy.strike(action, times=2)
        if verb == "create":
            proxied.create("b", b"1")
        else:
            assert proxied.read("a", 1 << 30) == b"one"
        assert len(proxy.exchanges) == 3

    def test_a_conflict_with_a_concurrent_create_is_worth_another_try(
        self, proxy: FaultProxy, proxied: Store
    ) -> None:
        proxy.strike(s3_error(409, "ConditionalRequestConflict"), "PUT")
        with pytest.raises(TransientStoreError, match="another request was writing it"):
            proxied.create("b", b"1")
        proxied.create("b", b"1")

    def test_a_create_whose_reply_was_lost_may_find_itself(self, proxy: FaultProxy, proxied: Store) -> None:
        proxy.strike(status(503), "PUT", after=True)
        with pytest.raises(ObjectExistsError):
            proxied.create("b", b"1")
        assert proxied.read("b", 1 << 30) == b"1"

    def test_a_body_that_breaks_off_is_taken_up_where_it_ended(
        self, proxy: FaultProxy, proxied: Store
    ) -> None:
        data = bytes(range(256)) * 4096
        proxied.create("b", data)
        proxy.exchanges.clear()
        proxy.strike(truncated(), "GET")
        assert proxied.read("b", 1 << 30) == data
        first, second = proxy.exchanges
        assert (first.status, second.status) == (200, 206)

    @pytest.mark.parametrize("action", [shortened(), empty()], ids=lambda action: action.name)
    def test_a_listing_or_a_range_that_is_not_all_there_is_an_error(
        self, proxy: FaultProxy, proxied: Store, action: Action
    ) -> None:
        proxy.strike(action, times=FOREVER)
        with pytest.raises(TransientStoreError, match="list response"):
            list(proxied.list(""))
        with pytest.raises(StoreError, match="ends before byte 3"):
            proxied.read_range("a", 0, 3)

    def test_a_body_that_flows_is_waited_for_and_one_that_stalls_is_not(
        self, proxy: FaultProxy, proxied: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(cloud, "_REPLY_WITHIN", ((1 << 30, 0.3),))
        data = bytes(1 << 20)
        proxied.create("b", data)
        proxied = open_store(proxied.url)
        proxy.strike(slow(0.1), "GET")
        assert proxied.read("b", 1 << 30) == data
        proxy.exchanges.clear()
        proxy.strike(slow(1.0), "GET")
        assert proxied.read("b", 1 << 30) == data
        assert [exchange.fault for exchange in proxy.exchanges] == ["slow", ""]


class TestListing:
    def test_a_server_that_repeats_its_token_is_not_listed_for_ever(
        self, proxy: FaultProxy, proxied: Store
    ) -> None:
        facts = "<LastModified>2026-01-01T00:00:00Z</LastModified><ETag>x</ETag><Size>1</Size>"
        entry = f"<Contents><Key>run/a</Key>{facts}</Contents>"
        again = "<IsTruncated>true</IsTruncated><NextContinuationToken>same</NextContinuationToken>"
        proxy.strike(
            status(200, f"<ListBucketResult>{again}{entry}</ListBucketResult>".encode()), "GET", times=10**6
        )
        with pytest.raises(StoreError, match="listing repeats itself"):
            list(proxied.list(""))

    @pytest.mark.parametrize("key", ["//x", "/./x", "/\x01x"])
    def test_a_key_of_another_program_is_passed_over(
        self, s3_server: MotoServer, s3_bucket: str, caplog: pytest.LogCaptureFixture, key: str
    ) -> None:
        store = open_store(s3_server.url(s3_bucket))
        for name in ("versions/0000000/a", "versions/0000001/b"):
            store.put(name, b"1")
        s3_server.client.put_object(Bucket=s3_bucket, Key=f"run/versions{key}", Body=b"x")
        assert [info.key for info in store.list("versions/")] == ["versions/0000000/a", "versions/0000001/b"]
        assert "another program's object" in caplog.text
        s3_server.client.delete_object(Bucket=s3_bucket, Key=f"run/versions{key}")

    @pytest.mark.parametrize(
        "key", ["versions/0000001//x", "versions/0000000/../x", "head.json//x", "zz/./x", "versions//x"]
    )
    @pytest.mark.parametrize("prefix", ["", "versions/", "versions/0000001/"])
    def test_a_key_of_another_program_is_passed_over_anywhere(
        self, s3_server: MotoServer, s3_bucket: str, key: str, prefix: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        store = open_store(s3_server.url(s3_bucket))
        names = [
            "head.json",
            "versions/0000000/a",
            "versions/0000000/b",
            "versions/0000001/c",
            "versions/0000002/d/e",
        ]
        for name in names:
            store.put(name, b"1")
        s3_server.client.put_object(Bucket=s3_bucket, Key=f"run/{key}", Body=b"x")
        for _ in range(2):
            assert [info.key for info in store.list(prefix)] == [
                name for name in names if name.startswith(prefix)
            ]
        assert caplog.text.count("It is passed over") == key.startswith(prefix)
        s3_server.client.delete_object(Bucket=s3_bucket, Key=f"run/{key}")

    def test_one_that_cannot_be_passed_over_is_named(self, s3_server: MotoServer, s3_bucket: str) -> None:
        store = open_store(s3_server.url(s3_bucket))
        s3_server.client.put_object(Bucket=s3_bucket, Key="run/compactions/x\x01y", Body=b"x")
        with pytest.raises(
            StoreError, match=r"the key 'run/compactions/x.*y', which cannot be listed: delete or rename it"
        ):
            list(store.list("compactions/"))
        s3_server.client.delete_object(Bucket=s3_bucket, Key="run/compactions/x\x01y")


class TestForgottenConnections:
    """A gateway has forgotten all idle connections: bytes over them vanish, and new ones work."""

    @pytest.mark.parametrize("verb", ["read", "read_range", "list", "put", "delete"])
    def test_cost_one_timeout_and_a_line_in_the_log(
        self,
        proxy: FaultProxy,
        s3_server: MotoServer,
        s3_bucket: str,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
        verb: str,
    ) -> None:
        is_long = verb in ("list", "delete")
        limit = ("_REPLY_WITHIN", ((cloud.LARGEST_BYTES, 1.5),)) if is_long else ("PROMPT_S", 1.5)
        monkeypatch.setattr(cloud, *limit)
        monkeypatch.setattr(cloud, "PATIENCE_S", 0.5)
        with ForgetfulGateway(proxy.url) as gateway:  # the proxy keeps connections open
            store = open_store(s3_server.url(s3_bucket, endpoint=gateway.url))
            store.put("a", b"one")
            with ThreadPoolExecutor(4) as pool:  # several idle connections
                assert set(pool.map(lambda _: store.read("a", 3), range(8))) == {b"one"}
            gateway.forget()
            ask: dict[str, Callable[[], object]] = {
                "read": lambda: store.read("a", 3),
                "read_range": lambda: store.read_range("a", 0, 3),
                "list": lambda: list(store.list("")),
                "put": lambda: store.put("a", b"two"),
                "delete": lambda: store.delete("a"),
            }
            ask[verb]()
        assert caplog.text.count("has had no answer for 0.5 s") == 1
        assert caplog.text.count("Trying once more over a new connection") == 1

    def test_a_store_that_answers_late_is_waited_for_from_then_on(
        self, proxy: FaultProxy, proxied: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for module in (cloud, object):
            monkeypatch.setattr(module, "PROMPT_S", 0.5)
        proxied.put("a", b"one")
        proxy.exchanges.clear()
        proxy.strike(slow(1.0), "GET", times=3)
        for _ in range(2):
            assert proxied.read("a", 3) == b"one"
        assert [exchange.fault for exchange in proxy.exchanges] == ["slow"] * 3, "one was asked twice"
        assert proxied.read("a", 3) == b"one"
        proxy.strike(slow(1.0), "GET")
        assert proxied.read("a", 3) == b"one"
        assert [exchange.fault for exchange in proxy.exchanges[3:]] == ["", "slow", ""]


class TestRenewal:
    """Credentials that were refused are read again by the next attempt."""

    def test_of_keys_in_the_environment(
        self, proxy: FaultProxy, proxied: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        proxy.strike(
            s3_error(403, "ExpiredToken"), header=("Authorization", "Credential=testkey/"), times=FOREVER
        )
        calls: list[tuple[Callable[[], object], list[type[StoreError]]]] = [
            (lambda: proxied.read("a", 3), [TransientStoreError, StoreError, StoreError]),
        ]
        for call, kinds in calls:
            monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testkey")
            for kind in kinds:  # others may be there at the second attempt
                with pytest.raises(StoreError, match="has expired: renew") as refusal:
                    call()
                assert type(refusal.value) is kind
            monkeypatch.setenv("AWS_ACCESS_KEY_ID", "renewed")
            call()

    def test_of_a_profile(
        self, proxy: FaultProxy, proxied: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        TestCredentials._profile(monkeypatch, tmp_path)
        store = open_store(f"{proxied.url}&profile=work")
        proxy.strike(
            s3_error(400, "InvalidToken"), header=("Authorization", "Credential=profilekey/"), times=FOREVER
        )
        with pytest.raises(StoreError, match="not valid: renew"):
            store.read("a", 3)
        (tmp_path / "credentials").write_text(
            "[work]\naws_access_key_id = renewed\naws_secret_access_key = s\n"
        )
        assert store.read("a", 3) == b"one"

    def test_a_publisher_and_a_replica_go_on(
        self, proxy: FaultProxy, s3_server: MotoServer, s3_bucket: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        url = s3_server.url(s3_bucket, endpoint=proxy.url)
        weights = {"w": torch.zeros(64, dtype=torch.bfloat16)}
        with Publisher(url) as publisher:
            publisher.publish(weights.items()).wait(60)
            replica = Replica(url)
            replica.sync()
            proxy.strike(
                s3_error(400, "ExpiredToken"), header=("Authorization", "Credential=testkey/"), times=FOREVER
            )
            weights["w"][3] = 1
            with pytest.raises(DeltaSyncError):
                publisher.publish(weights.items()).wait(60)
            with pytest.raises(StoreError):
                replica.sync()
            monkeypatch.setenv("AWS_ACCESS_KEY_ID", "renewed")
            receipt = publisher.publish(weights.items())
            receipt.wait(60)
            with contextlib.suppress(StoreError):
                replica.sync()  # a connection may have been opened with the old credentials just before
            assert replica.sync() == receipt.version

    @pytest.mark.parametrize("code", ["ExpiredToken", "InvalidAccessKeyId"])
    def test_the_attempt_that_follows_at_once_takes_keys_that_are_there_already(
        self,
        proxy: FaultProxy,
        s3_server: MotoServer,
        s3_bucket: str,
        monkeypatch: pytest.MonkeyPatch,
        code: str,
    ) -> None:
        weights = {"w": torch.zeros(64, dtype=torch.bfloat16)}
        with Publisher(
            s3_server.url(s3_bucket, endpoint=proxy.url), retries=1, retry_delay_s=0.01
        ) as publisher:
            publisher.publish(weights.items()).wait(60)
            proxy.strike(s3_error(403, code), header=("Authorization", "Credential=testkey/"), times=FOREVER)
            monkeypatch.setenv("AWS_ACCESS_KEY_ID", "renewed")  # by whoever renews it, before it is missed
            weights["w"][3] = 1
            assert publisher.publish(weights.items()).wait(60).version == 2


class TestPut:
    def test_one_that_is_refused_is_told(self, proxy: FaultProxy, proxied: Store) -> None:
        proxy.strike(s3_error(403, "AccessDenied"), "PUT")
        with pytest.raises(StoreError, match="AccessDenied") as refusal:
            proxied.put("b", b"1")
        assert type(refusal.value) is StoreError


class TestProbe:
    KEY = "probe/000001-9f8e7d6c"

    def test_a_server_that_ignores_preconditions_is_found_out(
        self, proxy: FaultProxy, proxied: Store
    ) -> None:
        assert decides(proxied, self.KEY)
        fault = proxy.strike(ignored("If-None-Match"), "PUT", times=FOREVER)
        assert not decides(proxied, self.KEY)
        assert fault.hits == 2
        assert [info.key for info in proxied.list("")] == ["a"]

    @pytest.mark.parametrize(
        "action", [s3_error(501, "NotImplemented"), s3_error(400, "InvalidArgument"), status(405)]
    )
    def test_so_is_one_that_refuses_them(self, proxy: FaultProxy, proxied: Store, action: Action) -> None:
        proxy.strike(action, "PUT", header=("If-None-Match", "."), times=FOREVER)
        assert not decides(proxied, self.KEY)
        assert [info.key for info in proxied.list("")] == ["a"]

    def test_one_that_refuses_everything_is_told(self, proxy: FaultProxy, proxied: Store) -> None:
        proxy.strike(s3_error(403, "AccessDenied"), "PUT", times=FOREVER)
        with pytest.raises(StoreError, match="AccessDenied"):
            decides(proxied, self.KEY)

    def test_what_may_pass_proves_nothing(self, proxy: FaultProxy, proxied: Store) -> None:
        proxy.strike(status(503), "PUT", times=FOREVER)
        with pytest.raises(TransientStoreError, match="503"):
            decides(proxied, self.KEY)

    def test_a_limit_of_one_change_in_a_second_is_waited_out(
        self, proxy: FaultProxy, proxied: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("deltasync.stores.retries._CHANGE_S", 0.01)
        # with the client's own attempts
        limited = proxy.strike(status(429), "PUT", header=("If-None-Match", "."), times=3)
        assert decides(proxied, self.KEY)
        assert limited.hits == 3
        proxy.strike(status(429), "PUT", header=("If-None-Match", "."), times=6)
        with pytest.raises(TransientStoreError):
            decides(proxied, self.KEY)
        # with the same key, also where something is left of the test before
        assert decides(proxied, self.KEY)

    @pytest.mark.parametrize("skip", [False, True], ids=["first", "second"])
    def test_a_lost_reply_is_no_proof_against_it(self, proxy: FaultProxy, proxied: Store, skip: bool) -> None:
        if skip:
            proxy.strike(ignored("nothing"), "PUT")
        proxy.strike(status(503), "PUT", after=True)
        assert decides(proxied, self.KEY)

    @pytest.mark.parametrize("action", [flipped(), shortened(), empty()], ids=lambda action: action.name)
    def test_a_damaged_answer_is_no_proof_against_it(
        self, proxy: FaultProxy, proxied: Store, action: Action
    ) -> None:
        fault = proxy.strike(action, "GET")
        assert decides(proxied, self.KEY)
        assert fault.hits == 1

    def test_a_writer_that_may_not_delete_leaves_it(self, proxy: FaultProxy, proxied: Store) -> None:
        proxy.strike(s3_error(403, "AccessDenied"), "POST", query="delete", times=FOREVER)
        assert decides(proxied, self.KEY)


class TestBounds:
    """Nothing that a server says of a size is believed."""

    @pytest.mark.parametrize(
        "announced", [b"3\r\nTransfer-Encoding: chunked", b"99999999999999"], ids=["less", "more"]
    )
    def test_a_body_without_end_is_given_up(self, s3_env: object, announced: bytes) -> None:
        chunked = b"chunked" in announced
        piece = bytes(1 << 16)
        with Endless(announced, b"10000\r\n" + piece + b"\r\n" if chunked else piece) as server:
            store = open_store(f"s3://bkt/run?endpoint={server.url}&region=us-east-1")
            with pytest.raises(CorruptDataError, match="may have 1000000 at most"):
                store.read("a", 1_000_000)
            time.sleep(0.05)  # what was sent before the connection ended
            assert server.sent_bytes < 32 << 20


class TestConnections:
    def test_they_are_kept_for_further_requests(self, proxy: FaultProxy, proxied: Store) -> None:
        for _ in range(10):
            proxied.put("b", b"1")
            assert proxied.read("b", 1) == b"1"
        # A request may come before the client has put the last one's connection back, and then opens one
        # more.
        assert len({exchange.connection for exchange in proxy.exchanges}) <= 4

    def test_one_that_the_server_has_closed_is_no_error(self, proxy: FaultProxy, proxied: Store) -> None:
        for action in (
            lambda: proxied.read("a", 3),
            lambda: proxied.create("b", b"1"),
            lambda: proxied.put("b", b"2"),
            lambda: list(proxied.list("")),
            lambda: proxied.delete("b"),
        ):
            proxied.read("a", 3)
            proxy.cut()
            time.sleep(0.05)
            before = len(proxy.exchanges)
            action()
            assert len(proxy.exchanges) - before == 1


class TestRequests:
    def test_a_redirect_to_another_host_is_followed_without_credentials(
        self, proxy: FaultProxy, proxied: Store, s3_server: MotoServer, s3_bucket: str
    ) -> None:
        presigned = s3_server.client.generate_presigned_url(
            "get_object", Params={"Bucket": s3_bucket, "Key": "run/a"}
        )
        with FaultProxy(s3_server.endpoint) as network:
            moved = Reply(
                302, [("Location", presigned.replace(s3_server.endpoint, network.url))], b""
            ).with_body(b"")
            proxy.strike(Action("moved", reply=moved), "GET", times=2)
            signed = network.strike(status(500), header=("Authorization", "."), times=FOREVER)
            assert proxied.read("a", 1 << 30) == b"one"
            assert proxied.read_range("a", 1, 3) == b"ne"
            assert (network.count(), signed.hits) == (2, 0)

    def test_a_large_create_is_one_put_with_a_precondition(self, proxy: FaultProxy, proxied: Store) -> None:
        fault = proxy.strike(s3_error(412, "PreconditionFailed"), "PUT", header=("If-None-Match", r"^\*$"))
        with pytest.raises(ObjectExistsError):
            proxied.create("b", bytes(17 << 20))
        assert (fault.hits, proxy.count()) == (1, 1)

    def test_what_no_single_put_takes_is_refused(self, proxied: Store) -> None:
        with pytest.raises(StoreError, match="limited to 5 GiB"):
            proxied.create("b", bytes(object.LARGEST_BYTES + 1))  # never touched, so never in memory

    def test_large_uploads_get_more_time(self, s3_env: object) -> None:
        store = cloud.CloudStore("s3://bkt/a?region=us-east-1")
        limits = [
            store.client(size).client_options["read_timeout"]
            for size in (0, 1 << 20, 100 << 20, 1 << 30, object.LARGEST_BYTES)
        ]
        assert limits == ["5s", "30s", "2m", "15m", "15m"]

    def test_asking_for_what_is_not_there_is_one_small_request(
        self, proxy: FaultProxy, proxied: Store
    ) -> None:
        with pytest.raises(ObjectMissingError):
            proxied.read("versions/0000012/0000012346.000003-9f8e7d6c.safetensors", 1 << 20)
        (exchange,) = proxy.exchanges
        assert exchange.bytes_up < 500

    def test_many_are_deleted_in_few_requests(self, proxy: FaultProxy, proxied: Store) -> None:
        proxied.delete("a", *(f"missing/{number}" for number in range(1500)))
        assert proxy.count("POST", query="delete") == len(proxy.exchanges) == 2
        assert list(proxied.list("")) == []

    def test_a_bucket_without_a_prefix_is_a_channel_too(self, s3_server: MotoServer, s3_bucket: str) -> None:
        open_store(s3_server.url(s3_bucket, "")).create("a/b", b"1")
        assert open_store(s3_server.url(s3_bucket, "a")).read("b", 1 << 30) == b"1"

    def test_channels_beside_each_other_see_only_their_own(
        self, s3_server: MotoServer, s3_bucket: str
    ) -> None:
        stores = [open_store(s3_server.url(s3_bucket, prefix)) for prefix in ("run", "run2", "run/2")]
        for store in stores:
            store.create("a", b"1")
        assert [info.key for info in stores[1].list("")] == ["a"]
        assert [info.key for info in stores[2].list("")] == ["a"]

    def test_a_url_that_ends_with_a_slash_is_no_other_place(
        self, s3_server: MotoServer, s3_bucket: str
    ) -> None:
        store = open_store(s3_server.url(s3_bucket, prefix="run/"))
        with pytest.raises(ObjectMissingError, match=f"s3://{s3_bucket}/run/a does not exist"):
            store.read("a", 1)

    def test_an_empty_object_in_place_of_the_prefix_is_not_listed(
        self, s3_server: MotoServer, s3_bucket: str
    ) -> None:
        s3_server.client.put_object(Bucket=s3_bucket, Key="run/", Body=b"")
        assert list(open_store(s3_server.url(s3_bucket)).list("")) == []


_FORKED = """
import multiprocessing, sys
from deltasync import open_store
from deltasync.errors import StoreError
url, parent_uses, = sys.argv[1:]
store = open_store(url)

def child(queue):
    try:
        queue.put(store.read("a", 1 << 30))
    except StoreError as error:
        queue.put(error)

if parent_uses == "before":
    store.read("a", 1 << 30)
if parent_uses == "memory":
    open_store("memory://x").put("a", b"1")
context = multiprocessing.get_context("fork")
queue = context.SimpleQueue()
process = context.Process(target=child, args=(queue,))
process.start()
found = queue.get()
process.join()
assert process.exitcode == 0
print(found, store.read("a", 1 << 30))
"""


class TestProcesses:
    def test_opening_a_store_asks_nothing_and_needs_no_credentials(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
        assert open_store("s3://bkt/a?endpoint=http://127.0.0.1:1").url.startswith("s3://")

    def test_a_store_is_pickled_without_its_client_and_without_credentials(self, proxied: Store) -> None:
        pickled = pickle.dumps(proxied)
        assert KEYS["AWS_SECRET_ACCESS_KEY"].encode() not in pickled
        copy = pickle.loads(pickled)
        assert copy.url == proxied.url
        assert copy.read("a", 1 << 30) == b"one"

    @pytest.mark.parametrize("parent_uses", ["after", "before", "memory"])
    def test_a_forked_child_works_or_says_why_not(self, proxied: Store, parent_uses: str) -> None:
        done = subprocess.run(
            [sys.executable, "-c", _FORKED, proxied.url, parent_uses],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        if parent_uses == "after":
            assert done.stdout == "b'one' b'one'\n"
        else:
            assert done.stdout.startswith("This process was forked")
            assert done.stdout.endswith(" b'one'\n")
