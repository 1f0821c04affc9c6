"""The stores that a fault is brought about on, one after the other."""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Iterator
from unittest import mock

from deltasync import open_store
from deltasync.stores import Store
from deltasync.stores.hub import HubStore
from tests.faults_matrix.matrix import Lab
from tests.hub.fixtures import LEASE

PLACES = ("file", "s3", "hub")


def url_of(lab: Lab, kind: str) -> str:
    """A channel's URL in a place."""
    if kind == "file":
        return f"file://{lab.folder}/channel"
    if kind == "s3":
        url: str = lab.request.getfixturevalue("s3_server").url(lab.request.getfixturevalue("s3_bucket"))
        return url
    return str(lab.request.getfixturevalue("hub_url"))


def open_at(url: str) -> Store:
    """The store of such a URL."""
    return HubStore(url) if url.startswith("hf://") else open_store(url)


@contextlib.contextmanager
def short_leases() -> Iterator[None]:
    """Writers where the store does not decide wait for two seconds instead of thirty."""
    with mock.patch("deltasync.publish.acquire.Lease", lambda: LEASE):
        yield


def chosen(lab: Lab, kinds: tuple[str, ...] = PLACES) -> tuple[str, ...]:
    """All places where the table is made; otherwise, to save time, each row has one of them."""
    turn = zlib.crc32(lab.request.node.name.encode()) % len(kinds)
    return kinds if "FAULT_RESULTS" in os.environ else kinds[turn : turn + 1]
