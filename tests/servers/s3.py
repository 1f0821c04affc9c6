"""S3 for tests. A plugin of pytest: tests/conftest.py names it."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

import boto3
import pytest
from botocore.config import Config
from moto.core import DEFAULT_ACCOUNT_ID
from moto.moto_server.threaded_moto_server import ThreadedMotoServer
from moto.s3.models import s3_backends

REGION = "us-east-1"
KEYS = {"AWS_ACCESS_KEY_ID": "testkey", "AWS_SECRET_ACCESS_KEY": "testsecret"}

RGW_VARIABLE = "RADOSGW_ENDPOINT"
"""Where a RADOS gateway listens that has a user with `KEYS`. Not DELTASYNC_*: conftest removes those."""

_numbers = itertools.count()


class S3Server:
    """A running server.

    Attributes:
        endpoint: Its URL.
        checks_signatures: Whether a wrong secret is refused.
    """

    checks_signatures = True

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.client: Any = boto3.client(
            "s3",
            endpoint_url=endpoint,
            region_name=REGION,
            aws_access_key_id=KEYS["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=KEYS["AWS_SECRET_ACCESS_KEY"],
            config=Config(s3={"addressing_style": "path"}),
        )

    def new_bucket(self) -> str:
        """Create an empty bucket."""
        name = f"deltasync-{os.getpid()}-{next(_numbers)}"
        self.client.create_bucket(Bucket=name)
        return name

    def url(self, bucket: str, prefix: str = "run", **options: str) -> str:
        """A channel's URL."""
        return f"s3://{bucket}/{prefix}?{urlencode({'endpoint': self.endpoint, 'region': REGION, **options}, safe=':/')}"

    def remove(self, bucket: str) -> None:
        """Delete a bucket with everything in it."""
        for page in self.client.get_paginator("list_objects_v2").paginate(Bucket=bucket):
            keys = [{"Key": each["Key"]} for each in page.get("Contents", [])]
            if keys:
                self.client.delete_objects(Bucket=bucket, Delete={"Objects": keys})
        self.client.delete_bucket(Bucket=bucket)

    def close(self) -> None:
        """End the connections to it."""
        self.client.close()


class MotoServer(S3Server):
    """moto in this process."""

    checks_signatures = False

    def __init__(self) -> None:
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._moto = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
        self._moto.start()
        host, port = self._moto.get_host_and_port()
        super().__init__(f"http://{host}:{port}")

    def fill(self, bucket: str, keys: Sequence[str]) -> None:
        """Put one byte under each key, without HTTP."""
        for key in keys:
            s3_backends[DEFAULT_ACCOUNT_ID]["aws"].put_object(bucket, key, b"x")

    def close(self) -> None:
        super().close()
        self._moto.stop()
        s3_backends.reset()


@pytest.fixture(scope="session")
def s3_server() -> Iterator[MotoServer]:
    """moto, for the whole run."""
    with contextlib.closing(MotoServer()) as server:
        yield server


@pytest.fixture(scope="session")
def rgw_server() -> Iterator[S3Server]:
    """The RADOS gateway that is running."""
    with contextlib.closing(S3Server(os.environ[RGW_VARIABLE])) as server:
        yield server


@pytest.fixture
def s3_env(monkeypatch: pytest.MonkeyPatch) -> Mapping[str, str]:
    """The environment holds the test servers' keys, and nothing else about AWS."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    return KEYS


@pytest.fixture
def s3_bucket(s3_server: MotoServer, s3_env: Mapping[str, str]) -> Iterator[str]:
    """A bucket of moto's, empty."""
    bucket = s3_server.new_bucket()
    yield bucket
    s3_server.remove(bucket)


@pytest.fixture
def rgw_bucket(rgw_server: S3Server, s3_env: Mapping[str, str]) -> Iterator[str]:
    """A bucket of the RADOS gateway's, empty."""
    bucket = rgw_server.new_bucket()
    yield bucket
    rgw_server.remove(bucket)
