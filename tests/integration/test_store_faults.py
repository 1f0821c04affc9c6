"""What a publisher and a replica do, and say, when the store fails between them: each row of the tables is one fault.

The rows name steps; a store's `Service` says which requests those are (`tests.servers.services`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable

import pytest

from deltasync import Publisher, Receipt, Replica, maintenance, open_store
from deltasync.channel import keys
from deltasync.channel.documents import sha256_hex
from deltasync.channel.reading import ChannelReader
from deltasync.errors import (
    DeltaSyncError,
    FencedError,
    MissingVersionError,
    PublishLostError,
    PublishPendingError,
    StoreError,
    TransientStoreError,
)
from deltasync.stores import Store
from tests import http_faults as faults
from tests.builders import Weights, in_parts, settle, trained, weights
from tests.conftest import assert_same_bits
from tests.faults import FaultyStore, FlakyStore
from tests.http_faults import Fault
from tests.servers.reverse_proxy import Action
from tests.servers.services import SERVICES, Service

FOREVER = 10_000


@dataclasses.dataclass(frozen=True)
class Case:
    """One fault, and what comes of it.

    Attributes:
        shows: The sentence that the test proves.
        step: At which it strikes. Where it names parts, no payload is inside its record.
        after: The server gets the request; its reply is lost.
        error: What publishing or following raises, None if it does not notice.
        said: Found in the error's message.
        versions: Those in the channel after two more publishes.
        visible: The newest version right after the fault.
    """

    shows: str
    step: str
    action: Action
    times: int = 1
    after: bool = False
    error: type[DeltaSyncError] | None = None
    said: str = "."
    versions: tuple[int, ...] = (1, 2, 3, 4)
    visible: int = 2


class Run:
    """A publisher and a replica on one channel, the first version published and followed.

    Attributes:
        published: Every version that may be visible, with its bits.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self.publisher = Publisher(service.url, retries=3, retry_delay_s=0.001, anchor_every=3)
        self.replica = Replica(service.url)
        self.published: dict[int, Weights] = {}
        self._state = weights()
        self.publish()
        assert self.replica.sync() == 1

    def publish(self) -> Receipt:
        """Publish the next state, wait for all that follows it; kept in `published` unless it is said to be lost."""
        self._state = trained(self._state, len(self.published) + 1)
        receipt = self.publisher.publish(self._state.items())
        self.published[receipt.version] = self._state
        try:
            return receipt.wait(60)
        except PublishLostError:
            del self.published[receipt.version]
            raise
        finally:
            settle(self.publisher)

    def check_visible(self) -> int:
        """What a fresh replica sees without the proxy is a whole version, with the bits that were published as such."""
        witness = Replica(self._service.direct)
        version = witness.sync()
        assert_same_bits(witness.state_dict(), self.published[version])
        return version

    def check_end(self, versions: tuple[int, ...]) -> None:
        """Once the store is well: these versions, each with its bits, and the replica at the newest."""
        self.publisher.close()
        assert tuple(self.published) == versions
        store = open_store(self._service.direct)
        assert tuple(version.version for version in ChannelReader(store).versions())[::-1] == versions
        assert self.replica.sync() == versions[-1]
        assert_same_bits(self.replica.state_dict(), self.published[versions[-1]])
        witness = Replica(store)
        for version in versions:
            witness.sync(version)
            assert_same_bits(witness.state_dict(), self.published[version])


def _strike(service: Service, case: Case) -> Fault:
    return service.strike(case.step, case.action, times=case.times, after=case.after)


def _inlined(case: Case) -> contextlib.AbstractContextManager[object]:
    return in_parts() if "part" in case.step else contextlib.nullcontext()


