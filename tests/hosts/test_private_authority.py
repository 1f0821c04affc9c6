from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import huggingface_hub
import pytest
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

from deltasync.errors import StoreError, TransientStoreError
from deltasync.stores import open_store
from tests.hosts.authority import Authority
from tests.hub import fixtures
from tests.hub.hub import WRITE
from tests.servers.s3 import S3Server


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@contextlib.contextmanager
def _s3_over_https(certificate: Path) -> Iterator[str]:
    app = DomainDispatcherApplication(create_backend_app)
    server = make_server("127.0.0.1", 0, app, threaded=True, ssl_context=(str(certificate), str(certificate)))
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield f"https://127.0.0.1:{server.port}"
    server.shutdown()
    thread.join()
    server.server_close()


@contextlib.contextmanager
def _hub_over_https(certificate: Path) -> Iterator[str]:
    with fixtures.listening("--certificate", str(certificate)) as port:
        yield f"https://127.0.0.1:{port}"


def _is_followed(url: str) -> None:
    store = open_store(url)
    store.put("a/b", bytes(range(256)) * 400)
    assert store.read("a/b", 1 << 30) == bytes(range(256)) * 400
    assert [info.key for info in store.list("")] == ["a/b"]


def test_s3_with_a_private_authority(
    authority: Authority, s3_env: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with _s3_over_https(authority.issue("bucket", "127.0.0.1")) as endpoint:
        monkeypatch.setenv("AWS_CA_BUNDLE", str(authority.certificate))
        with contextlib.closing(S3Server(endpoint)) as server:
            bucket = server.new_bucket()
            with pytest.raises(StoreError, match=r"not trusted \(UnknownIssuer\).*SSL_CERT_FILE"):
                open_store(server.url(bucket)).read("a/b", 1 << 30)
            monkeypatch.setenv("SSL_CERT_FILE", str(authority.certificate))
            _is_followed(server.url(bucket))


def test_the_hub_with_a_private_authority(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with _hub_over_https(authority.issue("hub", "127.0.0.1")) as endpoint:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", endpoint)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        for name, value in (
            ("HF_TOKEN", WRITE),
            ("HF_XET_CACHE", str(tmp_path)),
            ("HF_XET_TELEMETRY_ENABLED", "0"),
        ):
            monkeypatch.setenv(name, value)
        huggingface_hub.close_session()
        try:
            with pytest.raises(TransientStoreError, match="certificate"):
                open_store("hf://buckets/user/private/run").read("a/b", 1 << 30)
            huggingface_hub.close_session()
            monkeypatch.setenv("SSL_CERT_FILE", str(authority.certificate))
            _is_followed("hf://buckets/user/private/run")
            event = threading.Event()
            watch = open_store("hf://buckets/user/private/run").watch("a/", lambda _: event.set())
            assert watch is not None
            with contextlib.closing(watch):
                assert event.wait(60)
        finally:
            huggingface_hub.close_session()
