"""Text from elsewhere, made fit for a terminal, a log line or a page.

Whoever may write one heartbeat, or the name of one tensor, chooses text that people read. All of it passes `printable`
before it is shown: the messages of our own errors by themselves, everything else where it is written.
"""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import unquote

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