_EXPIRED = faults.s3_error(403, "ExpiredToken")
_CONFLICT = faults.s3_error(409, "ConditionalRequestConflict")
_NO_BUCKET = faults.s3_error(404, "NoSuchBucket")
_RENEW = "has expired: renew the credentials"
_BUSY = faults.status(503, retry_after_s=1)
_RESET = faults.reset()
_KILLED = faults.killed_upload()
_LATE = faults.late(0.6)

PUBLISHING = [
    Case("a busy store is asked again for the part", "put part", _BUSY, 5),
    Case("a busy store is asked again for the record", "put record", _BUSY, 5),
    Case("a busy store is asked again for head", "put head", _BUSY, 5),
    Case("too many requests are no loss", "put record", faults.status(429, retry_after_s=1), 5),
    Case("an internal error is no loss", "put part", faults.status(500), 5),
    Case("a reset before the part is stored is no loss", "put part", _RESET, 2),
    Case("a part whose reply is lost is stored once", "put part", _RESET, 2, after=True),
    Case("a record whose reply is lost is stored once", "put record", _RESET, 2, after=True),
    Case("a head whose reply is lost is stored", "put head", _RESET, 2, after=True),
    Case("a part that the client itself sends twice is stored once", "put part", _BUSY, after=True),
    Case("a record that the client itself sends twice is nobody else's", "put record", _BUSY, after=True),
    Case("a part half uploaded is uploaded again", "put part", _KILLED, 2),
    Case("a record half uploaded is uploaded again", "put record", _KILLED, 2),
    Case("a head half uploaded is uploaded again", "put head", _KILLED, 2),
    Case("a conflict between concurrent writes is tried again", "put record", _CONFLICT, 2),
    Case("a reply without a body is enough", "any", faults.empty(), 3),
    Case("a reply with a damaged body is enough", "put part", faults.flipped()),
    Case("a part answered too late is stored once", "put part", _LATE),
    Case("a record answered too late is stored once", "put record", _LATE),
    Case("a clock that differs is no loss", "any", faults.skewed(3600), FOREVER),
    Case("a head that cannot be written is done without", "put head", _EXPIRED, FOREVER),
    Case("a head that stays away is done without", "put head", _BUSY, FOREVER),
    Case(
        "an expired token loses the version and says what to do",
        *("put part", _EXPIRED, FOREVER),
        error=PublishLostError,
        said=_RENEW,
        versions=(1, 2, 3),
        visible=1,
    ),
    Case(
        "a record that was refused keeps its number and its bytes",
        *("put record", _EXPIRED, FOREVER),
        error=PublishPendingError,
        said=_RENEW,
        visible=1,
    ),
    Case(
        "a store that stays away before the record loses the version",
        *("put part", _BUSY, FOREVER),
        error=PublishLostError,
        said="503 Service Unavailable",
        versions=(1, 2, 3),
        visible=1,
    ),
    Case(
        "a record that stays away is pending",
        *("put record", _BUSY, FOREVER),
        error=PublishPendingError,
        said="the next publish puts the same bytes again",
        visible=1,
    ),
    Case(
        "a record that is stored but never answered is pending, and visible",
        *("put record", _RESET, FOREVER),
        after=True,
        error=PublishPendingError,
        said="the next publish puts the same bytes again",
    ),
    Case(
        "a bucket that is gone is named",
        *("put part", _NO_BUCKET, FOREVER),
        error=PublishLostError,
        said="there is no such bucket",
        versions=(1, 2, 3),
        visible=1,
    ),
    Case(
        "a clock that is off by too much is named",
        *("put part", faults.s3_error(403, "RequestTimeTooSkewed"), FOREVER),
        error=PublishLostError,
        said="clock",
        versions=(1, 2, 3),
        visible=1,
    ),
]

_HALF, _EMPTY, _FLIP, _CUT = faults.shortened(), faults.empty(), faults.flipped(), faults.truncated()
_MISSING = faults.s3_error(404, "NoSuchKey")

