"""Xet's content-addressed store (hf_xet): the bytes of a bucket of the Hub, by their hash.

Only the length is checked here. hf_xet returned a flipped bit without an error, so readers have to check digests.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import hf_xet  # type: ignore[import-untyped]
import msgspec
from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

from deltasync.errors import TransientStoreError
from deltasync.stores.base import ObjectInfo

_ERRORS = (OSError, RuntimeError, ValueError)
_IDLE = "300s"  # versions may be minutes apart
CONFIG = {
    "read": {
        "client.idle_connection_timeout": _IDLE,
        "client.connect_timeout": "10s",
        "client.read_timeout": "60s",
        "client.retry_base_delay": "300ms",
        "client.retry_max_attempts": 3,
        "client.retry_max_duration": "60s",
    },
    # The default read timeout of 5 min stays, because it includes sending: many pieces of 64 MB at once, on any line.
    "write": {
        "client.idle_connection_timeout": _IDLE,
        "client.connect_timeout": "10s",
        "client.retry_base_delay": "300ms",
        "client.retry_max_attempts": 3,
        # Weights share no 64 KiB with older ones, so a query per upload would find nothing. Nor are chunks
        # skipped because they were uploaded once; by default the record of these grows to 16 GB on disk.
        "deduplication.global_dedup_query_enabled": False,
        "shard.cache_subdir": "deltasync",
        "shard.cache_size_limit": 1,
    },
}
_TOKEN_MARGIN_S = 60.0


class Token(msgspec.Struct, rename="camel"):
    """Access to the content-addressed store, to read or to write, until `exp` (seconds since the epoch)."""

    cas_url: str
    access_token: str
    exp: int


class Xet:
    """Upload and download bytes, in one process. Tokens and connections are kept until a transfer fails."""

    def __init__(self, url: str, api: str, fetch_token: Callable[[str], Token]) -> None:
        self._url = url
        self._api = api
        self._fetch_token = fetch_token
        self._sessions: dict[str, Any] = {}
        self._tokens: dict[str, Token] = {}
        self._downloads: Any = None

    def upload(self, data: bytes | memoryview) -> str:
        """Store bytes and return their hash."""
        try:
            with self._session("write").new_upload_commit(**self._connection("write")) as commit:
                handle = commit.start_upload_bytes(bytes(data), sha256=hf_xet.SKIP_SHA256)
            info = handle.result().xet_info
        except _ERRORS as error:
            raise self.failed("write", one_line(error)) from error
        if info.file_size != len(data):
            raise self.failed("write", f"{info.file_size} of {len(data)} bytes were stored")
        return str(info.hash)

    def download(self, info: ObjectInfo, start: int, end: int) -> bytes:
        """Return bytes `start` to `end` (excluded) of what has the hash `info.content`."""
        if start == end:
            return b""
        try:
            if self._downloads is None:
                self._downloads = self._session("read").new_download_stream_group(**self._connection("read"))
            content = hf_xet.XetFileInfo(info.content, info.bytes)
            pieces, size = [], 0
            for piece in self._downloads.download_stream(content, start=start, end=end):
                pieces.append(piece)
                size += len(piece)
                if size > end - start:
                    break
        except _ERRORS as error:
            raise self.failed("read", one_line(error)) from error
        if size != end - start:
            # A refused token sometimes looks like this too.
            raise self.failed("read", f"{size} of {end - start} bytes arrived")
        return b"".join(pieces)

    def _session(self, scope: str) -> Any:
        if scope not in self._sessions:
            self._sessions[scope] = hf_xet.XetSession(hf_xet.XetConfig().with_config(CONFIG[scope]))
        return self._sessions[scope]

    def _connection(self, scope: str) -> dict[str, Any]:
        """Return arguments of a session's methods. The token is fetched here, where a refusal can be recognised."""
        token = self._tokens.get(scope)
        if token is None or token.exp < time.time() + _TOKEN_MARGIN_S:
            token = self._tokens[scope] = self._fetch_token(scope)
        return {
            "endpoint": token.cas_url,
            "token": token.access_token,
            "token_expiry_unix_secs": token.exp,
            "token_refresh_url": f"{self._api}/xet-{scope}-token",
            "token_refresh_headers": request_headers(),
        }

    def failed(self, scope: str, reason: str) -> TransientStoreError:
        """Return a transient error. hf_xet reports too little to know more; the next token or HEAD fails more clearly."""
        self._tokens.pop(scope, None)
        if scope == "read":
            self._downloads = None
        return TransientStoreError(f"{self._url}: the transfer ({scope}) failed: {reason}.")


def request_headers() -> dict[str, str]:
    """Return headers with the token, which is read each time: it may be replaced while we run."""
    return build_hf_headers(library_name="deltasync")


def one_line(error: Exception) -> str:
    """Return an error's text in one line, without the queries of URLs, which hold signatures."""
    text = re.sub(r"\?[^\s)\"']+", "?...", " ".join(str(error).split()))
    return (text or type(error).__name__)[:300].rstrip(".")
