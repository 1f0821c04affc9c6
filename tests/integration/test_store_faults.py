"""What a publisher and a replica do, and say, when the store fails between them: each row of the tables is one fault.

The rows name steps; a store's `Service` says which requests those are (`tests.servers.services`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time

import pytest
import torch

from deltasync import Publisher, Receipt, Replica, housekeeping, layout, open_store
from deltasync.errors import (
    CorruptDataError,
    DeltaSyncError,
    FormatError,
    HeadConflictError,
    MissingVersionError,
    PublishLostError,
    PublishStateUnknownError,
    StoreError,
    TransientStoreError,
)
from deltasync.reader import ChannelReader
from deltasync.stores import Store
from tests import http_faults as faults
from tests.conftest import assert_same_bits
from tests.faults import FlakyStore
from tests.http_faults import Fault
from tests.servers import s3, services
from tests.servers.reverse_proxy import Action
from tests.servers.services import SERVICES, Service

s3_server, s3_env, s3_bucket, s3_service = s3.s3_server, s3.s3_env, s3.s3_bucket, services.s3_service
rgw_server, rgw_bucket, rgw_service = s3.rgw_server, s3.rgw_bucket, services.rgw_service
service = services.service

FOREVER = 10_000

Weights = dict[str, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Case:
    """One fault, and what comes of it.

    Attributes:
        shows: The sentence that the test proves.
        after: The server gets the request; its reply is lost.
        error: What publishing or following raises, None if it does not notice.
        said: Found in the error's message.
        versions: Those in the channel after two more publishes.
        visible: Head, right after the fault.
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


def _weights() -> Weights:
    random = torch.Generator().manual_seed(0)
    return {"w": torch.randn(40, 30, generator=random).to(torch.bfloat16), "ids": torch.arange(7)}


def _trained(weights: Weights, seed: int) -> Weights:
    random = torch.Generator().manual_seed(seed)
    moved = {name: tensor.clone() for name, tensor in weights.items()}
    mask = torch.rand(moved["w"].shape, generator=random) < 0.05
    moved["w"].view(torch.int16).add_(mask.to(torch.int16))
    moved["ids"][seed % 7] += 1
    return moved


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
        self._state = _weights()
        self.publish()
        assert self.replica.sync() == 1

    def publish(self) -> Receipt:
        """Publish the next state; kept in `published` unless it is said to be lost."""
        self._state = _trained(self._state, len(self.published) + 1)
        receipt = self.publisher.publish(self._state.items())
        self.published[receipt.version] = self._state
        try:
            return receipt.wait(60)
        except PublishLostError:
            del self.published[receipt.version]
            raise

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
        assert tuple(layout.manifest_version(info.key) for info in store.list(layout.MANIFESTS)) == versions
        assert self.replica.sync() == versions[-1]
        assert_same_bits(self.replica.state_dict(), self.published[versions[-1]])
        witness = Replica(store)
        for version in versions:
            witness.sync(version)
            assert_same_bits(witness.state_dict(), self.published[version])


def _strike(service: Service, case: Case) -> Fault:
    return service.strike(case.step, case.action, times=case.times, after=case.after)


_EXPIRED = faults.s3_error(403, "ExpiredToken")
_CONFLICT = faults.s3_error(409, "ConditionalRequestConflict")
_NO_BUCKET = faults.s3_error(404, "NoSuchBucket")
_RENEW = "has expired: renew the credentials"
_BUSY = faults.status(503, retry_after_s=1)
_RESET = faults.reset()
_KILLED = faults.killed_upload()
_LATE = faults.late(0.6)  # of 0.3 s that are waited