FOLLOWING = [
    Case("a busy store is asked again for the record", "get record", _BUSY, 2),
    Case("a reset is asked again", "get record", _RESET, 2),
    Case("a record that breaks off is taken up again", "get record", _CUT),
    Case("a part that breaks off is taken up again", "get part", _CUT),
    Case("a slow part is waited for", "get part", faults.slow(0.02)),
    Case("a part that does not come is asked for again", "get part", _LATE),
    Case("a clock that differs does not matter", "any", faults.skewed(-3600), FOREVER),
    Case("a record that lags is found by head", "get record", _MISSING),
    Case("half a head is done without", "get head", _HALF),
    Case("an empty head is done without", "get head", _EMPTY),
    Case("a damaged head is done without", "get head", _FLIP),
    Case("a missing head is done without", "get head", _MISSING),
    Case("a store that stays away is said", "get record", _BUSY, FOREVER, error=TransientStoreError, said="503"),
    Case("a server that is gone is said", "any", _RESET, FOREVER, error=TransientStoreError, said="Connection reset"),
    Case("an expired token is said", "get record", _EXPIRED, FOREVER, error=StoreError, said=_RENEW),
    Case("an expired token at a part is said", "get part", _EXPIRED, error=StoreError, said=_RENEW),
    Case("half a record is not followed", "get record", _HALF, FOREVER, error=DeltaSyncError),
    Case("an empty record is not followed", "get record", _EMPTY, FOREVER, error=DeltaSyncError),
    Case("a damaged record is not followed", "get record", _FLIP, FOREVER, error=DeltaSyncError),
    Case("half a part is not applied", "get part", _HALF, error=DeltaSyncError),
    Case("an empty part is not applied", "get part", _EMPTY, error=DeltaSyncError),
    Case("a damaged part is not applied", "get part", _FLIP, error=DeltaSyncError),
    Case("a part that lags is missing", "get part", _MISSING, error=MissingVersionError),
]


@pytest.mark.parametrize("case", PUBLISHING, ids=lambda case: case.shows)
def test_publishing(service: Service, case: Case) -> None:
    publishes_through(service, case)


def publishes_through(service: Service, case: Case) -> tuple[str, float]:
    """Assert a row of PUBLISHING.

    Returns:
        The error, "" if there was none; seconds from when the store was well until a new version was followed.
    """
    run, said = Run(service), ""
    with _inlined(case):
        fault = _strike(service, case)
        if case.error is None:
            assert run.publish().kind == "delta"
        else:
            with pytest.raises(case.error, match=case.said) as failure:
                run.publish()
            assert type(failure.value) is case.error
            said = str(failure.value)
        assert fault.hits == case.times or case.times >= FOREVER
        assert fault.hits
        assert run.check_visible() == case.visible
        service.proxy.heal()
        assert run.replica.sync() == case.visible
        well_s = time.perf_counter()
        run.publish()
        run.replica.sync()
        recovered_s = time.perf_counter() - well_s
        run.publish()
    run.check_end(case.versions)
    assert_all_named(open_store(service.direct))
    return said, recovered_s


def assert_all_named(store: Store) -> None:
    """After `gc`, nothing is there that no document names."""
    maintenance.gc(ChannelReader(store), grace_s=0.0)
    left = maintenance.gc(ChannelReader(store), grace_s=0.0, dry_run=True)
    assert (left.objects, left.waiting) == ([], [])


@pytest.mark.parametrize("case", FOLLOWING, ids=lambda case: case.shows)
def test_following(service: Service, case: Case) -> None:
    follows_through(service, case)


