"""Every exception of deltasync, in one tree.

    DeltaSyncError                               1  root: catch this to catch everything
    ├── ConfigError (ValueError)                 3  a setting or an argument is wrong; nothing was done
    ├── FormatError                              4  bytes from a store are not what the format says
    │   ├── UnsupportedFormatError               4    written by a newer or a foreign writer
    │   └── CorruptDataError                     4    truncated, bit-flipped, or not decodable
    │       └── SignatureError                   4      not signed with a trusted key, or not since it was signed
    ├── ChainError                               5  versions do not connect
    │   ├── NotPublishedError                    5    the channel has no version yet: wait
    │   ├── MissingVersionError                  5    a version or a payload it needs is gone
    │   ├── StaleChannelError                    5    the newest version is too old to be taken
    │   └── RunMismatchError                     5    the channel now belongs to another run
    ├── StoreError                               6  the object store refused or failed
    │   ├── ObjectMissingError                   6    no object has this key
    │   ├── ObjectExistsError                    6    a create-only put met an existing object
    │   └── TransientStoreError                  6    worth another try
    ├── PublishError                             7  a version did not become visible
    │   ├── ChannelInUseError                    7    the channel holds a run; resume it or choose another URL
    │   ├── FencedError                          7    another publisher has opened the channel; this one must stop
    │   ├── PublishPendingError                  7    the store has not answered yet; the next publish asks again
    │   ├── PublishLostError                     7    given up after all retries; the next publish is an anchor
    │   └── PublishTimeoutError (TimeoutError)   7    still being uploaded; the upload goes on
    ├── ModelMismatchError                       8  names, shapes or dtypes differ from the channel's
    ├── ApplyError                               9  a version did not become live
    │   ├── StageError                           9    live weights untouched, retry
    │   ├── FingerprintMismatchError             9    rolled back to the previous version; re-anchor
    │   ├── SleepingError                        9    vLLM sleeps; live weights untouched, retry when it wakes up
    │   └── CommitError                          9    weights uncertain, reload
    └── AckTimeoutError                         10  the version is published, but the fleet does not serve it yet

The number is the process exit code of the command line for that class; 2 is a usage error, 130 is Ctrl-C.
"""

from __future__ import annotations

import logging
import re
import traceback
from typing import Any
from urllib.parse import unquote

import msgspec

UNREADABLE_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for JSON that is malformed, that has other bytes than UTF-8, or that is nested too deeply."""


class DeltaSyncError(Exception):
    """Root of all errors raised by deltasync.

    Messages quote what a channel, a server or a replica said, and URLs. So each is one printable line without credentials.
    """

    exit_code = 1

    def __init__(self, *args: object) -> None:
        super().__init__(*(printable(redacted(arg)) if isinstance(arg, str) else arg for arg in args))


class ConfigError(DeltaSyncError, ValueError):
    """A setting or an argument is wrong; nothing was done."""

    exit_code = 3


class FormatError(DeltaSyncError):
    """Bytes from a store are not what the format says."""

    exit_code = 4


class UnsupportedFormatError(FormatError):
    """The object was written in a format, or with a required feature, that this reader does not know."""


class CorruptDataError(FormatError):
    """The object is truncated, altered, or cannot be decoded."""


class SignatureError(CorruptDataError):
    """No trusted key has signed these bytes for this place; nothing in them was looked at."""


class ChainError(DeltaSyncError):
    """The versions of the channel do not connect."""

    exit_code = 5


class NotPublishedError(ChainError):
    """The channel has no complete version yet; wait for the first anchor."""


class MissingVersionError(ChainError):
    """A version, or an object that a version refers to, is not in the store."""


class StaleChannelError(ChainError):
    """The newest version is older than is allowed: nothing newer was published, or it is kept back."""


class RunMismatchError(ChainError):
    """The channel belongs to another run than the one that was followed."""


class StoreError(DeltaSyncError):
    """The object store refused a request or failed."""

    exit_code = 6


class ObjectMissingError(StoreError):
    """No object has this key."""


class ObjectExistsError(StoreError):
    """A create-only put met an existing object; the existing object is unchanged."""


class TransientStoreError(StoreError):
    """The request failed for a reason that may pass; a retry is safe."""


class PublishError(DeltaSyncError):
    """A version did not become visible."""

    exit_code = 7


class ChannelInUseError(PublishError):
    """The channel already holds a run; resume it or choose another URL."""


class FencedError(PublishError):
    """Another publisher has opened the channel, or has written this version; nothing of ours became visible. Stop."""


class PublishPendingError(PublishError):
    """The store has not said whether it has the version; the same bytes are put again by the next publish."""


class PublishLostError(PublishError):
    """The version was given up after all retries and is not visible; the next publish starts from an anchor."""


class PublishTimeoutError(PublishError, TimeoutError):
    """The version is not visible yet; its upload goes on."""


class ModelMismatchError(DeltaSyncError):
    """Names, shapes or dtypes of the tensors differ from the channel's."""

    exit_code = 8


