"""Each operation raises only the classes that it may, whatever a store replies."""

from __future__ import annotations

import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltasync import open_store
from deltasync.clouds import cloud
from deltasync.clouds.hub import HubStore
from deltasync.errors import ObjectExistsError, ObjectMissingError, StoreError, TransientStoreError
from deltasync.stores import replies
from deltasync.stores.replies import Meaning, meaning
from tests.http_faults import FaultProxy, status
from tests.hub.fixtures import HubServer
from tests.servers.s3 import MotoServer

LASTING = {StoreError, TransientStoreError}
ALLOWED = {
    "create": LASTING | {ObjectExistsError},
    "put": LASTING,
    "read": LASTING | {ObjectMissingError},
    "list": LASTING,
    "delete": LASTING,
}
CODES = st.sampled_from(
    sorted([*replies._CODES, *replies._NO_PLACE, "", "AccessDenied", "InvalidBucketState"])
) | st.text(string.ascii_letters + ".", min_size=1, max_size=20)


@pytest.mark.parametrize(
    ("number", "code", "found"),
    [
        (412, "PreconditionFailed", Meaning.EXISTS),
        (412, "ConditionNotMet", Meaning.EXISTS),
        (412, "", Meaning.EXISTS),
        (412, "LeaseIdMissing", Meaning.REFUSED),
        (409, "BlobAlreadyExists", Meaning.EXISTS),
        (409, "", Meaning.REFUSED),
        (409, "InvalidBucketState", Meaning.REFUSED),
        (409, "BlobImmutableDueToPolicy", Meaning.REFUSED),
        (409, "ContainerBeingDeleted", Meaning.LATER),
        (409, "OperationAborted", Meaning.RACE),
        (404, "NoSuchKey", Meaning.MISSING),
        (404, "", Meaning.MISSING),
        (404, "NoSuchBucket", Meaning.REFUSED),
        (404, "SomethingNew", Meaning.REFUSED),
        (400, "RequestTimeout", Meaning.LATER),
        (429, "", Meaning.THROTTLED),
        (503, "SlowDown", Meaning.THROTTLED),
        (500, "", Meaning.LATER),
        (501, "NotImplemented", Meaning.REFUSED),
        (0, "", Meaning.LATER),
        (0, "AccessDenied", Meaning.REFUSED),
        (0, "InternalError", Meaning.LATER),
        (200, "", Meaning.LATER),
    ],
)
def test_what_a_reply_means(number: int, code: str, found: Meaning) -> None:
    assert meaning(number, code) is found


@given(st.integers(0, 999), CODES, st.sampled_from(sorted(ALLOWED)))
def test_every_reply_has_a_meaning_and_every_operation_its_classes(
    number: int, code: str, operation: str
) -> None:
    assert replies.error_class(operation, meaning(number, code)) in ALLOWED[operation] | (  # type: ignore[arg-type]
        {ObjectMissingError} if operation == "delete" else set()
    )


def test_a_cloud_holds_to_it(
    s3_server: MotoServer, s3_bucket: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cloud, "_RETRIES", {"max_retries": 0})
    with FaultProxy(s3_server.endpoint) as proxy:
        store = open_store(s3_server.url(s3_bucket, endpoint=proxy.url))
        calls = {
            "create": lambda: store.create("a", b"1"),
            "put": lambda: store.put("a", b"1"),
            "read": lambda: store.read("a", 1),
            "list": lambda: list(store.list("")),
            "delete": lambda: store.delete("a"),
        }

        @given(
            st.integers(300, 599),
            CODES,
            st.text(string.printable, max_size=40),
            st.sampled_from(sorted(calls)),
        )
        @settings(max_examples=100)
        def holds(number: int, code: str, reason: str, operation: str) -> None:
            proxy.heal()
            told = (
                f"<Code>{code}</Code><Message>{reason.replace('<', '').replace('&', '')}</Message>"
                if code
                else reason
            )
            proxy.strike(status(number, f"<?xml version='1.0'?><Error>{told}</Error>".encode()), times=9)
            try:
                calls[operation]()
            except StoreError as error:
                assert type(error) in ALLOWED[operation]
                assert len(str(error)) < 500
            else:
                assert operation == "delete"  # a missing object is no error

        @given(CODES.filter(bool), st.sampled_from(["run/a", "/run/a", "run%2Fa", ""]))
        @settings(max_examples=30)
        def holds_in_bulk(code: str, key: str) -> None:
            """A key that the client does not expect makes it panic."""
            proxy.heal()
            refused = f"<Error><Key>{key}</Key><Code>{code}</Code><Message>x</Message></Error>"
            proxy.strike(
                status(200, f"<?xml version='1.0'?><DeleteResult>{refused}</DeleteResult>".encode()),
                "POST",
                times=9,
            )
            try:
                store.delete("a", "b")
            except StoreError as error:
                assert type(error) in ALLOWED["delete"]

        holds()
        holds_in_bulk()
    capfd.readouterr()  # what a panic prints


def test_the_hub_holds_to_it(hub: HubServer, hub_channel: HubStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltasync.clouds.hub._RETRIES", 0)
    hub_channel.put("a", b"1")
    steps = {"read": ("resolve",), "list": ("tree",), "delete": ("batch",), "put": ("batch", "write_token")}

    @given(st.integers(400, 599), CODES, st.sampled_from(sorted(steps)))
    @settings(max_examples=60)
    def holds(number: int, code: str, operation: str) -> None:
        hub.reset()
        for step in steps[operation]:
            hub.arm(step, times=9, status=number, headers={"X-Error-Code": code, "Retry-After": "0"})
        store = HubStore(hub_channel.url)
        calls = {
            "read": lambda: store.read("a", 1),
            "list": lambda: list(store.list("")),
            "delete": lambda: store.delete("a"),
            "put": lambda: store.put("a", b"1"),
        }
        with pytest.raises(StoreError) as caught:
            calls[operation]()
        assert type(caught.value) in ALLOWED[operation]

    holds()
