"""Check the environment variables of the clouds and the Hub before the first request, and refuse bad ones by
name.
"""

from __future__ import annotations

import importlib
import ipaddress
import os
import re
import socket
from collections.abc import Iterable
from typing import Any
from urllib.parse import urlsplit

from deltasync.errors import ConfigError

# The variables that the clients read. Other programs use others with these prefixes; AWS_PAGER, for one, is
# often empty.
_CLOUDS = {
    "s3": re.compile(
        r"AWS_(ACCESS_KEY_ID|SECRET_ACCESS_KEY|(SESSION_)?TOKEN|(DEFAULT_)?REGION|ENDPOINT(_URL(_S3|_STS)?)?|METADATA_ENDPOINT"
        r"|WEB_IDENTITY_TOKEN_FILE|ROLE_(ARN|SESSION_NAME)|CONTAINER_\w+|PROXY_URL|CHECKSUM_ALGORITHM|SERVER_SIDE_ENCRYPTION"
        r"|SSE_\w+|VIRTUAL_HOSTED_STYLE_REQUEST|REQUEST_PAYER|SKIP_SIGNATURE|ALLOW_HTTP|PROFILE)"
    ),
    "gs": re.compile(r"GOOGLE_(APPLICATION_CREDENTIALS|SERVICE_ACCOUNT\w*|BASE_URL|SKIP_SIGNATURE)"),
    "az": re.compile(
        r"AZURE_(STORAGE_\w+|MSI_\w+|CLIENT_\w+|TENANT_ID|AUTHORITY_\w+|ENDPOINT|FEDERATED_\w+)|AZURITE_\w+"
    ),
}
_S3_CREDENTIALS = (
    "AWS_ACCESS_KEY_ID",
    "AWS_TOKEN",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_SKIP_SIGNATURE",
)
_METADATA_S = 1.0  # the service is on the machine's own link
_HUB = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_ENDPOINT", "HF_HOME", "HF_XET_CACHE")
_URL = re.compile(r"ENDPOINT(_URL)?(_\w+)?$|_URL$|_FULL_URI$")
_FILE = re.compile(
    r"_TOKEN_FILE$|^GOOGLE_APPLICATION_CREDENTIALS$|^GOOGLE_SERVICE_ACCOUNT(_PATH)?$|^SSL_CERT_FILE$"
)
_FOLDERS = ("HF_HOME", "HF_XET_CACHE")
_TEXT = ("GOOGLE_SERVICE_ACCOUNT_KEY",)  # JSON, which may have lines
_REGION = re.compile(r"^AWS_(DEFAULT_)?REGION$")
_SHARED = (
    "SSL_CERT_FILE",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "ALL_PROXY",
    "http_proxy",
    "https_proxy",
    "all_proxy",
)


def check_cloud(scheme: str) -> None:
    """Raise ConfigError if a variable of a cloud cannot work; it names the variable, without a value that may
    be secret.
    """
    _check([name for name in os.environ if _CLOUDS[scheme].fullmatch(name)])


def check_role() -> None:
    """Raise ConfigError if no variables hold credentials for S3 and no metadata service answers; obstore
    would wait 20 s.
    """
    if any(os.environ.get(name) for name in (*_S3_CREDENTIALS, "HTTP_PROXY", "http_proxy")):
        return
    service = urlsplit(os.environ.get("AWS_METADATA_ENDPOINT") or "http://169.254.169.254")
    address = (service.hostname or "", service.port or (443 if service.scheme == "https" else 80))
    try:
        socket.create_connection(address, timeout=_METADATA_S).close()
    except OSError:
        raise ConfigError(
            "No credentials for S3 are set, and this machine has no metadata service to take a role from. "
            "Set "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or add ?anonymous=1 to read a "
            "public bucket."
        ) from None


def check_hub() -> None:
    """Check the variables of the Hub. Raises ConfigError like `check_cloud`."""
    _check([name for name in _HUB if name in os.environ])


def check_xet_cache(writes: bool) -> None:
    """Check the folder that transfers of the Hub use; only uploads write to it. Raises ConfigError like
    `check_cloud`.
    """
    folder = os.environ.get("HF_XET_CACHE", "")
    existing = folder
    while existing and not os.path.lexists(existing):
        existing = os.path.dirname(existing)
    if existing and not os.path.isdir(existing):
        raise ConfigError(f"HF_XET_CACHE: {folder!r} is not a folder.")
    if existing and writes and not os.access(existing, os.W_OK):
        raise ConfigError(f"HF_XET_CACHE: the folder {folder!r} is not writable.")


def aws_profile() -> str | None:
    """Return the profile in AWS_PROFILE; None if it is unset, or if keys are set."""
    return None if "AWS_ACCESS_KEY_ID" in os.environ else os.environ.get("AWS_PROFILE")


def import_quietly(module: str) -> Any:
    """Import hf_xet without its log, which by default writes 18 kB to disk for each upload. RUST_LOG turns it
    on.
    """
    if any(name in os.environ for name in ("RUST_LOG", "HF_XET_LOG_DEST")):
        return importlib.import_module(module)
    os.environ["RUST_LOG"] = "off"  # read at import only
    try:
        return importlib.import_module(module)
    finally:
        del os.environ["RUST_LOG"]


def is_endpoint(url: str) -> bool:
    """Whether this is a server's address: http or https, a host, and optionally a port and a path."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:  # a port out of range, or no number
        return False
    return (
        parts.scheme in ("http", "https")
        and _is_host(parts.hostname or "")
        and re.search(r"[\s\x00-\x20\x7f]", url) is None
        and port != 0
        and not ("@" in parts.netloc or parts.query or parts.fragment)
    )


def _is_host(host: str) -> bool:
    """Whether clients take this for a host: a name whose last part is a number has to be an IPv4 address."""
    if not re.fullmatch(r"[0-9]+|0x[0-9a-f]*", host.rstrip(".").rpartition(".")[2]):
        return bool(host)
    try:
        ipaddress.IPv4Address(host)
    except ValueError:
        return False
    return True


def _check(names: Iterable[str]) -> None:
    for name in (*names, *(name for name in _SHARED if os.environ.get(name))):
        value = os.environ[name]
        if not value.strip():
            raise ConfigError(f"{name} is empty. Set it to a value, or unset it.")
        is_path = _FILE.search(name) is not None or name in _FOLDERS
        if name not in _TEXT and not (
            value.isprintable() and value == value.strip() and (value.isascii() or is_path)
        ):
            raise ConfigError(
                f"{name} starts or ends with a blank or a line end, or has an unprintable character. Set it "
                "again without. "
                "Secrets mounted from files often end with a line feed."
            )
        if _FILE.search(name) and not os.path.isfile(value):
            raise ConfigError(f"{name}: the file {value!r} does not exist.")
        if name.upper().endswith("_PROXY"):
            continue  # a host without a scheme is valid, and so is a user with a password
        if _URL.search(name) and not is_endpoint(value):
            raise ConfigError(
                f"{name} must be https://host or http://host, with a port and a path if needed."
            )
        if _REGION.search(name) and not re.fullmatch(r"[A-Za-z0-9_-]+", value):
            raise ConfigError(f"{name} must be a region such as us-east-1, not {value!r}.")