def follows_through(service: Service, case: Case) -> tuple[str, float]:
    """Assert a row of FOLLOWING; returns the error, and seconds from when the store was well until it was followed."""
    run, said = Run(service), ""
    with _inlined(case):
        run.publish()
    fault = _strike(service, case)
    if case.error is None:
        assert run.replica.sync() == 2
    else:
        with pytest.raises(case.error, match=case.said) as failure:
            run.replica.sync()
        assert run.replica.version == 1
        said = f"{type(failure.value).__name__}: {failure.value}"
    assert fault.hits == case.times or case.times >= FOREVER
    assert_same_bits(run.replica.state_dict(), run.published[run.replica.version or 0])
    service.proxy.heal()
    well_s = time.perf_counter()
    assert run.replica.sync() == 2
    recovered_s = time.perf_counter() - well_s
    for _ in range(2):
        run.publish()
    run.check_end(case.versions)
    return said, recovered_s


def test_a_stale_head_costs_nothing(service: Service) -> None:
    run = Run(service)
    run.publish()
    service.strike("get head", faults.stale(), times=3)
    assert run.replica.sync() == 2
    run.check_end((1, 2))


@pytest.mark.parametrize("step", ["put part", "put record"])
def test_what_the_store_confirmed_and_lost_is_passed_by_at_the_next_anchor(service: Service, step: str) -> None:
    run = Run(service)
    with in_parts():
        service.strike(step, faults.swallowed())
        run.publish()
        if step == "put part":
            with pytest.raises(MissingVersionError):
                run.replica.sync()
        run.publish()
        with pytest.raises(MissingVersionError):
            run.replica.sync()
        assert_same_bits(run.replica.state_dict(), run.published[1])
        run.publish()  # announces an anchor
    assert run.replica.sync() == run.check_visible() == 4
    assert_same_bits(run.replica.state_dict(), run.published[4])
    run.publisher.close()


def test_a_damaged_channel_is_read_again(service: Service) -> None:
    run = Run(service)
    at = open_store(service.direct).read(keys.CHANNEL, 1 << 30).index(str(run.publisher.run_id).encode()) + 5
    service.strike("get channel", faults.flipped(at))
    run.replica = Replica(service.url)
    with contextlib.suppress(DeltaSyncError):
        run.replica.sync()
    run.check_end((1,))


class TestResume:
    @pytest.mark.parametrize("steps", [("list",), ("list", "get head")])
    def test_a_stale_listing_does_not_hide_what_is_there(self, service: Service, steps: tuple[str, ...]) -> None:
        run = Run(service)
        list(open_store(service.url).list(keys.VERSIONS))  # what the stale listing will say
        run.publish()
        run.publisher.close()
        for step in steps:
            service.strike(step, faults.stale(), times=FOREVER)
        run.publisher = Publisher(service.url, resume=True, retry_delay_s=0.001, anchor_every=3)
        assert run.publisher.version == 2
        run.publish()
        service.proxy.heal()
        run.check_end((1, 2, 3))

    def test_the_publisher_that_opens_the_channel_is_the_one_that_writes(self, service: Service) -> None:
        run = Run(service)
        other = Publisher(service.direct, resume=True)
        receipts = [run.publisher.publish(trained(weights(), 5).items()), other.publish(weights().items())]
        with pytest.raises(FencedError, match="Another publisher opened the channel"):
            receipts[0].wait(60)
        receipts[1].wait(60)
        run.published[2] = weights()
        with pytest.raises(FencedError):
            run.publisher.close()
        other.close()
        assert run.check_visible() == 2
        assert run.replica.sync() == 2
        assert_same_bits(run.replica.state_dict(), weights())


RANDOM_ACTIONS = [
    faults.status(503),
    faults.status(429, retry_after_s=1),
    faults.status(500),
    _CONFLICT,
    _RESET,
    _KILLED,
    _CUT,
    _HALF,
    _EMPTY,
    _FLIP,
    faults.stale(),
]


