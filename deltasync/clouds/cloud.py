"""`s3://` for all S3-compatible servers, `gs://` and `az://`.

Timeouts of one request: 10 s to connect, 30 s until the reply begins and for each further piece of it, more
for a large upload (`_REPLY_WITHIN`); 5 s for reads and small uploads while the store answers promptly. After
5xx, 429, 408 and dropped connections, the client makes at most three attempts within 25 s, 0.1 and 0.2 s
apart. After a timeout, as where a gateway has forgotten all idle connections, one more goes over new ones,
with the longer limit. Callers retry further: an uploader as `PublisherSettings.retries` says, a replica at
its next poll.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import re
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, unquote, urlsplit

from obstore.exceptions import BaseError
from obstore.store import AzureStore, GCSStore, S3Store

from deltasync.clouds.environment import aws_profile, check_cloud, check_role, is_endpoint
from deltasync.errors import ConfigError
from deltasync.stores.base import check_key
from deltasync.stores.object import LARGEST_BYTES, PROMPT_S, ObstoreStore, check_files, mark_process
from deltasync.stores.replies import is_panic
from deltasync.stores.retries import PATIENCE_S
from deltasync.threads import watched

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig, S3Config, S3CredentialProvider

logger = logging.getLogger(__name__)


_OPTIONS = ("endpoint", "region", "virtual_hosted", "profile", "anonymous")

# Largest body of a request, and the time limit for sending it and receiving the first byte of the reply.
_PROMPT_BYTES = 64 << 10  # of an upload that a slow line carries within `PROMPT_S`, too
_REPLY_WITHIN = ((8 << 20, 30), (256 << 20, 120), (LARGEST_BYTES, 900))

_RETRIES: RetryConfig = {
    "max_retries": 2,
    "backoff": {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=1), "base": 2},
}


class CloudStore(ObstoreStore):
    """A bucket (see `open_store`). Its clients are made on first use, so it can be pickled, and opened before
    a fork.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        parts = urlsplit(url)
        if "@" in parts.netloc:
            raise ConfigError(
                "A channel URL holds no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY."
            )
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]+", parts.netloc):
            short = " A bucket's name has two characters or more." if len(parts.netloc) == 1 else ""
            raise ConfigError(f"A bucket is written {parts.scheme}://bucket/prefix, not {url!r}.{short}")
        if parts.fragment:
            raise ConfigError(f"A channel URL has no '#': {parts.scheme}://{parts.netloc}{parts.path}#...")
        self._scheme, self._bucket, self._prefix = parts.scheme, parts.netloc, unquote(parts.path).strip("/")
        if self._prefix:
            check_key(self._prefix)
        self._options = _options(parts.scheme, parts.query)
        self._is_anonymous = self._options.get("anonymous") == "1"
        self._clients: dict[float, ObjectStore] = {}

    def client(self, upload_bytes: int = 0, is_long: bool = False) -> ObjectStore:
        mark_process(needs_threads=True)
        allowed_s: float = next(
            limit_s for most_bytes, limit_s in _REPLY_WITHIN if upload_bytes <= most_bytes
        )
        if self._is_prompt and not is_long and upload_bytes <= _PROMPT_BYTES:
            allowed_s = min(allowed_s, PROMPT_S)
        if allowed_s not in self._clients:
            check_cloud(self._scheme)
            if self._scheme == "s3" and not (self._is_anonymous or self._profile()):
                check_role()
            # Two threads may both do this; the second client stays.
            self._clients[allowed_s] = self._connect(allowed_s)
        return self._clients[allowed_s]

    def _watched(self, key: str) -> contextlib.AbstractContextManager[None]:
        message = "%s has had no answer for %g s; waiting on."
        return watched(PATIENCE_S, lambda: logger.warning(message, self._place(key), PATIENCE_S))

    def connect_again(self) -> None:
        """Connect again for the next request: keys, profiles and tokens may have been renewed, or connections
        forgotten.
        """
        self._clients = {}

    def _connect(self, within_s: float) -> ObjectStore:
        client_options: ClientConfig = {
            "connect_timeout": timedelta(seconds=10),
            # obstore applies this limit from sending until the reply begins, and then to each piece of the
            # reply.
            "read_timeout": timedelta(seconds=within_s),
            "timeout": timedelta(hours=1),
            "pool_idle_timeout": timedelta(minutes=1),  # gateways forget idle connections after some minutes
            # Without endpoint=, the environment may name an http:// server.
            "allow_http": self._options.get("endpoint", "http://").startswith("http://"),
        }
        common: dict[str, Any] = {
            "prefix": self._prefix or None,
            "client_options": client_options,
            # less than the time limit: after that, `ObstoreStore` connects again
            "retry_config": {**_RETRIES, "retry_timeout": timedelta(seconds=min(within_s * 0.8, 25.0))},
        }
        try:
            if self._scheme == "s3":
                return S3Store(
                    self._bucket, config=self._s3_config(), credential_provider=self._credentials(), **common
                )
            return (GCSStore if self._scheme == "gs" else AzureStore)(self._bucket, **common)
        except BaseException as error:
            if not isinstance(error, BaseError | ValueError) and not is_panic(error):
                raise
            check_files()
            message = str(error).partition("\n\n")[0]
            variables = {"s3": "AWS", "gs": "GOOGLE", "az": "AZURE_STORAGE"}[self._scheme]
            raise ConfigError(
                f"{self._scheme}://{self._bucket} cannot be opened: {message}. Check the {variables}_* "
                "variables."
            ) from None

    def _s3_config(self) -> S3Config:
        config: S3Config = {}
        is_virtual = self._options.get("virtual_hosted") == "1"
        if "endpoint" in self._options:
            endpoint = self._options["endpoint"].rstrip("/")
            if is_virtual and not endpoint.partition("://")[2].startswith(f"{self._bucket}."):
                endpoint = endpoint.replace("://", f"://{self._bucket}.")
            config["aws_endpoint_url_s3"] = config["endpoint"] = endpoint
        if "region" in self._options:
            config["region"] = self._options["region"]
        if is_virtual:
            config["virtual_hosted_style_request"] = True
        if self._is_anonymous:
            config["skip_signature"] = True
        return config

    def _profile(self) -> str | None:
        return self._options.get("profile") or aws_profile()

    def _credentials(self) -> S3CredentialProvider | None:
        """Return a profile's credentials. None lets obstore find keys, a web identity, or a container or
        instance role.
        """
        profile = self._profile()
        if profile is None or self._is_anonymous:
            return None
        try:
            import boto3
            from botocore.exceptions import BotoCoreError
            from obstore.auth.boto3 import Boto3CredentialProvider
        except ImportError:
            raise ConfigError(f"AWS profile {profile!r} needs boto3: pip install boto3.") from None
        try:
            return Boto3CredentialProvider(boto3.Session(profile_name=profile))
        except (BotoCoreError, ValueError) as error:
            raise ConfigError(f"AWS profile {profile!r} gives no credentials: {error}.") from None

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_clients": {}}