PUBLISHING = [
    Case("a busy store is asked again for the payload", "put payload", _BUSY, 5),
    Case("a busy store is asked again for the manifest", "put manifest", _BUSY, 5),
    Case("a busy store is asked again for head", "put head", _BUSY, 5),
    Case("too many requests are no loss", "put manifest", faults.status(429, retry_after_s=1), 5),
    Case("an internal error is no loss", "put payload", faults.status(500), 5),
    Case("a reset before the payload is stored is no loss", "put payload", _RESET, 2),
    Case("a payload whose reply is lost is stored once", "put payload", _RESET, 2, after=True),
    Case("a manifest whose reply is lost is stored once", "put manifest", _RESET, 2, after=True),
    Case("a head whose reply is lost is stored", "put head", _RESET, 2, after=True),
    Case("a payload that the client itself sends twice is stored once", "put payload", _BUSY, after=True),
    Case("a manifest that the client itself sends twice is no conflict", "put manifest", _BUSY, after=True),
    Case("a payload half uploaded is uploaded again", "put payload", _KILLED, 2),
    Case("a manifest half uploaded is uploaded again", "put manifest", _KILLED, 2),
    Case("a head half uploaded is uploaded again", "put head", _KILLED, 2),
    Case("a conflict between concurrent writes is tried again", "put manifest", _CONFLICT, 2),
    Case("a reply without a body is enough", "any", faults.empty(), 3),
    Case("a reply with a damaged body is enough", "put payload", faults.flipped()),
    Case("a payload answered too late is stored once", "put payload", _LATE),
    Case("a manifest answered too late is stored once", "put manifest", _LATE),
    Case("a clock that differs is no loss", "any", faults.skewed(3600), FOREVER),
    Case(
        "an expired token loses the version and says what to do",
        *("put payload", _EXPIRED, FOREVER),
        error=PublishLostError,
        said=_RENEW,
        versions=(1, 2, 3),
        visible=1,
    ),
    Case(
        "a number whose manifest may be stored is not used again",
        *("put manifest", _EXPIRED, FOREVER),
        error=PublishLostError,
        said=_RENEW,
        versions=(1, 3, 4),
        visible=1,
    ),
    Case(
        "a manifest without a head is repaired by the next publish",
        *("put head", _EXPIRED, FOREVER),
        error=PublishStateUnknownError,
        said=_RENEW,
        visible=1,
    ),
    Case(
        "a store that stays away loses the version",
        *("put payload", _BUSY, FOREVER),
        error=PublishLostError,
        said="503 Service Unavailable",
        versions=(1, 2, 3),
        visible=1,
    ),
    Case(
        "a head that stays away leaves the state unknown",
        *("put head", _BUSY, FOREVER),
        error=PublishStateUnknownError,
        said="head may not name it yet",
        visible=1,
    ),
    Case(
        "a head that is stored but never answered leaves the state unknown, and is visible",
        *("put head", _RESET, FOREVER),
        after=True,
        error=PublishStateUnknownError,
        said="head may not name it yet",
    ),
    Case(
        "a bucket that is gone is named",
        *("put payload", _NO_BUCKET, FOREVER),
        error=PublishLostError,
        said="there is no such bucket",
        versions=(1, 2, 3),
        visible=1,
    ),
    Case(
        "a clock that is off by too much is named",
        *("put payload", faults.s3_error(403, "RequestTimeTooSkewed"), FOREVER),
        error=PublishLostError,
        said="clock",
        versions=(1, 2, 3),
        visible=1,
    ),
]

_HALF, _EMPTY, _FLIP, _CUT = faults.shortened(), faults.empty(), faults.flipped(), faults.truncated()
_MISSING = faults.s3_error(404, "NoSuchKey")

