"""The stores that a fault is brought about on, one after the other."""

from __future__ import annotations

import contextlib
import functools
import os
import zlib
from collections.abc import Callable, Iterator
from unittest import mock

from deltasync import open_store
from deltasync.stores import Store
from deltasync.stores.hub import HubStore
from tests.faults_matrix.matrix import Lab, Seen
from tests.hub.fixtures import LEASE

Open = Callable[[], Store]
"""Opens a channel's store; each party has one of its own."""

PLACES = ("file", "s3", "hub")
DECIDING = PLACES[:2]


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
    with mock.patch("deltasync.publish.acquire.Lease", lambda _: LEASE):
        yield


def chosen(lab: Lab, kinds: tuple[str, ...] = PLACES) -> tuple[str, ...]:
    """All places where the table is made; otherwise, to save time, each row has one of them."""
    turn = zlib.crc32(lab.request.node.name.encode()) % len(kinds)
    return kinds if "FAULT_RESULTS" in os.environ else kinds[turn : turn + 1]


def everywhere(action: Callable[[Open], Seen], kinds: tuple[str, ...] = PLACES) -> Callable[[Lab], Seen]:
    """Does it in each place, or the `chosen` one; tells what was said in the first, and the longest recovery."""

    def run(lab: Lab) -> Seen:
        urls = [url_of(lab, kind) for kind in chosen(lab, kinds)]  # fixtures that patch too come first
        with short_leases():
            seen = [action(functools.partial(open_at, url)) for url in urls]
        return Seen(seen[0].said, max(each.recovered_s for each in seen), len(seen))

    return run
