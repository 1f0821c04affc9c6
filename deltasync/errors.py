"""Every exception of deltasync, in one tree. A class is what a caller can do.

    DeltaSyncError                        1  root: catch this to catch everything
    ├── ConfigError (ValueError)          3  correct the setting or the argument; nothing was done
    ├── FormatError                       4  bytes from a store do not follow the format, or a newer one: upgrade
    │   └── CorruptDataError              4    truncated, altered, not decodable, or signed with no trusted key
    ├── ChainError                        5  versions do not connect, or the newest is too old
    │   ├── NotPublishedError             5    wait: the channel has no version yet
    │   ├── MissingVersionError           5    plan again: a version, or an object of it, is not in the store
    │   └── RunMismatchError              5    begin anew: the channel now belongs to another run
    ├── StoreError                        6  the object store refused or failed
    │   ├── ObjectMissingError            6    no object has this key
    │   ├── ObjectExistsError             6    an object to be created exists already
    │   └── TransientStoreError           6    retry
    ├── PublishError                      7  a version did not become visible; the next publish is an anchor
    │   ├── ChannelInUseError             7    choose `resume`, or another URL: the channel has another run,
    │   │                                      or other weights of the trainer's step
    │   ├── FencedError                   7    stop: another publisher has opened the channel
    │   └── PublishPendingError           7    publish on: the store has not answered yet
    ├── ModelMismatchError                8  names, shapes or dtypes differ from the channel's
    ├── ApplyError                        9  a version did not become live, or a pin excludes it
    │   ├── StageError                    9    retry: the live weights are those of the version before
    │   ├── FingerprintMismatchError      9    avoid the version: it was rolled back to the one before
    │   ├── SleepingError                 9    wait: vLLM sleeps; live weights untouched
    │   └── CommitError                   9    reload: weights uncertain
    └── AckTimeoutError (TimeoutError)   10  wait longer: not uploaded, or not served by the fleet yet

The number is the exit code of the `deltasync` command for that class; 2 is a usage error, 130 is Ctrl-C.
"""

from __future__ import annotations

import contextlib
import logging
import re
import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

import msgspec

UNREADABLE_JSON = (msgspec.DecodeError, UnicodeError, RecursionError)
"""The errors of msgspec for JSON that is malformed, invalid Unicode, or nested too deeply."""


def describe(*kinds: Any) -> None:
    """Build msgspec's decoders of these types. The modules that define them call this at import.

    msgspec would otherwise inspect a class at its first use, without a lock: a second thread that decodes the
    same class meanwhile crashes the process (msgspec 0.22, a null pointer in `convert`).
    """
    for kind in kinds:
        msgspec.json.Decoder(kind)


class DeltaSyncError(Exception):
    """Root of all errors raised by deltasync.

    Messages quote URLs and text from channels, servers and replicas. So each message is converted to one
    printable line without credentials.

    Attributes:
        key: Key of the record whose objects are missing or damaged; None for another cause.
        tensors: Names of the tensors that the error is about, if it counts or needs some.
    """

    exit_code = 1
    key: str | None = None
    tensors: Collection[str] = ()

    def __init__(self, *args: object) -> None:
        super().__init__(*(printable(redacted(arg)) if isinstance(arg, str) else arg for arg in args))


class ConfigError(DeltaSyncError, ValueError):
    """A setting or an argument is wrong; nothing was done."""

    exit_code = 3


class FormatError(DeltaSyncError):
    """Bytes from a store do not follow the format: it is unknown, or needs an unknown feature."""

    exit_code = 4


class CorruptDataError(FormatError):
    """The object is truncated or altered, cannot be decoded, or no trusted key has signed it for its place."""


class ChainError(DeltaSyncError):
    """The versions of the channel do not connect, or the newest is older than allowed."""

    exit_code = 5


class NotPublishedError(ChainError):
    """The channel has no complete version yet; wait for the first anchor."""


class MissingVersionError(ChainError):
    """A version, or an object that a version refers to, is not in the store."""


class RunMismatchError(ChainError):
    """The channel now belongs to another run than before."""


class StoreError(DeltaSyncError):
    """The object store refused a request or failed."""

    exit_code = 6


class ObjectMissingError(StoreError):
    """No object has this key."""


class ObjectExistsError(StoreError):
    """An object to be created exists already. It is unchanged."""


class TransientStoreError(StoreError):
    """The request failed, but a retry is safe and may succeed.

    Attributes:
        wait_s: The wait before the retry that the store asks for; 0 if it asks for none.
    """

    def __init__(self, message: str = "", wait_s: float = 0.0) -> None:
        super().__init__(message)
        self.wait_s = wait_s


class PublishError(DeltaSyncError):
    """A version did not become visible. After one that was given up, the next publish writes an anchor."""

    exit_code = 7


class ChannelInUseError(PublishError):
    """The channel holds a run, or other weights than a resumed trainer has of its step. Nothing was published.

    Choose `resume`, or another URL.

    Attributes:
        step: The step that differs; None if the channel holds another run.
        version: The newest version of that step.
        tensors: How many elements differ, by the name of the tensor; empty if that version cannot be read.
        changed_fraction: Differing elements divided by all elements; None if that version cannot be read.
    """

    tensors: Mapping[str, int] = {}

    def __init__(
        self,
        message: str = "",
        step: int | None = None,
        version: int | None = None,
        tensors: Mapping[str, int] | None = None,
        changed_fraction: float | None = None,
    ) -> None:
        super().__init__(message)
        self.step, self.version, self.tensors = step, version, tensors or {}
        self.changed_fraction = changed_fraction


