"""A publisher and a replica through the real clients of stores, while one request in a hundred fails in some way.

`tests/simulator` has the same faults at the calls of a store, at every step; `tests/contract` has each answer of a server by
itself.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

import pytest

from deltasync import Publisher, Replica, maintenance, open_store
from deltasync.channel import keys
from deltasync.channel.documents import sha256_hex
from deltasync.channel.reading import ChannelReader
from deltasync.errors import DeltaSyncError
from deltasync.stores import Store
from tests import http_faults as faults
from tests.builders import Weights, in_parts, trained, weights
from tests.conftest import assert_same_bits
from tests.faults import FaultyStore
from tests.servers.services import SERVICES, Service

RANDOM_ACTIONS = [
    faults.status(503),
    faults.status(429, retry_after_s=1),
    faults.status(500),
    faults.s3_error(409, "ConditionalRequestConflict"),
    faults.reset(),
    faults.killed_upload(),
    faults.truncated(),
    faults.shortened(),
    faults.empty(),
    faults.flipped(),
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


def assert_all_named(store: Store) -> None:
    """After `gc`, nothing is there that no document names."""
    maintenance.gc(ChannelReader(store), grace_s=0.0)
    left = maintenance.gc(ChannelReader(store), grace_s=0.0, dry_run=True)
    assert (left.objects, left.waiting) == ([], [])


@pytest.mark.parametrize("kind", SERVICES)
def test_versions_through_random_faults(kind: str, request: pytest.FixtureRequest) -> None:
    _publishes_through_chance(kind, request, 60)


@pytest.mark.slow
@pytest.mark.timeout(6 * 3600)
@pytest.mark.parametrize("kind", SERVICES)
def test_many_versions_through_random_faults(kind: str, request: pytest.FixtureRequest) -> None:
    count = int(os.environ.get("FAULT_VERSIONS", "10000"))
    # Those take a tenth of a second for each version.
    _publishes_through_chance(kind, request, count // 10 if kind in ("azurite", "fake_gcs") else count)


def _publishes_through_chance(kind: str, request: pytest.FixtureRequest, count: int) -> None:
    """Publish and follow so many versions through faults at 1 % of all requests; every third has its payload in a part."""
    service: Service = request.getfixturevalue(f"{kind}_service")
    service.proxy.strike_at_random(0.01, RANDOM_ACTIONS, seed=0)
    direct, noting = open_store(service.direct), _Noting(open_store(service.url))
    state, states = weights(), dict[int, Weights]()
    publisher, replica = Publisher(noting, retry_delay_s=0.001, anchor_every=20), Replica(service.url)
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
    struck = sum(1 for exchange in service.proxy.exchanges if exchange.fault)
    service.proxy.heal()
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
