"""A Hub in a process of its own, and what tests ask of it.

A test module takes the fixtures by assigning them: `hub_server = fixtures.hub_server`, `hub = fixtures.hub`.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from deltasync.demo.processes import Child
from deltasync.publish.log import Lease
from deltasync.stores.hub import HubStore, hub_store
from tests.hub.hub import WRITE

ROOT = Path(__file__).parents[2]

LEASE = Lease(2.2, 1.0, 1.0)
"""How publishers of the test's own process succeed each other."""

_numbers = itertools.count()


class HubServer:
    """A running server.

    Attributes:
        endpoint: Its URL.
        env: An environment in which huggingface_hub uses it.
    """

    def __init__(self, port: int, cache: str) -> None:
        self._port = port
        self.endpoint = f"http://127.0.0.1:{port}"
        self.env = os.environ | {
            "HF_ENDPOINT": self.endpoint,
            "HF_TOKEN": WRITE,
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_XET_CACHE": cache,
            "HF_XET_TELEMETRY_ENABLED": "0",
        }

    def ask(self, method: str, path: str, body: object = None) -> Any:
        """What the server answers."""
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)) as connection:
            connection.request(method, path, json.dumps(body), {"Content-Type": "application/json"})
            reply = connection.getresponse()
            assert reply.status == 200, reply.read()
            return json.loads(reply.read())

    def reset(self) -> None:
        """Forget faults and counts."""
        self.ask("POST", "/_reset")

    def arm(self, step: str, **fault: object) -> None:
        """Let requests of this name fail; see `tests.hub.faults.Fault`."""
        self.ask("POST", "/_faults", {"step": step, **fault})

    def requests(self) -> dict[str, int]:
        """Requests by name since the last reset."""
        return dict(self.ask("GET", "/_requests"))

    def counted(self, action: Callable[[], object]) -> dict[str, int]:
        """The requests that `action` makes."""
        self.reset()
        action()
        return self.requests()

    def fill(self, store: HubStore, keys: Sequence[str], like: str) -> None:
        """Give many objects the content of one."""
        bucket, prefix = store.url.removeprefix("hf://buckets/").split("/run/")
        paths = [f"run/{prefix}/{key}" for key in keys]
        self.ask("POST", f"/_fill/{bucket}", {"paths": paths, "like": f"run/{prefix}/{like}"})

    def tell_listeners(self, bucket: str, do: str) -> int:
        """`drop`, `reset` or `reconnect` the event streams of a bucket; how many there were."""
        return int(self.ask("POST", f"/_events/{bucket}", {"do": do}))


@contextlib.contextmanager
def listening(*arguments: str) -> Iterator[int]:
    """The port of a server that runs for the length of the block.

    Args:
        *arguments: For `tests.hub.server`.
    """
    command = [sys.executable, "-m", "tests.hub.server", *arguments]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    with tempfile.TemporaryDirectory(prefix="deltasync-hub-") as folder:
        log = Path(folder) / "log"
        with Child("The Hub", command, environ, log) as child:
            child.wait_until(lambda: log.read_text().endswith("\n"), 60, "to start")
            yield int(log.read_text().split()[-1])


@contextlib.contextmanager
def running_server() -> Iterator[HubServer]:
    """A server for the length of the block."""
    with tempfile.TemporaryDirectory(prefix="deltasync-xet-") as cache, listening() as port:
        yield HubServer(port, cache)


@pytest.fixture(scope="session")
def hub_server() -> Iterator[HubServer]:
    """One server for all tests; each test takes a bucket of its own."""
    with running_server() as server:
        yield server


@pytest.fixture
def hub(hub_server: HubServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """The server, without faults, as the Hub that this process uses, whose publishers settle within seconds."""
    hub_server.reset()
    monkeypatch.setattr("deltasync.publish.opening.Lease", lambda settle_s: LEASE)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub_server.endpoint)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    for name in ("HF_TOKEN", "HF_XET_CACHE", "HF_XET_TELEMETRY_ENABLED"):
        monkeypatch.setenv(name, hub_server.env[name])
    yield hub_server
    huggingface_hub.close_session()


@pytest.fixture
def hub_url(hub: HubServer) -> str:
    """A channel in a bucket that does not exist yet."""
    return f"hf://buckets/user/bucket-{next(_numbers)}/run/a"


@pytest.fixture
def hub_channel(hub_url: str) -> HubStore:
    """The store at `hub_url`."""
    return hub_store(hub_url)


def wait_until(condition: Callable[[], object], timeout_s: float = 10.0) -> float:
    """Wait for a condition and return how long it took."""
    started = time.perf_counter()
    while not condition():
        assert time.perf_counter() - started < timeout_s
        time.sleep(0.001)
    return time.perf_counter() - started
