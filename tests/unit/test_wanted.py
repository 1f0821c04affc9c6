"""Versions that requests demand, of a follow loop; the headers of replies are in `test_versions`."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests import driving
from tests.driving import Engine, Trainer, serving

engine, trainer = driving.engine, driving.trainer  # fixtures


def ask(client: Any, version: str, timeout: str = "20") -> tuple[int, str]:
    reply = client.post("/v1/completions", headers={"x-deltasync-version": version, "x-deltasync-timeout": timeout})
    return reply.status_code, reply.text


def test_a_request_waits_for_the_version_that_it_demands(
    engine: Engine, trainer: Trainer, memory_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer.publish()
    with serving(engine, monkeypatch, CHANNEL=memory_url, POLL_INTERVAL_S="60") as client:
        for version in ("1", ">=1", ">=latest"):
            assert ask(client, version)[0] == 200
        trainer.publish()  # nobody polls for a minute
        assert ask(client, ">=1")[0] == 200
        assert client.get("/deltasync/status").json()["version"] in (1, 2)
        assert ask(client, ">=latest")[0] == 200
        assert client.get("/deltasync/status").json()["version"] == 2
        trainer.publish()
        assert ask(client, "3")[0] == 200


def test_a_version_that_does_not_come_is_answered_with_409_that_names_the_live_one(
    engine: Engine, trainer: Trainer, memory_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer.publish()
    trainer.publish()
    with serving(engine, monkeypatch, CHANNEL=memory_url) as client:
        assert ask(client, ">=latest")[0] == 200
        before = time.monotonic()
        code, text = ask(client, ">=3", timeout="0.2")
        assert code == 409 and "Version >=3 was asked for, and this server serves version 2. It waited 0.2 s." in text
        assert time.monotonic() - before < 5
        code, text = ask(client, "1")
        assert code == 409 and "ask a server that is pinned to that one" in text
        assert ask(client, "1", timeout="soon")[0] == 400


def test_a_pinned_server_serves_its_version_alone(
    engine: Engine, trainer: Trainer, memory_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        trainer.publish()
    with serving(engine, monkeypatch, CHANNEL=memory_url, PIN="2") as client:
        assert ask(client, ">=1")[0] == 200
        assert ask(client, "2")[0] == 200
        code, text = ask(client, "3")
        assert code == 409 and "This replica is pinned to version 2" in text


def test_a_server_that_follows_nothing_says_so(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(engine, monkeypatch) as client:
        code, text = ask(client, ">=1")
        assert code == 409 and "set DELTASYNC_CHANNEL" in text