class ApplyError(DeltaSyncError):
    """A version did not become live."""

    exit_code = 9


class StageError(ApplyError):
    """Staging failed; the live weights are untouched and a retry is safe."""


class FingerprintMismatchError(ApplyError):
    """The bits after commit were not the published ones; they were rolled back to the previous version."""


class SleepingError(ApplyError):
    """vLLM sleeps, so its weights are not in memory; they were not touched."""


class CommitError(ApplyError):
    """A commit failed half-way and could not be rolled back; reload the weights."""


class AckTimeoutError(DeltaSyncError):
    """The version is published, but the replicas did not report serving it in time."""

    exit_code = 10


def error_of(kind: str, message: str, other: type[DeltaSyncError]) -> DeltaSyncError:
    """The error that another process tells of by its class and message; of `other` if its class is none of these."""
    found = globals().get(kind)
    if isinstance(found, type) and issubclass(found, DeltaSyncError):
        return found(message)
    return other(f"Unexpected {kind}: {message}")


# Whoever may write one heartbeat, or the name of one tensor, chooses text that people read. All of it passes `printable`
# before it is shown: the messages above by themselves, everything else where it is written.

_SHOWN_OPTIONS = ("endpoint", "region", "virtual_hosted", "profile", "anonymous", "commits")
_URL = re.compile(r"\b([A-Za-z][A-Za-z0-9+.-]*://)([^\s'\"<>]*)")
# `user:secret@`, where the secret may hold slashes, as those of AWS do; not the port of `host:8000/`.
_USER = re.compile(r"(?:[^/?#@:]*:(?![0-9]+(?:/|$))[^?#]*|[^/?#]*)@")
_HIDDEN = "***"
_NO_PORT = ("s3://", "gs://", "az://", "hf://")


def printable(text: str) -> str:
    r"""Text in one line, without characters that command a terminal or hide others: these become `\x1b`, `\n`, `\u202e`."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def printable_in(document: Any) -> Any:
    """Plain data (dicts, lists, numbers, strings) with every string in it printable, names too."""
    if isinstance(document, str):
        return printable(document)
    if isinstance(document, dict):
        return {printable_in(name): printable_in(value) for name, value in document.items()}
    return [printable_in(value) for value in document] if isinstance(document, list | tuple) else document


def printable_traceback(error: BaseException) -> str:
    """The traceback as Python shows it; what the exception says is one printable line without credentials."""
    lines = []
    for part in traceback.format_exception(error):
        text = part.strip("\n")
        lines.append(text if part.startswith("  File ") else printable(redacted(text)))  # a frame is our own source
    return "\n".join(lines)


class _PrintableLines(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = printable(redacted(record.getMessage())), ()
        if record.exc_info and record.exc_info[1] is not None:
            record.exc_text = printable_traceback(record.exc_info[1])  # which formatters take as it is
        return True


_PRINTABLE_LINES = _PrintableLines()


def get_logger(name: str) -> logging.Logger:
    """As `logging.getLogger`, for loggers of what may have come from elsewhere: lines and tracebacks are printable."""
    logger = logging.getLogger(name)
    logger.addFilter(_PRINTABLE_LINES)
    return logger


def redacted(text: str) -> str:
    """Text with the credentials that URLs in it may hold replaced by `***`: users, passwords, and unknown options."""
    return _URL.sub(lambda match: match[1] + _without_credentials(match[1], match[2]), text) if "://" in text else text


def _without_credentials(scheme: str, rest: str) -> str:
    place, question, query = rest.partition("?")
    user = _USER.match(place)
    if user is not None:
        place = f"{_HIDDEN}@{place[user.end() :]}"
    elif scheme.lower() in _NO_PORT and ":" in place.partition("/")[0]:  # `s3://KEY:SECRET`; a secret may hold slashes
        place = _HIDDEN
    return place + question + "&".join(map(_option, query.split("&")))


def _option(option: str) -> str:
    name, equals, value = option.partition("=")
    if not equals:
        return name and _HIDDEN
    shown = name in _SHOWN_OPTIONS and "@" not in unquote(value)
    return f"{name}={value if shown else _HIDDEN}"
