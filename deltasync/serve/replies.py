"""Replies of a server with a followed model: its answers at /deltasync/, and headers that name the versions
of tokens.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import parse_qs

import msgspec
import numpy as np

from deltasync.channel.documents import sha256_hex
from deltasync.config import ReplicaSettings
from deltasync.errors import ConfigError, DeltaSyncError
from deltasync.serve import startup
from deltasync.serve.constraint import ReplyGuard, VersionConstraint, wait_until_met
from deltasync.serve.module import ModuleReplica
from deltasync.serve.requests import token_matches

VERSIONS_HEADER = "x-deltasync-versions"
"""The least and the greatest version that were live while a reply was made: `7..9`."""

SPANS_HEADER = "x-deltasync-spans"
"""`[version, tokens]` for each choice of a reply and each version that made some of its tokens:
`[[[7,12],[9,20]]]`.
"""

_LONGEST = 4000  # characters of spans: clients refuse long headers


def spans_text(choices: Sequence[Sequence[tuple[int, int]] | None]) -> str | None:
    """Return the value of `SPANS_HEADER`; None if the spans of a choice are unknown, or if the text would be
    too long.
    """
    if not choices or None in choices:
        return None
    text = json.dumps(choices, separators=(",", ":"))
    return text if len(text) <= _LONGEST else None


def version_headers(made_by: Iterable[int | None]) -> dict[str, str]:
    """Return the headers of a reply with one choice; none if a token's version is unknown.

    Args:
        made_by: The version of each token, in order.
    """
    versions = [-1 if version is None else version for version in made_by]
    if not versions or -1 in versions:
        return {}
    spans = spans_text([[(version, len([*group])) for version, group in itertools.groupby(versions)]])
    headers = {VERSIONS_HEADER: f"{min(versions)}..{max(versions)}"}
    return headers if spans is None else headers | {SPANS_HEADER: spans}


async def reached(following: ModuleReplica, wanted: VersionConstraint) -> VersionConstraint:
    """Wait until a followed module is a demanded version, as `constraint.wait_until_met`. Raises AckTimeoutError."""
    return await wait_until_met(following._follow, wanted)


def held(following: ModuleReplica, wanted: VersionConstraint | None) -> ReplyGuard:
    """Return what tells whether a reply that begins now is made by what its request demands."""
    return ReplyGuard(following._follow, wanted)


def answer(
    following: ModuleReplica,
    settings: ReplicaSettings,
    path: str,
    authorization: str | None,
    live: Callable[[], Mapping[str, np.ndarray]],
    made: Callable[[], Mapping[str, np.ndarray]] = dict,
) -> tuple[int, Any] | None:
    """Answer a GET request for /deltasync/status, ready or digest. Returns None for any other path.

    Args:
        following: The model that the server serves.
        settings: `http_token` guards all routes but `ready`.
        path: The request's path, with its query: `?commits=0` shortens the status.
        authorization: The request's header of this name.
        live: Returns the bits of the model's tensors by name. They are read while the model is held.
        made: Likewise of what the framework has made of published weights, of which `live` has a mirror.

    Returns:
        The status code, and what to send as JSON.
    """
    path, _, query = path.partition("?")
    if path == "/deltasync/ready":
        reason = following.not_ready
        return 200 if reason is None else 503, {"ready": reason is None, "reason": reason}
    if path not in ("/deltasync/status", "/deltasync/digest"):
        return None
    if settings.http_token is not None and not token_matches(authorization, settings.http_token):
        return 401, {"error": "Send DELTASYNC_HTTP_TOKEN as a bearer token."}
    if path == "/deltasync/status":
        commits, status = parse_qs(query).get("commits", ["all"])[-1], following.status
        if commits.isdecimal():
            status.commits = status.commits[max(0, len(status.commits) - int(commits)) :]
        return 200, msgspec.to_builtins(status)
    try:
        with following.hold() as version:
            sha256, of_made = _digests(live()), _digests(made())
    except DeltaSyncError as error:
        return 503, {"error": str(error)}
    return 200, {"version": version, "sha256": sha256} | ({"made": [of_made]} if of_made else {})


def _digests(bits: Mapping[str, np.ndarray]) -> dict[str, str]:
    return {name: sha256_hex(np.ascontiguousarray(each).data) for name, each in bits.items()}


def server_settings(program: str) -> tuple[str, ReplicaSettings, list[str]]:
    """Parse the command line of a server: MODEL, --channel and the options of the server that it wraps.

    Returns:
        The model, the settings, in which a channel is named, and the other options.

    Raises:
        ConfigError: neither `--channel` nor DELTASYNC_CHANNEL names a channel that can be followed, or a
            variable is wrong.
    """
    parser = argparse.ArgumentParser(program, epilog="Other options are those of the server that this wraps.")
    parser.add_argument("model", help="directory or name of the model")
    parser.add_argument("--channel", help="URL of the channel; by default DELTASYNC_CHANNEL")
    args, others = parser.parse_known_args()
    settings = ReplicaSettings.from_env(channel=args.channel)
    settings.check_no_max_lag()
    if args.channel is not None:
        startup.check_channel(args.channel, "--channel")
    elif not startup.is_to_follow():
        raise ConfigError("Name the channel by --channel or DELTASYNC_CHANNEL.")
    return args.model, settings, others
