"""Replicas behind the HTTP cache of docs/guides/cache.md: the bucket sends each byte once."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from deltasync import Publisher, Replica
from deltasync.channel import keys
from deltasync.errors import CorruptDataError, DeltaSyncError
from tests.conftest import assert_same_bits
from tests.http_faults import FaultProxy, late, status
from tests.servers.nginx import cache_before, require_nginx
from tests.servers.s3 import MotoServer
from tests.waiting import wait_until

ELEMENTS = 5_000_000  # full weights are two slices
VERSIONS, REPLICAS = 3, 20
_HEADERS_BYTES = 2_000  # of a request that the cache repeats, or of a small reply


@pytest.fixture
def origin(s3_server: MotoServer) -> Iterator[FaultProxy]:
    require_nginx()
    with FaultProxy(s3_server.endpoint) as proxy:
        yield proxy


@pytest.fixture
def cache(origin: FaultProxy, tmp_path: Path) -> Iterator[str]:
    with cache_before(origin.url, tmp_path) as url:
        yield url


@pytest.fixture
def behind(s3_server: MotoServer, s3_bucket: str, cache: str) -> str:
    """The channel's URL for replicas. The bucket lets everybody read, as it would the cache alone."""
    resources = [f"arn:aws:s3:::{s3_bucket}", f"arn:aws:s3:::{s3_bucket}/*"]
    rule = {
        "Effect": "Allow",
        "Principal": "*",
        "Action": ["s3:GetObject", "s3:ListBucket"],
        "Resource": resources,
    }
    s3_server.client.put_bucket_policy(Bucket=s3_bucket, Policy=json.dumps({"Statement": [rule]}))
    return s3_server.url(s3_bucket, endpoint=cache, anonymous="1")


@contextlib.contextmanager
def published(url: str, versions: int) -> Iterator[tuple[Publisher, dict[str, torch.Tensor]]]:
    """A channel of versions."""
    weights = {"w": torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)}
    with Publisher(url) as publisher:
        for seed in range(versions):
            change(weights, seed)
            publisher.publish(weights).wait(60)
        publisher.flush()
        yield publisher, weights


def change(weights: dict[str, torch.Tensor], seed: int) -> None:
    """Add to a twentieth of the bits."""
    chosen = torch.rand(ELEMENTS, generator=torch.Generator().manual_seed(seed)) < 0.05
    weights["w"].view(torch.int16)[chosen] += 1


def sent(origin: FaultProxy) -> int:
    """Bytes of records, parts and anchors that the bucket has sent."""
    folders = r"/(versions|parts|anchors|compactions|announcements|epochs)/"
    return sum(each.bytes_down for each in origin.matching("GET", folders) if each.status in (200, 206))


@pytest.mark.slow
def test_the_bucket_sends_each_byte_once_to_twenty_replicas(
    s3_server: MotoServer, s3_bucket: str, origin: FaultProxy, behind: str
) -> None:
    with published(s3_server.url(s3_bucket), VERSIONS) as (publisher, weights):
        Replica(behind).sync(publisher.version)
        one = sent(origin)
        assert one > 2 * ELEMENTS
        replicas = [Replica(behind) for _ in range(REPLICAS)]
        with ThreadPoolExecutor(REPLICAS) as pool:
            list(pool.map(lambda replica: replica.sync(publisher.version), replicas))
            assert sent(origin) - one <= _HEADERS_BYTES  # what one replica took is there
            before = sent(origin)
            change(weights, VERSIONS)
            receipt = publisher.publish(weights).wait(60)
            list(pool.map(lambda replica: replica.sync(receipt.version, timeout_s=60), replicas))
        # all asked at once
        assert 0 <= sent(origin) - before - receipt.payload_bytes <= 2 * _HEADERS_BYTES
        for replica in replicas:
            assert replica.digest == publisher.digest
            assert_same_bits(replica.state_dict(), weights)


def test_a_damaged_entry_is_never_applied(
    s3_server: MotoServer, s3_bucket: str, behind: str, tmp_path: Path
) -> None:
    with published(s3_server.url(s3_bucket), 1) as (publisher, weights):
        replica = Replica(behind)
        replica.sync()
        before = {name: tensor.clone() for name, tensor in replica.state_dict().items()}
        change(weights, 1)
        receipt = publisher.publish(weights).wait(60)
        Replica(behind).sync(receipt.version, timeout_s=60)  # it is in the cache now
        for path in (tmp_path / "cache").rglob("*"):
            if path.is_file() and re.search(
                rb"\nKEY: .*/versions/.*/0000000002\.", data := path.read_bytes()
            ):
                path.write_bytes(data[:-20] + bytes([data[-20] ^ 1]) + data[-19:])
        with pytest.raises(CorruptDataError):
            replica.sync(receipt.version)
        assert replica.version == 1
        assert_same_bits(replica.state_dict(), before)


@pytest.mark.slow
def test_a_replica_with_both_urls_reads_from_the_cache_and_outlives_it(
    s3_server: MotoServer, s3_bucket: str, origin: FaultProxy, behind: str, tmp_path: Path
) -> None:
    with (
        FaultProxy(s3_server.endpoint) as direct,
        published(s3_server.url(s3_bucket), 1) as (publisher, weights),
    ):
        wait_until(lambda: any(info.key == keys.HEAD for info in publisher.store.list("")))
        direct.strike(late(0.5), times=1 << 30)  # farther than the cache, however busy this machine is
        replica = Replica(f"{s3_server.url(s3_bucket, endpoint=direct.url)} {behind}")
        replica.sync()
        change(weights, 1)
        replica.sync(publisher.publish(weights).wait(60).version, timeout_s=60)
        assert sent(origin) > 2 * ELEMENTS and sent(direct) < ELEMENTS
        origin.strike(status(503), times=1 << 30)
        change(weights, 2)
        replica.sync(publisher.publish(weights).wait(60).version, timeout_s=60)
        assert_same_bits(replica.state_dict(), weights)


def test_the_cache_writes_nothing(s3_server: MotoServer, s3_bucket: str, behind: str) -> None:
    with pytest.raises(DeltaSyncError, match="403"):
        Publisher(behind).publish({"w": torch.zeros(4)})
