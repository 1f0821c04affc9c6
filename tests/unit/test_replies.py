"""Replies of a server around one followed model: its routes, and the headers that name versions."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from deltasync.config import ReplicaSettings
from deltasync.errors import ApplyError, ConfigError
from deltasync.following import Commit, Status
from deltasync.serve import replies
from deltasync.serve.replies import answer, server_settings, spans_text, version_headers

WEIGHTS = {"w": np.arange(6, dtype=np.uint16).reshape(2, 3).T}  # not contiguous


class Following:
    """A followed model as far as `answer` goes."""

    def __init__(self, not_ready: str | None = None) -> None:
        commits = [Commit(version=number, sha256="0" * 64, anchor=False) for number in (1, 2, 3)]
        self.status = Status(
            replica_id="r", channel="memory://c", state="serving", version=3, commits=commits
        )
        self.not_ready = not_ready
        self.held = False

    @contextlib.contextmanager
    def hold(self) -> Iterator[int]:
        self.held = True
        yield 3
        self.held = False


def ask(path: str, authorization: str | None = None, following: Any = None, **settings: Any) -> Any:
    following = following or Following()

    def live() -> dict[str, np.ndarray]:
        assert following.held
        return WEIGHTS

    return answer(following, ReplicaSettings(**settings), path, authorization, live)


def test_the_status_has_as_many_commits_as_are_asked_for() -> None:
    for query, versions in (
        ("", [1, 2, 3]),
        ("?commits=2", [2, 3]),
        ("?commits=0", []),
        ("?commits=many", [1, 2, 3]),
    ):
        code, body = ask(f"/deltasync/status{query}")
        assert (code, [commit["version"] for commit in body["commits"]]) == (200, versions)


def test_ready_needs_no_token_and_the_others_do() -> None:
    assert ask("/deltasync/ready", http_token="secret") == (200, {"ready": True, "reason": None})
    assert ask("/deltasync/ready", following=Following("not yet")) == (
        503,
        {"ready": False, "reason": "not yet"},
    )
    for path in ("/deltasync/status", "/deltasync/digest"):
        settings = {"http_token": "secret"}
        assert ask(path, **settings)[0] == ask(path, "Bearer guessed", **settings)[0] == 401
        assert ask(path, "Bearer secret", **settings)[0] == 200


def test_the_digest_is_of_the_bits_in_the_order_of_the_tensor() -> None:
    expected = hashlib.sha256(WEIGHTS["w"].tobytes()).hexdigest()
    assert ask("/deltasync/digest") == (200, {"version": 3, "sha256": {"w": expected}})
    assert ask("/v1/models") is None


def test_headers_name_the_versions_of_tokens() -> None:
    headers = {"x-deltasync-versions": "7..9", "x-deltasync-spans": "[[[7,2],[9,1],[7,1]]]"}
    assert version_headers([7, 7, 9, 7]) == headers
    assert version_headers([]) == version_headers([7, None]) == {}
    assert spans_text([[(7, 1)], None]) is None


def test_headers_that_clients_would_refuse_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replies, "_LONGEST", 10)
    assert version_headers([7, 8, 9]) == {"x-deltasync-versions": "7..9"}


def test_the_command_line_of_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "sys.argv", ["server", "MODEL", "--port", "1", "--channel", "file:///c", "--temp", "0"]
    )
    model, settings, others = server_settings("server")
    assert (model, settings.channel, others) == ("MODEL", "file:///c", ["--port", "1", "--temp", "0"])
    monkeypatch.setattr("sys.argv", ["server", "MODEL"])
    monkeypatch.delenv("DELTASYNC_CHANNEL", raising=False)
    with pytest.raises(ConfigError, match="--channel or DELTASYNC_CHANNEL"):
        server_settings("server")
    monkeypatch.setenv("DELTASYNC_MAX_LAG", "1")
    with pytest.raises(ConfigError, match="DELTASYNC_MAX_LAG is set, and this server ends no request"):
        server_settings("server")


def test_a_model_that_may_not_be_read_now_has_no_digest_but_a_sentence() -> None:
    class Refusing(Following):
        @contextlib.contextmanager
        def hold(self) -> Iterator[int]:
            raise ApplyError("The weights are of no known version.")
            yield 3

    assert ask("/deltasync/digest", following=Refusing()) == (
        503,
        {"error": "The weights are of no known version."},
    )
