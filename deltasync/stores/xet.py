"""Xet's content-addressed store, by hf_xet: the bytes of a bucket of the Hub, by their hash.

Nothing here checks content: hf_xet returned a flipped bit without an error. The length is checked, digests are the reader's.
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
    # Its default read timeout of 5 min, because that includes sending: 64 MB at a time, many at once, on whatever line.
    "write": {
        "client.idle_connection_timeout": _IDLE,
        "client.connect_timeout": "10s",
        "client.retry_base_delay": "300ms",
        "client.retry_max_attempts": 3,
        # Weights share no 64 KiB with older ones: asking would cost a request per upload and find nothing. Nor are chunks
        # taken for stored because they once were; by default the record of that grows to 16 GB on disk.
        "deduplication.global_dedup_query_enabled": False,
        "shard.cache_subdir": "deltasync",
        "shard.cache_size_limit": 1,
    },
}
_TOKEN_MARGIN_S = 60.0


class Token(msgspec.Struct, rename="camel"):
    """What opens the content-addressed store, to read or to write, until `exp`, seconds since the epoch."""

    cas_url: str
    access_token: str
    exp: int


class Xet:
    """Bytes by their hash, in one process. Tokens and connections are kept until something fails."""

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
            raise self.failed("write", f"{info.file_size} bytes were stored of {len(data)}")
        return str(info.hash)

    def download(self, named: ObjectInfo, start: int, end: int) -> bytes:
        """Bytes `start` to `end`, the latter excluded, of what has the hash `content`, whatever the key names by now."""
        if start == end:
            return b""
        try:
            downloads = self._downloads
            if downloads is None:
                downloads = self._session("read").new_download_stream_group(**self._connection("read"))
                self._downloads = downloads
            info = hf_xet.XetFileInfo(named.content, named.bytes)
            pieces, size = [], 0
            for piece in downloads.download_stream(info, start=start, end=end):
                pieces.append(piece)
                size += len(piece)
                if size > end - start:
                    break
        except _ERRORS as error:
            raise self.failed("read", one_line(error)) from error
        if size != end - start:
            # Also how a refused token looks now and then.
            raise self.failed("read", f"{size} bytes came of {end - start}")
        return b"".join(pieces)

    def _session(self, scope: str) -> Any:
        session = self._sessions.get(scope)
        if session is None:
            config = hf_xet.XetConfig().with_config(CONFIG[scope])
            session = self._sessions[scope] = hf_xet.XetSession(config)
        return session

    def _connection(self, scope: str) -> dict[str, Any]:
        """Arguments of a session's methods. The token is fetched here, where a refusal can be understood."""
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
        """hf_xet tells too little to know what will pass; the next token, or the next HEAD, tells better."""
        self._tokens.pop(scope, None)
        if scope == "read":
            self._downloads = None
        return TransientStoreError(f"{self._url}: the transfer ({scope}) failed: {reason}.")


def request_headers() -> dict[str, str]:
    """With the token, read anew each time: it may be replaced while we run."""
    return build_hf_headers(library_name="deltasync")


def one_line(error: Exception) -> str:
    """An error in one line, without the signatures that URLs carry in their query."""
    text = re.sub(r"\?[^\s)\"']+", "?...", " ".join(str(error).split()))
    return (text or type(error).__name__)[:300].rstrip(".")