class FencedError(PublishError):
    """Another publisher has opened the channel or written this version. This one must stop; its version is
    not visible.
    """


class PublishPendingError(PublishError):
    """It is unknown whether the store has the version. The next publish stores the same bytes again."""


class ModelMismatchError(DeltaSyncError):
    """Names, shapes or dtypes of the tensors differ from the channel's."""

    exit_code = 8


class ApplyError(DeltaSyncError):
    """A version did not become live, or the pin excludes the requested one."""

    exit_code = 9


class StageError(ApplyError):
    """Staging failed, or a commit was rolled back; the version before is live, and a retry is safe.

    If `tensors` names some, decoding needs more of them than this process has.
    """


class FingerprintMismatchError(ApplyError):
    """The bits after commit were not the published ones, and were rolled back to the previous version."""


class SleepingError(ApplyError):
    """vLLM sleeps, so its weights are not in memory. Nothing was changed."""


class CommitError(ApplyError):
    """A commit failed and could not be rolled back. Reload the weights."""


class AckTimeoutError(DeltaSyncError, TimeoutError):
    """In the given time a version was not uploaded, or not served by the replicas; both go on."""

    exit_code = 10


@contextlib.contextmanager
def undoing() -> Iterator[None]:
    """Convert errors inside this context, which restores old weights, to CommitError."""
    try:
        yield
    except Exception as error:
        raise CommitError(
            f"A commit could not be undone, so the weights are uncertain. Reload them: {error}."
        ) from error


def error_of(kind: str, message: str, other: type[DeltaSyncError]) -> DeltaSyncError:
    """Return an error of the class with this name; for an unknown name, an error of the class `other`."""
    error_class = globals().get(kind)
    if isinstance(error_class, type) and issubclass(error_class, DeltaSyncError):
        return error_class(message)
    return other(f"Unexpected {kind}: {message}")


# Anyone who may write a heartbeat or name a tensor controls text that people read. So all such text passes
# `printable` before it is shown: messages of errors in the constructor, other text where it is printed.

_SHOWN_OPTIONS = ("endpoint", "region", "virtual_hosted", "profile", "anonymous", "commits")
_URL = re.compile(r"\b([A-Za-z][A-Za-z0-9+.-]*://)([^\s'\"<>]*)")
# `user:secret@`, where the secret may contain slashes, as AWS's do; but not the port of `host:8000/`.
_USER = re.compile(r"(?:[^/?#@:]*:(?![0-9]+(?:/|$))[^?#]*|[^/?#]*)@")
_HIDDEN = "***"
_NO_PORT = ("s3://", "gs://", "az://", "hf://")


def printable(text: str) -> str:
    r"""Return text as one line. Control characters and invisible ones are escaped as `\x1b`, `\n`, `\u202e`
    etc.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def printable_in(document: Any) -> Any:
    """Return plain data (dicts, lists, numbers, strings) with printable strings and names."""
    if isinstance(document, str):
        return printable(document)
    if isinstance(document, dict):
        return {printable_in(name): printable_in(value) for name, value in document.items()}
    return [printable_in(value) for value in document] if isinstance(document, list | tuple) else document


def printable_traceback(error: BaseException) -> str:
    """Return Python's traceback, with the exception's text as one printable line without credentials."""
    lines = []
    for part in traceback.format_exception(error):
        text = part.strip("\n")
        # a frame shows only source code
        lines.append(text if part.startswith("  File ") else printable(redacted(text)))
    return "\n".join(lines)


def _made_printable(record: logging.LogRecord) -> bool:
    record.msg, record.args = printable(redacted(record.getMessage())), ()
    if record.exc_info and record.exc_info[1] is not None:
        record.exc_text = printable_traceback(record.exc_info[1])  # formatters use it unchanged
    return True


def get_logger(name: str) -> logging.Logger:
    """Return the logger with this name. Its lines and tracebacks are made printable, without credentials."""
    logger = logging.getLogger(name)
    logger.addFilter(_made_printable)
    return logger


def redacted(text: str) -> str:
    """Return text in which users, passwords and unknown options of URLs are replaced with `***`."""
    return (
        _URL.sub(lambda match: match[1] + _without_credentials(match[1], match[2]), text)
        if "://" in text
        else text
    )


def _without_credentials(scheme: str, rest: str) -> str:
    place, question, query = rest.partition("?")
    user = _USER.match(place)
    if user is not None:
        place = f"{_HIDDEN}@{place[user.end() :]}"
    elif scheme.lower() in _NO_PORT and ":" in place.partition("/")[0]:
        # `s3://KEY:SECRET`; a secret may contain slashes
        place = _HIDDEN
    return place + question + "&".join(map(_option, query.split("&")))


def _option(option: str) -> str:
    name, equals, value = option.partition("=")
    if not equals:
        return name and _HIDDEN
    shown = name in _SHOWN_OPTIONS and "@" not in unquote(value)
    return f"{name}={value if shown else _HIDDEN}"


def first_five(names: Sequence[str]) -> str:
    """The first five names as text."""
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