class _Noting(FaultyStore):
    """Notes what was sent to each key."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.sent: dict[str, set[str]] = {}

    def create(self, key: str, data: bytes) -> None:
        self.sent.setdefault(key, set()).add(sha256_hex(data))
        self.inner.create(key, data)

    def put(self, key: str, data: bytes, *, guard: Callable[[], None] | None = None) -> None:
        self.sent.setdefault(key, set()).add(sha256_hex(data))
        self.inner.put(key, data, guard=guard)

    def check(self, direct: Store, copy: Store) -> None:
        """No key but head was ever sent two contents, and what is there is what was sent. All of it is copied."""
        probes = ("probe/",)
        assert [
            key for key, found in self.sent.items() if len(found) > 1 and key != keys.HEAD and not key.startswith(probes)
        ] == []
        for info in direct.list(""):
            data = direct.read(info.key, 1 << 30)
            assert sha256_hex(data) in self.sent[info.key]
            copy.put(info.key, data)


@pytest.mark.parametrize("kind", ["memory", "file", *SERVICES])
def test_versions_through_random_faults(kind: str, request: pytest.FixtureRequest) -> None:
    _publishes_through_chance(kind, request, 150 if kind in ("memory", "file") else 60)


@pytest.mark.slow
@pytest.mark.timeout(6 * 3600)
@pytest.mark.parametrize("kind", ["memory", "file", *SERVICES])
def test_many_versions_through_random_faults(kind: str, request: pytest.FixtureRequest) -> None:
    count = int(os.environ.get("FAULT_VERSIONS", "10000"))
    # Those take a tenth of a second for each version.
    _publishes_through_chance(kind, request, count // 10 if kind in ("azurite", "fake_gcs") else count)


def _publishes_through_chance(kind: str, request: pytest.FixtureRequest, count: int) -> None:
    """Publish and follow so many versions through faults at 1 % of all requests; every third has its payload in a part."""
    rate = 0.01
    service: Service | None = None
    if kind not in ("memory", "file"):
        service = request.getfixturevalue(f"{kind}_service")
        assert service is not None
        service.proxy.strike_at_random(rate, RANDOM_ACTIONS, seed=0)
        direct = open_store(service.direct)
        ends: tuple[Store, Store] = (open_store(service.url), open_store(service.url))
    else:
        folder = request.getfixturevalue("tmp_path")
        direct = open_store(f"memory://{folder.name}-{os.getpid()}" if kind == "memory" else f"file://{folder}/channel")
        ends = (FlakyStore(direct, rate, 1), FlakyStore(direct, rate, 2))
    noting = _Noting(ends[0])
    state, states = weights(), dict[int, Weights]()
    publisher, replica = Publisher(noting, retry_delay_s=0.001, anchor_every=20), Replica(ends[1])
    refusals = 0
    for number in range(1, count + 1):
        state = trained(state, number)
        with in_parts() if number % 3 == 0 else contextlib.nullcontext():
            receipt = publisher.publish(state.items(), step=number).wait(60)
        assert receipt.version == number
        states[number] = state
        for _ in range(10):
            try:
                version = replica.sync()
            except DeltaSyncError:
                refusals += 1
                continue
            assert_same_bits(replica.state_dict(), states[version])
            if version == number:
                break
        else:
            pytest.fail(f"the replica did not reach version {number} in ten attempts")
    publisher.close()
    if service is not None:
        struck = sum(1 for exchange in service.proxy.exchanges if exchange.fault)
        service.proxy.heal()
    else:
        struck = sum(end.faults for end in ends if isinstance(end, FlakyStore))
    print(f"{kind}: {count} versions, {struck} faults, {refusals} times the replica refused")
    assert struck
    left = open_store(f"memory://left-{kind}-{os.getpid()}")  # everything is read once; a listing of a long channel is slow
    noting.check(direct, left)
    assert_all_named(left)
    reader = ChannelReader(left)
    assert [version.version for version in reader.versions()] == list(range(count, 0, -1))
    report = maintenance.check(reader, read_data=True)
    assert (report.problems, report.proven) == ([], list(range(1, count + 1)))
    witness = Replica(reader)
    for version, expected in states.items():
        witness.sync(version)
        assert_same_bits(witness.state_dict(), expected)
