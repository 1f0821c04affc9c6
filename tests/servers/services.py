"""Stores behind a fault proxy, and which of their requests are which step of publishing and following.

A store takes part in the tests by a fixture `<name>_service` and its name in SERVICES.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from tests.http_faults import Fault, FaultProxy
from tests.servers.reverse_proxy import Action
from tests.servers.s3 import RGW_VARIABLE, MotoServer, S3Server

SERVICES: list[Any] = ["s3"]
if RGW_VARIABLE in os.environ:
    SERVICES.append(pytest.param("rgw", marks=pytest.mark.radosgw))


@dataclasses.dataclass(frozen=True)
class Service:
    """A store behind a proxy.

    Attributes:
        url: URL of a channel, through the proxy.
        direct: URL of the same channel, without it.
        steps: Name of a step to method, path and query of its requests, as `FaultProxy.strike` takes them.
    """

    url: str
    direct: str
    proxy: FaultProxy
    steps: Mapping[str, tuple[str, str, str]]

    def strike(self, step: str, action: Action, *, times: int = 1, after: bool = False) -> Fault:
        """Strike at the requests of a step; see `FaultProxy.strike`."""
        method, path, query = self.steps[step]
        return self.proxy.strike(action, method, path, query=query, times=times, after=after)


S3_STEPS = {
    "put part": ("PUT", r"/parts/", ""),
    "put record": ("PUT", r"/versions/", ""),
    "put head": ("PUT", r"/head\.json$", ""),
    "get channel": ("GET", r"/channel\.json$", ""),
    "get head": ("GET", r"/head\.json$", ""),
    "get record": ("GET", r"/versions/", ""),
    "get part": ("GET", r"/parts/", ""),
    "list": ("GET", "", "list-type"),
    "any": (".*", "", ""),
}


@pytest.fixture
def s3_service(s3_server: MotoServer, s3_bucket: str) -> Iterator[Service]:
    yield from _s3_service(s3_server, s3_bucket)


@pytest.fixture
def rgw_service(rgw_server: S3Server, rgw_bucket: str) -> Iterator[Service]:
    yield from _s3_service(rgw_server, rgw_bucket)


def _s3_service(server: S3Server, bucket: str) -> Iterator[Service]:
    with FaultProxy(server.endpoint) as proxy:
        yield Service(server.url(bucket, endpoint=proxy.url), server.url(bucket), proxy, S3_STEPS)


@pytest.fixture(params=SERVICES)
def service(request: pytest.FixtureRequest) -> Service:
    return request.getfixturevalue(f"{request.param}_service")
