"""The router of `deploy/router`: the real HAProxy with the shipped files, in front of replicas that the test
names.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from demo.processes import Child
from demo.run import free_port
from deploy.router import write

PATIENCE_S = 60.0


def require_haproxy() -> None:
    """Skip the test where there is none."""
    if shutil.which("haproxy") is None:
        pytest.skip("no haproxy here; make test-router installs it, as root on Debian or Ubuntu")


class Router:
    """A running router."""

    def __init__(self, port: int, token: str | None) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._token = token

    def open(self, path: str, body: object = None, **headers: str) -> Any:
        """The reply to a GET, or with a body to a POST, errors too. Underscores in names of headers are
        dashes.
        """
        named = {"content-type": "application/json"} | {
            name.replace("_", "-"): value for name, value in headers.items()
        }
        if self._token is not None:
            named.setdefault("authorization", f"Bearer {self._token}")
        data = None if body is None else json.dumps(body).encode()
        try:
            return urllib.request.urlopen(
                urllib.request.Request(self.url + path, data, named), timeout=PATIENCE_S
            )
        except urllib.error.HTTPError as error:
            return error

    def json(self, path: str, body: object = None, **headers: str) -> Any:
        with self.open(path, body, **headers) as reply:
            return json.load(reply)

    def replicas(self) -> dict[str, dict[str, Any]]:
        return dict(self.json("/deltasync/replicas"))

    def wait_for_versions(self, **versions: int | None) -> None:
        """Until it knows that these replicas are up, or down if None, and serve these versions."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            found = self.replicas()
            if all(
                found[name]["up"] is (v is not None) and found[name]["version"] == v
                for name, v in versions.items()
            ):
                return
            assert time.monotonic() < deadline, (found, versions)
            time.sleep(0.02)


@contextlib.contextmanager
def routing(
    folder: Path,
    replicas: Mapping[str, int | str],
    token: str | None = None,
    nameserver: str | None = None,
    **environ: str,
) -> Iterator[Router]:
    """A router in front of replicas, once it listens.

    Args:
        folder: For its files and its log.
        replicas: By name; port on the loopback interface, or all that follows it, options too.
        token: Its ROUTER_TOKEN.
        nameserver: Address and port of what resolves names, instead of the system's.
        **environ: Its other settings.
    """
    file = write(folder, {name: f"127.0.0.1:{options}" for name, options in replicas.items()})
    if nameserver is not None:
        file.write_text(file.read_text().replace("parse-resolv-conf", f"nameserver test {nameserver}"))
    port = free_port()
    settings = {"ROUTER_BIND": f"127.0.0.1:{port}", "ROUTER_PROBES": f"deltasync-router-{port}"}
    if token is not None:
        settings["ROUTER_TOKEN"] = token
    router = Router(port, token)

    def answers() -> bool:
        try:
            router.open("/health").close()
        except OSError:
            return False
        return True

    command = ["haproxy", "-db", "-f", str(file)]
    with Child("The router", command, os.environ | settings | environ, folder / "haproxy.log") as child:
        child.wait_until(answers, PATIENCE_S, "to start")
        yield router
