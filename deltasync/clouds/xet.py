"""Xet's content-addressed store (hf_xet), which holds the bytes of the Hub's buckets by hash.

Only the length is checked here. hf_xet once returned a flipped bit without an error, so readers must check
digests.
"""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections.abc import Callable
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec
from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

from deltasync.clouds.environment import check_xet_cache, import_quietly
from deltasync.errors import ConfigError, DeltaSyncError, StoreError, TransientStoreError
from deltasync.stores.base import ObjectInfo
from deltasync.stores.replies import is_panic
from deltasync.stores.retries import PATIENCE_S, Pause
from deltasync.threads import Workers, watched

logger = logging.getLogger(__name__)

hf_xet = import_quietly("hf_xet")

_ERRORS = (OSError, RuntimeError, ValueError, EOFError)
_AGAIN = r"^Internal error"  # often caused by a concurrent transfer
_REFUSED = r"\b40[0134] "
_MAY_BE_TOKEN = r"\b40[13] |^0 of "  # a refused token may look like an empty object
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
    # The read timeout stays at its default of 5 min, because it includes sending many pieces of 64 MB at
    # once.
    "write": {
        "client.idle_connection_timeout": _IDLE,
        "client.connect_timeout": "10s",
        "client.retry_base_delay": "300ms",
        "client.retry_max_attempts": 3,
        # Weights share no 64 KiB with older ones, so a query per upload would find nothing. For the same
        # reason the cache of uploaded chunks is switched off; by default it grows to 16 GB on disk.
        "deduplication.global_dedup_query_enabled": False,
        "shard.cache_subdir": "deltasync",
        "shard.cache_size_limit": 1,
    },
}
_TOKEN_MARGIN_S = 60.0
# time limit of a transfer without bytes, and what each second adds
_WITHIN_S, _SLOWEST_BYTES_S = 60.0, 128 << 10

_Result = TypeVar("_Result")


class Token(msgspec.Struct, rename="camel"):
    """A read or write token of the content-addressed store, valid until `exp` (seconds since the epoch)."""

    cas_url: str
    access_token: str
    exp: int


class _SilentError(TransientStoreError):
    """The storage does not answer."""