def _options(scheme: str, query: str) -> dict[str, str]:
    """Parse the options of a URL. Raise ConfigError for an unknown one, or a wrong value."""
    options = dict(parse_qsl(query, keep_blank_values=True))
    known = _OPTIONS if scheme == "s3" else ()
    for name, value in options.items():
        if name not in known:
            shown = f"{name}=" if re.fullmatch(r"[a-z_]{1,24}", name) else "(not shown)"  # it may be a secret
            if "key" in name or "token" in name or "secret" in name:
                raise ConfigError(f"A channel URL holds no credentials ({shown}); set environment variables.")
            raise ConfigError(
                f"Unknown option {shown} in a channel URL; options of {scheme}:// are: "
                f"{', '.join(known) or 'none'}."
            )
        if name in ("virtual_hosted", "anonymous") and value not in ("0", "1"):
            raise ConfigError(f"{name}= in a channel URL is 0 or 1.")
    endpoint = options.get("endpoint")
    if endpoint is not None and not is_endpoint(endpoint):
        raise ConfigError(
            "endpoint= in a channel URL must be https://host or http://host, with a port and a path if "
            "needed."
        )
    if (
        options.get("virtual_hosted") == "1"
        and endpoint is not None
        and _is_address(urlsplit(endpoint).hostname)
    ):
        raise ConfigError(
            "virtual_hosted=1 in a channel URL needs an endpoint with a host name, not an IP address."
        )
    return options


def _is_address(host: str | None) -> bool:
    try:
        ipaddress.ip_address(host or "")
    except ValueError:
        return False
    return True
