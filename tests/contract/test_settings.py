"""Settings with a mistake: one sentence that names what is wrong, from every command and every call, and no
second attempt.

Those of the environment are refused before the first request. What only the server can know is told at its
first answer.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import pytest
import torch
from click.testing import CliRunner

from deltasync import Publisher, Replica, follow
from deltasync.clouds.environment import check_cloud
from deltasync.errors import ConfigError, DeltaSyncError, TransientStoreError
from deltasync.ops.cli import main
from tests.hub.fixtures import HubServer
from tests.servers.s3 import KEYS, MotoServer

_S3 = {**KEYS, "AWS_REGION": "us-east-1", "AWS_ENDPOINT_URL": "http://127.0.0.1:9"}
_AZ = {"AZURE_STORAGE_ACCOUNT_NAME": "account", "AZURE_STORAGE_ACCOUNT_KEY": "a2V5"}
_GS = {"GOOGLE_SERVICE_ACCOUNT_KEY": '{"gcs_base_url":"http://127.0.0.1:9","disable_oauth":true}'}

S3 = [
    *(
        ("AWS_ENDPOINT_URL", value)
        for value in ("localhost:9000", "", " ", "http://127.0.0.1:9 ", "http://a b", "minio")
    ),
    *(
        ("AWS_ENDPOINT_URL", value)
        for value in ("http://host:99999", "http://host:port", "ftp://host", "http://", "http://h\n")
    ),
    *(("AWS_ENDPOINT_URL_S3", value) for value in ("minio:9000", "", "https://user:pass@host")),
    ("AWS_ENDPOINT", "localhost:9000"),
    *(("AWS_REGION", value) for value in ("", "us east 1", "us-east-1\n", "eu/central")),
    ("AWS_DEFAULT_REGION", ""),
    *(("AWS_ACCESS_KEY_ID", value) for value in ("", "key\n", " key", "k\u200bey")),
    *(("AWS_SECRET_ACCESS_KEY", value) for value in ("", "secret\n", "secret\r\n")),
    *(("AWS_SESSION_TOKEN", value) for value in ("", "token\n", "tok\x00".rstrip("\x00") + "\x07")),
    ("AWS_WEB_IDENTITY_TOKEN_FILE", "/nowhere/token"),
    ("AWS_PROFILE", ""),
    ("AWS_CONTAINER_CREDENTIALS_FULL_URI", "169.254.170.2/v2"),
    ("SSL_CERT_FILE", "/nowhere.pem"),
]
AZ = [
    *(("AZURE_STORAGE_ACCOUNT_NAME", value) for value in ("", "account\n")),
    *(("AZURE_STORAGE_ACCOUNT_KEY", value) for value in ("", "a2V5\n", " a2V5")),
    ("AZURE_STORAGE_SAS_KEY", "sv=2024\n"),
    ("AZURE_STORAGE_ENDPOINT", "account.blob.core.windows.net"),
    ("AZURE_STORAGE_ENDPOINT", "https://host:0"),
    ("AZURE_FEDERATED_TOKEN_FILE", "/nowhere/token"),
    ("AZURITE_BLOB_STORAGE_URL", "127.0.0.1:10000"),
    ("AZURE_STORAGE_ACCOUNT_KEY", "not base64!"),
]
GS = [
    *(("GOOGLE_APPLICATION_CREDENTIALS", value) for value in ("", "/nowhere.json", "/tmp\n")),
    ("GOOGLE_SERVICE_ACCOUNT", "/nowhere.json"),
    ("GOOGLE_SERVICE_ACCOUNT_KEY", ""),
    ("GOOGLE_SERVICE_ACCOUNT_KEY", "{"),
    ("GOOGLE_SERVICE_ACCOUNT_KEY", '{"no": "key"}'),
    ("GOOGLE_BASE_URL", "localhost"),
]
HUB = [
    *(("HF_TOKEN", value) for value in ("", "hf_good\n", "hf_good ", "hf_go od", "hf_good\u200b")),
    *(
        ("HF_ENDPOINT", value)
        for value in ("", "hf-mirror.example", "https://host\n", "https://host ", "https://host:x")
    ),
    ("SSL_CERT_FILE", "/nowhere.pem"),
]
URLS = {
    "endpoint=": "s3://bkt/run?endpoint=host:9000",
    "endpoint= ": "s3://bkt/run?endpoint=http://host:99999",
    "endpoint=  ": "s3://bkt/run?endpoint=http://ho%20st",
    "virtual_hosted=1": "s3://bkt/run?endpoint=http://127.0.0.1:9&virtual_hosted=1",
    "'play' gives no credentials": "s3://bkt/run?profile=play",
}
LATER = {
    "there is no such bucket": lambda server, bucket: server.url("no-such-bucket"),
    "does not speak TLS": lambda server, bucket: server.url(bucket).replace("http:", "https:"),
    "The reply is a web page": lambda server, bucket: (
        f"s3://{bucket}/run?region=us-east-1&endpoint={server.endpoint}/moto-api/x"
    ),
}


def _ways(url: str) -> list[Callable[[], object]]:
    return [
        lambda: Publisher(url),
        lambda: Replica(url).sync(),
        lambda: follow(torch.nn.Linear(2, 2), url),
        lambda: _command("log", url),
        lambda: _command("doctor", url),
    ]


def _command(name: str, url: str) -> None:
    done = CliRunner().invoke(main, [name, url])
    assert done.exit_code in (1, 3, 6) and isinstance(done.exception, SystemExit)
    assert "Traceback" not in done.output
    raise ConfigError(" ".join(done.output.split()))


def _check(url: str, said: str, kind: type[DeltaSyncError], caplog: pytest.LogCaptureFixture) -> None:
    for way in _ways(url):
        with pytest.raises(DeltaSyncError) as caught:
            way()
        assert said in str(caught.value)
        assert isinstance(caught.value, kind)
        assert not isinstance(caught.value, TransientStoreError)
    # A thread that another test left may still be trying: it names another store.
    own = url.partition("?")[0]
    tries = [record.getMessage() for record in caplog.records if "Trying again" in record.getMessage()]
    assert [line for line in tries if own in line] == []


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """No settings of this machine, and every retry is seen."""
    for name in [name for name in os.environ if name.startswith(("AWS_", "AZURE_", "AZURITE_", "GOOGLE_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    caplog.set_level(logging.DEBUG, "deltasync")


@pytest.mark.parametrize(
    ("url", "right", "name", "value"),
    [
        *(("s3://bkt/run", _S3, *row) for row in S3),
        *(("az://container/run", _AZ, *row) for row in AZ),
        *(("gs://bkt/run", _GS, *row) for row in GS),
    ],
)
def test_a_variable_of_a_cloud(
    url: str,
    right: dict[str, str],
    name: str,
    value: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for other, text in right.items():
        monkeypatch.setenv(other, text)
    monkeypatch.setenv(name, value)
    # What the client itself refuses is told with the group of variables.
    said = (
        name
        if not value.startswith(("{", "not base64"))
        else "GOOGLE_"
        if url.startswith("gs")
        else "AZURE_STORAGE_"
    )
    _check(url, said, ConfigError, caplog)


@pytest.mark.parametrize(("name", "value"), HUB)
def test_a_variable_of_the_hub(
    name: str, value: str, hub: HubServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(name, value)
    hub.reset()
    _check("hf://buckets/user/settings/run", name, ConfigError, caplog)
    assert hub.requests() == {}


def test_a_path_may_have_any_letters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "schlüssel meiner.json"
    file.write_text("{}")
    for name in ("GOOGLE_APPLICATION_CREDENTIALS", "SSL_CERT_FILE"):
        monkeypatch.setenv(name, str(file))
    check_cloud("gs")
    monkeypatch.setenv("AWS_PAGER", "")  # of other programs
    check_cloud("s3")


@pytest.mark.parametrize("said", URLS)
def test_an_option_of_a_url(
    said: str, s3_env: object, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _check(URLS[said], said.strip(), ConfigError, caplog)


@pytest.mark.parametrize("said", LATER)
def test_what_the_server_tells(
    said: str,
    s3_server: MotoServer,
    s3_bucket: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    _check(LATER[said](s3_server, s3_bucket), said, DeltaSyncError, caplog)


@pytest.mark.parametrize(
    ("token", "said"),
    [
        ("hf_wrong", "does not accept the token"),
        ("hf_expired", "has expired"),
        ("hf_readonly", "lacks a right"),
    ],
)
def test_a_token_that_the_hub_refuses(
    token: str, said: str, hub: HubServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    huggingface_hub.close_session()
    url = "hf://buckets/user/settings/run"
    ways = _ways(url)[:1] if token == "hf_readonly" else _ways(url)
    for way in ways:
        with pytest.raises(DeltaSyncError, match=said) as caught:
            way()
        assert not isinstance(caught.value, TransientStoreError)
        assert token not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "variables"),
    [("az://bkt/run", "AZURE_STORAGE_"), ("gs://bkt/run", "GOOGLE_"), ("s3://bkt/run", "AWS_")],
)
def test_no_credentials_at_all(
    url: str, variables: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The machine's metadata service is not the store, and is not told as if it were."""
    nobody = "http://127.0.0.1:9"
    for name, value in (
        ("AWS_METADATA_ENDPOINT", nobody),
        ("AZURE_MSI_ENDPOINT", f"{nobody}/msi"),
        ("AZURE_STORAGE_ACCOUNT_NAME", "account"),
        ("GCE_METADATA_HOST", "127.0.0.1:9"),
        ("METADATA_HOST", "127.0.0.1:9"),
        ("GOOGLE_APPLICATION_CREDENTIALS", ""),
    ):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS")
    _check(url, variables, ConfigError, caplog)