class Xet:
    """Uploads and downloads bytes in one process. Tokens and connections are reused.

    hf_xet itself tries a transfer three times after failures of the network or the server. After a refusal or
    a short reply this class tries once more, with a new token if the old one may be the reason. Each scope,
    `read` and `write`, pauses when it keeps failing.
    """

    def __init__(self, url: str, api: str, fetch_token: Callable[[str], Token]) -> None:
        self._url = url
        self._api = api
        self._fetch_token = fetch_token
        self._sessions: dict[str, Any] = {}
        self._tokens: dict[str, Token] = {}
        self._downloads: Any = None
        self._direct = True  # whether uploads skip the request that asks where to upload
        self._pauses = {"read": Pause(), "write": Pause()}

    def check(self, scope: str) -> None:
        """Raise TransientStoreError during a pause, so that the caller saves its own requests."""
        self._pauses[scope].check()

    def upload(self, data: bytes | memoryview) -> str:
        """Store bytes and return their hash."""

        def upload() -> str:
            with self._session("write").new_upload_commit(**self._connection("write")) as commit:
                handle = commit.start_upload_bytes(bytes(data), sha256=hf_xet.SKIP_SHA256)
            info = handle.result().xet_info
            if info.file_size != len(data):
                raise EOFError(f"{info.file_size} of {len(data)} bytes were stored")
            return str(info.hash)

        return self._transferred("write", upload, len(data))

    def download(self, info: ObjectInfo, start: int, end: int) -> bytes:
        """Return bytes `start` to `end` (excluded) of the content with the hash `info.content`."""
        if start == end:
            return b""

        def download() -> bytes:
            group = self._downloads
            if group is None:
                group = self._downloads = self._session("read").new_download_stream_group(
                    **self._connection("read")
                )
            content = hf_xet.XetFileInfo(info.content, info.bytes)
            pieces, size = [], 0
            for piece in group.download_stream(content, start=start, end=end):
                pieces.append(piece)
                size += len(piece)
                if size > end - start:
                    break
            if size != end - start:
                raise EOFError(f"{size} of {end - start} bytes arrived")
            return b"".join(pieces)

        return self._transferred("read", download, end - start)

    def _awaited(self, scope: str, transfer: Callable[[], _Result], size: int) -> _Result:
        """Run a transfer of `size` bytes in a thread, and wait for it, for a time. Say it if that takes long.

        The Hub and the storage are different hosts: one may answer while the other hangs, and hf_xet is
        silent for minutes. It does not check for signals either: from another thread, Ctrl-C ends the wait.

        Raises:
            TransientStoreError: the storage has not answered in time.
        """

        def place() -> str:
            token = self._tokens.get(scope)
            return f"{self._url}: {'the Hub' if token is None else f'its storage at {urlsplit(token.cas_url).netloc}'}"

        def report() -> None:
            logger.warning("%s has had no answer for %g s; waiting on.", place(), PATIENCE_S)

        within_s = _WITHIN_S + size / _SLOWEST_BYTES_S
        with watched(PATIENCE_S, report):
            try:
                return Workers(1, "fetch").submit(transfer).result(within_s)
            except FutureTimeoutError:
                self._sessions.pop(scope, None)
                raise _SilentError(
                    f"{place()} has not finished a transfer ({scope}) of {size:,} bytes in {within_s:.0f} s. "
                    "Check that "
                    "this machine reaches that host: a proxy or a firewall may hold its connections."
                ) from None

    def _transferred(self, scope: str, transfer: Callable[[], _Result], size: int) -> _Result:
        """Run a transfer and return its result. Raises StoreError if an upload is refused, else
        TransientStoreError.
        """
        pause = self._pauses[scope]
        pause.check()
        for is_last in (False, True):
            try:
                result = self._awaited(scope, transfer, size)
            except BaseException as error:
                if isinstance(error, _SilentError):
                    self._downloads = None
                    raise pause.failed(str(error)) from None
                if isinstance(error, DeltaSyncError) or not (isinstance(error, _ERRORS) or is_panic(error)):
                    raise
                reason = one_line(error)
                refused = re.search(_REFUSED, reason) is not None
                self._downloads = None  # later transfers of this group would all fail
                if re.search(_MAY_BE_TOKEN, reason):
                    self.forget_token(scope)
                if refused and scope == "write" and self._direct:
                    self._direct = False
                    self._sessions.pop(scope, None)
                if is_last or not (refused or isinstance(error, EOFError) or re.search(_AGAIN, reason)):
                    failed = pause.failed(f"{self._url}: the transfer ({scope}) failed: {reason}.")
                    # A refused read may be of an object that was replaced meanwhile; a refused write is
                    # final.
                    raise StoreError(str(failed)) if refused and scope == "write" else failed from error
            else:
                pause.answered()
                return result
        raise AssertionError("unreachable")

    def _session(self, scope: str) -> Any:
        if scope not in self._sessions:
            check_xet_cache(writes=scope == "write")
            config = hf_xet.XetConfig().with_config(CONFIG[scope])
            if scope == "write" and self._direct:
                with contextlib.suppress(*_ERRORS):  # older hf_xet lacks this setting
                    config = config.with_config({"client.legacy_direct_xorb_upload": True})
            self._sessions[scope] = hf_xet.XetSession(config)
        return self._sessions[scope]

    def _connection(self, scope: str) -> dict[str, Any]:
        """Return the arguments of a session's methods. The token is fetched here, so that a refusal is
        recognised.
        """
        token = self._tokens.get(scope)
        if token is None or token.exp < time.time() + _TOKEN_MARGIN_S:
            token = self._tokens[scope] = self._fetch_token(scope)
            # To a clock that is ahead the token seems expired. It is used all the same; the server decides.
            token.exp = max(token.exp, int(time.time() + 5 * _TOKEN_MARGIN_S))
        return {
            "endpoint": token.cas_url,
            "token": token.access_token,
            "token_expiry_unix_secs": token.exp,
            "token_refresh_url": f"{self._api}/xet-{scope}-token",
            "token_refresh_headers": request_headers(),
        }

    def forget_token(self, scope: str) -> None:
        """Drop the token, so that the next transfer fetches another one."""
        self._tokens.pop(scope, None)


def request_headers() -> dict[str, str]:
    """Return headers with the token, which is read each time, because it may be replaced while we run."""
    headers = build_hf_headers(library_name="deltasync")
    token = headers.get("authorization", "")
    if not token.isascii() or not token.isprintable() or len(token.split()) > 2:
        raise ConfigError(
            "The Hub's token (HF_TOKEN, or the file of `hf auth login`) has a blank, a line end or a "
            "non-ASCII character. "
            "Copy it again."
        )
    return headers


def one_line(error: BaseException) -> str:
    """Return an error's text as one line, without the queries of URLs, which may hold signatures."""
    text = re.sub(r"\?[^\s)\"']+", "?...", " ".join(str(error).split()))
    return (text or type(error).__name__)[:300].rstrip(".")
