"""Stores behind a fault proxy, and which of their requests are which step of publishing and following.

A store takes part in the tests by a fixture `<name>_service` and its name in SERVICES.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest

from deltasync.stores import Store
from deltasync.stores.cloud import CloudStore
from tests.http_faults import Fault, FaultProxy
from tests.servers import clouds
from tests.servers.reverse_proxy import Action
from tests.servers.s3 import RGW_VARIABLE, MotoServer, S3Server

if TYPE_CHECKING:
    from obstore.store import ObjectStore

SERVICES: list[Any] = ["s3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("azurite", "fake_gcs"))]
if RGW_VARIABLE in os.environ:
    SERVICES.append(pytest.param("rgw", marks=pytest.mark.radosgw))


@dataclasses.dataclass(frozen=True)
class Service:
    """A store behind a proxy.

    Attributes:
        url: URL of a channel, through the proxy.
        direct: URL of the same channel, or its store, without it.
        steps: Name of a step to method, path and query of its requests, as `FaultProxy.strike` takes them.
    """

    url: str
    direct: str | Store
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


_CLOUD_LISTS = {"az": "comp=list", "gs": "list-type"}


class DirectStore(CloudStore):
    """A channel at a service without the proxy, which the process's environment names."""

    def __init__(self, url: str, env: Mapping[str, str]) -> None:
        super().__init__(url)
        self._env = env

    def client(self, upload_bytes: int = 0, once: bool = False) -> ObjectStore:
        """See `CloudStore.client`."""
        with mock.patch.dict(os.environ, self._env):
            return super().client(upload_bytes, once)


@pytest.fixture
def azurite_service(azurite: clouds.Service, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    yield from _cloud_service(azurite, monkeypatch)


@pytest.fixture
def fake_gcs_service(fake_gcs: clouds.Service, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    yield from _cloud_service(fake_gcs, monkeypatch)


def _cloud_service(cloud: clouds.Service, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    url = clouds.channel_url(cloud, monkeypatch)
    with FaultProxy(cloud.endpoint) as proxy:
        for name, value in cloud.env.items():
            monkeypatch.setenv(name, value.replace(cloud.endpoint, proxy.url))
        steps = S3_STEPS | {"list": ("GET", "", _CLOUD_LISTS[cloud.scheme])}
        yield Service(url, DirectStore(url, cloud.env), proxy, steps)


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