FOLLOWING = [
    Case("a busy store is asked again for head", "get head", _BUSY, 2),
    Case("a reset is asked again", "get head", _RESET, 2),
    Case("a head that breaks off is taken up again", "get head", _CUT),
    Case("a payload that breaks off is taken up again", "get payload", _CUT),
    Case("a slow payload is waited for", "get payload", faults.slow(0.02)),
    Case("a payload that does not come is asked for again", "get payload", _LATE),
    Case("a clock that differs does not matter", "any", faults.skewed(-3600), FOREVER),
    Case("a store that stays away is said", "get head", _BUSY, FOREVER, error=TransientStoreError, said="503"),
    Case("a server that is gone is said", "any", _RESET, FOREVER, error=TransientStoreError, said="Connection reset"),
    Case("an expired token is said", "get head", _EXPIRED, error=StoreError, said=_RENEW),
    Case("an expired token at a payload is said", "get payload", _EXPIRED, error=StoreError, said=_RENEW),
    Case("half a head is not followed", "get head", _HALF, error=FormatError, said="head.json"),
    Case("an empty head is not followed", "get head", _EMPTY, error=FormatError, said="head.json"),
    Case("a damaged head is not followed", "get head", _FLIP, error=DeltaSyncError),
    Case("half a manifest is not followed", "get manifest", _HALF, error=FormatError, said="manifests/"),
    Case("an empty manifest is not followed", "get manifest", _EMPTY, error=FormatError, said="manifests/"),
    Case("a damaged manifest is not followed", "get manifest", _FLIP, error=FormatError, said="manifests/"),
    Case("a manifest that lags is missing", "get manifest", _MISSING, error=MissingVersionError, said="no manifest"),
    Case("half a payload is not applied", "get payload", _HALF, error=CorruptDataError, said="its manifest says"),
    Case("an empty payload is not applied", "get payload", _EMPTY, error=CorruptDataError, said="its manifest says"),
    Case("a damaged payload is not applied", "get payload", _FLIP, error=CorruptDataError, said="sha256"),
    Case("a payload that lags is missing", "get payload", _MISSING, error=MissingVersionError, said="is referred to"),
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
    if case.error is None:
        keys = [info.key for info in open_store(service.direct).list("deltas/")]
        assert keys == [f"{layout.delta_dir(version)}/{layout.delta_part(1, 1)}" for version in (2, 3, 4)]
    return said, recovered_s


@pytest.mark.parametrize("case", FOLLOWING, ids=lambda case: case.shows)
def test_following(service: Service, case: Case) -> None:
    follows_through(service, case)


def follows_through(service: Service, case: Case) -> tuple[str, float]:
    """Assert a row of FOLLOWING; returns the error, and seconds from when the store was well until head was followed."""
    run, said = Run(service), ""
    run.publish()
    fault = _strike(service, case)
    if case.error is None:
        assert run.replica.sync() == 2
    else:
        with pytest.raises(case.error, match=case.said) as failure:
            run.replica.sync()
        assert run.replica.version == 1
        said = str(failure.value)
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


def test_a_stale_head_is_an_old_version_and_no_error(service: Service) -> None:
    run = Run(service)
    run.publish()
    service.strike("get head", faults.stale(), times=3)
    assert [run.replica.sync() for _ in range(4)] == [1, 1, 1, 2]
    run.check_end((1, 2))


def test_a_payload_that_the_store_confirmed_and_lost_is_passed_by_at_the_next_anchor(service: Service) -> None:
    run = Run(service)
    service.strike("put payload", faults.swallowed())
    run.publish()
    with pytest.raises(MissingVersionError, match="is referred to by a manifest"):
        run.replica.sync()
    run.publish()
    with pytest.raises(MissingVersionError):
        run.replica.sync()
    assert_same_bits(run.replica.state_dict(), run.published[1])
    assert run.publish().anchor_bytes
    assert run.replica.sync() == run.check_visible() == 4
    assert_same_bits(run.replica.state_dict(), run.published[4])
    run.publisher.close()


def test_a_damaged_answer_to_who_was_first_is_not_taken_for_another_publisher(service: Service) -> None:
    run = Run(service)
    for step, action, after in (("put manifest", _RESET, True), ("get manifest", _FLIP, False)):
        service.strike(step, action, after=after)
    run.publish()
    run.check_end((1, 2))


def test_a_damaged_channel_is_read_again(service: Service) -> None:
    run = Run(service)
    at = open_store(service.direct).read(layout.CHANNEL).index(str(run.publisher.run_id).encode()) + 5
    service.strike("get channel", faults.flipped(at))
    run.replica = Replica(service.url)
    run.check_end((1,))


class TestResume:
    def test_a_stale_listing_does_not_hide_what_head_names(self, service: Service) -> None:
        run = Run(service)
        list(open_store(service.url).list(layout.MANIFESTS))  # what the stale listing will say
        run.publish()
        run.publisher.close()
        service.strike("list", faults.stale(), times=FOREVER)
        run.publisher = Publisher(service.url, resume=True, retry_delay_s=0.001, anchor_every=3)
        assert run.publisher.version == 2
        run.publish()
        run.check_end((1, 2, 3))

    def test_a_publisher_that_sees_an_old_channel_is_fenced_off(self, service: Service) -> None:
        run = Run(service)
        list(open_store(service.url).list(layout.MANIFESTS))
        run.publish()
        run.publisher.close()
        for step in ("list", "get head"):
            service.strike(step, faults.stale(), times=FOREVER)
        misled = Publisher(service.url, resume=True, retry_delay_s=0.001)
        assert misled.version == 1
        with pytest.raises(HeadConflictError, match="wrote version 2"):
            misled.publish(_weights().items()).wait(60)
        with pytest.raises(HeadConflictError):
            misled.close()
        service.proxy.heal()
        run.check_end((1, 2))

    def test_of_two_publishers_at_once_one_wins_each_version(self, service: Service) -> None:
        run = Run(service)
        other = Publisher(service.direct, resume=True)
        state = _trained(_weights(), 5)
        receipts = [run.publisher.publish(state.items()), other.publish(_weights().items())]
        won = []
        for number, receipt in enumerate(receipts):
            try:
                receipt.wait(60)
                won.append(number)
            except HeadConflictError:
                pass
        (winner,) = won
        run.published[2] = (state, _weights())[winner]
        with contextlib.suppress(HeadConflictError):
            other.close()
        with contextlib.suppress(HeadConflictError):
            run.publisher.close()
        assert run.check_visible() == 2
        assert run.replica.sync() == 2


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


@pytest.mark.timeout(6 * 3600)
@pytest.mark.parametrize("kind", ["memory", "file", *SERVICES])
def test_many_versions_through_random_faults(kind: str, request: pytest.FixtureRequest) -> None:
    # FAULT_VERSIONS=10000 for the long run.
    count, rate = int(os.environ.get("FAULT_VERSIONS", "150")), 0.01
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
    state, states = _weights(), dict[int, Weights]()
    publisher, replica = Publisher(ends[0], retry_delay_s=0.001, anchor_every=20), Replica(ends[1])
    refusals = 0
    for number in range(1, count + 1):
        state = _trained(state, number)
        assert publisher.publish(state.items()).wait(60).version == number
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
    else:
        struck = sum(end.faults for end in ends if isinstance(end, FlakyStore))
    print(f"{kind}: {count} versions, {struck} faults, {refusals} times the replica refused")
    assert struck
    manifests = [layout.manifest_version(info.key) for info in direct.list(layout.MANIFESTS)]
    assert manifests == list(range(1, count + 1))
    housekeeping.prune(ChannelReader(direct), grace_s=0.0)
    left = housekeeping.prune(ChannelReader(direct), grace_s=0.0, dry_run=True)
    assert (left.objects, left.waiting) == ([], [])
    witness = Replica(direct)
    for version, expected in states.items():
        witness.sync(version)
        assert_same_bits(witness.state_dict(), expected)
